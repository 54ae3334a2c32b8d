"""Low-latency calls over nodes when something is wrong: refusals, different calls, ranks that are late or gone."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from exchange_cases import device_of, look
from low_latency_cases import Case, make_buffer, run_case, start_dispatch
from on_ranks import on_ranks

from deepep_moe.errors import EPMismatchError, EPPeerError

pytestmark = pytest.mark.gpu

CASE = Case([6, 8, 7, 5], max_tokens=8, num_topk=5, ranks_per_node=2)
CULPRIT = 2


def check_usable(buffer, rank):
    for seed in range(3):
        run_case(buffer, replace(CASE, seed=seed), rank, "nvshmem")
    look(buffer)


def raises(rank, error, message):
    """`error` on the culprit, and on the others an EPPeerError."""
    return pytest.raises(error if rank == CULPRIT else EPPeerError, match=message)


def rows_for(out):
    return torch.zeros(out.recv_x.shape, dtype=torch.bfloat16, device=out.recv_x.device)


@on_ranks(4)
def test_refused_dispatch(rank):
    """All ranks of all nodes learn of a refusal in the refused call, also of several in a row, and stay in step."""
    buffer = make_buffer(CASE, "nvshmem", rank)
    run_case(buffer, CASE, rank, "nvshmem")
    for mode in ("now", "hook"):
        for _ in range(5):
            with raises(rank, ValueError, "scale_format is 'e8'") as caught:
                case = replace(CASE, mode=mode, scale_format="e8" if rank == CULPRIT else "fp32")
                _, wait = start_dispatch(buffer, case, rank, "nvshmem")
                wait()
                look(buffer)
            assert rank == CULPRIT or caught.value.rank == CULPRIT
        check_usable(buffer, rank)


@on_ranks(4)
def test_bad_indices(rank):
    """The GPU finds them, and tells why. Along a dispatch that has failed on every rank, nobody waits for a deadline."""
    buffer, device = make_buffer(CASE, "nvshmem", rank), device_of("nvshmem", rank)
    x, idx, weights = (tensor.to(device) for tensor in CASE.inputs(rank))
    for wrong, message, some in (
        (idx * 0 + 24, r"is 24; it must be -1 \(no expert\) or 0 to 23", None),
        (idx * 0, "twice", weights),
    ):
        with raises(rank, ValueError, message) as caught:
            out = buffer.dispatch(x, wrong if rank == CULPRIT else idx, weights)
            look(buffer)
        assert rank == CULPRIT or caught.value.rank == CULPRIT
        with pytest.raises((ValueError, EPPeerError), match="handle"):
            buffer.combine(rows_for(out), out.handle, topk_weights=some)
            look(buffer)
        check_usable(buffer, rank)


@on_ranks(4)
def test_refused_combine(rank):
    """Ranks of the node name the culprit. Those of the other node name the rank that told them, or with weights perhaps the culprit."""
    buffer = make_buffer(CASE, "nvshmem", rank)
    out, _ = start_dispatch(buffer, CASE, rank, "nvshmem")
    for weights in (None, CASE.inputs(rank)[2].to(out.recv_x.device)):
        with raises(rank, ValueError, "wire is 'fp4'|its call: EPPeerError") as caught:
            buffer.combine(rows_for(out), out.handle, wire="fp4" if rank == CULPRIT else None, topk_weights=weights)
            look(buffer)
        if rank != CULPRIT:
            assert caught.value.rank in {0: (2,), 1: (3,) if weights is None else (2, 3), 3: (2,)}[rank], (rank, caught.value)
        check_usable(buffer, rank)


@on_ranks(4)
def test_different_calls(rank):
    buffer = make_buffer(CASE, "nvshmem", rank)
    text = "ranks make different calls: .*sent as fp8"
    with pytest.raises(EPMismatchError, match=text):
        start_dispatch(buffer, replace(CASE, fp8=rank == CULPRIT), rank, "nvshmem")
        look(buffer)
    check_usable(buffer, rank)
    outputs = [start_dispatch(buffer, CASE, rank, "nvshmem")[0] for _ in range(2)]
    rows = rows_for(outputs[0])
    weights = CASE.inputs(rank)[2].to(rows.device)
    for some in (None, weights):
        with pytest.raises((EPMismatchError, EPPeerError), match="combine with the handle of call"):
            buffer.combine(rows, outputs[rank // 2].handle, topk_weights=some)
            look(buffer)
        check_usable(buffer, rank)
    out, _ = start_dispatch(buffer, CASE, rank, "nvshmem")
    for have_weights in ((CULPRIT,), (0, 1), (0, 1, 3)):
        with pytest.raises((EPMismatchError, EPPeerError), match="combine of bfloat16, with topk_weights"):
            buffer.combine(rows, out.handle, topk_weights=weights if rank in have_weights else None)
            look(buffer)
        check_usable(buffer, rank)


@on_ranks(4, mode=("now", "hook"))
def test_who_is_late_to_a_dispatch(rank, mode):
    """Statistics of all other ranks, also of the other node, say so."""
    buffer = make_buffer(CASE, "nvshmem", rank)
    run_case(buffer, CASE, rank, "nvshmem")
    buffer.reset_statistics()
    dist.barrier()
    time.sleep(2 if rank == CULPRIT else 0)
    _, wait = start_dispatch(buffer, replace(CASE, mode=mode), rank, "nvshmem")
    wait()
    look(buffer)
    waited = buffer.statistics().wait_ns
    assert rank == CULPRIT or (waited[CULPRIT] > 1e9 and waited[rank] < 1e9), waited


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks, masked", ((2, 1), (4, CULPRIT)))
@on_ranks(())
def test_rank_that_stalls(rank, num_ranks, masked):
    """A rank that stalls is masked, and so are rows that came by it, on its own node and on others. Later calls go on without it."""
    case = replace(CASE, masked=0.0, num_tokens=CASE.num_tokens[:num_ranks], ranks_per_node=num_ranks // 2)
    buffer = make_buffer(case, "nvshmem", rank, timeout_s=5, mask_stalled=True)
    run_case(buffer, case, rank, "nvshmem")
    dist.barrier()
    if rank != masked:
        start_dispatch(buffer, case, rank, "nvshmem")
        look(buffer)
        assert masked in buffer.masked_ranks, buffer.masked_ranks
        began = time.monotonic()
        for seed in range(3):
            run_case(buffer, replace(case, without=masked, seed=seed), rank, "nvshmem")
        assert time.monotonic() - began < 60
    dist.barrier()
    buffer.destroy()


@pytest.mark.slow
@on_ranks(4)
def test_rank_that_stalls_in_a_combine_with_weights(rank):
    """A rank that sends no weights is masked, and what came by it; ranks that wait for those who wait for it are not."""
    case = replace(CASE, masked=0.0, combine_weights=True)
    buffer = make_buffer(case, "nvshmem", rank, timeout_s=5, mask_stalled=True)
    out, _ = start_dispatch(buffer, case, rank, "nvshmem")
    look(buffer)
    rows = rows_for(out)
    dist.barrier()
    if rank != CULPRIT:
        buffer.combine(rows, out.handle, topk_weights=CASE.inputs(rank)[2].to(rows.device))
        look(buffer)
        assert buffer.masked_ranks == ([0, CULPRIT] if rank == 3 else [CULPRIT]), buffer.masked_ranks
        for seed in range(3):
            run_case(buffer, replace(case, without=CULPRIT, seed=seed), rank, "nvshmem")
    dist.barrier()
    buffer.destroy()
