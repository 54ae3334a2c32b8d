"""Ranks that leave, die, stall or are interrupted: the others learn it, and memory is freed."""

import os
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from error_cases import BACKENDS, HIDDEN, IDX, X, make_buffer
from events import tell, wait_for
from fault_cases import held
from on_ranks import on_ranks

from deepep_moe import _C, Buffer
from deepep_moe.errors import EPError, EPPeerError, EPTimeoutError

DEADLINE_S = 3.0  # what must pass in tests of ranks that are late, and what the others must keep on a busy machine


@on_ranks(2)
def test_failure_on_the_thread(rank):
    """An asynchronous failure that nobody waited for is raised by the next call; the handle leads nowhere."""
    buffer = make_buffer(timeout_s=DEADLINE_S)
    buffer.dispatch(X, IDX)
    if rank == 1:
        buffer.calls._move = lambda *_: (_ for _ in ()).throw(MemoryError("no memory left"))
        with pytest.raises(MemoryError):
            buffer.dispatch(X, IDX, async_op=True)
        return wait_for("rank 0 knows")
    out = buffer.dispatch(X, IDX, async_op=True)
    with pytest.raises(EPError, match="an earlier asynchronous call of this buffer failed: EPTimeoutError: .*rank 1 did not deliver"):
        buffer.combine(torch.ones(out.handle.num_rows, HIDDEN), out.handle)
    with pytest.raises(EPTimeoutError):
        out.event.wait()
    tell("rank 0 knows")


def test_changed_handle():
    buffer = make_buffer()
    unseen = buffer.dispatch(X, IDX).handle
    unseen.topk_idx.data.fill_(-1)  # which PyTorch does not count
    with pytest.raises(RuntimeError, match="its handle was changed after its dispatch"):
        buffer.dispatch(X, handle=unseen)


# ---- peers that die or stall ----


def check_timeout(culprit, call):
    with pytest.raises(EPTimeoutError) as info:
        call()
    error = info.value
    assert error.rank == culprit and f"rank {culprit}" in str(error), str(error)
    assert error.phase and error.phase in str(error) and error.expected > error.seen >= 0, str(error)


EVERYWHERE = torch.tensor([[0, 2], [4, 1], [3, 5], [2, -1]])  # every one of three ranks gets tokens


@on_ranks(3, backend=BACKENDS, expected_dead=[1])
def test_peer_that_dies_between_the_halves(rank, backend):
    buffer = make_buffer(backend, timeout_s=300, num_experts=6)
    buffer.dispatch(X, EVERYWHERE)
    dist.barrier()
    if rank == 1:
        buffer.calls._move = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    check_timeout(1, lambda: buffer.dispatch(X, EVERYWHERE))
    assert time.monotonic() - began < 60, "far from the deadline"
    tell(f"rank {rank} knows")
    wait_for(f"rank {2 - rank} knows")  # collective blames the first process it finds gone


@on_ranks(3)
def test_peer_that_stalls_between_the_halves(rank):
    buffer = make_buffer(timeout_s=DEADLINE_S, num_experts=6)
    out = buffer.dispatch(X, EVERYWHERE)
    if rank == 2:
        move = buffer.calls._move
        buffer.calls._move = lambda *args: (wait_for("rank 0 knows", "rank 1 knows"), move(*args))
        with pytest.raises((EPPeerError, EPTimeoutError)):
            buffer.combine(out.recv_x, out.handle)
            buffer.combine(out.recv_x, out.handle)
    else:
        check_timeout(2, lambda: buffer.combine(out.recv_x, out.handle))
    tell(f"rank {rank} knows")
    wait_for("rank 2 knows")


@on_ranks(3)
def test_peer_that_stops_in_the_middle(rank):
    """Rank 2 stops with its rings half full; rank 1 finds out first and tells rank 0, who waits for rank 1 as well."""
    hidden, num_tokens, process = 4096, 2000, os.getpid()
    buffer = Buffer(None, num_tokens, hidden, 6, 6, timeout_s=DEADLINE_S)
    x, idx = torch.ones(num_tokens, hidden), torch.arange(6).repeat(num_tokens, 1)
    if rank == 2:
        if os.fork() == 0:  # a process that stops its parent for a while
            time.sleep(0.1)
            os.kill(process, signal.SIGSTOP)
            wait_for("rank 0 knows", "rank 1 knows")
            os.kill(process, signal.SIGCONT)
            os._exit(0)
        with pytest.raises((EPPeerError, EPTimeoutError)):
            while True:
                buffer.dispatch(x, idx)
    else:
        with pytest.raises(EPTimeoutError) as info:
            while True:
                buffer.dispatch(x, idx)
        assert info.value.rank == 2, str(info.value)
    tell(f"rank {rank} knows")
    wait_for("rank 2 knows")


# ---- memory ----


@on_ranks(2)
def test_buffers_free_their_memory(rank, num_ranks):
    files, _, before = held()
    for _ in range(5):
        buffer = make_buffer()
        buffer.dispatch(X, IDX)
        assert held()[2] == before + num_ranks
        buffer.destroy()
    assert held()[2] == before
    buffer = make_buffer()
    del buffer  # without destroy
    assert held()[2] == before and held()[0] <= files
    dist.barrier()
    assert not [name for name in os.listdir("/dev/shm") if "deepep" in name]


def test_is_a_process_gone():
    assert not _C.running(os.getpid()).is_gone()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = _C.running(child.pid)
    assert not process.is_gone()
    limits, used = resource.getrlimit(resource.RLIMIT_NOFILE), os.open(os.devnull, os.O_RDONLY)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, limits[1]))
        assert not process.is_gone(), "this process has all the files that it may have"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(used)
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.is_gone(), "it only waits to be reaped"
    child.wait()
    assert process.is_gone() and not _C.running(child.pid).is_gone(), "that was not known when it began"
