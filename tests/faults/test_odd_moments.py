"""Faults where nobody expects them: in the words of an error, on the way to a call, in a second thread, in a recovery."""

import os
import pickle
import random
import signal
import threading
import time
from functools import partial

import pytest
import torch
from events import tell, wait_for
from fault_cases import SOON_S, at_random, check_told, inputs, make, make_step, once, outcome
from on_ranks import on_ranks

from deepep_moe import Buffer, config
from deepep_moe.errors import BufferDestroyedError, EPError, EPMismatchError, EPPeerError, EPTimeoutError
from deepep_moe.exchange import buffer as of_buffers
from deepep_moe.exchange import calls as of_calls
from deepep_moe.group import rendezvous

# ---- words, and what fails on the way to a call ----


class WordlessError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


TOLD = {  # what is no wrong argument is told too: PyTorch on a CPU raises RuntimeError where memory is lacking
    WordlessError(): "WordlessError: (its text cannot be had: RuntimeError)",
    ValueError("a path \udcff"): r"ValueError: a path \udcff",
    ValueError("é" * 2000): "ValueError: ééé",
    ValueError(): "ValueError: ",
    RuntimeError("while it quantizes"): "RuntimeError: while it quantizes",
    MemoryError("while it quantizes"): "MemoryError: while it quantizes",
    KeyboardInterrupt("while it quantizes"): "KeyboardInterrupt: while it quantizes",
}


@on_ranks(2, kind=("shm", "collective", "low latency"))
def test_failures_before_a_call(rank, num_ranks, kind):
    buffer = make(kind, num_ranks)
    x, idx = inputs(buffer, 0)
    owner, name = (of_buffers, "quantize_fp8") if isinstance(buffer, Buffer) else (buffer._backend._pool, "empty")
    stock = getattr(owner, name)
    for step, (error, reason) in enumerate(TOLD.items()):
        if rank == 0:
            setattr(owner, name, once(stock, error))
        ended = outcome(partial(buffer.dispatch, x, idx, fp8=isinstance(buffer, Buffer)))
        setattr(owner, name, stock)
        check_told(rank, 0, error, *ended, reason)
        make_step(buffer, step)


@on_ranks(2)
def test_interrupted_wait_for_an_earlier_call(rank, num_ranks):
    """The interrupt comes while a call waits for the asynchronous one before it."""
    buffer, error = make("shm", num_ranks), KeyboardInterrupt("of the wait")
    x, idx = inputs(buffer, 0)
    out = buffer.dispatch(x, idx)
    if rank:
        wait_for("interrupted")
    _, combined = buffer.combine(out.recv_x, out.handle, async_op=True)
    if rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: (tell("interrupted"), fail(error)))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    check_told(rank, 0, error, *outcome(partial(buffer.dispatch, x, idx)), "KeyboardInterrupt: of the wait")
    combined.wait()
    make_step(buffer, 1)


def fail(error):
    raise error


@on_ranks(2)
def test_no_thread_for_an_asynchronous_call(rank, num_ranks):
    class NoThreads:
        def __init__(self):
            raise error

    buffer, stock = make("shm", num_ranks), of_calls.Worker
    x, idx = inputs(buffer, 0)
    out = buffer.dispatch(x, idx)
    for step, call in enumerate((partial(buffer.combine, out.recv_x, out.handle), partial(buffer.dispatch, x, idx))):
        error = RuntimeError("can't start new thread")
        if rank == 0:
            of_calls.Worker = NoThreads

        def run(call=call):
            output = call(async_op=True)
            (output[1] if isinstance(output[1], of_calls.Event) else output.event).wait()

        ended = outcome(run)
        of_calls.Worker = stock
        check_told(rank, 0, error, *ended, "RuntimeError: can't start new thread")
        buffer.recover()
        make_step(buffer, step)
        buffer.calls._worker = None  # the next asynchronous call starts another one


def interrupted_at_random(rank, num_ranks, kind, seed):
    """However often and wherever in a call a handler raises, the ranks stay in step."""
    buffer, victim, draw, is_armed = make(kind, num_ranks), seed % num_ranks, random.Random(seed), False
    x, idx = inputs(buffer, 1)
    began = time.monotonic()
    out = buffer.dispatch(x, idx)
    usual_s, num_calls, error = time.monotonic() - began, 80, None

    def raise_once(*_):
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise KeyboardInterrupt("at random")

    def call():
        nonlocal is_armed
        is_armed = rank == victim and buffer.num_calls < num_calls - 10
        try:
            if is_armed:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, usual_s))
            buffer.combine(out.recv_x, out.handle)
        finally:
            is_armed = False

    signal.signal(signal.SIGALRM, raise_once)
    while buffer.num_calls < num_calls:
        error, elapsed_s = outcome(call)
        assert error is None or isinstance(error, KeyboardInterrupt if rank == victim else EPPeerError), repr(error)
        assert elapsed_s < SOON_S
    assert error is None


@pytest.mark.parametrize("kind", ("collective", pytest.param("shm", marks=pytest.mark.slow)))
def test_interrupts_at_random(kind):
    at_random(interrupted_at_random, 3, kind)


# ---- two buffers, two callers ----


@on_ranks(2)
def test_buffers_of_a_group_in_another_order(rank, num_ranks):
    """Rows of one buffer do not arrive in the other."""
    buffers = [make("collective", num_ranks) for _ in range(2)]
    x, idx = inputs(buffers[0], 0)
    for turn in range(2):
        error, elapsed_s = outcome(partial(buffers[(rank + turn) % 2].dispatch, x, idx))
        assert isinstance(error, EPMismatchError) and elapsed_s < SOON_S, repr(error)
        assert "ranks are in calls of different buffers of one group: rank" in str(error)
    for step, buffer in enumerate(buffers):
        make_step(buffer, step)
    smaller = Buffer(None, 4, 16, num_ranks, 1, backend="collective", timeout_s=1.0)  # whose messages are shorter
    call = partial(buffers[0].dispatch, x, idx) if rank else partial(smaller.dispatch, x, idx[:, :1] // 2)
    error, _ = outcome(call)
    assert isinstance(error, EPTimeoutError) and error.rank == 1 - rank, repr(error)


@pytest.mark.parametrize(("kind", "is_handler"), [("shm", True), ("shm", False), ("collective", False)])
@on_ranks(2)
def test_calls_from_threads_and_handlers(rank, num_ranks, kind, is_handler):
    """A second thread calls the buffer that is in a call, or a handler does, which interrupts its call. That is refused."""
    buffer, errors = make(kind, num_ranks), []
    x, idx = inputs(buffer, 0)
    if rank:
        wait_for("refused")
        buffer.dispatch(x, idx)
    else:

        def call(*_):
            errors.append(outcome(partial(buffer.dispatch, x + 1, idx))[0])
            tell("refused")

        signal.signal(signal.SIGALRM, call)
        thread = threading.Timer(0.3, partial(signal.raise_signal, signal.SIGALRM) if is_handler else partial(call_beside, buffer, call))
        thread.start()
        buffer.dispatch(x, idx)
        thread.join()
        assert isinstance(errors[0], EPError) and "two threads are in calls of one buffer" in str(errors[0]), errors
    make_step(buffer, 1)


def call_beside(buffer, call):
    while not buffer.calls._calling.locked():
        time.sleep(0.001)
    call()


# ---- recovery, construction, deadline ----


@on_ranks(2)
def test_interrupted_recovery(rank, num_ranks):
    """Peers in the recovery learn of it, and all ranks blame the interrupted one. A second recovery meets none of the first one's
    messages. (The wait of a process group lets the handler raise once it has ended.)"""
    buffer = make("shm", num_ranks)
    if rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: fail(KeyboardInterrupt("of the recovery")))
        threading.Timer(0.2, partial(tell, "interrupted")).start()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        error, _ = outcome(buffer.recover)
        assert isinstance(error, KeyboardInterrupt)
    else:
        wait_for("interrupted")
    error, elapsed_s = outcome(buffer.recover)
    assert isinstance(error, EPTimeoutError) and error.rank == 0 and elapsed_s < SOON_S, repr(error)
    make_step(buffer, 1)


@on_ranks(2, learned=(EPPeerError, EPTimeoutError))
def test_construction_without_files(rank, num_ranks, learned):
    """Nothing is left to open a file with, say: no argument is wrong."""
    error = OSError(24, "Too many open files")
    if rank == 0:
        owner, name = (config, "num_threads") if learned is EPPeerError else (rendezvous, "host_id")
        setattr(owner, name, once(getattr(owner, name), error))
    raised, elapsed_s = outcome(partial(make, "shm", num_ranks))
    if rank == 0:
        assert type(raised) is type(error), repr(raised)
    else:
        assert isinstance(raised, learned) and raised.rank == 0 and elapsed_s < SOON_S, repr(raised)
    if learned is EPPeerError:
        make_step(make("shm", num_ranks), 1)


@on_ranks(2)
def test_peer_that_comes_at_the_deadline(rank, num_ranks):
    """The peer comes between a wait's last look at the data and the question who is missing."""
    deadline_s, looks, is_held = 1.0, [], False
    buffer = make("shm", num_ranks, deadline_s if rank == 0 else 300.0)
    x, idx = inputs(buffer, 0)
    if rank:
        wait_for("overdue")
        tell("coming")
        buffer.dispatch(x, idx)
        return

    def handle(*_):
        nonlocal is_held
        elapsed_s = time.monotonic() - began
        if is_held or elapsed_s < 0.9 * deadline_s or len(looks) == 2:
            return
        looks.append(elapsed_s)
        is_held = True
        if len(looks) == 1:
            time.sleep(0.2 * deadline_s)  # this look finds the deadline passed, and the next one what is still missing
        else:
            tell("overdue")
            wait_for("coming")
            time.sleep(0.5)
        is_held = False

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.001)
    began = time.monotonic()
    error, _ = outcome(partial(buffer.dispatch, x, idx))
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert error is None and len(looks) == 2, repr(error)


@on_ranks(1, kind=("shm", "collective", "low latency"))
def test_use_by_another_and_by_a_forked_process(rank, num_ranks, kind):
    buffer = make(kind, num_ranks)
    handle = buffer.dispatch(torch.ones(4, 16), torch.tensor([[0], [1], [0], [1]])).handle
    with pytest.raises(TypeError, match="Handle says where the rows of this process are and cannot be saved or sent"):
        pickle.dumps(handle)

    child = os.fork()
    if child == 0:
        error, _ = outcome(partial(make_step, buffer, 0))
        os._exit(0 if isinstance(error, BufferDestroyedError) and "belongs to " in str(error) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    make_step(buffer, 1)
