"""The nvlink backend against the reference, bit for bit; several ranks share a GPU where there are fewer."""

import os
import signal
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from exchange_cases import Case, assert_same, check_case, device_of, poison_outputs

from deepep_moe import _C, Buffer, ops, reference
from deepep_moe.errors import BufferDestroyedError, EPCapacityError, EPMismatchError, EPPeerError, EPTimeoutError
from deepep_moe.testing import run_ranks

pytestmark = pytest.mark.gpu
LAYOUTS = ("expert", "rank")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("num_tokens", ([13], [9, 21], [5, 0, 17], [300, 1, 130, 0]), ids=str)
def test_equals_reference(num_tokens, dtype, layout):
    case = Case(num_tokens, dtype=dtype, layout=layout, expert_alignment=4, with_bias=True, backends=("nvlink",))
    run_ranks(check_case, case.num_ranks, case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pattern", ("one_expert", "one_rank", "skewed", "masked", "nobody"))
def test_uneven_routings(pattern, layout):
    case = Case([140, 3, 0], pattern=pattern, layout=layout, dtype=torch.bfloat16, index_dtype=torch.int32, backends=("nvlink",))
    run_ranks(check_case, case.num_ranks, case)


@pytest.mark.parametrize("hidden", (8, 72, 2880, 7168))
def test_hidden_sizes(hidden):
    run_ranks(check_case, 2, Case([33, 20], hidden=hidden, dtype=torch.bfloat16, backends=("nvlink",)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ("now", "async", "hook"))
@pytest.mark.parametrize("num_sms", (0, 1, 7, None))
def test_ways_to_send(num_sms, mode, layout):
    """Multiprocessors or copy engines, at once or in halves: the results are the same."""
    case = Case([140, 37, 90], layout=layout, dtype=torch.bfloat16, num_sms=num_sms, mode=mode, with_bias=True, backends=("nvlink",))
    run_ranks(check_case, case.num_ranks, case)


def guessed_rows(rank, num_ranks, layout, mode):
    """Token t of every rank chooses experts t and t + 1 of 4. The rows allocated are guessed where the last two calls received about as
    many, a sixteenth more than the last: enough, or not."""
    poison_outputs()
    device = device_of("nvlink", rank)
    buffer = Buffer(None, 80, 16, 4, 2, backend="nvlink", timeout_s=60)
    rows: list[int] = []
    for num_tokens in (40, 40, 40, 41, 80, 80, 80, 77, 0, 0, 0, 9):
        xs = [torch.randn(num_tokens, 16, generator=torch.Generator().manual_seed(num_tokens + r)) for r in range(num_ranks)]
        token = torch.arange(num_tokens)
        idx = torch.stack((token % 4, (token + 1) % 4), 1)
        weights = [x[:, :2].contiguous() for x in xs]
        received = reference.dispatch(xs, [idx] * num_ranks, weights, 4, layout=layout)
        expected = received[rank]
        is_guessed = len(rows) > 1 and abs(rows[-1] - rows[-2]) * 16 <= rows[-1]
        room = rows[-1] + rows[-1] // 16 if is_guessed else 0
        out = buffer.dispatch(xs[rank].to(device), idx.to(device), weights[rank].to(device), layout=layout, async_op=mode == "async")
        if mode == "async":
            out.event.wait()
        rows.append(len(out.recv_x))
        assert not out.recv_x._is_view()  # those may not be changed in place where there are gradients
        assert_same("recv_x", out.recv_x, expected.recv_x)
        assert_same("recv_topk_weights", out.recv_topk_weights, expected.recv_topk_weights)
        assert_same("recv_topk_idx", out.recv_topk_idx, expected.recv_topk_idx)
        assert out.recv_x.untyped_storage().nbytes() == max(room, rows[-1]) * 16 * 4
        y = buffer.combine(out.recv_x, out.handle)
        assert_same("combined_x", y, reference.combine([r.recv_x for r in received], received, [num_tokens] * num_ranks, None, None)[rank])


@pytest.mark.parametrize("mode", ("now", "async"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_guessed_rows(layout, mode):
    run_ranks(guessed_rows, 2, layout, mode)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_loads_and_stores(dtype, layout):
    """The path of GPUs before sm_90, on any GPU."""
    case = Case([140, 0, 77], layout=layout, dtype=dtype, expert_alignment=8, bulk_copies=False, with_bias=True, backends=("nvlink",))
    run_ranks(check_case, case.num_ranks, case)


@pytest.mark.parametrize("num_ranks", (5, 6, 7, 8))
def test_any_number_of_ranks(num_ranks):
    num_experts = num_ranks * 3
    run_ranks(check_case, num_ranks, Case([20 + rank for rank in range(num_ranks)], num_experts=num_experts, backends=("nvlink",)))


def changing_num_sms(rank, num_ranks):
    device = device_of("nvlink", rank)
    buffer = Buffer(None, 64, 128, 8, 2, backend="nvlink", num_sms=5, timeout_s=20)
    x = torch.randn(50, 128, device=device)
    idx = torch.rand(50, 8, device=device).argsort(1)[:, :2].contiguous()
    out = buffer.dispatch(x, idx)
    all_of_them = buffer.calls.backend._communicator.num_multiprocessors
    for num_sms in (1, 0, all_of_them, 3, None):
        again = buffer.dispatch(x, handle=out.handle, num_sms=num_sms)
        assert torch.equal(again.recv_x, out.recv_x)
        assert torch.equal(buffer.combine(again.recv_x, out.handle, num_sms=num_sms), buffer.combine(out.recv_x, out.handle))
    with pytest.raises(ValueError, match="num_sms is 100000; this GPU has [0-9]+: give 1 to [0-9]+, or 0 for copy engines"):
        buffer.dispatch(x, idx, num_sms=100000)
    with pytest.raises(ValueError, match="num_sms=0 and num_recv_rows were both given"):
        buffer.dispatch(x, idx, num_sms=0, num_recv_rows=500)


def test_num_sms_may_change():
    run_ranks(changing_num_sms, 2)


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("hidden", (1024, 7168))
def test_workspace_is_bounded(hidden, num_ranks):
    """At most twice what a rank may receive, in the largest rows there are."""
    sizes = {"num_experts": 32 * num_ranks, "num_topk": 8, "hidden": hidden, "num_max_tokens": 4096}
    assert _C.gpu_workspace_bytes(num_ranks=num_ranks, **sizes) <= 2 * num_ranks * 4096 * 4 * hidden


# ---- CUDA graphs ----


def captured(rank, num_ranks, layout):
    device = device_of("nvlink", rank)
    buffer = Buffer(None, 64, 128, 8, 2, backend="nvlink", timeout_s=20)
    x = torch.zeros(64, 128, device=device, requires_grad=True)
    weights = torch.zeros(64, 2, device=device, requires_grad=True)
    idx = torch.zeros(64, 2, dtype=torch.int64, device=device)

    def step():
        out = buffer.dispatch(x, idx, weights, layout=layout, num_recv_rows=64 * 2 * num_ranks)
        row_weights = out.recv_topk_weights if layout == "expert" else out.recv_topk_weights.sum(1)
        y = buffer.combine(out.recv_x * 1.5, out.handle, row_weights)
        return y, *torch.autograd.grad((y * y).sum(), (x, weights))

    def draw(seed):
        generator = torch.Generator(device=device).manual_seed(seed * 10 + rank)
        with torch.no_grad():
            x.copy_(torch.randn(x.shape, generator=generator, device=device))
            weights.copy_(torch.rand(weights.shape, generator=generator, device=device))
            idx.copy_(torch.rand(64, 8, generator=generator, device=device).argsort(1)[:, :2])

    draw(0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    for seed in range(1, 4):
        draw(seed)
        for result in results:
            result.detach().fill_(float("nan"))
        graph.replay()
        for ours, eager in zip(results, step(), strict=True):
            assert torch.equal(ours, eager)
    torch.cuda.synchronize()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cuda_graph(layout):
    run_ranks(captured, 2, layout)


def waits_in_a_capture(rank, num_ranks):
    buffer, x, idx = make_buffer(rank)
    rows = buffer.dispatch(x, idx).recv_x
    torch.cuda.synchronize()
    message = "waits for its counts cannot be captured in a CUDA graph; give num_recv_rows or a handle"
    with pytest.raises(ValueError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        buffer.dispatch(x, idx)
    out = buffer.dispatch(x, idx)
    assert_same("recv_x", out.recv_x, rows)
    message = "num_sms=0 cannot be captured in a CUDA graph: the host waits for the peers"
    with pytest.raises(ValueError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        buffer.combine(rows, out.handle, num_sms=0)
    assert_same("combined_x", buffer.combine(rows, out.handle, num_sms=0), buffer.combine(rows, out.handle))


def test_what_waits_is_no_part_of_a_cuda_graph():
    run_ranks(waits_in_a_capture, 2)


def captured_between_calls(rank, num_ranks):
    """A call follows the buffer's last one on another stream, also when a graph was captured on a third in between."""
    buffer, x, idx = make_buffer(rank)
    streams, pool = [torch.cuda.Stream() for _ in range(3)], torch.cuda.graph_pool_handle()

    def capture():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(streams[1]):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            out = buffer.dispatch(x, idx, num_recv_rows=16)
            graph.capture_end()
        return graph, out

    for stream in streams:  # kernels that are loaded, and memory that is allocated, when they are used first may wait for the GPU
        with torch.cuda.stream(stream):
            buffer.dispatch(x, idx, num_recv_rows=16)
    before = capture()[0]  # whose memory the next one takes
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(int(8e9))  # cycles: four seconds
        first = buffer.dispatch(x, idx, num_recv_rows=16)
    graph, captured = capture()
    with torch.cuda.stream(streams[2]):
        second = buffer.dispatch(x, idx, num_recv_rows=16)
        done = torch.cuda.Event()
        done.record()
    time.sleep(0.2)
    assert not streams[0].query(), "the first call has not ended, else this says nothing"
    assert not done.query()
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    for out in (second, captured):
        assert_same("recv_x", out.recv_x, first.recv_x)
    before.reset()


def test_cuda_graph_between_calls():
    run_ranks(captured_between_calls, 1)


# ---- errors ----

IDX = [[0, 2], [1, 3], [3, 0], [2, -1]]


def make_buffer(rank, timeout_s=20.0, num_experts=4):
    device = device_of("nvlink", rank)
    buffer = Buffer(None, 8, 16, num_experts, 2, backend="nvlink", timeout_s=timeout_s)
    return buffer, torch.randn(4, 16, device=device), torch.tensor(IDX, device=device)


def bad_arguments(rank, num_ranks):
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
        ):
            buffer.dispatch(**(dict(x=x, topk_idx=idx) | (changes if rank == 0 else {})))
        out = buffer.dispatch(x, idx)
        assert torch.isfinite(buffer.combine(out.recv_x, out.handle)).all(), "usable afterwards"


def test_bad_arguments():
    run_ranks(bad_arguments, 2)


def different_calls(rank, num_ranks):
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


def test_ranks_in_different_calls():
    run_ranks(different_calls, 2)


def late_peer(rank, num_ranks, num_experts):
    buffer, x, idx = make_buffer(rank, timeout_s=3.0, num_experts=num_experts)
    buffer.dispatch(x, idx)
    if rank == 1:
        time.sleep(8)
        return
    with pytest.raises(EPTimeoutError, match="rank 1 did not deliver .*phase 'entry into the call', expected 2, seen 1") as info:
        buffer.dispatch(x, idx)
    assert (info.value.rank, info.value.phase, info.value.expected, info.value.seen) == (1, "entry into the call", 2, 1)
    assert (x + 1).isfinite().all(), "the GPU stays usable"


@pytest.mark.parametrize("num_experts", (4, 512))  # words of counts for a few threads, for all of a block
def test_late_peer(num_experts):
    run_ranks(late_peer, 2, num_experts)


def reads_late(rank, num_ranks, num_sms):
    """Rank 1 receives the rows of a dispatch when rank 0 has given up waiting for it in the next call."""
    buffer, x, idx = make_buffer(rank, timeout_s=3.0)
    first = buffer.dispatch(x, idx)
    again = buffer.dispatch(x, handle=first.handle, return_hook=True)
    if rank == 1:
        time.sleep(8)
        again.hook()
        assert_same("recv_x", again.recv_x, first.recv_x)
        return dist.barrier()
    again.hook()
    with pytest.raises(EPTimeoutError, match="rank 1 did not deliver .*phase 'entry into the call', expected 3, seen 2"):
        buffer.combine(torch.full_like(first.recv_x, 7.0), first.handle, num_sms=num_sms)
        torch.cuda.synchronize()
        buffer.check()
    dist.barrier()  # its workspace stays until the other has read


@pytest.mark.parametrize("num_sms", (4, 0))
def test_rows_that_are_read_late_are_not_overwritten(num_sms):
    run_ranks(reads_late, 2, num_sms)


def given_up_capture(rank, num_ranks):
    """Calls that are captured on one rank only are not counted: calls made later find their handles again."""
    buffer, x, idx = make_buffer(rank)
    out = buffer.dispatch(x, idx, num_recv_rows=64)
    expected = buffer.combine(out.recv_x, out.handle)
    torch.cuda.synchronize()
    gives_up = pytest.raises(RuntimeError, match="no more") if rank == 0 else nullcontext()
    with gives_up, torch.cuda.graph(torch.cuda.CUDAGraph()):
        out = buffer.dispatch(x, idx, num_recv_rows=64)
        if rank == 0:
            raise RuntimeError("no more")
        buffer.combine(out.recv_x, out.handle)
    for _ in range(2):
        out = buffer.dispatch(x, idx)
        assert_same("combined_x", buffer.combine(out.recv_x, out.handle), expected)


def test_cuda_graph_given_up_on_one_rank():
    run_ranks(given_up_capture, 2)


def hook_after_next_call(rank, num_ranks):
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


def test_hook_after_next_call_on_other_stream():
    run_ranks(hook_after_next_call, 2)


def interrupted(rank, num_ranks):
    """Rank 0 is interrupted while it waits, its rows are on their way, and their memory is used for something else at once."""
    device = device_of("nvlink", rank)
    buffer = Buffer(None, 8192, 512, 4, 2, backend="nvlink", timeout_s=60)
    x = torch.full((8192, 512), float(rank + 1), device=device)
    idx = torch.tensor([0, 2], device=device).repeat(8192, 1)
    buffer.dispatch(x[:8], idx[:8])  # too few to guess from
    dist.barrier()
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 1)
        with pytest.raises(KeyboardInterrupt):
            buffer.dispatch(x, idx)
        x.fill_(-7)
    else:
        time.sleep(3)
        rows = buffer.dispatch(x, idx).recv_x
        assert_same("recv_x", rows, torch.tensor([1.0, 2.0], device=device).repeat_interleave(8192)[:, None].expand_as(rows))
    dist.barrier()


def test_rows_of_an_interrupted_call():
    run_ranks(interrupted, 2)


class Unchecked:
    """A communicator whose failures nobody looks at before the next call, as in a CUDA graph."""

    def __init__(self, communicator):
        self.communicator = communicator

    def __getattr__(self, name):
        return getattr(self.communicator, name)

    def check(self):
        pass


def refusing_on_and_on(rank, num_ranks):
    """Rank 1 refuses call after call while the others wait for rank 0: none of its refusals may count as tokens."""
    buffer, x, idx = make_buffer(rank, timeout_s=15.0, num_experts=256)
    buffer.dispatch(x, idx)
    communicator = buffer.calls.backend._communicator
    buffer.calls.backend._communicator = Unchecked(communicator)
    time.sleep((2, 1, 0, 0)[rank])
    for _ in range(3 if rank == 1 else 1):
        buffer.dispatch(x, idx + (1000 if rank == 1 else 0), num_recv_rows=8 * num_ranks)
    error, message = (ValueError, r"topk_idx\[\d, \d\] is 1") if rank == 1 else (EPPeerError, "rank [01] did not make its call")
    deadline = time.time() + 20
    with pytest.raises(error, match=message):
        while time.time() < deadline:
            communicator.check()
    dist.barrier()


def test_refusals_of_later_calls():
    run_ranks(refusing_on_and_on, 4)


def refuses_once(rank, num_ranks):
    """Calls that wait for nothing learn of a refusal later. Who does makes the call all the same, so that it is nobody else's error."""
    buffer, x, idx = make_buffer(rank)
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


def test_errors_that_are_learned_later():
    run_ranks(refuses_once, 2)


WHY = r"topk_idx\[\d, \d\] is 4; it must be -1"
FAILED = "the dispatch of this handle has failed, so nothing goes along it"


def along_failed_dispatch(rank, num_ranks, call, how):
    """A dispatch without waits on the host gives a handle before it has failed. Nothing goes along it, and its counts are zeros: whether
    the call learns of the failure, somebody else has before, or nobody."""
    buffer, x, idx = make_buffer(rank, timeout_s=60)
    good = buffer.dispatch(x, idx)
    expected = buffer.combine(good.recv_x, good.handle)
    communicator = buffer.calls.backend._communicator
    learns = partial(pytest.raises, ValueError if rank == 1 else EPPeerError)
    for _ in range(2):
        out = buffer.dispatch(x, idx + 1 if rank == 1 else idx, num_recv_rows=64)
        torch.cuda.synchronize()
        dist.barrier()
        assert out.handle.has_failed and not good.handle.has_failed and out.num_recv_tokens_per_expert.tolist() == [0, 0]
        if how == "before":
            with learns(match=WHY):
                buffer.check()
        if how == "nobody":
            buffer.calls.backend._communicator = Unchecked(communicator)
        with learns(match=WHY) if how == "by the call" else nullcontext():
            if call == "combine":
                buffer.combine(torch.ones_like(out.recv_x), out.handle)
            else:
                buffer.dispatch(x, handle=out.handle)
        torch.cuda.synchronize()
        dist.barrier()
        buffer.calls.backend._communicator = communicator
        if how != "by the call":
            with pytest.raises(ValueError, match=FAILED) if how == "before" else learns(match=WHY):
                buffer.check()
        dist.barrier()
        assert_same("combined_x", buffer.combine(good.recv_x, good.handle), expected)
        torch.cuda.synchronize()
        buffer.check()
        dist.barrier()


@pytest.mark.parametrize("how", ("by the call", "before", "nobody"))
@pytest.mark.parametrize("call", ("combine", "dispatch"))
def test_along_failed_dispatch(call, how):
    run_ranks(along_failed_dispatch, 2, call, how)


def one_failed_handle(rank, num_ranks):
    """Rows that did not come to one rank have no places there: it makes no call along their handle, and says so."""
    buffer, x, idx = make_buffer(rank, timeout_s=60)
    out = buffer.dispatch(x, idx, num_recv_rows=64)
    torch.cuda.synchronize()
    buffer.check()
    if rank == 0:
        out.handle.recv_counts[0] |= -(2**31)  # as the kernel that waits for rows leaves it
    buffer.combine(out.recv_x, out.handle)
    torch.cuda.synchronize()
    dist.barrier()
    with pytest.raises(
        ValueError if rank == 0 else EPPeerError, match=FAILED if rank == 0 else f"rank 0 did not make its call: .*{FAILED}"
    ):
        buffer.check()
    dist.barrier()


def test_one_failed_handle():
    run_ranks(one_failed_handle, 2)


class SendsNothing(Unchecked):
    """A communicator that enters dispatches, and that is all."""

    def dispatch(self, *_):
        pass


def rows_that_do_not_come(rank, num_ranks):
    buffer, x, idx = make_buffer(rank, timeout_s=2)
    if rank == 1:
        buffer.calls.backend._communicator = SendsNothing(buffer.calls.backend._communicator)
    out = buffer.dispatch(x, idx, num_recv_rows=64)
    torch.cuda.synchronize()
    if rank == 0:
        with pytest.raises(EPTimeoutError, match="rank 1 did not deliver within the deadline of 2000 ms; phase 'targets and weights'"):
            buffer.check()
        assert out.handle.has_failed
    dist.barrier()


def test_handle_of_rows_that_do_not_come():
    run_ranks(rows_that_do_not_come, 2)


def runs_out_of_memory(rank, num_ranks):
    """Once rows are on their way, a rank that has no memory to receive them says so, and its own still arrive."""

    def fail(*_):
        raise torch.OutOfMemoryError("no room")

    buffer, x, idx = make_buffer(rank)
    sent, rows = x.clone(), None
    if rank == 0:
        allocate = buffer.calls.backend._receive_buffers
        buffer.calls.backend._receive_buffers = fail
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            buffer.dispatch(sent, idx)
        buffer.calls.backend._receive_buffers = allocate
        sent.fill_(-7)
    else:
        rows = buffer.dispatch(x, idx).recv_x
    out = buffer.dispatch(x, idx)
    if rows is not None:
        assert_same("recv_x", rows, out.recv_x)
    assert_same("combined_x", buffer.combine(out.recv_x, out.handle), x * (idx >= 0).sum(1, keepdim=True))


def test_out_of_memory_for_the_rows():
    run_ranks(runs_out_of_memory, 2)


def checks_between_halves(rank, num_ranks):
    """Once its failure is raised, the second half of a call has nothing to wait for."""
    buffer, x, idx = make_buffer(rank, timeout_s=30)
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
            assert time.monotonic() - began < 20
        dist.barrier()
        assert_same("combined_x", buffer.combine(out.recv_x, out.handle), expected)


def test_check_between_two_halves():
    run_ranks(checks_between_halves, 2)


def hook_after_destroy(rank, num_ranks):
    buffer, x, idx = make_buffer(rank)
    out = buffer.dispatch(x, idx)
    hook = buffer.combine(out.recv_x, out.handle, return_hook=True)[1]
    torch.cuda.synchronize()
    dist.barrier()
    buffer.destroy()
    with pytest.raises(BufferDestroyedError, match="destroyed before this call's hook"):
        hook()


def test_hook_after_destroy():
    run_ranks(hook_after_destroy, 2)


ROOM = 32768 * 8192 * 2  # bytes, less than the workspace of `large_buffer`; more than what else may happen on the device


def large_buffer():
    return Buffer(None, 32768, 8192, 4, 2, backend="nvlink", timeout_s=60)


def memory_used(device):
    """Bytes on the device, by all processes; of the emulated one what this process has allocated."""
    if not emulated_gpu.is_chosen():
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    maps = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if f"memfd:emulated-gpu-{os.getpid()}" in line)
    return sum(int(end, 16) - int(begin, 16) for begin, end in (fields[0].split("-") for fields in maps))


def memory_that_a_peer_may_write_to(rank, num_ranks):
    device = device_of("nvlink", rank)
    make_buffer(rank)[0].destroy()  # what the device needs besides
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
    dist.barrier()
    make_buffer(rank)[0].destroy()
    measure()
    assert used[1] - used[0] > ROOM
    assert used[1] - used[2] < ROOM / 2, "rank 0 has not left"
    assert used[3] - used[0] < ROOM / 2, "both have left, and another buffer was made since"


def test_memory_stays_until_all_have_left():
    run_ranks(memory_that_a_peer_may_write_to, 2)


def memory_beside_dead_peer(rank, num_ranks):
    device = device_of("nvlink", rank)
    used = memory_used(device)
    dist.barrier()
    buffer = large_buffer()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert memory_used(device) - used > ROOM
    buffer.destroy()
    deadline = time.monotonic() + 30  # the driver takes back what the other process had, some time after its end
    while memory_used(device) - used > ROOM / 2:
        assert time.monotonic() < deadline, "rank 1 is gone"
        time.sleep(0.1)


def test_memory_goes_beside_dead_peer():
    run_ranks(memory_beside_dead_peer, 2, expected_dead=[1])


def scales_of_whole_pieces(rank, num_ranks, bulk_copies):
    """Rows whose scales are as long as the instructions of sm_90 copy at once."""
    device = device_of("nvlink", rank)
    poison_outputs()
    xs, idxs = zip(*(Case([40, 23], hidden=1024, num_experts=8, num_topk=4).inputs(r)[:2] for r in range(num_ranks)), strict=True)
    buffer = Buffer(None, 40, 1024, 8, 4, backend="nvlink", timeout_s=60)
    buffer.calls.backend.tuning.uses_bulk_copies = bulk_copies
    out = buffer.dispatch(xs[rank].to(device), idxs[rank].to(device), fp8=True, expert_alignment=8)
    rows, scales = zip(*(reference.quantize_fp8(x) for x in xs), strict=True)
    expected = reference.dispatch(rows, idxs, None, 8, expert_alignment=8, x_scales=scales)[rank]
    assert_same("recv_x", out.recv_x, expected.recv_x)
    assert_same("recv_x_scales", out.recv_x_scales, expected.recv_x_scales)


@pytest.mark.parametrize("bulk_copies", (True, False))
def test_scales_of_whole_pieces(bulk_copies):
    run_ranks(scales_of_whole_pieces, 2, bulk_copies)


def under_another_default_device(rank, num_ranks):
    buffer, x, idx = make_buffer(rank)
    expected = buffer.dispatch(x, idx)
    with torch.device("meta"):
        out = buffer.dispatch(x, idx)
        bounded = buffer.dispatch(x, idx, num_recv_rows=len(out.recv_x))
    for other in (out, bounded):
        assert torch.equal(other.recv_x, expected.recv_x) and other.handle.call.device.type == "cpu"


def test_default_device():
    run_ranks(under_another_default_device, 2)


def leave(buffer, how):
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    buffer.destroy()


def without_peer(rank, num_ranks, how, call):
    """Rank 1 has left: the others notice it long before the deadline, in each call."""
    buffer, x, idx = make_buffer(rank, timeout_s=300.0, num_experts=6)
    out = buffer.dispatch(x, idx)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        return leave(buffer, how)
    error, message = (
        (EPTimeoutError, rf"rank {rank}: rank 1 did not deliver, its process \d+ is gone; phase 'entry into the call', expected 2, seen 1$")
        if how == "killed"
        else (EPPeerError, f"rank {rank}, waiting for entry into the call: rank 1 destroyed its buffer, or its process is ending")
    )
    began = time.monotonic()
    with pytest.raises(error, match=message) as info:
        if call == "dispatch":
            buffer.dispatch(x, idx)
        else:
            buffer.combine(out.recv_x, out.handle)
            torch.cuda.synchronize()
            buffer.check()
    assert info.value.rank == 1 and (x + 1).isfinite().all(), "the GPU stays usable"
    with pytest.raises(error, match="rank 1"):
        buffer.dispatch(x, idx)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("call", ("dispatch", "combine"))
@pytest.mark.parametrize("how", ("killed", "destroyed"))
def test_peer_that_is_gone(how, call):
    run_ranks(without_peer, 3, how, call, expected_dead=[1] if how == "killed" else [])


def last_call_of_peer(rank, num_ranks, how):
    """Rank 1 is gone, but not before it has made a call: rank 0 receives that."""
    buffer, x, idx = make_buffer(rank)
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


@pytest.mark.parametrize("how", ("killed", "destroyed"))
def test_last_call_of_peer_that_is_gone(how):
    run_ranks(last_call_of_peer, 2, how, expected_dead=[1] if how == "killed" else [])


def exceeded_bound(rank, num_ranks):
    buffer, x, idx = make_buffer(rank)
    with pytest.raises(EPCapacityError, match="rank 0 would receive 7 rows, more than its num_recv_rows of 3"):
        buffer.dispatch(x, idx, num_recv_rows=3)  # the host waits for nothing, so it learns it later
        torch.cuda.synchronize()
        buffer.check()
    buffer.check()
    buffer.dispatch(x, idx)


def non_finite_gate(rank, num_ranks):
    buffer, x, idx = make_buffer(rank)
    logits = torch.zeros(len(x), 4, device=x.device)
    logits[2, 3] = float("nan")
    assert ops.gate(logits, 2).topk_idx[2].tolist() == [-1, -1]
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="logits must be finite, got nan for token 2, expert 3 in an earlier call of the gate on the GPU"):
        buffer.check()
    buffer.check()
    buffer.dispatch(x, idx)


def test_check_looks_at_the_gate_too():
    run_ranks(non_finite_gate, 1)


def test_exceeded_bound():
    run_ranks(exceeded_bound, 1)
