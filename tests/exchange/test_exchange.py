"""Dispatch and combine against the reference, bit for bit. Ranks share GPUs if there are fewer."""

import itertools
import os
from dataclasses import replace
from typing import Any
from unittest import mock

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
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks

from deepep_moe import Buffer, reference
from deepep_moe.group import rendezvous
from deepep_moe.ops import weighted
from deepep_moe.testing import run_ranks

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


# ---- sums over nodes: the contract's third level by hand ----


@on_ranks(4, backend=("shm", "collective"))
def test_nodes_by_hand(rank, backend):
    """One token of each rank goes to all four; rank r returns the r-th of four numbers. In bf16, with 8 bits, 256 + 1 is 256.

    One node: 1 + 256 + 1 = 258. Nodes of two: ranks 0 and 1 keep the exact sum 1 + 256 and get 258. For ranks 2 and 3 it is rounded to 256
    before it crosses: 256 + 1 = 257, which is 256 in bf16. Nodes of one: every number is exact when it crosses."""
    poison_outputs()
    sums = []
    for per_node in (4, 2, 1):
        buffer = Buffer(None, 1, 8, 4, 4, backend=backend, ranks_per_node=per_node)
        assert buffer.ranks_per_node == per_node
        out = buffer.dispatch(torch.zeros(1, 8, dtype=torch.bfloat16), torch.arange(4)[None])
        value = [1.0, 256.0, 1.0, 0.0][rank]
        y = buffer.combine(torch.full((4, 8), value, dtype=torch.bfloat16), out.handle)
        assert (y == y[0, 0]).all()
        sums.append(y[0, 0].item())
    assert sums == [258.0, 258.0 if rank < 2 else 256.0, 258.0]


# ---- which ranks are a node ----


def on_hosts(rank: int, _: int, hosts: str) -> Any:
    """Ranks that say they are on these hosts, a letter each: ranks of a node, or the error."""
    rendezvous.host_id = lambda: f"host {hosts[rank]}"
    try:
        return Buffer(None, 1, 8, len(hosts), 1, timeout_s=60).ranks_per_node
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aaaa", 4), ("aabb", 2), ("abcd", 1), ("a", 1), ("aaab", "ranks 0 to 2 on host a, rank 3 on host b"),
        ("abab", "rank 0 on host a, rank 1 on host b, rank 2 on"),
    ],
)  # fmt: skip
def test_ranks_of_a_host_are_a_node(hosts, expected):
    (answer,) = set(run_ranks(on_hosts, len(hosts), hosts))
    if isinstance(expected, int):
        assert answer == expected
    else:
        assert f"ranks lie on hosts as {expected}" in answer and "pass ranks_per_node" in answer


# ---- what crosses ----


@on_ranks(4)
def test_one_row_crosses_for_each_token_and_node(rank: int, num_ranks):
    """One row for each (token, other node) leaves a source in a dispatch and comes back in a combine, however many experts it has there."""
    case = Case([5, 0, 17, 9], num_topk=4, ranks_per_node=2)
    idxs = [case.routing(r) for r in range(num_ranks)]
    buffer = Buffer(None, 17, case.hidden, case.num_experts, 4, backend="collective", ranks_per_node=2)
    backend, crossed = buffer.calls.backend, []
    stock = backend._all_to_all

    def counting(step: Any, *rest: Any) -> Any:
        if step.parts[0].shape[1] == case.hidden:  # rows, and not what leads them
            crossed.append(sum(number for peer, number in enumerate(step.num_sent) if peer // 2 != rank // 2))
        return stock(step, *rest)

    backend._all_to_all = counting
    out = buffer.dispatch(torch.zeros(case.num_tokens[rank], case.hidden), idxs[rank])
    buffer.combine(out.recv_x, out.handle)

    def goes(source: int, node: int) -> int:
        return int(((idxs[source] >= 6 * node) & (idxs[source] < 6 * node + 6)).any(1).sum())

    other = 1 - rank // 2
    assert crossed == [goes(rank, other), 0, 0, goes(2 * other + rank % 2, rank // 2)]


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


# ---- sums by lanes: the same bits whatever ranks, nodes, backends and placements of experts there are ----


@on_ranks(4, backend=BACKENDS, ranks_per_node=(None, 2))
def test_sums_by_lanes_by_hand(rank, backend, ranks_per_node):
    """256 + 1 is 256 in bf16, so what is rounded between lanes loses both ones of 256 + 1 + 1 = 258."""
    if backend == "nvlink" and ranks_per_node:
        return  # it serves one node
    device = device_of(backend, rank)
    poison_outputs()
    buffer = Buffer(None, 1, 8, 4, 3, backend=backend, sums="lanes", ranks_per_node=ranks_per_node)
    x = torch.ones(1, 8, dtype=torch.bfloat16, device=device)
    out = buffer.dispatch(x, torch.tensor([[1, 0, 3]], device=device), torch.tensor([[256.0, 1.0, 1.0]], device=device))
    assert out.recv_x.shape == ((0, 8) if rank == 2 else (4, 8))
    y = buffer.combine(out.recv_x, out.handle, out.recv_topk_weights)
    assert y.tolist() == [[258.0] * 8]
    y = buffer.combine(out.recv_x, out.handle, bias=torch.full((1, 8), 0.5, dtype=torch.bfloat16, device=device))
    assert y.tolist() == [[3.5] * 8]


def test_one_rounding_by_hand():
    """(1 + 2^-23) * (1 - 2^-23) is 1 - 2^-46, which fp32 rounds to 1 before it subtracts 1, unless both are one operation. A tie goes to
    the even neighbour, also among denormal numbers."""
    unit, least = 2.0**-23, 2.0**-149
    for a, b, addends, expected in (
        (1 + unit, 1 - unit, [-1.0], [-(2.0**-46)]),
        (0.5, unit, [1.0, 1 + unit, -1 - unit], [1.0, 1 + 2 * unit, -1.0]),
        (0.5, least, [0.0, least, -least], [0.0, 2 * least, 0.0]),
        (0.625, least, [0.0], [least]),
    ):
        c = torch.tensor(addends)
        for multiply_add in (weighted.fused_multiply_add, reference.exchange.fused_multiply_add):
            assert multiply_add(torch.tensor(a), torch.tensor(b).expand_as(c), c).tolist() == expected


FLOATS = st.floats(width=32, allow_nan=False, min_value=-(2.0**60), max_value=2.0**60)


@settings(max_examples=300, deadline=None)
@given(values=st.lists(st.tuples(FLOATS, FLOATS, FLOATS), min_size=1, max_size=30), scale=st.sampled_from((1.0, 2.0**-100, 2.0**-60)))
def test_one_rounding(values, scale):
    a, b, c = (torch.tensor(column, dtype=torch.float32) for column in zip(*values, strict=True))
    a, nearly = a * scale, -(a * scale * b)  # and sums of which little is left
    for addend in (c, nearly, torch.nextafter(nearly, c)):
        fused = weighted.fused_multiply_add(a, b, addend)
        assert (fused == reference.exchange.fused_multiply_add(a, b, addend)).all()


CASE = Case([48], hidden=64, num_experts=8, num_topk=5, dtype=torch.bfloat16, pattern="masked")


# ---- rows that do not fit ----


@pytest.mark.gpu
@on_ranks(2)
def test_rows_left_out(rank, num_ranks):
    """Another row is sent in place of rows beyond a bound, so that no rank waits for them. Sums of the other rows are right. All are
    finite, even if the memory for copy engines holds NaN."""
    for bound in (0, 8):
        buffer, x, idx, weights = opened(replace(CASE, num_tokens=[11, 6], pattern="one_expert"), "nvlink", rank, sums="lanes")
        buffer.allow_excess()
        buffer.dispatch(torch.full_like(x, torch.nan), torch.where(idx < 0, -1, 0), weights, num_sms=0)
        out = buffer.dispatch(x, idx, weights, num_recv_rows=bound)
        y = buffer.combine(out.recv_x, out.handle, out.recv_topk_weights)
        if rank == 0:
            kept = slice(0, bound)
            assert torch.equal(y[kept], (x.float() * weights[:, :1])[kept].to(x.dtype))
            assert bound == 0 or y.isfinite().all()
        buffer.check()


@pytest.mark.gpu
@on_ranks(2)
def test_copy_engines_send_no_single_rows(rank, num_ranks):
    """They serve the dispatch."""
    buffer, x, idx, weights = opened(replace(CASE, num_tokens=[11, 6]), "nvlink", rank, sums="lanes")
    out, expected = buffer.dispatch(x, idx, weights, num_sms=0), buffer.dispatch(x, idx, weights)
    assert_all_same("rows", (out.recv_x, out.recv_topk_weights), (expected.recv_x, expected.recv_topk_weights))
    for num_sms in (1, 3):
        again = buffer.combine(out.recv_x, out.handle, out.recv_topk_weights, num_sms=num_sms)
        assert torch.equal(again, buffer.combine(out.recv_x, out.handle, out.recv_topk_weights))
    with pytest.raises(ValueError, match="num_sms=0 cannot serve sums by lanes"):
        buffer.combine(out.recv_x, out.handle, out.recv_topk_weights, num_sms=0)


# ---- refusals ----


def test_refusals_of_sums():
    """Bad arguments are refused as in other buffers: test_errors.py."""
    with pytest.raises(ValueError, match="sums is 'lane'"):
        Buffer(None, 4, 8, 4, 2, sums="lane")
    with pytest.raises(ValueError, match="num_sms is 0; with sums='lanes' it must be 1 or more"):
        Buffer(None, 4, 8, 4, 2, sums="lanes", num_sms=0)
    buffer = Buffer(None, 4, 8, 4, 2, sums="lanes", backend="shm")
    assert (buffer.num_topk, buffer.num_max_tokens_per_rank, buffer.sums) == (2, 4, "lanes")
    x, idx = torch.ones(4, 8), torch.tensor([[0, 1]] * 4)
    with pytest.raises(ValueError, match="layout is 'rank'; with sums='lanes'"):
        buffer.dispatch(x, idx, layout="rank")
    calls = buffer.num_calls
    with mock.patch("deepep_moe.exchange.calls.for_lanes", side_effect=MemoryError), pytest.raises(MemoryError):
        buffer.dispatch(x, idx)
    assert buffer.num_calls == calls + 1, "the peers were told"
