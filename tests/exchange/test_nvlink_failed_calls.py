"""Handles, hooks and rows under way after a failed call of the nvlink backend."""

import time

import pytest
import torch
import torch.distributed as dist
from error_cases import on_gpus
from exchange_cases import assert_same, look
from fault_cases import allocations_fail, is_rows
from on_ranks import on_ranks, refused

from deepep_moe.errors import EPPeerError

pytestmark = pytest.mark.gpu


@on_ranks(2)
def test_errors_that_are_learned_later(rank):
    """Calls that wait for nothing learn of a refusal later. Who does makes the call all the same, so that it is nobody else's error."""
    buffer, x, idx = on_gpus(rank)
    out = buffer.dispatch(x, idx)
    expected = buffer.combine(out.recv_x, out.handle)
    if rank == 1:
        with pytest.raises(TypeError, match="x has dtype float64; it must be"):
            buffer.combine(out.recv_x.double(), out.handle)
    else:
        buffer.combine(out.recv_x, out.handle)
        torch.cuda.synchronize()
    dist.barrier()
    if rank == 0:
        with pytest.raises(EPPeerError, match="rank 1 did not make its call: TypeError: x has dtype float64"):
            buffer.combine(out.recv_x, out.handle)
    else:
        assert_same("combined_x", buffer.combine(out.recv_x, out.handle), expected)
    for _ in range(3):
        torch.cuda.synchronize()
        dist.barrier()
        assert_same("combined_x", buffer.combine(out.recv_x, out.handle), expected)


WHY = r"topk_idx\[\d, \d\] is 4"
FAILED = "the dispatch of this handle has failed, so nothing goes along it"


@on_ranks(2)
def test_one_failed_handle(rank):
    """Rows that did not come to one rank have no places there: it makes no call along their handle, and says so."""
    buffer, x, idx = on_gpus(rank, timeout_s=60)
    out = buffer.dispatch(x, idx, num_recv_rows=64)
    look(buffer)
    if rank == 0:
        out.handle.recv_counts.data[0] |= -(2**31)  # as the kernel that waits for rows leaves it
    buffer.combine(out.recv_x, out.handle)
    torch.cuda.synchronize()
    dist.barrier()
    with refused(rank, 0, ValueError, FAILED):
        buffer.check()
    dist.barrier()


@on_ranks(2)
def test_out_of_memory_for_the_rows(rank):
    """Once rows are on their way, a rank that has no memory to receive them says so in the next call, and its own still arrive."""
    buffer, x, idx = on_gpus(rank)
    sent, rows = x.clone(), None
    if rank == 0:
        with allocations_fail(torch.OutOfMemoryError("no room"), is_rows), pytest.raises(torch.OutOfMemoryError, match="no room"):
            buffer.dispatch(sent, idx)
        sent.fill_(-7)
    else:
        rows = buffer.dispatch(x, idx).recv_x
        with pytest.raises(EPPeerError, match="rank 0 did not make its call: OutOfMemoryError: no room"):
            buffer.dispatch(x, idx)
    out = buffer.dispatch(x, idx)
    if rows is not None:
        assert_same("recv_x", rows, out.recv_x)
    assert_same("combined_x", buffer.combine(out.recv_x, out.handle), x * (idx >= 0).sum(1, keepdim=True))


@on_ranks(2)
def test_check_between_two_halves(rank):
    """Once its failure is raised, the second half of a call has nothing to wait for."""
    buffer, x, idx = on_gpus(rank, timeout_s=300)
    out = buffer.dispatch(x, idx)
    expected = buffer.combine(out.recv_x, out.handle)
    halves = (
        lambda: buffer.combine(out.recv_x, out.handle, return_hook=True)[1],
        lambda: buffer.dispatch(x, handle=out.handle, return_hook=True).hook,
    )
    for half in halves:
        if rank == 1:
            with pytest.raises(TypeError):
                buffer.combine(out.recv_x.double(), out.handle)
        else:
            hook = half()
            torch.cuda.synchronize()
            with pytest.raises(EPPeerError, match="rank 1 did not make its call"):
                buffer.check()
            began = time.monotonic()
            hook()
            torch.cuda.synchronize()
            assert time.monotonic() - began < 60
        dist.barrier()
        assert_same("combined_x", buffer.combine(out.recv_x, out.handle), expected)
