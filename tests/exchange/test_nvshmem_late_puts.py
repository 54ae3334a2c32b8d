"""Puts that are still under way when their rank has no use for them any more: its process ends, or its call has failed."""

import atexit
import logging
import os
import signal
import time
from functools import partial

import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from events import tell, wait_for
from exchange_cases import NETWORK, device_of
from fault_cases import NUM_TOKENS, SOON_S, inputs, look, make, make_step, outcome
from on_ranks import on_ranks

from deepep_moe import Buffer
from deepep_moe.errors import EPPeerError
from deepep_moe.testing import run_ranks

KEPT = []  # buffers that nobody destroys
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not emulated_gpu.is_chosen(), reason="is about the emulated network")]


def buffer_of_two_nodes(timeout_s):
    """Of one rank each."""
    device_of("nvlink", dist.get_rank())
    buffer = Buffer(None, NUM_TOKENS, 16, 4, 2, backend="nvshmem", timeout_s=timeout_s, ranks_per_node=1)
    make_step(buffer, 0)
    dist.barrier()
    return buffer


# ---- a process that ends ----


def ends(rank, num_ranks, how):
    """The process of rank 0 ends right after its last call, which is a refusal, as that waits for nobody. Its reason is under way."""
    os.environ[NETWORK] = "delay_us=500000"
    buffer = buffer_of_two_nodes(30.0)
    if rank == 0:
        buffer.refuse(ValueError("the last call"))
        if how == "destroyed":
            buffer.destroy()
        elif how == "dropped":
            del buffer
        else:
            KEPT.append(buffer)
        if how == "forked":
            return  # a process that multiprocessing has forked asks atexit for nothing
        if how != "destroyed":
            atexit._run_exitfuncs()  # as an interpreter that ends does
        os.kill(os.getpid(), signal.SIGKILL)
    error, elapsed_s = outcome(lambda: buffer.dispatch(*inputs(buffer, 1)))
    assert isinstance(error, EPPeerError) and "rank 0 did not make its call: ValueError: the last call" in str(error), repr(error)
    assert elapsed_s < SOON_S, elapsed_s
    buffer.destroy()


@pytest.mark.parametrize("how", ("destroyed", "kept", "dropped", "forked"))
def test_what_was_put_arrives(how):
    run_ranks(ends, 2, how, expected_dead=[] if how == "forked" else [0])


# ---- a network that does not deliver ----


@on_ranks(2)
def test_what_does_not_arrive(rank):
    """What rank 0 puts is under way for longer than its deadline. It says so, and neither its other buffer nor its end hangs."""
    os.environ[NETWORK] = "hold_after=12"  # a message and a chunk of rows in each of six calls
    first, second = buffer_of_two_nodes(60.0), buffer_of_two_nodes(3.0)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("deepep_moe").addHandler(handler)
    if rank == 0:
        second.refuse(ValueError("the last call"))
        began = time.monotonic()
        second.destroy()
        first.destroy()
        assert 2.9 < time.monotonic() - began < SOON_S
        assert len(lines) == 1 and "what rank 0 has put has not arrived within 3 s" in lines[0], lines
        tell("rank 0 has given up")
    wait_for("rank 0 has given up")


# ---- a call that has failed ----


@pytest.mark.parametrize("along_handle", (False, True))
@on_ranks(4)
def test_rows_of_a_refused_dispatch(rank, num_ranks, along_handle):
    """Ranks off the culprit's rail meet, so their rows cross, while they learn in their nodes that the call has failed. The next call
    writes to the same places."""
    os.environ[NETWORK] = "delay_us=100000"
    buffer = make("nvshmem", num_ranks, 30.0)
    x, idx = inputs(buffer, 1)
    handle = buffer.dispatch(x, idx).handle
    for step in range(1, 5):
        is_culprit = rank == step % num_ranks
        given = x.double() if is_culprit else x
        error, elapsed_s = outcome(partial(dispatch_and_look, buffer, given, handle if along_handle else idx))
        assert isinstance(error, TypeError if is_culprit else EPPeerError) and elapsed_s < SOON_S, (error, elapsed_s)
        make_step(buffer, step)
    buffer.destroy()


def dispatch_and_look(buffer, x, to):
    buffer.dispatch(x, to) if isinstance(to, torch.Tensor) else buffer.dispatch(x, handle=to)
    look(buffer)
