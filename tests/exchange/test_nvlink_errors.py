"""Errors of the nvlink backend: wrong arguments, different calls, late ranks. Refusals wait for nobody, failures for nothing but the
buffer's own work, and a rank that refused catches up before its next call."""

import signal
import time
from functools import partial

import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from error_cases import on_gpus
from events import tell, wait_for
from exchange_cases import assert_same, device_of, look, new_stream
from fault_cases import unchecked
from on_ranks import on_ranks, refused

from deepep_moe import Buffer, ops
from deepep_moe.device import call_stream
from deepep_moe.errors import BackendUnavailableError, EPCapacityError, EPPeerError, EPTimeoutError
from deepep_moe.group import rendezvous

pytestmark = pytest.mark.gpu
SOON_S = 20.0  # far from the deadline of 60 s
DEADLINE_S = 4.0  # what a rank that is late misses, and the others must not, on a busy machine


@on_ranks(2, sums=("ranks", "lanes"))
def test_bad_arguments(rank, sums):
    buffer, x, idx = on_gpus(rank, sums=sums)
    on_cpu = [] if emulated_gpu.is_chosen() else [(dict(x=x.cpu()), ValueError, "x is on cpu")]
    for changes, error, message in [
        *on_cpu,
        (dict(topk_idx=idx + 1), ValueError, r"topk_idx\[[12], [01]\] is 4"),
        (dict(topk_idx=idx * 0), ValueError, "names expert 0 twice"),
        (dict(num_recv_rows=-1), ValueError, "num_recv_rows is -1"),
        (dict(num_recv_rows=2**63), ValueError, "num_recv_rows is 9223372036854775808"),
        (dict(num_sms=0, num_recv_rows=500), ValueError, "num_sms=0 and num_recv_rows were both given"),
        (dict(num_sms=100000), ValueError, "num_sms is 100000; this GPU has [0-9]+"),
    ]:
        with refused(rank, 0, error, message):
            buffer.dispatch(**(dict(x=x, topk_idx=idx) | (changes if rank == 0 else {})))
        out = buffer.dispatch(x, idx)
        assert torch.isfinite(buffer.combine(out.recv_x, out.handle)).all(), "usable afterwards"


@on_ranks(2)
def test_late_peer(rank):
    """There are words of counts for all threads of a block. tests/faults/test_stalls.py has few of them."""
    buffer, x, idx = on_gpus(rank, timeout_s=DEADLINE_S, num_experts=512)
    buffer.dispatch(x, idx)
    if rank == 1:
        return wait_for("rank 0 knows")
    with pytest.raises(EPTimeoutError, match="rank 1 did not deliver .*phase 'entry into the call', expected 2, seen 1") as info:
        buffer.dispatch(x, idx)
    assert (info.value.rank, info.value.phase, info.value.expected, info.value.seen) == (1, "entry into the call", 2, 1)
    assert (x + 1).isfinite().all(), "the GPU stays usable"
    tell("rank 0 knows")


@on_ranks(2, num_sms=(4, 0))
def test_rows_that_are_read_late_are_not_overwritten(rank, num_sms):
    """Rank 1 receives the rows of a dispatch when rank 0 has given up waiting for it in the next call."""
    buffer, x, idx = on_gpus(rank, timeout_s=DEADLINE_S)
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
        look(buffer)
    tell("rank 0 knows")
    dist.barrier()  # its workspace stays until the other has read


@on_ranks(2)
def test_hook_after_next_call_on_other_stream(rank):
    """The buffer's next call receives the rows, on a stream that is busy; a call of the hook then waits for that stream."""
    buffer, x, idx = on_gpus(rank)
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
    buffer, x, idx = on_gpus(rank, timeout_s=60.0, num_experts=256)
    buffer.dispatch(x, idx)
    error, message = (ValueError, r"topk_idx\[\d, \d\] is 1") if rank == 1 else (EPPeerError, "rank [01] did not make its call")
    with unchecked(buffer) as communicator:
        time.sleep((2, 1, 0, 0)[rank])
        for _ in range(3 if rank == 1 else 1):
            buffer.dispatch(x, idx + (1000 if rank == 1 else 0), num_recv_rows=8 * num_ranks)
        deadline = time.time() + 100
        with pytest.raises(error, match=message):
            while time.time() < deadline:
                communicator.check()
    dist.barrier()


@on_ranks(2, num_layers=(2, 6))  # 4 calls, and 12, which are more than a rank keeps the reasons of
def test_calls_after_a_failure(rank, num_layers):
    """Rank 1 has too little room, and nobody looks before the last call: a rank that has failed may overtake its peer."""
    buffer, x, idx = on_gpus(rank)
    idx[3, 1] = 3 if rank == 0 else -1  # rank 1 receives 9 rows
    for _ in range(5):
        with unchecked(buffer):
            for _ in range(num_layers):
                out = buffer.dispatch(x, idx, num_recv_rows=(64, 8)[rank])
                buffer.combine(out.recv_x, out.handle)
            torch.cuda.synchronize()
        with pytest.raises(EPCapacityError, match="rank 1 would receive 9 rows, more than its num_recv_rows of 8") as info:
            buffer.check()
        assert info.value.rank == 1


@on_ranks(3)
def test_calls_after_a_refusal(rank, num_ranks):
    """Rank 2 refuses a call, and rank 0 the next twelve because of it, all before rank 1 makes the first. When rank 1 looks, rank 0 has
    gone on. All errors name rank 2."""
    buffer, x, idx = on_gpus(rank, num_experts=2 * num_ranks)
    with unchecked(buffer):
        time.sleep(0.5 if rank == 1 else 0)
        if rank == 2:
            buffer.refuse(ValueError("no rows"))
        else:
            buffer.dispatch(x, idx, num_recv_rows=64)
        for _ in range(6):
            out = buffer.dispatch(x, idx, num_recv_rows=64)
            buffer.combine(out.recv_x, out.handle)
        torch.cuda.synchronize()
    if rank != 0:
        wait_for("rank 0 goes on")
        time.sleep(0.2)
    with pytest.raises(EPPeerError, match="^rank 2 did not make its call") as info:
        buffer.check()
    assert info.value.rank == 2
    tell("rank 0 goes on")
    out = buffer.dispatch(x, idx, num_recv_rows=64)
    assert int(buffer.combine(out.recv_x, out.handle).isnan().sum()) == 0


@on_ranks(1)
def test_check_looks_at_the_gate_too(rank):
    buffer, x, idx = on_gpus(rank)
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
    buffer, x, idx = on_gpus(rank)
    if from_python:
        buffer.calls.native = None
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


@on_ranks(2)
def test_without_the_module_that_links_torch(rank):
    """No rank makes a buffer where one lacks it, and all say how it is built."""
    device_of("nvlink", rank)
    rendezvous.WHY_NOT = "not built; `deepep-moe build _torch` builds it" if rank == 1 else ""
    with pytest.raises(BackendUnavailableError, match="deepep_moe._torch of rank 1 is not built; `deepep-moe build _torch`"):
        Buffer(None, 8, 16, 4, 2, backend="nvlink")


# ---- refusals ----


@on_ranks((2, 3))
def test_refusals_wait_for_nobody(rank, num_ranks):
    """Rank 0 is done with its wrong calls before a peer has made one. They learn each reason. Its next call is seven calls ahead."""
    buffer, x, idx = on_gpus(rank, num_experts=12)
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
    buffer, x, idx = on_gpus(rank)
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
    buffer, x, idx = on_gpus(rank, timeout_s=DEADLINE_S)
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
    look(buffer)
    dist.barrier()


# ---- streams of others ----


@on_ranks(1)
def test_call_on_other_stream_that_is_destroyed(rank):
    """The stream of a call is destroyed after the call. The next one still waits for it."""
    buffer, x, idx = on_gpus(rank)
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
    look(buffer)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert call_stream(x.device) == torch.cuda.current_stream().cuda_stream


@on_ranks(1, is_beside=(True, False))
def test_failure_beside_work_on_other_stream(rank, is_beside):
    """Somebody else's kernel runs for many seconds, beside the failed call or behind it: the error does not wait for it."""
    buffer, x, idx = on_gpus(rank)
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
    raises = partial(pytest.raises, ValueError, match=r"topk_idx\[\d, \d\] is 4")
    with raises():
        buffer.check()
    assert not done.query() and time.monotonic() - began < 8
    if not is_beside:  # it stays, as the buffer cannot tell its own work from what lies behind
        with raises():
            buffer.check()
        torch.cuda.synchronize()
        with raises():
            buffer.check()
    buffer.check()
    torch.cuda.synchronize()
    buffer.dispatch(x, idx)
