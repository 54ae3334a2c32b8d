"""Refusals wait for nobody, failures for nothing but the buffer's own work, and a rank that refused catches up before its next call."""

import time

import pytest
import torch
import torch.distributed as dist
from events import tell, wait_for
from exchange_cases import assert_same
from nvlink_cases import make_buffer
from on_ranks import on_ranks

from deepep_moe.device import call_stream
from deepep_moe.errors import EPPeerError, EPTimeoutError

pytestmark = pytest.mark.gpu
SOON_S = 20.0  # far from the deadline of 60 s
DEADLINE_S = 4.0


@pytest.mark.parametrize("num_ranks", (2, 3))
@on_ranks()
def test_refusals_wait_for_nobody(rank, num_ranks):
    """Rank 0 is done with its wrong calls before any peer has made one. They learn the reason of each. Its
    next call is seven calls ahead of theirs."""
    buffer, x, idx = make_buffer(rank, num_experts=12)
    idx = 3 * idx.clamp(min=0)  # on all ranks
    expected = buffer.dispatch(x, idx).recv_x
    if rank == 0:
        began = time.monotonic()
        for number in range(7):
            with pytest.raises(ValueError, match="topk_idx has shape"):
                buffer.dispatch(x[: number % 4], idx)
        assert time.monotonic() - began < SOON_S
        tell("rank 0 goes on")
    else:
        wait_for("rank 0 goes on")
        time.sleep(0.5)  # rank 0 has made its next call by then
        for number in range(7):
            with pytest.raises(EPPeerError, match=rf"rank 0 did not make its call: ValueError: .* must be \[{number % 4}, 2\]"):
                buffer.dispatch(x, idx)
    for _ in range(3):
        out = buffer.dispatch(x, idx)
        assert_same("recv_x", out.recv_x, expected)
        assert torch.isfinite(buffer.combine(out.recv_x, out.handle)).all()
    dist.barrier()


@on_ranks(2)
def test_reason_that_is_overwritten(rank):
    """Rank 0 refuses more calls than ranks keep reasons of. Rank 1 looks at the first one once that is overwritten."""
    buffer, x, idx = make_buffer(rank)
    out = buffer.dispatch(x, idx)
    if rank == 0:
        for number in range(9):
            buffer.refuse(ValueError(f"reason {number}"))
        torch.cuda.synchronize()
        tell("rank 0 has refused nine calls")
        return
    buffer.combine(out.recv_x, out.handle)
    buffer.refuse(ValueError("nobody asks"))
    wait_for("rank 0 has refused nine calls")
    with pytest.raises(EPPeerError, match="rank 0 did not make its call: its reason is lost, as rank 0 has entered later calls") as info:
        buffer.check()
    assert (info.value.rank, info.value.cause) == (0, "")


@on_ranks(2)
def test_one_deadline_for_a_late_peer(rank):
    """A call that nobody waits for times out. The next one raises that, and does not wait for another deadline."""
    buffer, x, idx = make_buffer(rank, timeout_s=DEADLINE_S)
    out = buffer.dispatch(x, idx)
    expected = buffer.combine(out.recv_x, out.handle)
    if rank == 0:
        buffer.combine(out.recv_x, out.handle)
        torch.cuda.synchronize()
        began = time.monotonic()
        with pytest.raises(EPTimeoutError, match="rank 1 did not deliver .*phase 'entry into the call', expected 3, seen 2"):
            buffer.combine(out.recv_x, out.handle)
        assert time.monotonic() - began < DEADLINE_S / 2
        tell("rank 0 goes on")
    else:
        wait_for("rank 0 goes on")
        with pytest.raises((EPPeerError, EPTimeoutError), match="rank 0"):  # which had entered call 3, and sends no rows
            for _ in range(2):
                buffer.combine(out.recv_x, out.handle)
                torch.cuda.synchronize()
    dist.barrier()
    assert_same("combined_x", buffer.combine(out.recv_x, out.handle), expected)
    torch.cuda.synchronize()
    buffer.check()
    dist.barrier()


# ---- streams of others ----


def new_stream():
    """A stream that PyTorch has not made, and its address."""
    address = torch.zeros(1, dtype=torch.int64)
    assert torch.cuda.cudart().cudaStreamCreate(address.data_ptr()).value == 0
    return torch.cuda.ExternalStream(address.item()), address.item()


@on_ranks(1)
def test_call_on_other_stream_that_is_destroyed(rank):
    """The stream of a call is destroyed after the call. The next one still waits for it."""
    buffer, x, idx = make_buffer(rank)
    first = buffer.dispatch(x, idx)
    expected, kept = buffer.combine(first.recv_x, first.handle), []
    for _ in range(3):
        stream, address = new_stream()
        with torch.cuda.stream(stream):
            assert call_stream(x.device) >> 63 == 1
            torch.cuda._sleep(100_000_000)
            kept.append(buffer.dispatch(x, idx, num_recv_rows=16))  # PyTorch's allocator would use the stream to free it
        assert torch.cuda.cudart().cudaStreamDestroy(address).value == 0
        assert_same("combined_x", buffer.combine(kept[-1].recv_x, kept[-1].handle), expected)
    torch.cuda.synchronize()
    buffer.check()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert call_stream(x.device) == torch.cuda.current_stream().cuda_stream


@pytest.mark.parametrize("is_beside", (True, False))
@on_ranks(1)
def test_failure_beside_work_on_other_stream(rank, is_beside):
    """Somebody else's kernel runs for many seconds, beside the failed call or behind it: the error does not wait for it."""
    buffer, x, idx = make_buffer(rank)
    buffer.dispatch(x, idx)
    done = torch.cuda.Event()
    other = torch.cuda.Stream() if is_beside else torch.cuda.current_stream()
    torch.cuda.synchronize()
    began = time.monotonic()
    buffer.dispatch(x, idx + 1, num_recv_rows=16)
    with torch.cuda.stream(other):
        for _ in range(20):
            torch.cuda._sleep(2_000_000_000)
        done.record()
    time.sleep(0.5)
    with pytest.raises(ValueError, match=r"topk_idx\[\d, \d\] is 4"):
        buffer.check()
    assert not done.query() and time.monotonic() - began < 8
    if not is_beside:  # it stays, as the buffer cannot tell its own work from what lies behind
        with pytest.raises(ValueError, match=r"topk_idx\[\d, \d\] is 4"):
            buffer.check()
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match=r"topk_idx\[\d, \d\] is 4"):
            buffer.check()
    buffer.check()
    torch.cuda.synchronize()
    buffer.dispatch(x, idx)
