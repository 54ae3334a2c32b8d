"""Ranks that stall, stop or die with their calls on GPUs.

The emulated device runs a kernel inside the process that launches it. So a process that stops or dies does so in the middle of a kernel,
between any two of its instructions, and takes the kernel along. What this cannot show: a process that is gone or stopped while its kernel
goes on, as a real GPU's does for a while, and a host that stops while its own kernels work. Memory of a dead process stays mapped by its
peers, as with CUDA.
"""

import os
import random
import signal
import time
from functools import partial

import pytest
import torch.distributed as dist
from events import tell, wait_for
from fault_cases import ON_GPUS, SOON_S, at_random, inputs, look, make, make_step, outcome
from on_ranks import on_ranks

from deepep_moe import Buffer
from deepep_moe.errors import EPError, EPMismatchError, EPPeerError, EPTimeoutError

pytestmark = pytest.mark.gpu
DEADLINE_S = 6.0  # far from what a step takes on a busy machine
OUT_OF_STEP = (EPTimeoutError, EPPeerError, EPMismatchError)


def back_in_step(buffer):
    """`recover` brings the ranks of a Buffer into step, once all have their errors: it waits for one deadline, and so does a late rank in
    its call. Those of a LowLatencyBuffer repeat the step until it succeeds."""
    tell(f"rank {buffer.rank} has its error")
    if isinstance(buffer, Buffer):
        wait_for(*(f"rank {peer} has its error" for peer in range(buffer.num_ranks)))
        buffer.recover()
        return
    for _ in range(10):
        error, _ = outcome(partial(make_step, buffer, 1))
        if error is None:
            return
        assert isinstance(error, OUT_OF_STEP), repr(error)
    raise AssertionError(f"out of step: {error!r}")


def combine(buffer, out):
    buffer.combine(out.recv_x, out.handle)
    look(buffer)


@pytest.mark.parametrize("operation", ("dispatch", "combine"))
@pytest.mark.parametrize("kind", ON_GPUS)
@on_ranks(3)
def test_stall(rank, num_ranks, kind, operation):
    """The last rank comes once all others have given up on it."""
    buffer, late = make(kind, num_ranks, DEADLINE_S), num_ranks - 1
    make_step(buffer, 0)
    out = buffer.dispatch(*inputs(buffer, 0))
    call = partial(make_step, buffer, 1) if operation == "dispatch" else partial(combine, buffer, out)
    dist.barrier()
    others = [peer for peer in range(num_ranks) if peer != late]
    if rank == late:
        wait_for(*(f"rank {peer} gave up" for peer in others))
    error, elapsed_s = outcome(call)
    tell(f"rank {rank} gave up")
    if rank == late and kind == "low latency nvlink":  # which has the rows of the others, and finds out in its next call
        assert error is None or isinstance(error, OUT_OF_STEP), repr(error)
    elif rank == late:
        assert isinstance(error, EPTimeoutError | EPPeerError) and error.rank != late, repr(error)
    else:
        assert isinstance(error, EPTimeoutError) and error.rank == late and error.phase == "entry into the call", repr(error)
        assert f"rank {late} did not deliver" in str(error) and elapsed_s < DEADLINE_S + SOON_S, (error, elapsed_s)
    back_in_step(buffer)
    for step in range(2, 5):  # of the same numbers on all ranks
        make_step(buffer, step)
    dist.barrier()


def stopped(rank, num_ranks, kind, seed):
    """A process stops at some moment for longer than a deadline; nobody knows in which call it was. So all get an error, and recover."""
    victim = seed % num_ranks
    buffer = make(kind, num_ranks, DEADLINE_S)
    make_step(buffer, 0)
    dist.barrier()
    own = os.getpid()
    if rank == victim and os.fork() == 0:  # a process that stops its parent for a while
        time.sleep(random.Random(seed).uniform(0, 0.5))
        os.kill(own, signal.SIGSTOP)
        time.sleep(1.5 * DEADLINE_S)
        os.kill(own, signal.SIGCONT)
        os._exit(0)
    began, error = time.monotonic(), None
    while error is None:
        error, _ = outcome(partial(make_step, buffer, 1))
        assert time.monotonic() - began < 5 * DEADLINE_S + SOON_S, "no error"
    assert isinstance(error, EPTimeoutError | EPPeerError) and error.rank != rank, repr(error)
    back_in_step(buffer)
    for step in range(2, 5):
        make_step(buffer, step)
    dist.barrier()


@pytest.mark.parametrize("number", range(2))
def test_stopped_process(number):
    at_random(stopped, 2 + number % 2, "nvlink")


def killed(rank, num_ranks, kind, seed):
    """Rows of a low-latency call are waited for up to the deadline, which so is short; all other waits end at once."""
    victim = seed % num_ranks
    buffer = make(kind, num_ranks, DEADLINE_S if kind == "low latency nvlink" else 300.0)
    make_step(buffer, 0)
    dist.barrier()
    own = os.getpid()
    if rank == victim and os.fork() == 0:
        time.sleep(random.Random(seed).uniform(0, 0.5))
        os.kill(own, signal.SIGKILL)
        os._exit(0)
    began, step, error = time.monotonic(), 0, None
    while error is None:
        error, _ = outcome(partial(make_step, buffer, step % 50))
        step += 1
    assert isinstance(error, EPTimeoutError) and error.rank == victim, repr(error)
    assert time.monotonic() - began < DEADLINE_S + SOON_S
    tell(f"rank {rank} knows")
    wait_for(*(f"rank {peer} knows" for peer in range(num_ranks) if peer != victim))
    began = time.monotonic()
    error, _ = outcome(partial(make_step, buffer, 0))
    assert isinstance(error, EPError) and time.monotonic() - began < DEADLINE_S + SOON_S, repr(error)
    buffer.destroy()


@pytest.mark.parametrize("number", range(6))
def test_killed_process(number):
    at_random(killed, 2 + number // 2 % 2, ON_GPUS[number % 2], is_killed=True)


@pytest.mark.parametrize("kind", ON_GPUS)
@on_ranks(3, expected_dead=[2])
def test_survivor_that_waits_for_another(rank, num_ranks, kind):
    """Rank 1 finds rank 2 dead, late. Rank 0 has waited for both meanwhile, and blames the dead one."""
    buffer = make(kind, num_ranks)
    make_step(buffer, 0)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        wait_for("rank 0 knows")
    error, elapsed_s = outcome(partial(make_step, buffer, 1))
    tell(f"rank {rank} knows")
    assert isinstance(error, EPTimeoutError) and error.rank == 2 and elapsed_s < SOON_S, repr(error)
    assert "is gone; phase 'entry into the call'" in str(error), error
    wait_for(f"rank {1 - rank} knows")
