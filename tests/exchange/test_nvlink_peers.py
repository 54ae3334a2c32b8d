"""Memory of the nvlink backend and ranks that leave."""

import os
import signal
import time
from pathlib import Path
from unittest import mock

import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from error_cases import on_gpus
from exchange_cases import assert_same, device_of, look
from on_ranks import on_ranks

from deepep_moe import Buffer
from deepep_moe.errors import EPPeerError, EPTimeoutError
from deepep_moe.exchange.backends.nvlink import NvlinkBackend

pytestmark = pytest.mark.gpu


ROOM = 32768 * 8192 * 2  # bytes, less than the workspace of `large_buffer`; more than what else may happen on the device


CONNECT = NvlinkBackend.connect


def large_buffer():
    return Buffer(None, 32768, 8192, 4, 2, backend="nvlink", timeout_s=60)


def memory_used(device):
    """Bytes on the device, by all processes; of the emulated one what this process maps."""
    if not emulated_gpu.is_chosen():
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    maps = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:emulated-gpu" in line)
    return sum(int(end, 16) - int(begin, 16) for begin, end in (fields[0].split("-") for fields in maps))


def connect_and_fail(self, addresses):
    CONNECT(self, addresses)
    raise OSError("no way to rank 0")


@on_ranks(2)
def test_a_rank_that_cannot_map_its_peers(rank):
    """All ranks unmap what they have mapped, and only then free their own: nothing is kept, and nobody writes to what is not there."""
    device = device_of("nvlink", rank)
    on_gpus(rank)[0].destroy()  # what the device needs besides
    dist.barrier()
    before = memory_used(device)
    connect = connect_and_fail if rank == 1 else CONNECT  # which keeps no error, whose frames would keep memory
    with mock.patch.object(NvlinkBackend, "connect", connect), pytest.raises(RuntimeError, match="on rank 1: no way to rank 0"):
        large_buffer()
    dist.barrier()
    assert memory_used(device) - before < ROOM
    buffer, x, idx = on_gpus(rank)
    assert buffer.dispatch(x, idx).recv_x.isfinite().all()


@on_ranks(2, how=("killed", "late"), expected_dead=lambda how: [1] if how == "killed" else [])
def test_a_rank_that_does_not_send_its_memory(rank, how):
    """Rank 0 names it as soon as it has ended, else at the deadline."""
    on_gpus(rank)[0].destroy()  # so that the deadline does not include what a first buffer takes
    failures = []

    def connect(self, addresses):
        if rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            time.sleep(5)
        try:
            CONNECT(self, addresses)
        except RuntimeError as error:
            failures.append(str(error))
            raise

    error = EPTimeoutError if how == "killed" else RuntimeError
    with mock.patch.object(NvlinkBackend, "connect", connect), pytest.raises(error, match="rank 1") as caught:
        Buffer(None, 8, 16, 4, 2, backend="nvlink", timeout_s=3 if how == "late" else 300)
    assert how == "late" or caught.value.rank == 1
    why = "did not send within 3 s" if how == "late" else "failed or ended before it sent"
    assert rank == 1 or f"rank 1 {why} the descriptor" in failures[0], failures


@on_ranks(2)
def test_memory_stays_until_all_have_left(rank):
    device = device_of("nvlink", rank)
    on_gpus(rank)[0].destroy()  # what the device needs besides
    used = []

    def measure():
        dist.barrier()
        used.append(memory_used(device))
        dist.barrier()

    measure()
    buffer = large_buffer()
    measure()
    if rank == 1:
        buffer.destroy()
    measure()
    if rank == 0:
        buffer.destroy()
    measure()
    assert used[1] - used[0] > ROOM
    assert used[1] - used[2] < ROOM / 2 or (rank == 1 and emulated_gpu.is_chosen()), "rank 0 has not left"
    assert used[3] - used[0] < ROOM / 2, "both have left"


@on_ranks(2, expected_dead=[1])
def test_memory_goes_beside_dead_peer(rank):
    device = device_of("nvlink", rank)
    used = memory_used(device)
    dist.barrier()
    buffer = large_buffer()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert memory_used(device) - used > ROOM
    buffer.destroy()
    deadline = time.monotonic() + 100  # the driver takes back what the other process had, some time after its end
    while memory_used(device) - used > ROOM / 2:
        assert time.monotonic() < deadline, "rank 1 is gone"
        time.sleep(0.1)


def leave(buffer, how):
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    buffer.destroy()


def who_dies(how, *_):
    return [1] if how == "killed" else []


@on_ranks(3, how=("killed", "destroyed"), call=("dispatch", "combine"), expected_dead=who_dies)
def test_peer_that_is_gone(rank, how, call):
    """Rank 1 has left: the others notice it long before the deadline, in each call."""
    buffer, x, idx = on_gpus(rank, timeout_s=300.0, num_experts=6)
    out = buffer.dispatch(x, idx)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        return leave(buffer, how)
    error, message = (
        (EPTimeoutError, rf"rank {rank}: rank 1 did not deliver, its process \d+ is gone; phase 'entry into the call', expected 2, seen 1$")
        if how == "killed"
        else (EPPeerError, f"rank {rank}, waiting for entry into the call: rank 1 has destroyed its buffer or is exiting")
    )
    began = time.monotonic()
    with pytest.raises(error, match=message) as info:
        if call == "dispatch":
            buffer.dispatch(x, idx)
        else:
            buffer.combine(out.recv_x, out.handle)
            look(buffer)
    assert info.value.rank == 1 and (x + 1).isfinite().all(), "the GPU stays usable"
    with pytest.raises(error, match="rank 1"):
        buffer.dispatch(x, idx)
    assert time.monotonic() - began < 60


@on_ranks(2, how=("killed", "destroyed"), expected_dead=who_dies)
def test_last_call_of_peer_that_is_gone(rank, how):
    """Rank 1 is gone, but not before it has made a call: rank 0 receives that."""
    buffer, x, idx = on_gpus(rank)
    expected = buffer.dispatch(x, idx)
    again = buffer.dispatch(x, handle=expected.handle, return_hook=True)
    if rank == 1:
        again.hook()
        torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        return leave(buffer, how)
    time.sleep(2)
    again.hook()
    assert_same("recv_x", again.recv_x, expected.recv_x)
    buffer.check()
