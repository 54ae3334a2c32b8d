"""Calls with `return_hook=True` whose hook nobody calls: the buffer's next call finishes them, and nothing of them stays."""

import gc
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from events import tell, wait_for
from fault_cases import NUM_TOKENS, SOON_S, inputs, make, make_step, outcome, values
from on_ranks import on_ranks

from deepep_moe.errors import BufferDestroyedError, EPTimeoutError

KINDS = ("shm", "collective", pytest.param("nvlink", marks=pytest.mark.gpu))
OPERATIONS = ("dispatch", "dispatch along a handle", "fp8 dispatch along a handle", "combine")


class Split(NamedTuple):
    rows: torch.Tensor
    scales: torch.Tensor | None
    hook: Callable[[], None]


def start(buffer, operation, handle, step):
    """A call whose hook was not called, and references to its input and its output."""
    x, idx = inputs(buffer, step)
    if operation == "combine":
        x = x.new_full((handle.num_rows, buffer.hidden), buffer.rank + 1.0)
        combined_x, hook = buffer.combine(x, handle, return_hook=True)
        return Split(combined_x, None, hook), [weakref.ref(x), weakref.ref(combined_x)]
    how = {"topk_idx": idx} if operation == "dispatch" else {"handle": handle, "fp8": operation.startswith("fp8")}
    out = buffer.dispatch(x, return_hook=True, **how)
    references = [weakref.ref(out.recv_x)] if how.get("fp8") else [weakref.ref(x), weakref.ref(out.recv_x)]  # x was copied
    return Split(out.recv_x, out.recv_x_scales, out.hook), references


def finish(buffer, operation, split, step):
    split.hook()
    if operation == "combine":
        wanted = [sum(range(1, buffer.num_ranks + 1))] * NUM_TOKENS
    else:
        wanted = [values(step, rank)[token] for expert in (0, 1) for rank in range(buffer.num_ranks) for token in (expert, expert + 2)]
    rows = split.rows.float() if split.scales is None else split.rows.float() * split.scales
    torch.testing.assert_close(rows[:, -1].cpu(), torch.tensor(wanted, dtype=torch.float32), rtol=1e-5, atol=0)


def scribble(buffer):
    """Tensors of the sizes of inputs and outputs, where memory that was freed too early would be."""
    rows = NUM_TOKENS, NUM_TOKENS * buffer.num_ranks
    columns = (buffer.hidden, torch.float32), (buffer.hidden, torch.uint8), (1, torch.float32)  # the last two of fp8
    sizes = [(count, *of_row) for count in rows for of_row in columns]
    return [torch.full(size, 123, dtype=dtype) for *size, dtype in sizes for _ in range(20)]


@on_ranks(2, kind=KINDS)
def test_next_call_finishes_it(rank, num_ranks, kind):
    """One rank drops the result of a call. Its peers have their rows all the same, and the next calls are right. Over shared memory it does
    so before a peer has entered the call, so its thread has sent nothing yet."""
    buffer = make(kind, num_ranks)
    handle = buffer.dispatch(*inputs(buffer, 0)).handle
    for step, operation in enumerate(OPERATIONS, 1):
        culprit, is_dropped_first = step % num_ranks, kind == "shm" and operation != "dispatch"
        if rank == culprit:
            references = start(buffer, operation, handle, step)[1]
            written = scribble(buffer)
            if is_dropped_first or kind == "nvlink":
                assert all(reference() is not None for reference in references), f"{operation}: still to be read and written"
            tell(f"dropped {step}")
        else:
            if is_dropped_first:
                wait_for(f"dropped {step}")
            out, _ = start(buffer, operation, handle, step)
            finish(buffer, operation, out, step)
        make_step(buffer, step)
        if rank == culprit:
            gc.collect()
            assert all(reference() is None for reference in references), f"{operation}: over, but kept"
            assert all((tensor == 123).all() for tensor in written), f"{operation}: memory of others was written"


def soon(condition):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < SOON_S, "kept"
        time.sleep(0.01)


@on_ranks(2, how=("dropped", "destroyed", "destroyed before its hook"), kind=KINDS)
def test_buffer_that_goes_with_a_call_in_flight(rank, num_ranks, kind, how):
    for step, operation in enumerate(OPERATIONS, 1):
        buffer = make(kind, num_ranks)
        handle = buffer.dispatch(*inputs(buffer, 0)).handle
        out, references = start(buffer, operation, handle, step)
        if rank != step % num_ranks:
            finish(buffer, operation, out, step)
        elif how == "dropped":
            references.append(weakref.ref(buffer.calls.backend))
            del buffer, out, handle
            gc.collect()
            soon(lambda: all(reference() is None for reference in references))  # noqa: B023
        else:
            buffer.destroy()
            if kind == "nvlink" and how == "destroyed before its hook":
                with pytest.raises(BufferDestroyedError, match="the buffer was destroyed before this call's hook"):
                    out.hook()
            elif how == "destroyed before its hook":
                finish(buffer, operation, out, step)
            del out
            gc.collect()
            assert all(reference() is None for reference in references), f"{operation}: kept by a buffer that was destroyed"
            with pytest.raises(BufferDestroyedError, match="this buffer was destroyed"):
                buffer.dispatch(*inputs(buffer, 0))
        dist.barrier()


@on_ranks(2, kind=("low latency", pytest.param("low latency nvlink", marks=pytest.mark.gpu)))
def test_lost_low_latency_hooks(rank, num_ranks, kind):
    """A LowLatencyBuffer finishes no call by itself: it says what to do, and `finish_calls` mends it, also with a second lost hook."""
    buffer = make(kind, num_ranks)
    make_step(buffer, 0)
    for step, num_lost in enumerate((1, 2), 1):
        for number in range(2):
            x, idx = inputs(buffer, step)
            out = buffer.dispatch(x, idx, return_hook=True)
            if rank != 1 or number >= num_lost:
                out.hook()
            del out
        if rank == 1:
            for _ in range(2):  # nothing was sent
                with pytest.raises(ValueError, match=r"the call before last was not received yet; .* call finish_calls\(\)"):
                    make_step(buffer, step)
            buffer.finish_calls()
        make_step(buffer, step)
    buffer.finish_calls()  # has nothing to do
    make_step(buffer, 3)
    buffer.destroy()
    with pytest.raises(BufferDestroyedError, match="this LowLatencyBuffer was destroyed"):
        buffer.finish_calls()


@on_ranks(2)
def test_lost_hook_of_a_peer_that_does_not_come(rank, num_ranks):
    """`finish_calls` raises the error of receiving."""
    buffer = make("low latency", num_ranks, timeout_s=3.0)
    make_step(buffer, 0)
    if rank == 0:
        buffer.dispatch(*inputs(buffer, 1), return_hook=True)
        with pytest.raises(EPTimeoutError, match="rank 1 did not deliver"):
            buffer.finish_calls()
        tell("rank 0 has its error")
    wait_for("rank 0 has its error")


@on_ranks(2)
def test_destroyed_before_a_peer_comes(rank, num_ranks):
    """`destroy` waits for the call on the buffer's thread, up to the deadline."""
    buffer = make("shm", num_ranks, timeout_s=4.0)
    handle = buffer.dispatch(*inputs(buffer, 0)).handle
    if rank == 1:
        wait_for("destroyed")
        with pytest.raises(EPTimeoutError, match="rank 0 gave up on rank 1 in phase 'entry into the call'"):
            buffer.dispatch(inputs(buffer, 1)[0], handle=handle)
        return
    out, _ = start(buffer, "dispatch along a handle", handle, 1)
    error, elapsed_s = outcome(buffer.destroy)
    assert error is None and elapsed_s < SOON_S, repr(error)
    with pytest.raises(EPTimeoutError, match="rank 1 did not deliver, nothing came for 4 s; phase 'entry into the call'"):
        out.hook()
    tell("destroyed")
