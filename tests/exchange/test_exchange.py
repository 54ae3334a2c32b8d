"""Dispatch and combine against the reference, bit for bit. Ranks share GPUs if there are fewer."""

import itertools
import os

import pytest
import torch
from exchange_cases import (
    BACKENDS,
    Case,
    assert_all_same,
    assert_fields_same,
    assert_same,
    check_cases,
    device_of,
    inputs_of,
    on_cpus_and_gpus,
    on_device,
    opened,
    poison_outputs,
)
from on_ranks import on_ranks

from deepep_moe import Buffer, reference

LAYOUTS = ("expert", "rank")
NODES = pytest.param("nvshmem", marks=pytest.mark.gpu)  # of one rank each
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_by_hand(backend):
    poison_outputs()
    device = device_of(backend, 0)
    x = torch.arange(3 * 4, dtype=torch.float32, device=device).reshape(3, 4)
    topk_idx = torch.tensor([[1, 0], [-1, 1], [-1, -1]], device=device)
    topk_weights = torch.tensor([[0.5, 0.25], [0.0, 2.0], [0.0, 0.0]], device=device)
    buffer = Buffer(None, 3, 4, 2, 2, backend=backend)
    out = buffer.dispatch(x, topk_idx, topk_weights, expert_alignment=2)
    assert out.recv_x.tolist() == [x[0].tolist(), [0.0] * 4, x[0].tolist(), x[1].tolist()]
    assert out.recv_topk_weights.tolist() == [0.25, 0.0, 0.5, 2.0]
    assert out.num_recv_tokens_per_expert.tolist() == [1, 2]
    assert out.handle.num_rows_per_expert.tolist() == [2, 2]
    y = buffer.combine(out.recv_x, out.handle, out.recv_topk_weights)
    assert y.tolist() == [(0.75 * x[0]).tolist(), (2 * x[1]).tolist(), [0.0] * 4]
    y = buffer.combine(out.recv_x, out.handle, bias=torch.ones(3, 4, device=device))
    assert y.tolist() == [(2 * x[0] + 1).tolist(), (x[1] + 1).tolist(), [1.0] * 4]


# ---- small enough to check by hand ----


@on_ranks(2, backend=BACKENDS)
def test_two_ranks_by_hand(rank, backend):
    device_of(backend, rank)
    poison_outputs()
    x = torch.full((2, 4), float(rank + 1)) * torch.tensor([[1.0], [10.0]])  # rank 0: 1, 10; rank 1: 2, 20
    topk_idx = torch.tensor([[[0, 2], [3, -1]], [[2, 3], [1, 0]]])[rank]  # rank 0 holds experts 0 and 1, rank 1 holds 2 and 3
    x, topk_idx = on_device(backend, rank, x, topk_idx)
    buffer = Buffer(None, 2, 4, 4, 2, backend=backend)
    out = buffer.dispatch(x, topk_idx)
    assert out.recv_x[:, 0].tolist() == [[1.0, 20.0, 20.0], [1.0, 2.0, 10.0, 2.0]][rank]
    out = buffer.dispatch(x, topk_idx, layout="rank")
    assert out.recv_x[:, 0].tolist() == [[1.0, 20.0], [1.0, 10.0, 2.0]][rank]
    assert out.recv_topk_idx.tolist() == [[[0, -1], [1, 0]], [[-1, 0], [1, -1], [0, 1]]][rank]
    y = buffer.combine(out.recv_x, out.handle)
    assert y[:, 0].tolist() == [[2.0, 10.0], [2.0, 20.0]][rank]  # once per rank the token went to
    counts = buffer.layout(topk_idx)
    assert counts.num_tokens_per_rank.tolist() == [[1, 2], [1, 1]][rank]
    assert counts.num_tokens_per_expert.tolist() == [[1, 0, 1, 1], [1, 1, 1, 1]][rank]
    assert counts.is_token_in_rank.tolist() == [[[True, True], [False, True]], [[False, True], [True, False]]][rank]


# ---- against the reference ----


@on_cpus_and_gpus
@pytest.mark.parametrize("num_tokens", ([13], [9, 21], [5, 0, 17], [300, 1, 130, 0]), ids=str)
def test_equals_reference(num_tokens, backends):
    how = {"expert_alignment": 4, "with_bias": True, "backends": backends}
    check_cases([Case(num_tokens, dtype=dtype, layout=layout, **how) for dtype, layout in itertools.product(DTYPES, LAYOUTS)])


@on_cpus_and_gpus
def test_hidden_sizes(backends):
    sizes = ((8, "ranks"), (72, "ranks"), (2880, "ranks"), (7168, "ranks"), (7168, "lanes"))
    check_cases([Case([33, 20], hidden=hidden, dtype=torch.bfloat16, sums=sums, backends=backends) for hidden, sums in sizes])


@pytest.mark.parametrize(
    "backends", (("shm", "collective"), *(pytest.param((name,), marks=pytest.mark.gpu) for name in ("nvlink", "nvshmem"))), ids=str
)
def test_bound_on_rows(backends):
    how = {"bound": 100, "backends": backends, "ranks_per_node": 1 if backends == ("nvshmem",) else None}
    check_cases([Case([6, 9], layout=layout, mode=mode, **how) for layout, mode in itertools.product(LAYOUTS, ("now", "hook"))])


@on_cpus_and_gpus
def test_routing_that_lies_lane_by_lane(backends):
    how = {"pattern": "masked", "by_lane": True, "backends": backends}
    kinds = itertools.product(LAYOUTS, (torch.int32, torch.int64))
    check_cases([Case([5, 9], layout=layout, index_dtype=dtype, **how) for layout, dtype in kinds])


@on_cpus_and_gpus
@pytest.mark.parametrize("num_ranks", (5, 6, 7, 8))
def test_more_ranks_than_cores(num_ranks, backends):
    check_cases([Case([20 + rank for rank in range(num_ranks)], num_experts=num_ranks * 3, num_topk=5, backends=backends)])


@pytest.mark.parametrize("start_method", ("fork", "spawn"))
def test_start_methods(start_method):
    check_cases([Case([11, 6])], start_method=start_method)


# ---- rings that wrap, several threads ----


@on_ranks(3, num_threads=(1, 3), layout=LAYOUTS)
def test_rings_wrap(rank, num_ranks, layout, num_threads):
    """More rows than a ring holds, several channels: against collective, which the small cases tie to the reference."""
    os.environ["DEEPEP_MOE_NUM_THREADS"] = str(num_threads)
    case = Case([900 + 100 * r for r in range(num_ranks)], hidden=2048, num_experts=15, num_topk=6, dtype=torch.bfloat16, layout=layout)
    x, idx, weights = case.inputs(rank)
    results = []
    for backend in ("shm", "collective"):
        buffer = Buffer(None, 2000, case.hidden, case.num_experts, case.num_topk, backend=backend)
        out = buffer.dispatch(x, idx, weights, layout=layout, expert_alignment=32)
        row_weights = out.recv_topk_weights if layout == "expert" else None
        results.append((out.recv_x.clone(), out.recv_topk_weights, buffer.combine(out.recv_x, out.handle, row_weights)))
        assert backend == "collective" or buffer.num_channels == num_threads
    assert_all_same("result", *results)


# ---- handles, buffers, bounds, fp8, asynchronous calls ----


@on_ranks(2, backend=(*BACKENDS, NODES), layout=(*LAYOUTS, "lanes"), dtype=(torch.float8_e4m3fn, torch.float8_e5m2))
def test_fp8_rows_with_scales(rank, backend, layout, dtype):
    layout, sums = ("expert", layout) if layout == "lanes" else (layout, "ranks")
    case = Case([6, 9], hidden=144, layout=layout, dtype=dtype, sums=sums, ranks_per_node=1 if backend == "nvshmem" else None)
    scales = [torch.rand(n, 2, generator=torch.Generator().manual_seed(n)) for n in case.num_tokens]
    expected = reference.dispatch(*inputs_of(case), case.num_experts, layout=layout, expert_alignment=2, x_scales=scales)[rank]
    buffer, x, idx, weights = opened(case, backend, rank)
    (x_scales,) = on_device(backend, rank, scales[rank])
    out = buffer.dispatch(x, idx, weights, x_scales=x_scales, layout=layout, expert_alignment=2)
    assert_fields_same(out, expected, "recv_x", "recv_x_scales", "recv_topk_weights")


@on_ranks(2, backend=BACKENDS)
def test_asynchronous_calls(rank, backend):
    buffer, x, idx, weights = opened(Case([600, 400], hidden=256), backend, rank)
    plain = buffer.dispatch(x, idx, weights)
    expected = buffer.combine(plain.recv_x, plain.handle)
    out = buffer.dispatch(x, idx, weights, async_op=True)
    out.event.wait()
    if backend == "nvlink":  # there `wait` holds the stream, not the host
        torch.cuda.synchronize()
    assert out.event.query() and out.hook is None
    assert_same("recv_x", out.recv_x, plain.recv_x)
    out = buffer.dispatch(x, handle=plain.handle, return_hook=True)
    out.hook()
    assert_same("recv_x", out.recv_x, plain.recv_x)
    combined, event = buffer.combine(out.recv_x, out.handle, async_op=True)
    again = buffer.combine(plain.recv_x, plain.handle)  # waits its turn
    event.wait()
    assert_same("combined_x", combined, expected)
    assert_same("combined_x", again, expected)


# ---- every value of the 16-bit formats ----


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_rounding_of_every_value(dtype):
    """Products of all finite 16-bit values with odd weights round as PyTorch rounds them, subnormals and overflow included."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    x = values[values.isfinite()].reshape(-1, 16).contiguous()
    buffer = Buffer(None, len(x), 16, 1, 1)
    out = buffer.dispatch(x, torch.zeros(len(x), 1, dtype=torch.int64))
    assert_same("recv_x", out.recv_x, x)
    for weight in (1.0, 1 / 3, 1e-3, 2.0**-11, 1.9999):
        y = buffer.combine(out.recv_x, out.handle, torch.full((len(x),), weight))
        assert_same(f"weight {weight}", y + 0.0, (torch.zeros(()) + weight * x.float()).to(dtype) + 0.0)
