"""Low-latency dispatch and combine against the reference, bit for bit."""

import itertools
import random
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from exchange_cases import NETWORK, assert_same, default_dtype, device_of, in_environment, on_device
from fault_cases import under
from low_latency_cases import (
    ALL_BACKENDS,
    BACKENDS,
    BLOCK,
    Case,
    Expected,
    check_cases,
    check_dispatch,
    combine_rows,
    make_buffer,
    run_case,
    start_combine,
    start_dispatch,
    unpack_scales,
)
from on_ranks import on_ranks

from deepep_moe import Buffer, LowLatencyBuffer, ops, reference
from deepep_moe.testing import run_ranks

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SUMS = ("lanes", "lanes_fma")  # beside those by ranks


OF_THREE_OR_TWO_NODES = pytest.mark.parametrize(
    ("backend", "num_ranks"), [("shm", 3), *(pytest.param(*size, marks=pytest.mark.gpu) for size in (("nvlink", 3), ("nvshmem", 4)))]
)


# ---- small enough to check by hand ----


@on_ranks(2, backend=ALL_BACKENDS)
def test_by_hand(rank, backend):
    """Rank 0 holds experts 0 and 1, rank 1 holds 2 and 3. Row r of expert e is received as value x, and goes back as 10 * x.
    With nvshmem they are two nodes."""
    device_of(backend, rank)
    buffer = LowLatencyBuffer(None, 2, 8, 4, 2, backend=backend, timeout_s=60, ranks_per_node=1 if backend == "nvshmem" else None)
    x = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])[rank].expand(2, 8).contiguous()
    idx = torch.tensor([[[0, 2], [3, -1]], [[2, 3], [0, 1]]])[rank]
    weights = torch.tensor([[[0.5, 0.25], [2.0, 9.0]], [[1.0, 1.0], [3.0, 0.0]]])[rank]
    x, idx, weights = on_device(backend, rank, x, idx, weights)
    wanted = [[[7.5] * 8, [40.0] * 8], [[60.0] * 8, [120.0] * 8]][rank]
    out = buffer.dispatch(x, idx, weights)
    counts = out.num_recv_tokens_per_expert.tolist()
    assert counts == [[2, 1], [2, 2]][rank]
    rows = [out.recv_x[expert, :count, 0].tolist() for expert, count in enumerate(counts)]
    assert rows == [[[1.0, 4.0], [4.0]], [[1.0, 3.0], [2.0, 3.0]]][rank]
    assert buffer.combine(out.recv_x * 10, out.handle).tolist() == wanted
    y = buffer.combine(out.recv_x, buffer.dispatch(x, idx).handle)  # a plain sum
    assert y[:, 0].tolist() == [[2.0, 2.0], [6.0, 8.0]][rank]
    for some in (None, torch.full_like(weights, 7)):  # weights of the dispatch do not count beside those of the combine
        out = buffer.dispatch(x, idx, some)
        into = torch.full_like(x, torch.nan)
        assert buffer.combine(out.recv_x * 10, out.handle, topk_weights=weights, out=into) is into
        assert into.tolist() == wanted
        y = buffer.combine(out.recv_x, out.handle, topk_weights=2 * weights)  # along the same handle
        assert y[:, 0].tolist() == [[1.5, 8.0], [12.0, 24.0]][rank]
    assert buffer.combine(out.recv_x, out.handle)[:, 0].tolist() == [[14.0, 14.0], [42.0, 56.0]][rank]


@on_ranks(2, backend=BACKENDS)
def test_sums_by_lanes_by_hand(rank, backend):
    """256 + 1 is 256 in bf16, so what is rounded between lanes loses both ones of 256 + 1 + 1 = 258."""
    device_of(backend, rank)
    buffer = LowLatencyBuffer(None, 2, 8, 4, 3, backend=backend, sums="lanes")
    x, idx = on_device(backend, rank, torch.ones(2, 8, dtype=torch.bfloat16), torch.tensor([[3, 0, 1], [2, -1, 0]]))
    weights = torch.tensor([[256.0, 1.0, 1.0], [2.0, torch.nan, 3.0]], device=x.device)
    out = buffer.dispatch(x, idx, weights)
    assert out.num_recv_tokens_per_expert.tolist() == [[4, 2], [2, 2]][rank]
    assert buffer.combine(out.recv_x, out.handle)[:, 0].tolist() == [258.0, 5.0]
    out = buffer.dispatch(x, idx)
    assert buffer.combine(out.recv_x, out.handle)[:, 0].tolist() == [3.0, 2.0]
    into = torch.full_like(x, torch.nan)
    assert buffer.combine(out.recv_x, out.handle, topk_weights=weights, out=into) is into
    assert into[:, 0].tolist() == [258.0, 5.0]


@pytest.mark.gpu
@on_ranks(2, with_hook=(False, True))
def test_combine_on_other_stream(rank, with_hook):
    """The stream of a combine is busy, and its handle is dropped at once. The memory is not used again before the combine has read it."""
    device = device_of("nvlink", rank)
    buffer = LowLatencyBuffer(None, 64, 1024, 4, 2, backend="nvlink", timeout_s=60)
    x = torch.randn(64, 1024, device=device)
    idx = torch.tensor([0, 2], device=device).repeat(64, 1)
    out = buffer.dispatch(x, idx)
    recv_x, handle, num_bytes, address = out.recv_x, out.handle, out.handle.state.numel(), out.handle.state.data_ptr()
    del out
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(500_000_000)
        combined = buffer.combine(recv_x, handle, return_hook=with_hook)
        if with_hook:
            combined[1]()
            combined = combined[0]
    del handle
    others = [torch.full((num_bytes,), 0x7F, dtype=torch.uint8, device=device) for _ in range(4)]
    assert all(tensor.data_ptr() != address for tensor in others)
    torch.cuda.synchronize()
    assert_same("combined_x", combined, 2 * x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_ranks", (1, 2, 3, 4, 8))
def test_equals_reference(num_ranks, backend):
    tokens = [24, 0, 7, 13, 1, 24, 3, 9][:num_ranks]
    cases = [
        Case(tokens, dtype=dtype, with_weights=with_weights, index_dtype=index_dtype, hidden=hidden, seed=num_ranks)
        for (dtype, hidden) in zip(DTYPES, (72, 136, 4), strict=True)
        for with_weights, index_dtype in ((True, torch.int64), (False, torch.int32))
    ]
    settings = ((torch.bfloat16, None, 72, "now"), (torch.float16, "fp8", 256, "async"), (torch.float32, None, 4, "hook"))
    cases += [
        Case(tokens, dtype=dtype, wire=wire, hidden=hidden, mode=mode, seed=num_ranks, combine_weights=True)
        for dtype, wire, hidden, mode in settings
    ]
    of_lanes = [Case(tokens, dtype=dtype, num_topk=5, sums=sums) for dtype, sums in itertools.product(DTYPES, SUMS)]
    changes = (
        {"with_weights": False}, {"combine_weights": True, "mode": "hook"}, {"num_topk": 1, "mode": "async"}, {"fp8": True, "hidden": 640},
        {"fp8": True, "hidden": 640, "scale_format": "ue8m0", "mode": "hook"},
    )  # fmt: skip
    run_ranks(check_cases, num_ranks, backend, cases + of_lanes + [replace(of_lanes[0], **each) for each in changes])


@OF_THREE_OR_TWO_NODES
def test_extreme_routings(backend, num_ranks):
    """Ranks without tokens, tokens without experts, heads of one to three lines, rows that a block of a GPU takes in several goes, room for
    many more tokens than come."""

    def case_of(*num_tokens, **settings):
        return Case(list(num_tokens[:num_ranks]), ranks_per_node=None if num_ranks == 3 else 2, **settings)

    routings = [
        case_of(24, 5, 24, 1, num_topk=32, num_experts=48, masked=0.0, hidden=8),
        case_of(24, 24, 24, 24, num_topk=1, num_experts=num_ranks, masked=0.0, hidden=8),
        case_of(6, 7, 8, 9, masked=1.0),
        case_of(0, 0, 0, 0),
        case_of(0, 24, 0, 0),
    ]
    of_dispatch = [
        *(case_of(1, 0, 1, 1, max_tokens=1, num_experts=experts, num_topk=20, hidden=2048) for experts in (300, 1020)),
        case_of(3, 5, 0, 2, hidden=16384),
        case_of(3, 5, 0, 2, hidden=16384, fp8=True),
        case_of(3, 5, 0, 2, hidden=16384, wire="fp8"),
        *(case_of(3, 5, 0, 2, hidden=16384, dtype=dtype, fp8=True, scale_format="ue8m0", wire="fp8") for dtype in DTYPES),
        case_of(2, 0, 0, 0, max_tokens=300, hidden=8),
        case_of(1, 290, 0, 0, max_tokens=300, hidden=128, fp8=True),
    ]
    of_combine = [
        case_of(9, 24, 3, 1, num_topk=16, num_experts=48, hidden=8),
        case_of(3, 5, 0, 2, hidden=16384),
        case_of(1, 0, 290, 0, max_tokens=300, num_experts=300, num_topk=20, hidden=128),
    ]
    cases = routings + of_dispatch + [replace(case, combine_weights=True) for case in routings + of_combine]
    run_ranks(in_environment, num_ranks, {NETWORK: "depth=2048"}, check_cases, backend, cases)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hidden", (128, 640))
def test_fp8(hidden, backend):
    """Rows quantized on the way; sums quantized on the way back. 640: the last word of packed scales is not full."""
    cases = [
        Case([24, 3, 11], hidden=hidden, dtype=dtype, fp8=True, scale_format=scale_format, wire=wire, seed=hidden)
        for dtype in DTYPES
        for scale_format, wire in (("fp32", "fp8"), ("ue8m0", None))
    ]
    cases.append(Case([5, 6, 7], hidden=hidden, wire="fp8", with_weights=False))
    run_ranks(check_cases, 3, backend, cases)


def random_case(seed, num_ranks, per_node):
    draw = random.Random(seed)
    fp8, sums, max_tokens = draw.random() < 0.5, draw.choice(("ranks", "ranks", "lanes", "lanes_fma")), draw.randint(1, 40)
    num_experts = num_ranks * draw.randint(1, 12)
    return Case(
        [draw.randint(0, max_tokens) for _ in range(num_ranks)], max_tokens=max_tokens, num_experts=num_experts, sums=sums, seed=seed,
        fp8=fp8, hidden=128 * draw.randint(1, 5) if fp8 else 8 * draw.randint(1, 40), num_topk=draw.randint(1, min(num_experts, 32)),
        dtype=draw.choice(DTYPES), index_dtype=draw.choice((torch.int32, torch.int64)), masked=draw.choice((0.0, 0.3, 0.9)),
        with_weights=draw.random() < 0.5, combine_weights=draw.random() < 0.5, mode=draw.choice(("now", "async", "hook")),
        scale_format=draw.choice(("fp32", "ue8m0")) if fp8 else "fp32", ranks_per_node=per_node,
        wire=draw.choice((None, "fp8")) if fp8 and sums == "ranks" else None,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_random_sizes(backend):
    splits = ((2, 1), (4, 2), (4, 1), (6, 2)) if backend == "nvshmem" else ((1, None), (2, None), (4, None))
    for number, (num_ranks, per_node) in enumerate(splits):
        cases = [random_case(8 * number + seed, num_ranks, per_node) for seed in range(8)]
        network = {NETWORK: "depth=2048"}  # a busy network has the puts of several calls at once
        run_ranks(in_environment, num_ranks, network, check_cases, backend, cases)


@on_ranks(2, backend=BACKENDS)
def test_default_dtype(rank, backend):
    """Sums are fp32, whatever PyTorch's default dtype is."""
    for case in (Case([24, 6]), Case([24, 6], fp8=True, scale_format="ue8m0", wire="fp8", combine_weights=True)):
        expected, buffer = Expected(case), make_buffer(case, backend, rank)
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            run_case(under(partial(default_dtype, dtype), buffer), case, rank, backend, expected)


@on_ranks(1, backend=BACKENDS)
def test_rows_that_are_hard_to_quantize(rank, backend):
    """Powers of two times 448, ties, zeros, tiny and large rows; equal to `ops.quantize_fp8` and to its definition."""
    case = Case([8], max_tokens=8, hidden=BLOCK, dtype=torch.float32, num_experts=1, num_topk=1)
    x = torch.randn(8, BLOCK, generator=torch.Generator().manual_seed(1))
    x[0] = 0
    x[1, 0], x[2, 0], x[3, 0] = 448 * 2.0**5, 448 * 2.0**-5, 449
    x[4] *= 1e-7
    x[5] *= 1e30
    x[6] = torch.arange(BLOCK) / 16 * 2.0**-6  # subnormals and ties
    x[6, 0] = 448
    x[7, 3] = -1e5
    (x, idx) = on_device(backend, rank, x, torch.zeros(8, 1, dtype=torch.int64))
    buffer = make_buffer(case, backend, rank)
    out = buffer.dispatch(x, idx, fp8=True)
    y, scales = ops.quantize_fp8(x)
    assert_same("y", out.recv_x[0], y)
    assert_same("scales", out.recv_x_scales[0], scales)
    rounded = buffer.dispatch(x, idx, fp8=True, scale_format="ue8m0")
    y, scales = reference.low_latency.round_scales(x.cpu())
    assert_same("y", rounded.recv_x[0], y)
    assert_same("exponents", rounded.recv_x_scales[0], scales.view(torch.int32) >> 23)


@on_ranks(1, backend=BACKENDS)
def test_what_is_not_finite_stays_in_its_block(rank, backend):
    """Three rows of four blocks, the second with a value that is not finite: its block is not, and the others are as without it. All
    equal the reference."""
    case = Case([3], max_tokens=3, hidden=4 * BLOCK, dtype=torch.bfloat16, num_experts=1, num_topk=1)
    buffer = make_buffer(case, backend, rank)
    good = torch.randn(3, 4 * BLOCK, generator=torch.Generator().manual_seed(1)).bfloat16()
    for bad, scale_format in itertools.product((torch.nan, torch.inf, -torch.inf), ("fp32", "ue8m0")):
        x = good.clone()
        x[1, BLOCK + 5] = bad
        rows = []
        for sent in (x, good):
            (sent, idx) = on_device(backend, rank, sent, torch.zeros(3, 1, dtype=torch.int64))
            out = buffer.dispatch(sent, idx, fp8=True, scale_format=scale_format)
            scales = unpack_scales(out.recv_x_scales[0].cpu(), scale_format, 4)
            rows.append((out.recv_x[0].cpu().float().view(3, 4, BLOCK), scales))
        quantize = reference.quantize_fp8 if scale_format == "fp32" else reference.low_latency.round_scales
        for name, ours, theirs in zip(("y", "scales"), rows[0], quantize(x), strict=True):
            ours, theirs = (values.nan_to_num(nan=-3e38) for values in (ours, theirs.float().view(ours.shape)))  # NaN of any sign
            assert_same(f"{name} with {bad} in {scale_format}", ours, theirs)
        others = torch.ones(3, 4, dtype=torch.bool)
        others[1, 1] = False
        for name, ours, theirs in zip(("y", "scales"), *rows, strict=True):
            assert_same(f"{name} of other blocks", ours[others], theirs[others])
        y, scales = rows[0]
        assert not scales[1, 1].isfinite(), f"{bad} has the scale {scales[1, 1]} in {scale_format}"
        assert not (y[1, 1, 5] * scales[1, 1]).isfinite()


@on_ranks(2, backend=BACKENDS)
def test_error_of_the_fp8_wire(rank, num_ranks, backend):
    """The documented bound of the fp8 wire, for one contribution to a token."""
    case = Case([24] * num_ranks, num_topk=1, num_experts=num_ranks, masked=0.0, hidden=512, dtype=torch.float32, with_weights=False)
    buffer = make_buffer(case, backend, rank)
    out, _ = start_dispatch(buffer, case, rank, backend)
    exact, wire = buffer.combine(out.recv_x, out.handle), buffer.combine(out.recv_x, out.handle, wire="fp8")
    largest = exact.unflatten(1, (-1, BLOCK)).abs().amax(2, keepdim=True).clamp(min=1e-4).expand(-1, -1, BLOCK).flatten(1)
    bound = torch.maximum(exact.abs() / 16, largest * 2**-10 / 448 * (1 + 1e-6))
    assert ((wire - exact).abs() <= bound).all() and (wire != exact).any()


@on_ranks((1, 2, 4, 8), backend=BACKENDS, sums=SUMS)
def test_bits_of_other_buffers(rank, num_ranks, backend, sums):
    """Training on all ranks with `Buffer`, and rollout on one or on all with `LowLatencyBuffer`, return the same bits."""
    alone = [dist.new_group([r]) for r in range(num_ranks)][rank]
    case = Case([24], num_topk=5)
    x, idx, weights = (tensor.tensor_split(num_ranks)[rank].contiguous() for tensor in case.inputs(0))
    x, idx, weights = on_device(backend, rank, x, idx, weights)
    sizes = 24, case.hidden, case.num_experts, case.num_topk
    buffer = Buffer(None, *sizes, backend=backend, sums=sums)
    out = buffer.dispatch(x, idx, weights)
    trained = buffer.combine(out.recv_x, out.handle, out.recv_topk_weights)
    for group in (alone, None):
        buffer = LowLatencyBuffer(group, *sizes, backend=backend, sums=sums)
        received = buffer.dispatch(x, idx, weights)
        assert_same("combined_x", buffer.combine(received.recv_x, received.handle), trained)


# ---- ways to call ----


def two_in_flight(rank, backend, buffer, cases):
    """Calls of either kind, received in either order, which is not the same one on all ranks. A third one has to wait."""
    expected = [Expected(case) for case in cases]
    refuses = partial(pytest.raises, ValueError, match="the call before last was not received yet; call its hook")
    for begin in (0, 1, rank % 2):
        started = [start_dispatch(buffer, case, rank, backend) for case in cases]
        with refuses():
            start_dispatch(buffer, cases[0], rank, backend)
        order = (begin, 1 - begin)
        for index in order:
            out, hook = started[index]
            hook()
            check_dispatch(cases[index], rank, out, expected[index])
            if index == 1 and begin == 1:
                with refuses():
                    buffer.combine(out.recv_x, out.handle)
        rows = [combine_rows(cases[index], rank, started[index][0], expected[index]) for index in range(2)]
        time.sleep(0.05 * rank)
        back = [start_combine(buffer, cases[index], rows[index], started[index][0].handle) for index in range(2)]
        for index in order:
            back[index][1]()
            assert_same("combined_x", back[index][0], expected[index].combined[rank])


OVER_NODES = [pytest.param("nvshmem", *split, marks=pytest.mark.gpu) for split in ((4, 2), (8, 4))]


@pytest.mark.parametrize(
    "backend, num_ranks, per_node", [("shm", 3, None), pytest.param("nvlink", 3, None, marks=pytest.mark.gpu), *OVER_NODES]
)
@on_ranks(())
def test_two_calls_in_flight(rank, num_ranks, backend, per_node):
    tokens = [9, 24, 0, 17, 1, 21, 5, 12][:num_ranks]
    cases = [Case(tokens, num_topk=5, mode="hook", seed=seed, combine_weights=seed == 1, ranks_per_node=per_node) for seed in range(3)]
    buffer = make_buffer(cases[0], backend, rank)
    for pair in (cases[:2], cases[::2]):
        two_in_flight(rank, backend, buffer, pair)


@OF_THREE_OR_TWO_NODES
@on_ranks(())
def test_many_calls(rank, num_ranks, backend):
    """Ranks that are late in turn, through all turns several times, in all modes. Those of nvshmem are of two nodes."""
    draw = random.Random(rank)
    cases = [
        Case([draw_tokens % 25 for draw_tokens in (seed * 7, seed * 5 + 3, seed * 3 + 8, seed * 6 + 2)][:num_ranks], fp8=seed % 3 == 0,
             wire=(None, "fp8")[seed % 2], mode=("now", "hook", "async")[seed % 3], seed=seed, num_topk=4, combine_weights=seed % 4 > 1,
             ranks_per_node=2 if backend == "nvshmem" else None)
        for seed in range(12)
    ]  # fmt: skip
    buffer = make_buffer(cases[0], backend, rank)
    for case in cases:
        time.sleep(draw.choice((0, 0, 0.02)))
        run_case(buffer, case, rank, backend)


@on_ranks(2, backend=BACKENDS)
def test_out_and_combine_input_and_one_handle(rank, backend):
    case = Case([24, 6])
    expected = Expected(case)
    buffer = make_buffer(case, backend, rank)
    out, _ = start_dispatch(buffer, case, rank, backend)
    rows = buffer.combine_input(case.dtype)
    assert rows.shape == out.recv_x.shape and rows is buffer.combine_input(case.dtype)
    rows.copy_(combine_rows(case, rank, out, expected))
    target = torch.empty_like(expected.combined[rank], device=rows.device)
    for _ in range(2):  # along one handle
        target.fill_(7)
        assert buffer.combine(rows, out.handle, out=target) is target
        assert_same("combined_x", target, expected.combined[rank])
    doubled = buffer.combine((rows * 2).float(), out.handle)
    assert doubled.dtype == torch.float32
    assert torch.allclose(doubled, 2 * target.float(), rtol=0.02, atol=0.1)


def late_rank(rank, buffer, start):
    """The result of a call to which rank 2 comes late: the statistics of the others say so."""
    dist.barrier()
    before = buffer.statistics().wait_ns.cpu().clone()
    time.sleep(0.8 if rank == 2 else 0)
    result, wait = start()
    wait()
    waited = buffer.statistics().wait_ns.cpu() - before
    assert waited.shape == (3,) and (rank == 2 or (waited[2] > 4e8 and waited[rank] < waited[2] / 2)), waited
    return result


@on_ranks(3, backend=BACKENDS)
def test_statistics(rank, backend):
    case = Case([24, 6, 9], combine_weights=True)
    buffer, expected = make_buffer(case, backend, rank), Expected(case)
    counted = torch.tensor(expected.received[rank].num_recv_tokens_per_expert)
    for calls, mode in ((1, "now"), (2, "hook")):
        case = replace(case, mode=mode)
        out = late_rank(rank, buffer, partial(start_dispatch, buffer, case, rank, backend))
        rows = combine_rows(case, rank, out, expected)
        y = late_rank(rank, buffer, partial(start_combine, buffer, case, rows, out.handle))
        assert_same("combined_x", y, expected.combined[rank])
        seen = buffer.statistics()
        assert torch.equal(seen.num_tokens_per_expert.cpu(), counted * calls) and seen.num_dropped.item() == 0
    buffer.reset_statistics()
    assert not buffer.statistics().num_tokens_per_expert.any() and not buffer.statistics().wait_ns.any()


@on_ranks(1, backend=BACKENDS)
def test_a_buffer_outlives_the_inference_mode_it_was_made_in(rank, backend):
    device_of(backend, rank)
    with torch.inference_mode():
        buffer = LowLatencyBuffer(None, 2, 8, 4, 2, backend=backend)
    buffer.reset_statistics()
    buffer.combine_input(torch.float32).fill_(1.0)
    with torch.inference_mode():
        buffer.combine_input(torch.float32).fill_(2.0)
        buffer.reset_statistics()
    assert not buffer.statistics().num_dropped.any()


# ---- graphs ----


@pytest.mark.gpu
@on_ranks(2)
def test_cuda_graph_across_streams(rank):
    """A capture that begins while an event was not waited for; a graph whose second half is on another stream."""
    case = Case([24, 6])
    expected, buffer = Expected(case), make_buffer(case, "nvlink", rank)
    x, idx, weights = (tensor.cuda() for tensor in case.inputs(rank))
    before, wait = start_dispatch(buffer, replace(case, mode="async"), rank, "nvlink")
    torch.cuda.synchronize()
    rows = combine_rows(case, rank, before, expected)
    graphs, side = [torch.cuda.CUDAGraph() for _ in range(2)], torch.cuda.Stream()
    with torch.cuda.graph(graphs[0]):
        out = buffer.dispatch(x, idx, weights)
    wait()
    graphs[0].replay()
    check_dispatch(case, rank, out, expected)
    with torch.cuda.graph(graphs[1]):
        out = buffer.dispatch(x, idx, weights, return_hook=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out.hook()
        torch.cuda.current_stream().wait_stream(side)
        y = buffer.combine(rows, out.handle)
    for _ in range(5):
        y.fill_(float("nan"))
        graphs[1].replay()
        check_dispatch(case, rank, out, expected)
        assert_same("combined_x", y, expected.combined[rank])


@pytest.mark.gpu
@on_ranks(2)
def test_cuda_graph_of_weights(rank):
    """Each replay reads the weights that are in the memory at that time."""
    case = Case([24, 6], combine_weights=True)
    buffer = make_buffer(case, "nvlink", rank)
    x, idx, weights = (tensor.cuda() for tensor in case.inputs(rank))
    out = buffer.dispatch(x, idx)
    rows = torch.where(out.recv_x.isnan(), 0, out.recv_x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = buffer.dispatch(x, idx)
        y, hook = buffer.combine(rows, out.handle, topk_weights=weights, return_hook=True)
        hook()
    for _ in range(5):
        weights.copy_(torch.rand(weights.shape, generator=torch.Generator().manual_seed(rank)))
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        eager = buffer.combine(rows, buffer.dispatch(x, idx, weights).handle)
        assert_same("combined_x", y, eager)
