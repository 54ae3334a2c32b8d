"""Ranks that die at any moment: the others learn who it was long before the deadline, and nothing is left behind."""

import os
import random
import signal
import time
from functools import partial

import pytest
import torch.distributed as dist
from events import tell, wait_for
from fault_cases import SOON_S, at_random, inputs, make, make_step, outcome, values
from on_ranks import on_ranks

from deepep_moe import _C
from deepep_moe.errors import EPPeerError, EPTimeoutError
from deepep_moe.testing import run_ranks

KINDS = ("shm", "collective", "low latency")


def held():
    """Descriptors, threads and mappings of ours that this process holds."""
    with open("/proc/self/maps") as file:
        mappings = sum("deepep_moe" in line and "memfd" in line for line in file)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mappings


def killed(rank, num_ranks, kind, seed):
    victim, own = seed % num_ranks, os.getpid()
    buffer = make(kind, num_ranks)
    make_step(buffer, 0)
    buffer.destroy()
    before = held()
    buffer = make(kind, num_ranks)
    dist.barrier()
    if rank == victim and os.fork() == 0:
        time.sleep(random.Random(seed).uniform(0, 0.05))
        os.kill(own, signal.SIGKILL)
        os._exit(0)
    began, step, error = time.monotonic(), 0, None
    while error is None:
        error, _ = outcome(partial(make_step, buffer, step % 50))
        step += 1
    assert isinstance(error, EPTimeoutError) and error.rank == victim, repr(error)
    assert time.monotonic() - began < SOON_S
    tell(f"rank {rank} knows")
    wait_for(*(f"rank {peer} knows" for peer in range(num_ranks) if peer != victim))
    buffer.destroy()
    del error
    began, after = time.monotonic(), held()
    while any(now > then for now, then in zip(after, before, strict=True)):  # the thread that asked a store for the culprit is about to end
        assert time.monotonic() - began < SOON_S, f"{after}, before {before}"
        time.sleep(0.01)
        after = held()
    return True


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(3, expected_dead=[2])
def test_survivor_that_waits_for_another(rank, num_ranks, kind):
    """Rank 1 finds rank 2 dead and makes no call. Rank 0 waits for rank 1 first."""
    buffer = make(kind, num_ranks)
    make_step(buffer, 0)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(1)
    error, elapsed_s = outcome(partial(make_step, buffer, 1))
    assert isinstance(error, EPTimeoutError) and error.rank == 2, repr(error)
    assert elapsed_s < SOON_S
    tell(f"rank {rank} knows")
    wait_for(f"rank {1 - rank} knows")


@pytest.mark.parametrize("number", (0, 1, 2, *(pytest.param(number, marks=pytest.mark.slow) for number in range(3, 23))))
def test_killed_process(number):
    at_random(killed, 3, KINDS[number % 3], is_killed=True)
    assert not [name for name in os.listdir("/dev/shm") if "deepep" in name]


# ---- a process that ends by itself, beside an asynchronous call ----

LEFT = []  # what a rank that ends still has


def ends_beside_a_call(rank, num_ranks, kind, peer_comes):
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


@pytest.mark.parametrize("kind", ("shm", "low latency"))
def test_end_beside_a_call(kind):
    """The peer is busy with something else. The process does not wait for it."""
    run_ranks(ends_beside_a_call, 2, kind, False)


@pytest.mark.parametrize("kind", ("shm", "low latency"))
def test_end_beside_a_call_that_peers_make(kind):
    """They get the rows of a process that ends meanwhile."""
    run_ranks(ends_beside_a_call, 2, kind, True)
