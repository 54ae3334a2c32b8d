"""Low-latency calls when something is wrong: bad arguments, different calls, ranks that are late, gone or come back."""

import os
import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from events import tell, wait_for
from exchange_cases import look, on_device
from fault_cases import Replaced
from low_latency_cases import (
    BACKENDS,
    CASE,
    IDX,
    Case,
    Expected,
    X,
    check_usable,
    combine_rows,
    make,
    make_buffer,
    run_case,
    start_combine,
    start_dispatch,
)
from on_ranks import on_ranks, refused

from deepep_moe.errors import BufferDestroyedError, EPError, EPMismatchError, EPPeerError, EPTimeoutError
from deepep_moe.low_latency import shm_rows

WEIGHED = Case([6, 8, 7], max_tokens=8, num_experts=9, num_topk=4, masked=0.0, combine_weights=True)

# ---- ranks that do different things ----


@on_ranks(2, backend=BACKENDS)
def test_different_calls(rank, backend):
    buffer, x, idx = make(backend, rank)
    weights = torch.ones(4, 2, device=x.device)
    outputs = [buffer.dispatch(x, idx) for _ in range(2)]
    y, handle = outputs[0].recv_x, outputs[0].handle
    one_is_weighed = "combine of float32, with topk_weights", "combine of float32"
    handles = [f"combine with the handle of call {call}" for call in (1, 2)]

    def mixes():
        if rank == 0:
            buffer.dispatch(x.bfloat16(), idx, weights)
        else:
            buffer.combine(y, handle, wire="fp8")

    for texts, call in (
        (("dispatch of float32", "dispatch of float32, sent as fp8"), lambda: buffer.dispatch(x, idx, fp8=rank == 1)),
        (("dispatch of bfloat16, with topk_weights", "combine of float32, sent as fp8"), mixes),
        (one_is_weighed, lambda: buffer.combine(y, handle, topk_weights=weights if rank == 0 else None)),
        (one_is_weighed[::-1], lambda: buffer.combine(y, handle, topk_weights=weights if rank == 1 else None)),
        (handles, lambda: buffer.combine(y, outputs[rank].handle)),
        (handles, lambda: buffer.combine(y, outputs[rank].handle, topk_weights=weights)),
    ):
        me, you = (f"rank {who}: {texts[who]}" for who in (rank, 1 - rank))
        with pytest.raises(EPMismatchError, match=f"ranks make different calls: {me}; {you}$"):
            call()
            look(buffer)
        check_usable(buffer, x, idx)
    assert torch.isfinite(buffer.combine(y, handle)).all()

    # A combine before the hook of its dispatch.
    out = buffer.dispatch(x, idx, return_hook=True)
    with pytest.raises(ValueError, match="handle is of a dispatch that was not received; call its hook"):
        buffer.combine(out.recv_x, out.handle)
    dist.barrier()  # both have refused, so neither has heard of the other's refusal
    out.hook()
    assert torch.isfinite(buffer.combine(out.recv_x, out.handle)).all()


@on_ranks(2, backend=BACKENDS)
def test_refusals_in_a_row_and_use_after_destroy(rank, backend):
    """A rank that refuses call after call does not get ahead of ranks in the first call, and they learn the reason of each."""
    buffer, x, idx = make(backend, rank)
    out, weights = buffer.dispatch(x, idx), torch.ones(4, 2, device=x.device)
    for name, bad, good, call in (
        ("scale_format", "e8", "fp32", partial(buffer.dispatch, x, idx)),
        ("wire", "fp4", None, partial(buffer.combine, out.recv_x, out.handle)),
        ("wire", "fp4", None, partial(buffer.combine, out.recv_x, out.handle, topk_weights=weights)),
    ):
        for number in range(7):
            time.sleep(0.05 if rank == 1 else 0)
            with pytest.raises(ValueError if rank == 0 else EPPeerError, match=f"{name} is '{bad}{number}'"):
                call(**{name: f"{bad}{number}" if rank == 0 else good})
                look(buffer)
        check_usable(buffer, x, idx)

    out, hook = buffer.dispatch(x, idx), buffer.dispatch(x, idx, return_hook=True).hook
    look(buffer)
    dist.barrier()
    buffer.destroy()
    buffer.destroy()
    for call in (lambda: buffer.dispatch(x, idx), lambda: buffer.combine(out.recv_x, out.handle), lambda: buffer.masked_ranks, hook):
        with pytest.raises(BufferDestroyedError, match="this LowLatencyBuffer was destroyed; create another"):
            call()


# ---- calls that fail before they have a number ----


@pytest.mark.gpu
@on_ranks(2)
def test_failure_before_the_number(rank):
    """Peers learn of it, and it takes the place of the call: after one in flight one more may be sent, and only one. On CPUs such a failure
    is reported as one of the arguments (`test_interrupt_around_native_code`)."""
    buffer, x, idx = make("nvlink", rank)
    out, calls = buffer.dispatch(x, idx), buffer._backend.calls

    def begin(*arguments):
        if arguments[-1]:  # they are checked
            raise error

    for error in (torch.OutOfMemoryError("no room"), RuntimeError("no call begins"), KeyboardInterrupt("now")):
        for call in (partial(buffer.dispatch, x, idx), partial(buffer.combine, out.recv_x, out.handle)):
            for hooks in (0, 1):
                earlier = [buffer.dispatch(x, idx, return_hook=True).hook for _ in range(hooks)]
                with refused(rank, 0, type(error), str(error)):
                    buffer._backend.calls = Replaced(calls, dispatch=begin, combine=begin) if rank == 0 else calls
                    try:
                        call()
                    finally:
                        buffer._backend.calls = calls
                        [hook() for hook in earlier]
                    look(buffer)
                check_usable(buffer, x, idx)


@pytest.mark.gpu
@on_ranks(2, learns_first=(True, False))
def test_combine_along_failed_dispatch(rank, learns_first):
    """On a GPU a dispatch gives a handle before it has failed; what was not received has no place, so nothing goes along it."""
    buffer, x, idx = make("nvlink", rank)
    learns = partial(pytest.raises, ValueError if rank == 1 else EPPeerError, match=r"topk_idx\[[12], [01]\] is 4; it must be -1")
    for weights in (None, torch.ones(4, 2, device=x.device)):
        out = buffer.dispatch(x, idx + 1 if rank == 1 else idx)
        torch.cuda.synchronize()
        dist.barrier()
        if learns_first:
            with learns():
                buffer.check()
            dist.barrier()  # before a peer can refuse the next call, whose reason may lie where the first did
        with nullcontext() if learns_first else learns():
            buffer.combine(out.recv_x, out.handle, topk_weights=weights)
        torch.cuda.synchronize()
        dist.barrier()
        if learns_first:
            with pytest.raises((ValueError, EPPeerError), match="the dispatch of this handle has failed, so nothing goes along it"):
                buffer.check()
        dist.barrier()
        check_usable(buffer, x, idx)
        buffer.check()


@on_ranks(3, backend=BACKENDS)
def test_refusal_of_a_peer_that_left(rank, backend):
    """The reason of a refusal is kept if the rank leaves before a third rank has entered the call."""
    case = replace(CASE, num_tokens=[4, 4, 4], num_experts=6)
    buffer = make_buffer(case, backend, rank, timeout_s=60)
    x, idx = on_device(backend, rank, X, IDX)
    check_usable(buffer, x, idx)
    dist.barrier()
    if rank == 1:
        with pytest.raises(TypeError, match="x has dtype float64"):
            buffer.dispatch(x.double(), idx)
        buffer.destroy()
        tell("rank 1 left")
    if rank == 2:
        wait_for("rank 1 left")
    if rank != 1:
        with pytest.raises(EPPeerError, match="rank 1 did not make its call: TypeError: x has dtype float64"):
            buffer.dispatch(x, idx)
            look(buffer)
    dist.barrier()


@on_ranks(2)
def test_failure_on_the_thread(rank):
    """An asynchronous failure that nobody waited for is raised by the next call, once."""
    case = replace(CASE, mode="async")
    buffer = make_buffer(case, "shm", rank)
    for is_dispatch in (True, False):
        out = buffer.dispatch(X, IDX, async_op=True, fp8=rank == 1)
        while not out.event.is_over():
            time.sleep(0.01)
        with pytest.raises(EPError, match="an earlier asynchronous call of this buffer failed: EPMismatchError"):
            if is_dispatch:
                buffer.dispatch(X, IDX)
            else:
                buffer.combine(torch.zeros(2, 16, 128), out.handle)
        with pytest.raises(EPMismatchError):
            out.event.wait()
        run_case(buffer, case, rank, "shm")


# ---- interrupts while rows are moved ----


class Stop(ValueError):
    """A handler's own error, which is no wrong argument."""


@on_ranks(2)
def test_interrupts_while_rows_are_moved(rank):
    """Peers learn of an error of a signal's handler, of any class, in the same call if rank 1 was writing, else in the next call."""
    buffer, x, idx = make("shm", rank)
    halves = [("dispatch", "write"), ("dispatch", "read"), ("combine", "write"), ("combine", "write_weighted"), ("combine", "read")]
    for (operation, half), kind_of_error in product(halves, (KeyboardInterrupt, Stop, EPError)):
        kind = shm_rows.DispatchRows if operation == "dispatch" else shm_rows.CombineRows
        error, out = kind_of_error("while it moves"), buffer.dispatch(x, idx)
        weights = torch.ones(4, 2) if half == "write_weighted" else None
        learns = partial(pytest.raises, EPPeerError, match=f"rank 1 did not make its call: {kind_of_error.__name__}: while it moves")

        def moves(*_, error=error):
            time.sleep(0.05)  # the peer waits for the rows by now
            raise error

        def call(operation=operation, out=out, weights=weights):
            return buffer.dispatch(x, idx) if operation == "dispatch" else buffer.combine(out.recv_x, out.handle, topk_weights=weights)

        if rank == 1:
            with mock.patch.object(kind, half, moves), pytest.raises(kind_of_error) as raised:
                call()
            assert raised.value is error, (operation, half)
        else:
            if half == "read":
                call()
            with learns():
                call()
        check_usable(buffer, x, idx)

    # A signal's handler may run while Python writes rows. It may not use the buffer, and the call that it interrupts goes on.
    calls = (
        partial(buffer.dispatch, x, idx), partial(buffer.dispatch, x, idx, return_hook=True), partial(buffer.dispatch, x, idx + 9),
        partial(buffer.refuse, ValueError("of a handler")), partial(buffer.mask_rank, 1 - rank), buffer.rejoin,
    )  # fmt: skip
    stock, refused = shm_rows.refuse_bad_routing, []

    def handle(*_):
        for call in calls:
            with pytest.raises(EPError, match="a signal's handler calls the buffer whose call it interrupts"):
                call()
            refused.append(call)

    def interrupts(*arguments):
        signal.raise_signal(signal.SIGALRM)
        stock(*arguments)

    signal.signal(signal.SIGALRM, handle)
    with mock.patch.object(shm_rows, "refuse_bad_routing", interrupts) if rank == 0 else nullcontext():
        check_usable(buffer, x, idx)
    assert len(refused) == (len(calls) if rank == 0 else 0)
    check_usable(buffer, x, idx)


@on_ranks(2)
def test_interrupt_around_native_code(rank):
    """All that may fail comes before a call has its number, so peers learn of it; receiving allocates nothing."""
    buffer, x, idx = make("shm", rank, timeout_s=300)
    out, error = buffer.dispatch(x, idx), KeyboardInterrupt("while it prepares")
    calls = partial(buffer.dispatch, x, idx), partial(buffer.combine, torch.ones(2, 16, 128), out.handle)
    fails = mock.patch.object(shm_rows.State, "__init__", side_effect=error)
    for call in calls:
        for how in ({}, {"return_hook": True}, {"async_op": True}):
            if rank == 1:
                with fails, pytest.raises(KeyboardInterrupt):
                    call(**how)
            else:
                with pytest.raises(EPPeerError, match="rank 1 did not make its call: KeyboardInterrupt: while it prepares"):
                    call(**how)
                    buffer.finish_calls()
            check_usable(buffer, x, idx)
        call(return_hook=True)
        with fails:
            buffer.finish_calls()
        check_usable(buffer, x, idx)


@on_ranks(2, where=("deepep_moe.low_latency.shm_rows.DispatchRows.read", "torch.frombuffer"))
def test_destroyed_with_an_error_kept(rank, where):
    """The peers learn at once of a buffer that is destroyed, though an error of its call is kept, with what it refers to."""
    buffer, x, idx = make("shm", rank, timeout_s=300)
    with mock.patch(where, side_effect=RuntimeError("kept")), pytest.raises(RuntimeError) as kept:
        buffer.dispatch(x, idx)
    dist.barrier()
    if rank == 1:
        buffer.destroy()
    dist.barrier()
    if rank == 0:
        with pytest.raises(EPPeerError, match="rank 1 has destroyed its buffer|rank 1 did not make its call"):
            for _ in range(2):
                buffer.dispatch(x, idx)
    dist.barrier()
    assert kept.value is not None


@on_ranks(2, return_hook=(False, True))
def test_destroy_beside_a_call(rank, return_hook):
    buffer, x, idx = make("shm", rank)
    if rank == 1:
        wait_for("destroyed")
        buffer.dispatch(x, idx)  # the peer had sent its rows before
        return
    sent, errors = threading.Event(), []
    stock = shm_rows.DispatchRows.write

    def write(*arguments):
        stock(*arguments)
        sent.set()

    def call():
        try:
            out = buffer.dispatch(x, idx, return_hook=return_hook)
            if return_hook:
                out.hook()
        except BaseException as error:
            errors.append(error)

    with mock.patch.object(shm_rows.DispatchRows, "write", write):
        thread = threading.Thread(target=call)
        thread.start()
        sent.wait()
        time.sleep(0.2)  # it waits for the peer by now
        buffer.destroy()
        tell("destroyed")
        thread.join()
    assert isinstance(errors[0], BufferDestroyedError) and "this LowLatencyBuffer was destroyed" in str(errors[0]), errors


# ---- ranks that are late or gone ----


@on_ranks(3, operation=("dispatch", "combine"), backend=BACKENDS)
def test_late_peer(rank, operation, backend):
    """A late dispatch finds the rows of those who gave up, so all go on. A late combine with weights finds that the others have no weights
    of it, and have summed nothing for it: it hears so at once."""
    buffer = make_buffer(WEIGHED, backend, rank, timeout_s=4.0)
    out, _ = start_dispatch(buffer, WEIGHED, rank, backend)
    rows = combine_rows(WEIGHED, rank, out, Expected(WEIGHED))
    look(buffer)
    dist.barrier()
    if operation == "dispatch":
        call = partial(start_dispatch, buffer, WEIGHED, rank, backend)
    else:
        call = partial(start_combine, buffer, WEIGHED, rows, out.handle)
    if rank == 2:
        wait_for("rank 0 knows", "rank 1 knows")
        hears, began = partial(pytest.raises, EPPeerError, match="rank [01] did not make its call: .*rank 2 did not"), time.monotonic()
        with hears() if operation == "combine" else nullcontext():
            call()
            look(buffer)
        assert time.monotonic() - began < 3.0
    else:
        with pytest.raises(EPTimeoutError, match="rank 2 did not deliver.*phase 'entry into the call', expected 2, seen") as info:
            call()
            look(buffer)
        assert (info.value.rank, info.value.phase, info.value.expected) == (2, "entry into the call", 2) and 0 <= info.value.seen < 2
        tell(f"rank {rank} knows")
    dist.barrier()
    run_case(buffer, WEIGHED, rank, backend)


@pytest.mark.gpu
@on_ranks(2)
def test_peer_that_gave_up_and_went_on(rank):
    """Rank 0 gives up on rank 1, and nobody looks before its next calls, as in a CUDA graph: rank 1 hears why its call cannot be made."""
    buffer, x, idx = make("nvlink", rank, timeout_s=1.0 if rank == 0 else 60)
    if rank == 0:
        buffer._backend.check = lambda: None
        for _ in range(5):
            buffer.dispatch(x, idx)
        torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        with pytest.raises(EPMismatchError, match="rank 0 is in call 5 already, rank 1 in call 1: rank 0 gave up waiting for a rank"):
            buffer.dispatch(x, idx)
            look(buffer)
    dist.barrier()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "operation, mode", [("dispatch", "now"), ("dispatch", "async"), ("combine", "now"), ("combine", "hook"), ("combine", "async")]
)
@on_ranks(3, expected_dead=[1])
def test_peer_that_dies(rank, operation, mode, backend):
    buffer = make_buffer(WEIGHED, backend, rank, timeout_s=300)
    out, _ = start_dispatch(buffer, WEIGHED, rank, backend)
    rows = combine_rows(WEIGHED, rank, out, Expected(WEIGHED))
    look(buffer)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    case, began = replace(WEIGHED, mode=mode), time.monotonic()
    # In a combine with weights the other survivor, which has seen it first, may say so.
    errors = EPTimeoutError if operation == "dispatch" else (EPTimeoutError, EPPeerError)
    with pytest.raises(errors, match="rank 1 did not deliver, its process [0-9]+ is gone; phase 'entry into the call'") as info:
        if operation == "dispatch":
            start_dispatch(buffer, case, rank, backend)[1]()
        else:
            start_combine(buffer, case, rows, out.handle)[1]()
        look(buffer)
    assert info.value.rank == (1 if isinstance(info.value, EPTimeoutError) else 2 - rank) and time.monotonic() - began < 60
