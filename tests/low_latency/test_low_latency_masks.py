"""Low-latency calls that go on without a rank, and its return."""

import itertools
import mmap
import os
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from events import tell, wait_for
from exchange_cases import assert_same, look, on_device
from logs import heard
from low_latency_cases import (
    BACKENDS,
    Case,
    Expected,
    check_dispatch,
    combine_rows,
    combined_without,
    come_back,
    make_buffer,
    run_case,
    start_combine,
    start_dispatch,
)
from on_ranks import on_ranks

from deepep_moe.errors import EPMismatchError, EPPeerError, EPTimeoutError
from deepep_moe.low_latency.shm import ShmLowLatencyBackend

CASE = Case([6, 8, 7], max_tokens=8, num_experts=9, num_topk=4, masked=0.0)
MASKED = 1
DEADLINE_S = 4.0  # what a rank that stalls misses, and the others must not, on a busy machine
WITHOUT = replace(CASE, without=MASKED)
WEIGHED = replace(CASE, combine_weights=True)


def lost_pairs(rank):
    return int((CASE.inputs(rank)[1] // 3 == MASKED).sum())


def check_all(buffer, rank, backend):
    for seed in range(3):
        run_case(buffer, replace(CASE, seed=seed, combine_weights=seed == 1), rank, backend)


@on_ranks(3, backend=BACKENDS)
def test_masked_by_hand(rank, backend):
    buffer = make_buffer(CASE, backend, rank)
    run_case(buffer, CASE, rank, backend)
    for times in (1, 2):
        if rank != MASKED:
            buffer.mask_rank(MASKED)
            assert buffer.masked_ranks == [MASKED]
            for mode, combine_weights in itertools.product(("now", "hook", "async"), (False, True)):
                run_case(buffer, replace(WITHOUT, mode=mode, combine_weights=combine_weights), rank, backend)
            assert buffer.statistics().num_dropped.item() == 6 * times * lost_pairs(rank)
        come_back(buffer, rank, MASKED)
        check_all(buffer, rank, backend)


@on_ranks(4, backend=BACKENDS)
def test_masked_in_sums_by_lanes(rank, backend):
    case = Case([9, 24, 0, 17], num_topk=5, sums="lanes")
    buffer = make_buffer(case, backend, rank)
    run_case(buffer, case, rank, backend)
    if rank != 1:
        buffer.mask_rank(1)
    dist.barrier()
    if rank != 1:
        run_case(buffer, replace(case, without=1), rank, backend)
    dist.barrier()


@on_ranks(3, backend=BACKENDS)
def test_rank_that_stalls(rank, backend):
    lines = heard()
    buffer = make_buffer(CASE, backend, rank, timeout_s=DEADLINE_S, mask_stalled=True)
    run_case(buffer, CASE, rank, backend)
    dist.barrier()
    began = time.monotonic()
    if rank != MASKED:  # it waits in `come_back`
        run_case(buffer, WITHOUT, rank, backend)
        took = time.monotonic() - began
        assert took > 0.8 * DEADLINE_S and buffer.masked_ranks == [MASKED], (took, buffer.masked_ranks)
        assert [f"rank {rank} masks rank {MASKED}, which is gone or missed a deadline" in text for text in lines].count(True) == 1
        expected, waited = Expected(WITHOUT), buffer.statistics().wait_ns[MASKED].item()
        for _ in range(5):
            run_case(buffer, WITHOUT, rank, backend, expected)
        assert buffer.statistics().wait_ns[MASKED].item() - waited < 1e9, "who is masked is not waited for"
        assert len(lines) <= 2
    come_back(buffer, rank, MASKED)
    check_all(buffer, rank, backend)


@on_ranks(3, how=("killed", "destroyed"), expected_dead=lambda how, backend: [MASKED] if how == "killed" else [], backend=BACKENDS)
def test_rank_that_is_gone(rank, how, backend):
    buffer = make_buffer(CASE, backend, rank, timeout_s=300, mask_stalled=True)
    run_case(buffer, CASE, rank, backend)
    dist.barrier()
    if rank == MASKED:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return buffer.destroy()
    began = time.monotonic()
    for _ in range(3):
        run_case(buffer, WITHOUT, rank, backend)
    assert time.monotonic() - began < 60 and buffer.masked_ranks == [MASKED]


@on_ranks(3, how=("late", "dead"), expected_dead=lambda how, backend: [MASKED] if how == "dead" else [], backend=BACKENDS)
def test_rank_that_stalls_in_a_combine(rank, how, backend):
    """A rank that has received a dispatch does not make the combine; the others mask it within the call, and go on."""
    buffer = make_buffer(WEIGHED, backend, rank, timeout_s=DEADLINE_S if how == "late" else 300, mask_stalled=True)
    out, _ = start_dispatch(buffer, WEIGHED, rank, backend)
    rows = combine_rows(WEIGHED, rank, out, Expected(WEIGHED))
    look(buffer)
    dist.barrier()
    if rank == MASKED:
        if how == "late":
            wait_for("rank 0 is through", "rank 2 is through")
        else:
            os.kill(os.getpid(), signal.SIGKILL)
        return
    began = time.monotonic()
    y, wait = start_combine(buffer, WEIGHED, rows, out.handle)
    wait()
    assert_same("combined_x", y, combined_without(WEIGHED, MASKED)[rank])
    assert buffer.masked_ranks == [MASKED] and time.monotonic() - began < 60
    run_case(buffer, replace(WITHOUT, combine_weights=True), rank, backend)
    tell(f"rank {rank} is through")


def sends_first(rank, backend, case):
    """A buffer in which the masked rank has sent a call that the others have not begun."""
    buffer = make_buffer(CASE, backend, rank)
    run_case(buffer, CASE, rank, backend)
    if rank == MASKED:
        start_dispatch(buffer, replace(case, mode="hook"), rank, backend)
        if backend == "nvlink":
            torch.cuda.synchronize()
    dist.barrier()
    if rank != MASKED:
        buffer.mask_rank(MASKED)
    return buffer


@on_ranks(3, backend=BACKENDS)
def test_calls_that_the_masked_rank_has_sent(rank, backend):
    buffer = sends_first(rank, backend, replace(CASE, seed=5))
    come_back(buffer, rank, MASKED)  # for the call that it has sent: only what it sends after its return counts
    time.sleep(0.5 if rank == MASKED else 0)
    run_case(buffer, CASE, rank, backend)
    buffer = sends_first(rank, backend, replace(CASE, fp8=True))
    if rank != MASKED:  # what a masked rank sends in their call is nobody's error
        run_case(buffer, WITHOUT, rank, backend)
        assert buffer.masked_ranks == [MASKED]
    dist.barrier()


@on_ranks(3, backend=BACKENDS)
def test_errors_mask_nobody(rank, backend):
    buffer = make_buffer(CASE, backend, rank, mask_stalled=True)
    x, idx, weights = on_device(backend, rank, *CASE.inputs(rank))
    refused = ValueError if rank == MASKED else EPPeerError
    duplicate = torch.zeros_like(idx)
    for error, arguments in (
        (refused, dict(scale_format="e8" if rank == MASKED else "fp32")),
        (refused, dict(topk_idx=duplicate if rank == MASKED else idx)),
        (EPMismatchError, dict(fp8=rank == MASKED)),
    ):
        with pytest.raises(error):
            buffer.dispatch(**(dict(x=x, topk_idx=idx, topk_weights=weights) | arguments))
            look(buffer)
        assert buffer.masked_ranks == []
        run_case(buffer, CASE, rank, backend)


@on_ranks(3, backend=BACKENDS)
def test_return_after_failed_calls(rank, backend):
    """Calls that a masked rank has made alone, in vain, do not keep it from coming back, nor those that failed meanwhile the others."""
    buffer = make_buffer(CASE, backend, rank, timeout_s=3.0 if rank == MASKED else 60)
    x, idx, weights = on_device(backend, rank, *CASE.inputs(rank))
    for looks in (True, False):  # does the rank look at the failure before it comes back?
        run_case(buffer, CASE, rank, backend)
        if rank == MASKED:
            if looks or backend == "shm":
                with pytest.raises(EPTimeoutError, match="did not deliver"):
                    buffer.dispatch(x, idx, weights)
                    look(buffer)
            else:
                buffer.dispatch(x, idx, weights)
        else:
            buffer.mask_rank(MASKED)
            for _ in range(3):
                run_case(buffer, WITHOUT, rank, backend)
            with pytest.raises((ValueError, EPPeerError), match="scale_format is 'e8'"):
                buffer.dispatch(x, idx, weights, scale_format="fp32" if rank else "e8")
                look(buffer)
        come_back(buffer, rank, MASKED)
        check_all(buffer, rank, backend)


@on_ranks(3, backend=BACKENDS)
def test_return_between_two_halves(rank, backend):
    """A rank that is taken back has no part in a call that was sent before."""
    buffer = make_buffer(CASE, backend, rank)
    run_case(buffer, CASE, rank, backend)
    hook = None
    if rank != MASKED:
        buffer.mask_rank(MASKED)
        out, hook = start_dispatch(buffer, replace(WITHOUT, mode="hook"), rank, backend)
    come_back(buffer, rank, MASKED)
    if hook is not None:
        hook()
        check_dispatch(WITHOUT, rank, out, Expected(WITHOUT))
    check_all(buffer, rank, backend)


@on_ranks(3)
def test_returns_that_fail(rank):
    """Nobody takes the rank back. Then rank 0 does, one call before rank 2."""
    buffer = make_buffer(CASE, "shm", rank, timeout_s=2)
    if rank == MASKED:
        with pytest.raises(EPTimeoutError, match="rank 0 did not deliver, nothing came for 2 s; phase 'return to the calls'"):
            buffer.rejoin()
    dist.barrier()
    run_case(buffer, CASE, rank, "shm")
    dist.barrier()
    if rank == MASKED:
        with pytest.raises(EPMismatchError, match="take rank 1 back between different calls: rank 0 at call 3, rank 2 at call 4"):
            buffer.rejoin()
        return dist.barrier()
    buffer.mask_rank(MASKED)
    if rank == 0:
        buffer.mask_rank(MASKED, False)
        with pytest.raises(EPTimeoutError, match="rank 1 did not deliver"):
            start_dispatch(buffer, CASE, rank, "shm")
    else:
        start_dispatch(buffer, CASE, rank, "shm")
        buffer.mask_rank(MASKED, False)
    dist.barrier()


# ---- rows that do not come, though their rank has entered the call ----


def layout(case):
    """Offsets of deepep_moe/low_latency/shm_calls."""
    ranks = case.num_ranks
    turns = -(-(16 * ranks + 4 * 240 * ranks) // 128) * 128
    arrived = 8 * ranks
    area_bytes = -(-8 * case.max_tokens * case.num_topk // 128) * 128 + case.max_tokens * -(-4 * case.hidden // 128) * 128
    turn_bytes = -(-16 * ranks // 128) * 128 + ranks * area_bytes
    return turns, arrived, turn_bytes, turns + 4 * turn_bytes


def lose_rows(case, paths, call, owner, source):
    """The flag of a rank's rows, back to nothing."""
    turns, arrived, turn_bytes, total = layout(case)
    with open(paths[owner], "r+b") as file, mmap.mmap(file.fileno(), total) as memory:
        at = turns + call % 4 * turn_bytes + arrived + 8 * source
        assert int.from_bytes(memory[at : at + 8], "little") >> 24 == call
        memory[at : at + 8] = bytes(8)


@on_ranks(3, operation=("dispatch", "combine"), mask_stalled=(False, True))
def test_lost_rows(rank, operation, mask_stalled):
    """The rows of rank 1 to rank 0 get lost, of a call that rank 0 makes only then. Every token goes to every rank."""
    ShmLowLatencyBackend.seal = lambda self: None
    case = Case([4, 4, 4], max_tokens=4, num_experts=3, masked=0.0, dtype=torch.float32, with_weights=False, mode="hook")
    buffer, paths = make_buffer(case, "shm", rank, timeout_s=2.0, mask_stalled=mask_stalled), [None] * 3
    dist.all_gather_object(paths, buffer._backend.address()[0])
    if operation == "dispatch":
        call, start = 1, partial(start_dispatch, buffer, case, rank, "shm")
    else:
        out, _ = start_dispatch(buffer, replace(case, mode="now"), rank, "shm")
        call, start = 2, partial(buffer.combine, out.recv_x, out.handle, return_hook=True)
    if rank == 1:
        result, hook = start()
        lose_rows(case, paths, call, 0, 1)
    dist.barrier()
    if rank != 1:
        result, hook = start()
    message = f"rank 1 did not deliver, nothing came for 2 s; phase '{operation} rows', expected {call}, seen 0"
    with pytest.raises(EPTimeoutError, match=message) if rank == 0 and not mask_stalled else nullcontext():
        hook()
    if operation == "dispatch" and rank == 0 and mask_stalled:
        assert_same("rows of rank 1", result.recv_x[0, 4:8], torch.zeros(4, case.hidden))
        for other in (0, 2):
            assert_same(f"rows of rank {other}", result.recv_x[0, 4 * other : 4 * other + 4], case.inputs(other)[0])
        assert buffer.masked_ranks == [1] and result.num_recv_tokens_per_expert.tolist() == [12]
    if operation == "combine" and (rank != 0 or mask_stalled):
        torch.testing.assert_close(result, case.inputs(rank)[0] * (2.0 if rank == 0 else 3.0))  # for rank 0 without that of rank 1
    dist.barrier()
    if not mask_stalled:
        run_case(buffer, replace(case, mode="now"), rank, "shm")  # usable afterwards


def lose_counts(buffer, case, call, source):
    """Erase the token counts that `source` sent for the experts of this rank, in the memory of an emulated GPU."""
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if not os.path.exists(path) or not os.readlink(path).startswith(f"/memfd:emulated-gpu-{os.getpid()} "):
            continue
        turns = -(-976 * case.num_ranks // 128) * 128
        turn_bytes = (buffer.workspace_bytes - turns) // 4
        num_bytes = 8 * buffer.num_local_experts
        at = turns + call % 4 * turn_bytes + 8 * case.num_ranks + source * num_bytes
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), buffer.workspace_bytes) as memory:
            assert all(int.from_bytes(memory[i : i + 8], "little") >> 24 == call for i in range(at, at + num_bytes, 8))
            memory[at : at + num_bytes] = bytes(num_bytes)
        return
    raise AssertionError("no workspace of an emulated GPU")


@pytest.mark.gpu
@pytest.mark.skipif(not emulated_gpu.is_chosen(), reason="reaches into the memory of an emulated GPU")
@on_ranks(3)
def test_lost_counts_of_a_dispatch(rank):
    """Rank 1 has entered the call, its rows are there, how many they are does not come: to rank 0 it has not come."""
    buffer = make_buffer(CASE, "nvlink", rank, timeout_s=2.0 if rank == 0 else 60, mask_stalled=True)
    case = replace(CASE, mode="hook")
    if rank == MASKED:
        out, hook = start_dispatch(buffer, case, rank, "nvlink")
    dist.barrier()
    if rank != MASKED:
        if rank == 0:
            lose_counts(buffer, CASE, 1, MASKED)
        out, hook = start_dispatch(buffer, case, rank, "nvlink")
    hook()
    look(buffer)
    case = WITHOUT if rank == 0 else CASE
    check_dispatch(case, rank, out, Expected(case))
    assert buffer.masked_ranks == ([MASKED] if rank == 0 else [])
    dist.barrier()
