"""Ranks that stall: the others blame them after the deadline, and all are in step again once they are back. Ranks that die at any moment:
the others learn who it was long before the deadline, and nothing is left behind.

The emulated GPU runs a kernel inside the process that launches it. So a process stops or dies in the middle of a kernel, between any two
instructions, and the kernel stops with it. On a real GPU a kernel goes on for a while after its process has ended or its host has stopped;
the emulated GPU cannot show that. Memory of a dead process stays mapped by its peers, as with CUDA.
"""

import os
import signal
import time
from functools import partial

import pytest
import torch.distributed as dist
from events import event, tell, wait_for
from exchange_cases import look
from fault_cases import (
    ON_GPUS,
    OUT_OF_STEP,
    SOON_S,
    at_random,
    back_in_step,
    held,
    inputs,
    make,
    make_step,
    outcome,
    signal_later,
    step_until_right,
    values,
)
from on_ranks import on_ranks

from deepep_moe import _C
from deepep_moe.errors import EPError, EPPeerError, EPTimeoutError

GPU_DEADLINE_S = 6.0  # far from what a step takes on a busy machine


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 2.0, 1.7), (5, 2.0, 2.6))]


@pytest.mark.parametrize(("num_ranks", "deadline_s", "num_deadlines"), [(3, 1.0, 1.7), *SLOW])
@on_ranks((), kind=("shm", "low latency"))
def test_stall(rank, num_ranks, kind, deadline_s, num_deadlines):
    buffer, late = make(kind, num_ranks, deadline_s), num_ranks - 1
    make_step(buffer, 0)
    dist.barrier()
    if rank == late:
        time.sleep(num_deadlines * deadline_s)
    errors = step_until_right(buffer)
    if rank != late:
        assert isinstance(errors[0], EPTimeoutError) and errors[0].rank == late, errors
    for step in range(2, 5):  # of the same numbers on all ranks
        make_step(buffer, step)


@on_ranks(3, operation=("dispatch", "combine"), kind=[pytest.param(kind, marks=pytest.mark.gpu) for kind in ON_GPUS])
def test_stall_on_gpus(rank, num_ranks, kind, operation):
    """The last rank comes once all others have given up on it."""
    buffer, late = make(kind, num_ranks, GPU_DEADLINE_S), num_ranks - 1
    make_step(buffer, 0)
    out = buffer.dispatch(*inputs(buffer, 0))
    call = partial(make_step, buffer, 1) if operation == "dispatch" else lambda: (buffer.combine(out.recv_x, out.handle), look(buffer))
    dist.barrier()
    if rank == late:
        wait_for(*(f"rank {peer} gave up" for peer in range(late)))
    error, elapsed_s = outcome(call)
    tell(f"rank {rank} gave up")
    if rank == late and kind == "low latency nvlink":  # which has the rows of the others, and finds out in its next call
        assert error is None or isinstance(error, OUT_OF_STEP), repr(error)
    elif rank == late:
        assert isinstance(error, EPTimeoutError | EPPeerError) and error.rank != late, repr(error)
    else:
        assert isinstance(error, EPTimeoutError) and error.rank == late and error.phase == "entry into the call", repr(error)
        assert f"rank {late} did not deliver" in str(error) and elapsed_s < GPU_DEADLINE_S + SOON_S, (error, elapsed_s)
    back_in_step(buffer)


@on_ranks(3)
def test_stall_in_process_group(rank, num_ranks):
    """A process group cannot be used after a deadline. The late rank learns it too, and the ranks make a new group."""
    deadline_s, late = 1.0, num_ranks - 1
    buffer, spare = make("collective", num_ranks, deadline_s), dist.new_group(backend="gloo")
    make_step(buffer, 0)
    dist.barrier()
    if rank == late:
        time.sleep(1.7 * deadline_s)
    error, _ = outcome(partial(make_step, buffer, 1))
    assert isinstance(error, EPTimeoutError) and "make a new one and a new Buffer" in str(error), repr(error)
    assert rank == late or error.rank == late, repr(error)
    error, elapsed_s = outcome(partial(make_step, buffer, 1))
    assert isinstance(error, EPError) and "make a new process group and a new Buffer" in str(error) and elapsed_s < 1, repr(error)
    again, elapsed_s = outcome(buffer.recover)
    assert type(again) is EPError and str(again) == str(error) and elapsed_s < 1, repr(again)
    buffer.destroy()
    make_step(make("collective", num_ranks, group=spare), 2)


@on_ranks((2, 3))
def test_stall_before_rows_in_process_group(rank, num_ranks):
    """The last rank enters the call and is late with its rows. torch.distributed does not say which peer is late."""
    late = num_ranks - 1
    buffer = make("collective", num_ranks, 1.0)
    make_step(buffer, 0)
    others = [f"rank {peer} has its error" for peer in range(late)]
    if rank == late:
        move = buffer.calls._move
        buffer.calls._move = lambda *args: (wait_for(*others), move(*args))
    error, _ = outcome(partial(make_step, buffer, 1))
    tell(f"rank {rank} has its error")
    assert isinstance(error, EPTimeoutError) and error.phase == "dispatch rows", repr(error)
    assert rank == late or error.rank == (late if num_ranks == 2 else -1), repr(error)
    again, _ = outcome(partial(make_step, buffer, 1))
    assert type(again) is EPError and all("rank -1" not in str(each) for each in (error, again)), (error, again)
    wait_for(*others, f"rank {late} has its error")


@on_ranks(3, kind=("shm", pytest.param("low latency", marks=pytest.mark.slow)))
def test_held_up_by_itself(rank, num_ranks, kind):
    """A signal's handler outlasts the deadline of a wait. Rows that the others sent meanwhile were in time."""
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
    buffer = make(kind, num_ranks, 1.0)
    make_step(buffer, 1)
    dist.barrier()
    if rank == seed % num_ranks:
        signal_later(seed, 0.05, signal.SIGSTOP, 1.6)
    num_right, ends, began = 0, [event(f"done {peer}") for peer in range(num_ranks)], time.monotonic()
    while not all(end.exists() for end in ends):
        error, _ = outcome(partial(make_step, buffer, 1))
        assert error is None or isinstance(error, OUT_OF_STEP), repr(error)
        num_right += error is None and event("resumed").exists()
        if num_right == 3:
            tell(f"done {rank}")
        assert time.monotonic() - began < SOON_S, f"out of step: {error!r}"


@pytest.mark.parametrize("number", (0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 4))))
def test_stopped_process(number):
    at_random(stopped, 3, ("shm", "low latency")[number % 2])


# ---- ranks that die ----


KINDS = ("shm", "collective", "low latency")


def killed(rank, num_ranks, kind, seed):
    """Rows of a low-latency call on GPUs are waited for up to the deadline, which so is short. All other waits end at once."""
    victim, soon_s = seed % num_ranks, SOON_S + (GPU_DEADLINE_S if kind in ON_GPUS else 0)
    buffer = make(kind, num_ranks)
    make_step(buffer, 0)
    buffer.destroy()
    before = held()
    buffer = make(kind, num_ranks, GPU_DEADLINE_S if kind == "low latency nvlink" else 300.0)
    dist.barrier()
    if rank == victim:
        signal_later(seed, 0.5 if kind in ON_GPUS else 0.05, signal.SIGKILL)
    began, step, error = time.monotonic(), 0, None
    while error is None:
        error, _ = outcome(partial(make_step, buffer, step % 50))
        step += 1
    assert isinstance(error, EPTimeoutError) and error.rank == victim, repr(error)
    assert time.monotonic() - began < soon_s
    tell(f"rank {rank} knows")
    wait_for(*(f"rank {peer} knows" for peer in range(num_ranks) if peer != victim))
    if kind in ON_GPUS:
        error, elapsed_s = outcome(partial(make_step, buffer, 0))
        assert isinstance(error, EPError) and elapsed_s < soon_s, repr(error)
    buffer.destroy()
    del error
    began, after = time.monotonic(), held()
    while kind not in ON_GPUS and any(now > then for now, then in zip(after, before, strict=True)):
        assert time.monotonic() - began < SOON_S, f"{after}, before {before}"
        time.sleep(0.01)  # the thread that asked a store for the culprit is about to end
        after = held()


@on_ranks(3, kind=(*KINDS, *(pytest.param(kind, marks=pytest.mark.gpu) for kind in ON_GPUS)), expected_dead=[2])
def test_survivor_that_waits_for_another(rank, num_ranks, kind):
    """Rank 1 finds rank 2 dead, late. Rank 0 has waited for rank 1 meanwhile, and blames the dead one."""
    buffer = make(kind, num_ranks)
    make_step(buffer, 0)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        wait_for("rank 0 knows") if kind in ON_GPUS else time.sleep(1)
    error, elapsed_s = outcome(partial(make_step, buffer, 1))
    assert isinstance(error, EPTimeoutError) and error.rank == 2 and elapsed_s < SOON_S, repr(error)
    assert kind not in ON_GPUS or "is gone; phase 'entry into the call'" in str(error), error
    tell(f"rank {rank} knows")
    wait_for(f"rank {1 - rank} knows")


@pytest.mark.parametrize("number", (0, 1, 2, *(pytest.param(number, marks=pytest.mark.slow) for number in range(3, 9))))
def test_killed_process(number):
    at_random(killed, 3, KINDS[number % 3], is_killed=True)
    assert not [name for name in os.listdir("/dev/shm") if "deepep" in name]


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(6))
def test_killed_process_on_gpus(number):
    at_random(killed, 2 + number // 2 % 2, ON_GPUS[number % 2], is_killed=True)


# ---- a process that ends by itself, beside an asynchronous call ----

LEFT = []  # what a rank that ends still has


@on_ranks(2, kind=("shm", "low latency"), peer_comes=(False, True))
def test_end_beside_a_call(rank, num_ranks, kind, peer_comes):
    """The process does not wait for a peer that is busy with something else. One that makes the call gets the rows of the process."""
    buffer = make(kind, num_ranks)
    x, idx = inputs(buffer, 0)
    out = buffer.dispatch(x, idx)
    call = partial(buffer.combine, out.recv_x, out.handle)
    pids = [None] * num_ranks
    dist.all_gather_object(pids, os.getpid())
    process = _C.running(pids[0])
    if rank == 0:
        LEFT.extend([buffer, call(async_op=True)])
        tell("rank 0 ends")
        return
    wait_for("rank 0 ends")
    began = time.monotonic()
    if not peer_comes:
        while not process.is_gone():
            time.sleep(0.01)
        assert time.monotonic() - began < SOON_S
    if peer_comes or kind == "low latency":  # which sends before it returns
        assert call()[:, 0].tolist() == [num_ranks * value for value in values(0, rank)]
        if peer_comes:
            return
    error, elapsed_s = outcome(call)
    assert isinstance(error, (EPTimeoutError, EPPeerError)) and error.rank == 0 and elapsed_s < SOON_S, repr(error)
