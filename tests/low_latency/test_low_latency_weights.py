"""Low-latency combine with weights of its own: what it returns, and who waits for whom."""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from events import tell, wait_for
from exchange_cases import assert_same, device_of, on_device
from low_latency_cases import (
    Case,
    Expected,
    check_cases,
    check_dispatch,
    combine_rows,
    finish,
    make_buffer,
    run_case,
    start_combine,
    start_dispatch,
)
from low_latency_faults import check_usable, make, on_every_backend

from deepep_moe import LowLatencyBuffer
from deepep_moe.errors import EPMismatchError, EPPeerError, EPTimeoutError
from deepep_moe.testing import run_ranks

CASE = Case([6, 8, 7], max_tokens=8, num_experts=9, num_topk=4, masked=0.0, combine_weights=True)
MASKED = 1
WITHOUT = replace(CASE, without=MASKED)

# ---- what it returns ----


def two_ranks_by_hand(rank, _, backend):
    """Rank 0 holds experts 0 and 1, rank 1 holds 2 and 3; every expert returns 10 * x."""
    device_of(backend, rank)
    buffer = LowLatencyBuffer(None, 2, 8, 4, 2, backend=backend, timeout_s=60)
    x = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])[rank].expand(2, 8).contiguous()
    idx = torch.tensor([[[0, 2], [3, -1]], [[2, 3], [0, 1]]])[rank]
    weights = torch.tensor([[[0.5, 0.25], [2.0, 9.0]], [[1.0, 1.0], [3.0, 0.0]]])[rank]
    x, idx, weights = on_device(backend, rank, x, idx, weights)
    for given in (None, torch.full_like(weights, 7)):  # weights of the dispatch do not count
        out = buffer.dispatch(x, idx, given)
        into = torch.full_like(x, torch.nan)
        assert buffer.combine(out.recv_x * 10, out.handle, topk_weights=weights, out=into) is into
        assert into.tolist() == [[[7.5] * 8, [40.0] * 8], [[60.0] * 8, [120.0] * 8]][rank]
        y = buffer.combine(out.recv_x, out.handle, topk_weights=2 * weights)  # along the same handle
        assert y[:, 0].tolist() == [[1.5, 8.0], [12.0, 24.0]][rank]
    y = buffer.combine(out.recv_x, out.handle)
    assert y[:, 0].tolist() == [[14.0, 14.0], [42.0, 56.0]][rank]


@on_every_backend
def test_by_hand(backend):
    run_ranks(two_ranks_by_hand, 2, backend)


@on_every_backend
@pytest.mark.parametrize("num_ranks", (1, 2, 3, 8))
def test_equals_reference(num_ranks, backend):
    tokens = [24, 0, 7, 13, 1, 24, 3, 9][:num_ranks]
    cases = [
        Case(tokens, dtype=dtype, wire=wire, hidden=hidden, mode=mode, seed=num_ranks, combine_weights=True)
        for dtype, wire, hidden, mode in (
            (torch.bfloat16, None, 72, "now"),
            (torch.float16, "fp8", 256, "async"),
            (torch.float32, None, 4, "hook"),
        )
    ]
    run_ranks(check_cases, num_ranks, backend, cases)


@on_every_backend
def test_extreme_routings(backend):
    """Heads of one to three lines, rows of several goes, ranks without tokens, tokens without experts."""
    cases = [
        Case([24, 5, 24], num_topk=32, num_experts=48, masked=0.0, hidden=8),
        Case([9, 24, 3], num_topk=16, num_experts=48, hidden=8),
        Case([24, 24, 24], num_topk=1, num_experts=3, masked=0.0, hidden=8),
        Case([6, 7, 8], masked=1.0),
        Case([0, 0, 0]),
        Case([3, 5, 0], hidden=16384),
        Case([1, 0, 290], max_tokens=300, num_experts=300, num_topk=20, hidden=128),
    ]
    run_ranks(check_cases, 3, backend, [replace(case, combine_weights=True) for case in cases])


def same_bits(rank, _, backend):
    """Magnitudes far apart, so that another order of the sum would show."""
    for wire in (None, "fp8"):
        case = Case([24, 9, 24], num_topk=8, masked=0.1, dtype=torch.float32, hidden=256, wire=wire)
        buffer = make_buffer(case, backend, rank)
        x, idx, weights = on_device(backend, rank, *case.inputs(rank))
        with_weights, without = buffer.dispatch(x, idx, weights), buffer.dispatch(x, idx)
        rows = combine_rows(case, rank, without, Expected(case))
        theirs = buffer.combine(rows, with_weights.handle, wire=wire)
        ours = buffer.combine(rows, without.handle, topk_weights=weights, wire=wire)
        assert_same("combined_x", ours, theirs)


@on_every_backend
def test_bits_of_weights_given_to_dispatch(backend):
    run_ranks(same_bits, 3, backend)


# ---- ways to call ----


def two_in_flight(rank, _, backend):
    """Two hooked calls of either kind, received in the order that each rank likes."""
    cases = [replace(CASE, mode="hook", seed=seed, combine_weights=seed != 1) for seed in range(3)]
    buffer = make_buffer(CASE, backend, rank)
    expected = [Expected(case) for case in cases]
    for first, second in ((0, 1), (1, 2), (2, 0)):
        pair = (first, second) if rank != 1 else (second, first)
        started = {index: start_dispatch(buffer, cases[index], rank, backend) for index in (first, second)}
        for index in pair:
            started[index][1]()
            check_dispatch(cases[index], rank, started[index][0], expected[index])
        rows = {index: combine_rows(cases[index], rank, started[index][0], expected[index]) for index in pair}
        time.sleep(0.05 * rank)
        back = {index: start_combine(buffer, cases[index], rows[index], started[index][0].handle) for index in (first, second)}
        for index in pair:
            back[index][1]()
            assert_same("combined_x", back[index][0], expected[index].combined[rank])


@on_every_backend
def test_two_calls_in_flight(backend):
    run_ranks(two_in_flight, 3, backend)


def many_calls(rank, num_ranks, backend):
    """Ranks that are late in turn, through all turns several times."""
    buffer = make_buffer(CASE, backend, rank)
    for seed in range(12):
        time.sleep(0.03 if seed % num_ranks == rank else 0)
        mode, wire = ("now", "hook", "async")[seed % 3], (None, "fp8")[seed % 2]
        run_case(buffer, replace(CASE, seed=seed, mode=mode, wire=wire, combine_weights=seed % 4 != 3), rank, backend)


@on_every_backend
def test_many_calls(backend):
    run_ranks(many_calls, 3, backend)


def counting(rank, _, backend):
    buffer = make_buffer(CASE, backend, rank)
    expected = Expected(CASE)
    out, _ = start_dispatch(buffer, CASE, rank, backend)
    rows = combine_rows(CASE, rank, out, expected)
    finish(buffer)
    for mode in ("now", "hook"):
        buffer.reset_statistics()
        dist.barrier()
        time.sleep(0.8 if rank == 2 else 0)
        y, wait = start_combine(buffer, replace(CASE, mode=mode), rows, out.handle)
        wait()
        assert_same("combined_x", y, expected.combined[rank])
        wait_ns = buffer.statistics().wait_ns.cpu()
        assert wait_ns.shape == (3,) and not buffer.statistics().num_tokens_per_expert.any()
        if rank != 2:
            assert wait_ns[2] > 4e8 and wait_ns[rank] < wait_ns[2] / 2, f"{mode}: {wait_ns}"


@on_every_backend
def test_statistics_name_the_late_rank(backend):
    run_ranks(counting, 3, backend)


def captured(rank, _):
    """Each replay reads the weights that lie there then."""
    case = Case([24, 6], combine_weights=True)
    buffer = make_buffer(case, "nvlink", rank)
    x, idx, weights = (tensor.cuda() for tensor in case.inputs(rank))
    out = buffer.dispatch(x, idx)
    rows = torch.where(out.recv_x.isnan(), 0, out.recv_x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = buffer.dispatch(x, idx)
        y, hook = buffer.combine(rows, out.handle, topk_weights=weights, return_hook=True)
        hook()
    for _ in range(5):
        weights.copy_(torch.rand(weights.shape, generator=torch.Generator().manual_seed(rank)))
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        told = buffer.combine(rows, buffer.dispatch(x, idx, weights).handle)
        assert_same("combined_x", y, told)


@pytest.mark.gpu
def test_cuda_graph():
    run_ranks(captured, 2)


# ---- ranks that do something else ----


def only_one_has_weights(rank, _, backend):
    buffer, x, idx = make(backend, rank)
    out, weights = buffer.dispatch(x, idx), torch.ones(4, 2, device=x.device)
    texts = ("combine of float32, with topk_weights", "combine of float32")
    for culprit in (0, 1):
        me, you = (f"rank {who}: {texts[(who + culprit) % 2]}" for who in (rank, 1 - rank))
        with pytest.raises(EPMismatchError, match=f"ranks make different calls: {me}; {you}$"):
            buffer.combine(out.recv_x, out.handle, topk_weights=weights if rank == culprit else None)
            finish(buffer)
        check_usable(buffer, x, idx)


@on_every_backend
def test_weights_on_one_rank_only(backend):
    run_ranks(only_one_has_weights, 2, backend)


def different_dispatches(rank, _, backend):
    buffer, x, idx = make(backend, rank)
    weights = torch.ones(4, 2, device=x.device)
    outputs = [buffer.dispatch(x, idx) for _ in range(2)]
    me, you = (f"rank {who}: combine with the handle of call {who + 1}" for who in (rank, 1 - rank))
    with pytest.raises(EPMismatchError, match=f"ranks make different calls: {me}; {you}$"):
        buffer.combine(outputs[rank].recv_x, outputs[rank].handle, topk_weights=weights)
        finish(buffer)
    check_usable(buffer, x, idx)


@on_every_backend
def test_handles_of_different_dispatches(backend):
    run_ranks(different_dispatches, 2, backend)


def refusing_on_and_on(rank, _, backend):
    buffer, x, idx = make(backend, rank)
    out, weights = buffer.dispatch(x, idx), torch.ones(4, 2, device=x.device)
    for _ in range(5):
        time.sleep(0.05 if rank == 1 else 0)
        with pytest.raises(ValueError if rank == 0 else EPPeerError, match="wire is 'fp4'"):
            buffer.combine(out.recv_x, out.handle, topk_weights=weights, wire="fp4" if rank == 0 else None)
            finish(buffer)
    check_usable(buffer, x, idx)


@on_every_backend
def test_refusals_in_a_row(backend):
    run_ranks(refusing_on_and_on, 2, backend)


def along_failed_dispatch(rank, _):
    """On a GPU a dispatch fails after it has given a handle; nobody waits for weights along it."""
    buffer, x, idx = make("nvlink", rank)
    weights = torch.ones(4, 2, device=x.device)
    for _ in range(2):
        out = buffer.dispatch(x, idx + 1 if rank == 1 else idx)
        torch.cuda.synchronize()
        dist.barrier()
        with pytest.raises(ValueError if rank == 1 else EPPeerError, match=r"topk_idx\[[12], [01]\] is 4; it must be -1"):
            buffer.check()
        dist.barrier()  # both have looked, so a second reason may lie where the first did
        buffer.combine(out.recv_x, out.handle, topk_weights=weights)
        torch.cuda.synchronize()
        dist.barrier()
        with pytest.raises((ValueError, EPPeerError), match="the dispatch of this handle has failed, so nothing goes along it"):
            buffer.check()
        dist.barrier()
        check_usable(buffer, x, idx)


@pytest.mark.gpu
def test_handle_of_a_failed_dispatch():
    run_ranks(along_failed_dispatch, 2)


# ---- ranks that are late or gone ----


def masked(rank, _, backend):
    buffer = make_buffer(CASE, backend, rank)
    run_case(buffer, CASE, rank, backend)
    if rank != MASKED:
        buffer.mask_rank(MASKED)
        for mode in ("now", "hook", "async"):
            run_case(buffer, replace(WITHOUT, mode=mode), rank, backend)
    dist.barrier()
    if rank == MASKED:
        buffer.rejoin()
    else:
        buffer.mask_rank(MASKED, False)
    for seed in range(3):
        run_case(buffer, replace(CASE, seed=seed), rank, backend)


@on_every_backend
def test_masked_by_hand(backend):
    run_ranks(masked, 3, backend)


def left_out(rank, buffer, out, rows, expected):
    """A combine in which the masked rank is left out: of the others' shares, in rank order, each rounded once to bf16."""
    y, wait = start_combine(buffer, CASE, rows, out.handle)
    wait()
    total = torch.zeros(y.shape)
    for peer, there in enumerate(expected.received):
        for slot, (source, token) in enumerate(there.tokens):
            if peer != MASKED and source == rank:
                lanes = sorted(there.row_of_lane[slot].items())
                weights = CASE.inputs(rank)[2][token]
                share = torch.zeros(CASE.hidden)
                for lane, row in lanes:
                    share = share + weights[lane] * expected.outputs[peer][row].float()
                total[token] += share.bfloat16().float()
    assert_same("combined_x", y, total.bfloat16())


def stalls(rank, _, backend, how):
    """A rank that has received a dispatch does not make the combine; the others mask it within the call, and go on."""
    expected = Expected(CASE)
    buffer = make_buffer(CASE, backend, rank, timeout_s=4.0 if how == "late" else 300, mask_stalled=True)
    out, _ = start_dispatch(buffer, CASE, rank, backend)
    rows = combine_rows(CASE, rank, out, expected)
    finish(buffer)
    dist.barrier()
    if rank == MASKED:
        if how == "late":
            wait_for("rank 0 is through", "rank 2 is through")
        else:
            os.kill(os.getpid(), signal.SIGKILL)
        return
    began = time.monotonic()
    left_out(rank, buffer, out, rows, expected)
    assert buffer.masked_ranks == [MASKED] and time.monotonic() - began < 60
    run_case(buffer, WITHOUT, rank, backend)
    tell(f"rank {rank} is through")


@on_every_backend
@pytest.mark.parametrize("how", ("late", "dead"))
def test_rank_that_stalls_is_masked(how, backend):
    run_ranks(stalls, 3, backend, how, expected_dead=[MASKED] if how == "dead" else [])


def late(rank, _, backend):
    """Who gave up on a late rank has no weights of it, and has summed nothing for it: the late one hears so at once."""
    buffer = make_buffer(CASE, backend, rank, timeout_s=4.0)
    out, _ = start_dispatch(buffer, CASE, rank, backend)
    rows = combine_rows(CASE, rank, out, Expected(CASE))
    finish(buffer)
    dist.barrier()
    if rank == 2:
        wait_for("rank 0 knows", "rank 1 knows")
        began = time.monotonic()
        with pytest.raises(EPPeerError, match="rank [01] did not make its call: .*rank 2 did not deliver"):
            start_combine(buffer, CASE, rows, out.handle)
            finish(buffer)
        assert time.monotonic() - began < 3.0
    else:
        with pytest.raises(EPTimeoutError, match="rank 2 did not deliver.*phase 'entry into the call', expected 2, seen") as info:
            start_combine(buffer, CASE, rows, out.handle)
            finish(buffer)
        assert (info.value.rank, info.value.expected) == (2, 2)
        tell(f"rank {rank} knows")
    dist.barrier()
    run_case(buffer, CASE, rank, backend)


@on_every_backend
def test_late_peer(backend):
    run_ranks(late, 3, backend)


def dies(rank, _, backend, mode):
    buffer = make_buffer(CASE, backend, rank, timeout_s=300)
    out, _ = start_dispatch(buffer, CASE, rank, backend)
    rows = combine_rows(CASE, rank, out, Expected(CASE))
    finish(buffer)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    # Or the other survivor, which has seen it first, says so.
    with pytest.raises(
        (EPTimeoutError, EPPeerError), match="rank 1 did not deliver, its process [0-9]+ is gone; phase 'entry into the call'"
    ) as info:
        start_combine(buffer, replace(CASE, mode=mode), rows, out.handle)[1]()
        finish(buffer)
    assert info.value.rank == (1 if isinstance(info.value, EPTimeoutError) else 2 - rank) and time.monotonic() - began < 60


@on_every_backend
@pytest.mark.parametrize("mode", ("now", "hook", "async"))
def test_peer_that_dies(mode, backend):
    run_ranks(dies, 3, backend, mode, expected_dead=[1])
