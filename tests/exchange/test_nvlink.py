"""Ways in which the nvlink backend sends, against the reference, bit for bit; CUDA graphs."""

import contextlib
import itertools
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from error_cases import on_gpus
from exchange_cases import (
    Case,
    assert_all_same,
    assert_fields_same,
    assert_same,
    check_cases,
    check_each,
    device_of,
    finish,
    in_environment,
    inputs_of,
    look,
    opened,
    poison_outputs,
)
from on_ranks import on_ranks

from deepep_moe import _C, Buffer, reference
from deepep_moe.errors import EPCapacityError
from deepep_moe.testing import run_ranks

pytestmark = pytest.mark.gpu


LAYOUTS = ("expert", "rank")


@pytest.mark.parametrize("mode", ("now", "async", "hook"))
@pytest.mark.parametrize("num_sms", (0, 1, 7, None))
def test_ways_to_send(num_sms, mode):
    """SMs or copy engines, at once or in halves; few SMs, of which senders leave some to receivers. The results are the same."""
    most = (None,) if num_sms is not None else (None, 2, 9, 100000)
    how = {"dtype": torch.bfloat16, "num_sms": num_sms, "mode": mode, "with_bias": True, "backends": ("nvlink",)}
    check_cases([Case([140, 37, 90], layout=layout, max_sms=max_sms, **how) for max_sms, layout in itertools.product(most, LAYOUTS)])


def test_few_blocks_of_a_plan():
    """A share of a GPU holds few blocks at once: each counts more of the tokens."""
    case = Case([3200, 7, 0], hidden=16, dtype=torch.bfloat16, expert_alignment=4, with_bias=True, backends=("nvlink",))
    a_block_each = {"DEEPEP_MOE_EMULATED_BLOCKS": "1"}  # of 12 SMs
    run_ranks(in_environment, case.num_ranks, a_block_each, check_each, [case])


@on_ranks(2, layout=LAYOUTS, mode=("now", "async"))
def test_guessed_rows(rank, num_ranks, layout, mode):
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
        assert_fields_same(out, expected, "recv_x", "recv_topk_weights", "recv_topk_idx")
        assert out.recv_x.untyped_storage().nbytes() == max(room, rows[-1]) * 16 * 4
        y = buffer.combine(out.recv_x, out.handle)
        assert_same("combined_x", y, reference.combine([r.recv_x for r in received], received, [num_tokens] * num_ranks, None, None)[rank])


@on_ranks(2)
def test_rows_of_each_layer_are_guessed_apart(rank):
    """Two alternating layers receive different numbers of rows. If they were one layer, nothing could be guessed."""
    device = device_of("nvlink", rank)
    buffer = Buffer(None, 80, 16, 4, 2, backend="nvlink", timeout_s=60)

    def rows_of_allocations(layers):
        for num_tokens, layer in layers:
            idx = torch.stack((torch.arange(num_tokens) % 4, (torch.arange(num_tokens) + 1) % 4), 1).to(device)
            out = buffer.dispatch(torch.ones(num_tokens, 16, device=device), idx, layer=layer)
            assert len(out.recv_x) == 2 * num_tokens
            yield out.recv_x.untyped_storage().nbytes() // (16 * 4)

    assert list(rows_of_allocations([(40, 5), (80, 6)] * 3)) == [80, 160, 80, 160, 85, 170]
    assert list(rows_of_allocations([(40, 0), (80, 0)] * 3)) == [80, 160] * 3


def test_guesses_of_many_layers_are_forgotten():
    device = device_of("nvlink", 0)
    buffer = Buffer(None, 64, 16, 4, 1, backend="nvlink", timeout_s=60)
    x, idx = torch.ones(64, 16, device=device), torch.zeros(64, 1, dtype=torch.int32, device=device)

    def room(layer):
        return buffer.dispatch(x, idx, layer=layer).recv_x.untyped_storage().nbytes() // (16 * 4)

    assert [room(0) for _ in range(3)] == [64, 64, 68]
    for layer in range(1, 4096):
        buffer.dispatch(x[:0], idx[:0], layer=layer)
    assert room(0) == 68
    buffer.dispatch(x[:0], idx[:0], layer=4096)
    assert [room(0) for _ in range(3)] == [64, 64, 68]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_loads_and_stores(dtype):
    """The path of GPUs before sm_90, on any GPU."""
    how = {"dtype": dtype, "expert_alignment": 8, "bulk_copies": False, "with_bias": True, "backends": ("nvlink",)}
    check_cases([Case([140, 0, 77], layout=layout, **how) for layout in LAYOUTS])


def test_workspace_is_bounded():
    """The memory is at most twice the rows that a rank may receive, of the largest size."""
    for hidden, num_ranks in itertools.product((1024, 7168), range(1, 9)):
        sizes = {"num_experts": 32 * num_ranks, "num_topk": 8, "hidden": hidden, "num_max_tokens": 4096}
        assert _C.gpu_workspace_bytes(num_ranks=num_ranks, **sizes) <= 2 * num_ranks * 4096 * 4 * hidden


@on_ranks(2)
def test_scales_of_whole_pieces(rank):
    """Rows whose scales are as long as the instructions of sm_90 copy at once."""
    case = Case([40, 23], hidden=1024, num_experts=8, num_topk=4)
    buffer, x, idx, _ = opened(case, "nvlink", rank)
    xs, idxs, _ = inputs_of(case)
    rows, scales = zip(*(reference.quantize_fp8(x) for x in xs), strict=True)
    expected = reference.dispatch(rows, idxs, None, 8, expert_alignment=8, x_scales=scales)[rank]
    for bulk_copies in (True, False):
        buffer.calls.backend.tuning.uses_bulk_copies = bulk_copies
        out = buffer.dispatch(x, idx, fp8=True, expert_alignment=8)
        assert_same(f"recv_x, bulk_copies={bulk_copies}", out.recv_x, expected.recv_x)
        assert_same(f"recv_x_scales, bulk_copies={bulk_copies}", out.recv_x_scales, expected.recv_x_scales)


# ---- the host's way: the files of the package that a call passes, and what it asks of C++ ----


MODES = {"now": {}, "async": {"async_op": True}, "hook": {"return_hook": True}}


class Counted:
    """A native object that notes what is asked of it."""

    def __init__(self, native, asked):
        self.__dict__.update(native=native, asked=asked)

    def __getattr__(self, name):
        self.asked.append(name)
        return getattr(self.native, name)


def passed(natives, call):
    """Return the result of `call`, the files of the package that it passes, and what it asks of C++. natives: owners, and their names for
    it."""
    files, asked, root = set(), [], str(Path(sys.modules["deepep_moe"].__file__).parent)

    def look(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            files.add(Path(frame.f_code.co_filename).name)

    with contextlib.ExitStack() as undo:
        for native in natives:
            undo.enter_context(mock.patch.object(*native, Counted(getattr(*native), asked)))
        undo.callback(sys.setprofile, None)
        sys.setprofile(look)
        output = call()
        sys.setprofile(None)
    return output, files, asked


KINDS = {"rows": {}, "gradients": {}, "bounded": {}, "fp8": {}, "lanes": {"sums": "lanes"}, "nodes": {"ranks_per_node": 1}}


@on_ranks(2, how=MODES, kind=KINDS)
def test_files_that_a_call_passes(rank, how, kind):
    buffer, x, idx = on_gpus(rank, backend="nvshmem" if kind == "nodes" else "nvlink", **KINDS[kind])
    natives, options = [(buffer.calls, "native"), (buffer.calls.backend, "_native")], MODES[how]
    rows = {"x": x.requires_grad_(kind not in ("rows", "fp8"))}
    if kind == "fp8":
        rows = {"x": x.to(torch.float8_e4m3fn), "x_scales": torch.ones(len(x), 1, device=x.device)}
    bound = {"num_recv_rows": 8} if kind == "bounded" else {}

    for _ in range(2):  # the first one warms up
        out, *of_dispatch = passed(natives, lambda: buffer.dispatch(**rows, topk_idx=idx, **bound, **options))
        finish(out.hook or out.event)
        along, *of_along = passed(natives, lambda: buffer.dispatch(**rows, handle=out.handle, **options))  # noqa: B023
        finish(along.hook or along.event)
        y = out.recv_x.float() if kind == "fp8" else out.recv_x
        combined, *of_combine = passed(natives, lambda: buffer.combine(y, out.handle, **options))  # noqa: B023
        finish(None if how == "now" else combined[1])
        combined_x = combined if how == "now" else combined[0]
        if combined_x.requires_grad:
            _, *of_backward = passed(natives, lambda: combined_x.backward(combined_x))  # noqa: B023
            assert of_backward == [set(), []]
    for files, asked in (of_dispatch, of_along, of_combine):
        assert len(files) <= 5 and len(asked) == 1, (files, asked)


@on_ranks(2)
def test_a_gradient_finishes_a_call_in_two_halves(rank):
    buffer, x, idx = on_gpus(rank)
    out = buffer.dispatch(x.requires_grad_(), idx)
    later = buffer.dispatch(x.detach(), idx, return_hook=True)
    (grad,) = torch.autograd.grad(out.recv_x.sum(), x)
    assert_same("recv_x", later.recv_x, out.recv_x.detach())
    assert_same("grad", grad, (idx >= 0).sum(1, keepdim=True).expand_as(x).to(x.dtype))
    later.hook()


@on_ranks(2)
def test_inference_mode(rank):
    """PyTorch counts no changes there, but those of a handle."""
    buffer, x, idx = on_gpus(rank)
    with torch.inference_mode():
        out = buffer.dispatch(x, idx)
        assert torch.equal(out.handle.topk_idx, idx.int())
        assert_same("combined_x", buffer.combine(out.recv_x, out.handle), x * (idx >= 0).sum(1, keepdim=True))
        out.num_recv_tokens_per_expert.zero_()
        with pytest.raises(ValueError, match="a tensor of this handle was changed in place"):
            buffer.combine(out.recv_x, out.handle)


@on_ranks(2, waits=("here", "on another stream", "never"))
def test_memory_of_an_asynchronous_call_on_this_and_on_other_stream(rank, waits):
    """The call is behind a busy stream, and its rows are dropped at once. What has their memory next comes after the call: at once on the
    stream that waits for it, elsewhere once the GPU is through."""
    buffer, x, idx = on_gpus(rank)
    out = buffer.dispatch(x, idx)
    buffer.combine(out.recv_x, out.handle, async_op=True)[1].wait()
    torch.full_like(out.recv_x, 7)  # as the call above: to load a kernel later, the host may wait until the GPU is idle
    rows = out.recv_x.clone()
    address, other = rows.data_ptr(), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    combined, event = buffer.combine(rows, out.handle, async_op=True)
    if waits != "never":
        with torch.cuda.stream(other if waits == "on another stream" else torch.cuda.current_stream()):
            event.wait()
    del rows, event
    others = [torch.full_like(out.recv_x, 7) for _ in range(256)]
    assert (address in [other.data_ptr() for other in others]) == (waits == "here")
    assert not torch.cuda.current_stream().query(), "the stream is idle already"
    torch.cuda.synchronize()
    assert_same("combined_x", combined, x * (idx >= 0).sum(1, keepdim=True))


@on_ranks(2, layout=LAYOUTS)
def test_asynchronous_calls_follow_this_and_run_on_other_stream(rank, layout):
    """This stream is busy before it writes the arguments, and frees memory that the outputs may get. Events are used again meanwhile."""
    buffer, x, idx = on_gpus(rank)
    plain = buffer.dispatch(x, idx, layout=layout)
    for value in range(1, 4):
        torch.cuda._sleep(100_000_000)
        rows, freed = torch.full_like(x, value), torch.full_like(plain.recv_x, -1)
        del freed
        bounded = buffer.dispatch(rows, idx, layout=layout, num_recv_rows=plain.handle.num_rows, async_op=True)
        bounded.event.wait()
        along = buffer.dispatch(bounded.recv_x[: len(x)] + 1, handle=plain.handle, async_op=True)
        along.event.wait()
        for out, want in ((bounded, value), (along, value + 1)):
            assert_same("recv_x", out.recv_x, torch.full_like(out.recv_x, want))
        assert along.event.query() and bounded.event.query()


# ---- calls in CUDA graphs ----


@on_ranks(2, layout=("expert", "rank"))
def test_cuda_graph(rank, num_ranks, layout):
    device = device_of("nvlink", rank)
    buffer = Buffer(None, 64, 128, 8, 2, backend="nvlink", timeout_s=60)
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
        assert_all_same("a replay", results, step())
    torch.cuda.synchronize()


@on_ranks(2)
def test_cuda_graph_without_room(rank):
    """A replay in which rank 1 has too little room: nobody looks before `check`, which raises on all ranks. Later replays are right."""
    buffer, x, idx = on_gpus(rank)  # of whose routing rank 1 receives 8 rows

    def step():
        out = buffer.dispatch(x, idx, num_recv_rows=(64, 8)[rank])
        return buffer.combine(out.recv_x, out.handle)

    stream, graph, fitting = torch.cuda.Stream(), torch.cuda.CUDAGraph(), idx.clone()
    with torch.cuda.stream(stream):
        expected = step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        combined_x = step()
    for num_replays in (1, 2, 8):
        idx.copy_(fitting)
        idx[3, 1] = 3 if rank == 0 else -1  # one row more for rank 1
        for _ in range(num_replays):  # a rank that has failed may overtake its peer
            graph.replay()
        torch.cuda.synchronize()
        with pytest.raises(EPCapacityError, match="rank 1 would receive 9 rows, more than its num_recv_rows of 8") as info:
            buffer.check()
        assert info.value.rank == 1
        idx.copy_(fitting)
        graph.replay()
        look(buffer)
        assert_same("combined_x", combined_x, expected)


@on_ranks(2)
def test_what_waits_is_no_part_of_a_cuda_graph(rank):
    buffer, x, idx = on_gpus(rank)
    rows = buffer.dispatch(x, idx).recv_x
    torch.cuda.synchronize()
    refused = partial(pytest.raises, ValueError)
    with refused(match="waits for its counts cannot be captured in a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        buffer.dispatch(x, idx)
    out = buffer.dispatch(x, idx)
    assert_same("recv_x", out.recv_x, rows)
    with refused(match="num_sms=0 cannot be captured in a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        buffer.combine(rows, out.handle, num_sms=0)
    assert_same("combined_x", buffer.combine(rows, out.handle, num_sms=0), buffer.combine(rows, out.handle))


@on_ranks(1)
def test_cuda_graph_between_calls(rank):
    """A call follows the buffer's last one on another stream, also when a graph was captured on a third in between."""
    buffer, x, idx = on_gpus(rank)
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


@on_ranks(2)
def test_cuda_graph_given_up_on_one_rank(rank):
    """Calls that are captured on one rank only are not counted: calls made later find their handles again."""
    buffer, x, idx = on_gpus(rank)
    out = buffer.dispatch(x, idx, num_recv_rows=64)
    expected = buffer.combine(out.recv_x, out.handle)
    torch.cuda.synchronize()
    gives_up = pytest.raises(RuntimeError, match="no more") if rank == 0 else contextlib.nullcontext()
    with gives_up, torch.cuda.graph(torch.cuda.CUDAGraph()):
        out = buffer.dispatch(x, idx, num_recv_rows=64)
        if rank == 0:
            raise RuntimeError("no more")
        buffer.combine(out.recv_x, out.handle)
    for _ in range(2):
        out = buffer.dispatch(x, idx)
        assert_same("combined_x", buffer.combine(out.recv_x, out.handle), expected)
