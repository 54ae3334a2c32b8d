"""Ranks that stall: the others blame them after the deadline, and all are in step again once they are back."""

import os
import random
import signal
import time

import pytest
import torch.distributed as dist
from events import event, tell, wait_for
from fault_cases import SOON_S, at_random, make, make_step, outcome
from on_ranks import on_ranks

from deepep_moe.errors import EPError, EPMismatchError, EPPeerError, EPTimeoutError
from deepep_moe.testing import run_ranks

OUT_OF_STEP = (EPTimeoutError, EPPeerError, EPMismatchError)


def stalls(rank, num_ranks, kind, deadline_s, num_deadlines):
    buffer, late = make(kind, num_ranks, deadline_s), num_ranks - 1
    make_step(buffer, 0)
    dist.barrier()
    if rank == late:
        time.sleep(num_deadlines * deadline_s)
    errors = []
    for _ in range(10):
        error, _ = outcome(lambda: make_step(buffer, 1))
        if error is None:
            break
        assert isinstance(error, OUT_OF_STEP), repr(error)
        errors.append(error)
    if rank != late:
        assert isinstance(errors[0], EPTimeoutError) and errors[0].rank == late, errors
    for step in range(2, 5):  # of the same numbers on all ranks
        make_step(buffer, step)


@pytest.mark.parametrize("kind", ("shm", "low latency"))
def test_stall(kind):
    run_ranks(stalls, 3, kind, 1.0, 1.7)


@pytest.mark.slow
@pytest.mark.parametrize("num_deadlines", (1.7, 2.6))
@pytest.mark.parametrize("num_ranks", (2, 3, 5))
@pytest.mark.parametrize("kind", ("shm", "low latency"))
def test_stalls(kind, num_ranks, num_deadlines):
    run_ranks(stalls, num_ranks, kind, 2.0, num_deadlines)


@on_ranks(3)
def test_stall_in_process_group(rank, num_ranks):
    """A process group cannot be used after a deadline. The late rank learns it too, and the ranks make a new group."""
    deadline_s, late = 1.0, num_ranks - 1
    buffer, spare = make("collective", num_ranks, deadline_s), dist.new_group(backend="gloo")
    make_step(buffer, 0)
    dist.barrier()
    if rank == late:
        time.sleep(1.7 * deadline_s)
    error, _ = outcome(lambda: make_step(buffer, 1))
    assert isinstance(error, EPTimeoutError) and "make a new one and a new Buffer" in str(error), repr(error)
    assert rank == late or error.rank == late, repr(error)
    error, elapsed_s = outcome(lambda: make_step(buffer, 1))
    assert isinstance(error, EPError) and elapsed_s < 1, repr(error)
    assert "make a new process group and a new Buffer" in str(error)
    again, elapsed_s = outcome(buffer.recover)
    assert type(again) is EPError and str(again) == str(error) and elapsed_s < 1, repr(again)
    buffer.destroy()
    make_step(make("collective", num_ranks, group=spare), 2)


@pytest.mark.parametrize("num_ranks", (2, 3))
@on_ranks()
def test_stall_before_rows_in_process_group(rank, num_ranks):
    """The last rank enters the call and is late with its rows. Of several peers torch.distributed does not say which one."""
    deadline_s, late = 1.0, num_ranks - 1
    buffer = make("collective", num_ranks, deadline_s)
    make_step(buffer, 0)
    others = [f"rank {peer} has its error" for peer in range(num_ranks) if peer != late]
    if rank == late:
        move = buffer.calls._move
        buffer.calls._move = lambda *args: (wait_for(*others), move(*args))
    error, _ = outcome(lambda: make_step(buffer, 1))
    tell(f"rank {rank} has its error")
    assert isinstance(error, EPTimeoutError) and error.phase == "dispatch rows", repr(error)
    assert rank == late or error.rank == (late if num_ranks == 2 else -1), repr(error)
    again, _ = outcome(lambda: make_step(buffer, 1))
    assert type(again) is EPError and all("rank -1" not in str(found) for found in (error, again)), (error, again)
    wait_for(*others, f"rank {late} has its error")


@pytest.mark.parametrize("kind", ("shm", pytest.param("low latency", marks=pytest.mark.slow)))
@on_ranks(3)
def test_held_up_by_itself(rank, num_ranks, kind):
    """A signal's handler outlasts the deadline of a wait. What the others sent meanwhile was in time."""
    deadline_s, is_late = 4.0, rank == 0
    buffer = make(kind, num_ranks, deadline_s)
    make_step(buffer, 0)
    dist.barrier()
    if is_late:
        signal.signal(signal.SIGALRM, lambda *_: time.sleep(1.3 * deadline_s))
        signal.setitimer(signal.ITIMER_REAL, 0.05 * deadline_s)
    else:
        time.sleep(0.9 * deadline_s)
    began = time.monotonic()
    make_step(buffer, 1)
    assert not is_late or time.monotonic() - began > 1.3 * deadline_s


def stopped(rank, num_ranks, kind, seed):
    """A process stops at some moment for more than a deadline; nobody knows in which call it was."""
    deadline_s, victim, own = 1.0, seed % num_ranks, os.getpid()
    buffer = make(kind, num_ranks, deadline_s)
    make_step(buffer, 1)
    dist.barrier()
    if rank == victim and os.fork() == 0:  # a process that stops its parent for a while
        time.sleep(random.Random(seed).uniform(0, 0.05))
        os.kill(own, signal.SIGSTOP)
        time.sleep(1.6 * deadline_s)
        os.kill(own, signal.SIGCONT)
        tell("resumed")
        os._exit(0)
    num_right, ends, began = 0, [event(f"done {peer}") for peer in range(num_ranks)], time.monotonic()
    while not all(end.exists() for end in ends):
        error, _ = outcome(lambda: make_step(buffer, 1))
        assert error is None or isinstance(error, OUT_OF_STEP), repr(error)
        num_right += error is None and event("resumed").exists()
        if num_right == 3:
            tell(f"done {rank}")
        assert time.monotonic() - began < SOON_S, f"out of step: {error!r}"


@pytest.mark.parametrize("number", (0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 11))))
def test_stopped_process(number):
    at_random(stopped, 3, ("shm", "low latency")[number % 2])
