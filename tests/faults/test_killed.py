"""Ranks that die at any moment: the others learn who it was long before the deadline, and nothing is left behind.

test_stalls.py says how processes on the emulated GPU die.
"""

import os
import signal
import time
from functools import partial

import pytest
import torch.distributed as dist
from events import tell, wait_for
from fault_cases import ON_GPUS, SOON_S, at_random, held, inputs, make, make_step, outcome, signal_later, values
from on_ranks import on_ranks

from deepep_moe import _C
from deepep_moe.errors import EPError, EPPeerError, EPTimeoutError

KINDS = ("shm", "collective", "low latency")
GPU_DEADLINE_S = 6.0  # far from what a step takes on a busy machine


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
