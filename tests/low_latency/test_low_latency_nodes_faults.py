"""Low-latency calls over nodes when something is wrong: refusals, different calls, ranks that are late or gone."""

import time
from dataclasses import replace

import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from events import tell, wait_for
from exchange_cases import NETWORK, device_of, in_environment
from low_latency_cases import Case, finish, make_buffer, run_case, start_dispatch
from on_ranks import on_ranks

from deepep_moe.errors import EPError, EPMismatchError, EPPeerError, EPTimeoutError
from deepep_moe.testing import run_ranks

pytestmark = pytest.mark.gpu

CASE = Case([6, 8, 7, 5], max_tokens=8, num_topk=5, ranks_per_node=2)
CULPRIT = 2


def check_usable(buffer, rank):
    for seed in range(3):
        run_case(buffer, replace(CASE, seed=seed), rank, "nvshmem")
    finish(buffer)


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
                finish(buffer)
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
            finish(buffer)
        assert rank == CULPRIT or caught.value.rank == CULPRIT
        began = time.monotonic()
        with pytest.raises((ValueError, EPPeerError), match="handle"):
            buffer.combine(rows_for(out), out.handle, topk_weights=some)
            finish(buffer)
        assert time.monotonic() - began < 30
        check_usable(buffer, rank)


@on_ranks(4)
def test_refused_combine(rank):
    """Ranks of the node name the culprit. Those of the other node name the rank that told them, or with weights perhaps the culprit."""
    buffer = make_buffer(CASE, "nvshmem", rank)
    out, _ = start_dispatch(buffer, CASE, rank, "nvshmem")
    for weights in (None, CASE.inputs(rank)[2].to(out.recv_x.device)):
        with raises(rank, ValueError, "wire is 'fp4'|its call: EPPeerError") as caught:
            buffer.combine(rows_for(out), out.handle, wire="fp4" if rank == CULPRIT else None, topk_weights=weights)
            finish(buffer)
        if rank != CULPRIT:
            assert caught.value.rank in {0: (2,), 1: (3,) if weights is None else (2, 3), 3: (2,)}[rank], (rank, caught.value)
        check_usable(buffer, rank)


@on_ranks(4)
def test_different_calls(rank):
    buffer = make_buffer(CASE, "nvshmem", rank)
    text = "ranks make different calls: .*sent as fp8"
    with pytest.raises(EPMismatchError, match=text):
        start_dispatch(buffer, replace(CASE, fp8=rank == CULPRIT), rank, "nvshmem")
        finish(buffer)
    check_usable(buffer, rank)
    outputs = [start_dispatch(buffer, CASE, rank, "nvshmem")[0] for _ in range(2)]
    rows = rows_for(outputs[0])
    weights = CASE.inputs(rank)[2].to(rows.device)
    for some in (None, weights):
        with pytest.raises((EPMismatchError, EPPeerError), match="combine with the handle of call"):
            buffer.combine(rows, outputs[rank // 2].handle, topk_weights=some)
            finish(buffer)
        check_usable(buffer, rank)
    out, _ = start_dispatch(buffer, CASE, rank, "nvshmem")
    for have_weights in ((CULPRIT,), (0, 1), (0, 1, 3)):
        with pytest.raises((EPMismatchError, EPPeerError), match="combine of bfloat16, with topk_weights"):
            buffer.combine(rows, out.handle, topk_weights=weights if rank in have_weights else None)
            finish(buffer)
        check_usable(buffer, rank)


@pytest.mark.slow
@on_ranks(4, operation=("dispatch", "combine", "combine with weights"))
def test_late_rank(rank, operation):
    """A rank that misses the deadline: all others raise, and those that wait for it name it."""
    buffer = make_buffer(CASE, "nvshmem", rank, timeout_s=3)
    out, _ = start_dispatch(buffer, CASE, rank, "nvshmem")
    finish(buffer)
    dist.barrier()
    if rank == CULPRIT:
        time.sleep(8)
        return buffer.destroy()
    began = time.monotonic()
    with pytest.raises(EPError) as caught:
        if operation == "dispatch":
            start_dispatch(buffer, CASE, rank, "nvshmem")
        else:
            rows = rows_for(out)
            weights = CASE.inputs(rank)[2].to(rows.device) if operation == "combine with weights" else None
            buffer.combine(rows, out.handle, topk_weights=weights)
        torch.cuda.synchronize()
        buffer.check()
    took = time.monotonic() - began
    assert 2 < took < 30, took
    assert isinstance(caught.value, (EPTimeoutError, EPPeerError)), caught.value
    if operation == "dispatch":  # rank 3 has the tokens of rank 0 by the culprit
        assert any(f"rank {named} did not deliver" in str(caught.value) for named in ((0, 2) if rank == 3 else (2,))), caught.value
    elif rank in (0, 3):
        assert f"rank {CULPRIT}" in str(caught.value), caught.value
    return buffer.destroy()


def may_share_the_blame(rank, late):
    """Ranks whose word reaches `rank` by the late one: those of other nodes on its rail, if it is of the node of `rank`."""
    per_node = CASE.ranks_per_node
    return {
        other for other in range(4) if rank // per_node == late // per_node != other // per_node and other % per_node == late % per_node
    }


def wait_that_tells(buffer, rank, late, case, name, pause):
    """Make a dispatch that rank `late` enters `pause` seconds after the others. Return the shortest wait of another rank for it, in
    nanoseconds, or 0 if a rank has waited as long for one that was in time."""
    dist.barrier()
    buffer.reset_statistics()
    if rank == late:
        wait_for(*(f"{name} {other}" for other in range(4) if other != late))
        time.sleep(pause)
    tell(f"{name} {rank}")
    _, wait = start_dispatch(buffer, case, rank, "nvshmem")
    wait()
    finish(buffer)
    waited = buffer.statistics().wait_ns.cpu()
    in_time = [other for other in range(4) if other not in {rank, late} | may_share_the_blame(rank, late)]
    least = waited[late] * (waited[late] > waited[in_time].max()) if rank != late else torch.tensor(2**62)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.item()


@on_ranks(4)
def test_who_is_late_to_a_dispatch(rank):
    """Statistics of all other ranks, also of the other node, say who was late. On a busy machine they may not have begun to wait by then,
    so a longer pause follows."""
    buffer = make_buffer(CASE, "nvshmem", rank)
    for late in range(4):
        case = replace(CASE, seed=late, mode=("now", "hook")[late % 2])
        waits = (wait_that_tells(buffer, rank, late, case, f"{late} {pause}", pause) for pause in (0.1, 0.5, 2.5, 12.5))
        assert any(waited > 1e7 for waited in waits), late


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
        finish(buffer)
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
    finish(buffer)
    rows = rows_for(out)
    dist.barrier()
    if rank != CULPRIT:
        buffer.combine(rows, out.handle, topk_weights=CASE.inputs(rank)[2].to(rows.device))
        finish(buffer)
        assert buffer.masked_ranks == ([0, CULPRIT] if rank == 3 else [CULPRIT]), buffer.masked_ranks
        for seed in range(3):
            run_case(buffer, replace(case, without=CULPRIT, seed=seed), rank, "nvshmem")
    dist.barrier()
    buffer.destroy()


def many_calls(rank, num_ranks, per_node, num_calls):
    case = Case([24, 3, 17, 0, 9, 24, 1, 12][:num_ranks], ranks_per_node=per_node, num_topk=5)
    buffer = make_buffer(case, "nvshmem", rank)
    for seed in range(num_calls):
        run_case(buffer, replace(case, seed=seed, fp8=seed % 2 == 0, combine_weights=seed % 3 == 0), rank, "nvshmem")
    buffer.destroy()


@pytest.mark.slow
@pytest.mark.skipif(not emulated_gpu.is_chosen(), reason="is about the emulated network")
@pytest.mark.parametrize("seed", range(18))
def test_networks(seed):
    """Networks that delay, tear and reorder, in other ways each."""
    network = {NETWORK: f"seed={seed},stall_us={200 * (seed % 4)}"}
    num_ranks, per_node = ((2, 1), (4, 2), (4, 1), (6, 2))[seed % 4] if seed < 16 else ((8, 4), (8, 2))[seed % 2]
    run_ranks(in_environment, num_ranks, network, many_calls, per_node, 5)
