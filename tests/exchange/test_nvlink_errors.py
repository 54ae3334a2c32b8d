"""Errors of the nvlink backend: wrong arguments, ranks in different calls, ranks that are late or refuse."""

import signal
import time

import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from events import tell, wait_for
from exchange_cases import assert_same, device_of
from nvlink_cases import Unchecked, make_buffer
from on_ranks import on_ranks

from deepep_moe import Buffer, ops
from deepep_moe.errors import EPCapacityError, EPMismatchError, EPPeerError, EPTimeoutError

pytestmark = pytest.mark.gpu
DEADLINE_S = 4.0  # what a rank that is late misses, and the others must not, on a busy machine
LAYOUTS = ("expert", "rank")


@on_ranks(2)
def test_bad_arguments(rank):
    buffer, x, idx = make_buffer(rank)
    on_cpu = [] if emulated_gpu.is_chosen() else [(dict(x=x.cpu()), ValueError, "x is on cpu; backend 'nvlink' moves tensors on cuda")]
    for changes, error, message in [
        *on_cpu,
        (dict(x=x.double()), TypeError, "x has dtype float64"),
        (dict(topk_idx=idx[:3]), ValueError, r"topk_idx has shape \[3, 2\]"),
        (dict(topk_idx=idx + 1), ValueError, r"topk_idx\[[12], [01]\] is 4; it must be -1 \(no expert\) or 0 to 3"),
        (dict(topk_idx=idx * 0), ValueError, "names expert 0 twice"),
    ]:
        with pytest.raises(
            error if rank == 0 else EPPeerError, match=message if rank == 0 else f"rank 0 did not make its call: .*{message}"
        ) as info:
            buffer.dispatch(**(dict(x=x, topk_idx=idx) | (changes if rank == 0 else {})))
        assert rank == 0 or info.value.cause == error.__name__, info.value
        out = buffer.dispatch(x, idx)
        assert torch.isfinite(buffer.combine(out.recv_x, out.handle)).all(), "usable afterwards"


@on_ranks(2)
def test_ranks_in_different_calls(rank):
    buffer, x, idx = make_buffer(rank)
    first, second = buffer.dispatch(x, idx), buffer.dispatch(x, idx)
    me = f"rank {rank}"
    with pytest.raises(EPMismatchError, match=f"ranks make different calls: {me}: .*layout.*rank {1 - rank}: .*layout"):
        buffer.dispatch(x, idx, layout=LAYOUTS[rank])
    with pytest.raises(EPMismatchError, match="rank 1: combine of float32 rows, layout expert, with the handle of call 2"):
        out = (first, second)[rank]
        buffer.combine(out.recv_x, out.handle)
        torch.cuda.synchronize()
        buffer.dispatch(x, idx)
    assert torch.isfinite(buffer.combine(second.recv_x, second.handle)).all(), "usable afterwards"


@pytest.mark.parametrize("num_experts", (4, 512))  # words of counts for a few threads, for all of a block
@on_ranks(2)
def test_late_peer(rank, num_experts):
    buffer, x, idx = make_buffer(rank, timeout_s=DEADLINE_S, num_experts=num_experts)
    buffer.dispatch(x, idx)
    if rank == 1:
        return wait_for("rank 0 knows")
    with pytest.raises(EPTimeoutError, match="rank 1 did not deliver .*phase 'entry into the call', expected 2, seen 1") as info:
        buffer.dispatch(x, idx)
    assert (info.value.rank, info.value.phase, info.value.expected, info.value.seen) == (1, "entry into the call", 2, 1)
    assert (x + 1).isfinite().all(), "the GPU stays usable"
    tell("rank 0 knows")


@pytest.mark.parametrize("num_sms", (4, 0))
@on_ranks(2)
def test_rows_that_are_read_late_are_not_overwritten(rank, num_sms):
    """Rank 1 receives the rows of a dispatch when rank 0 has given up waiting for it in the next call."""
    buffer, x, idx = make_buffer(rank, timeout_s=DEADLINE_S)
    first = buffer.dispatch(x, idx)
    again = buffer.dispatch(x, handle=first.handle, return_hook=True)
    if rank == 1:
        wait_for("rank 0 knows")
        again.hook()
        assert_same("recv_x", again.recv_x, first.recv_x)
        return dist.barrier()
    again.hook()
    with pytest.raises(EPTimeoutError, match="rank 1 did not deliver .*phase 'entry into the call', expected 3, seen 2"):
        buffer.combine(torch.full_like(first.recv_x, 7.0), first.handle, num_sms=num_sms)
        torch.cuda.synchronize()
        buffer.check()
    tell("rank 0 knows")
    dist.barrier()  # its workspace stays until the other has read


@on_ranks(2)
def test_hook_after_next_call_on_other_stream(rank):
    """The buffer's next call receives the rows, on a stream that is busy; whoever calls the hook then waits for that stream."""
    buffer, x, idx = make_buffer(rank)
    good = buffer.dispatch(x, idx)
    out = buffer.dispatch(x, idx, return_hook=True)
    out.recv_x.fill_(float("nan"))
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(500_000_000)
        buffer.combine(good.recv_x, good.handle)
    out.hook()
    assert_same("recv_x", out.recv_x.clone(), good.recv_x)


@on_ranks(2)
def test_rows_of_an_interrupted_call(rank):
    """Rank 0 is interrupted while it waits, its rows are on their way, and their memory is used for something else at once."""
    device = device_of("nvlink", rank)
    buffer = Buffer(None, 8192, 512, 4, 2, backend="nvlink", timeout_s=60)
    x = torch.full((8192, 512), float(rank + 1), device=device)
    idx = torch.tensor([0, 2], device=device).repeat(8192, 1)
    buffer.dispatch(x[:8], idx[:8])  # too few to guess from
    dist.barrier()
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 1)
            buffer.dispatch(x, idx)
        x.fill_(-7)
        tell("rank 0 goes on")
    else:
        wait_for("rank 0 goes on")
        rows = buffer.dispatch(x, idx).recv_x
        assert_same("recv_x", rows, torch.tensor([1.0, 2.0], device=device).repeat_interleave(8192)[:, None].expand_as(rows))
    dist.barrier()


@on_ranks(4)
def test_refusals_of_later_calls(rank, num_ranks):
    """Rank 1 refuses call after call while the others wait for rank 0: none of its refusals may count as tokens."""
    buffer, x, idx = make_buffer(rank, timeout_s=60.0, num_experts=256)
    buffer.dispatch(x, idx)
    communicator = buffer.calls.backend._exchange
    buffer.calls.backend._exchange = Unchecked(communicator)
    time.sleep((2, 1, 0, 0)[rank])
    for _ in range(3 if rank == 1 else 1):
        buffer.dispatch(x, idx + (1000 if rank == 1 else 0), num_recv_rows=8 * num_ranks)
    error, message = (ValueError, r"topk_idx\[\d, \d\] is 1") if rank == 1 else (EPPeerError, "rank [01] did not make its call")
    deadline = time.time() + 100
    with pytest.raises(error, match=message):
        while time.time() < deadline:
            communicator.check()
    dist.barrier()


@pytest.mark.parametrize("num_layers", [2, 6])  # 4 calls, and 12, which are more than a rank keeps the reasons of
@on_ranks(2)
def test_calls_after_a_failure(rank, num_layers):
    """Rank 1 has too little room, and nobody looks before the last call: a rank that has failed may overtake its peer."""
    buffer, x, idx = make_buffer(rank)
    communicator = buffer.calls.backend._exchange
    idx[3, 1] = 3 if rank == 0 else -1  # rank 1 receives 9 rows
    for _ in range(5):
        buffer.calls.backend._exchange = Unchecked(communicator)
        for _ in range(num_layers):
            out = buffer.dispatch(x, idx, num_recv_rows=(64, 8)[rank])
            buffer.combine(out.recv_x, out.handle)
        torch.cuda.synchronize()
        buffer.calls.backend._exchange = communicator
        with pytest.raises(EPCapacityError, match="rank 1 would receive 9 rows, more than its num_recv_rows of 8") as info:
            buffer.check()
        assert info.value.rank == 1


@on_ranks(2)
def test_calls_after_a_refusal(rank):
    """Rank 1 refuses a call, and both refuse the next twelve, each because of the other. Both errors name rank 1."""
    buffer, x, idx = make_buffer(rank)
    communicator = buffer.calls.backend._exchange
    buffer.calls.backend._exchange = Unchecked(communicator)
    if rank == 1:
        buffer.refuse(ValueError("no rows"))
    else:
        buffer.dispatch(x, idx, num_recv_rows=64)
    for _ in range(6):
        out = buffer.dispatch(x, idx, num_recv_rows=64)
        buffer.combine(out.recv_x, out.handle)
    torch.cuda.synchronize()
    buffer.calls.backend._exchange = communicator
    with pytest.raises(EPPeerError, match="rank 1 did not make its call"):
        buffer.check()
    dist.barrier()


@on_ranks(1)
def test_exceeded_bound(rank):
    buffer, x, idx = make_buffer(rank)
    with pytest.raises(EPCapacityError, match="rank 0 would receive 7 rows, more than its num_recv_rows of 3"):
        buffer.dispatch(x, idx, num_recv_rows=3)  # the host waits for nothing, so it learns it later
        torch.cuda.synchronize()
        buffer.check()
    buffer.check()
    buffer.dispatch(x, idx)


@on_ranks(1)
def test_check_looks_at_the_gate_too(rank):
    buffer, x, idx = make_buffer(rank)
    logits = torch.zeros(len(x), 4, device=x.device)
    logits[2, 3] = float("nan")
    assert ops.gate(logits, 2).topk_idx[2].tolist() == [-1, -1]
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="logits has nan for token 2, expert 3 in an earlier call of the gate on the GPU"):
        buffer.check()
    buffer.check()
    buffer.dispatch(x, idx)


@pytest.mark.parametrize("from_python", [False, True], ids=["", "in Python"])
@on_ranks(2)
def test_allowed_excess(rank, from_python):
    """In the second pass rank 0 has room for 3 rows. It goes on with those, on both ranks, and so does a third pass, which is whole."""
    buffer, x, idx = make_buffer(rank)
    if from_python:
        buffer.calls._native = None
    buffer.allow_excess()
    x.requires_grad_()
    num_experts = (idx >= 0).sum(1, keepdim=True).to(x.dtype)
    for is_bounded in (False, True, False):
        bound = 3 if is_bounded and rank == 0 else 64
        x.grad = None
        out = buffer.dispatch(x, idx, num_recv_rows=bound)
        combined = buffer.combine(out.recv_x * 2, out.handle)
        combined.sum().backward()
        torch.cuda.synchronize()
        assert len(out.recv_x) == bound and bool(out.handle.num_rows_per_expert.sum() > bound) == (bound == 3)
        if not is_bounded:
            assert_same("combined_x", combined.detach(), 2 * x.detach() * num_experts)
            assert_same("gradient of x", x.grad, 2 * num_experts.expand_as(x))
    buffer.check()
