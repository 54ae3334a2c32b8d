"""Sums by lanes: the same bits whatever ranks, nodes, backends and placements of experts there are."""

import itertools
from dataclasses import replace
from fractions import Fraction
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from exchange_cases import (
    Case,
    assert_all_same,
    assert_fields_same,
    check_cases,
    device_of,
    inputs_of,
    on_device,
    opened,
    poison_outputs,
)
from on_ranks import on_ranks, refused

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from deepep_moe import Buffer, reference
from deepep_moe.errors import EPMismatchError
from deepep_moe.ops import weighted

SUMS = ("lanes", "lanes_fma")
BACKENDS = ("shm", "collective", pytest.param("nvlink", marks=pytest.mark.gpu))
ON_CPUS_AND_GPUS = pytest.mark.parametrize(
    "backends", [pytest.param(("shm", "collective"), id="cpu"), pytest.param(("nvlink",), id="nvlink", marks=pytest.mark.gpu)]
)


# ---- by hand ----


@on_ranks(4, backend=BACKENDS, ranks_per_node=(None, 2))
def test_by_hand(rank, backend, ranks_per_node):
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
    """(1 + 2^-23) * (1 - 2^-23) is 1 - 2^-46, which fp32 rounds to 1 before it subtracts 1, unless both are one operation."""
    a, b = torch.tensor([1 + 2**-23]), torch.tensor([1 - 2**-23])
    for multiply_add in (weighted.fused_multiply_add, reference.exchange.fused_multiply_add):
        assert multiply_add(a, b, torch.tensor([-1.0])).tolist() == [-(2.0**-46)]
    assert (a * b - 1).tolist() == [0.0]


FLOATS = st.floats(width=32, allow_nan=False, min_value=-(2.0**60), max_value=2.0**60)


@settings(max_examples=300, deadline=None)
@given(values=st.lists(st.tuples(FLOATS, FLOATS, FLOATS), min_size=1, max_size=30), scale=st.sampled_from((1.0, 2.0**-100, 2.0**-60)))
def test_one_rounding(values, scale):
    a, b, c = (torch.tensor(column, dtype=torch.float32) for column in zip(*values, strict=True))
    a, nearly = a * scale, -(a * scale * b)  # and sums of which little is left
    for addend in (c, nearly, torch.nextafter(nearly, c)):
        fused = weighted.fused_multiply_add(a, b, addend)
        assert (fused == reference.exchange.fused_multiply_add(a, b, addend)).all()


def test_rounding_of_the_reference():
    """A tie goes to the even neighbour, also among denormal numbers."""
    rounded = reference.exchange._rounded
    unit = Fraction(1, 2**23)
    assert [rounded(1 + unit / 2), rounded(1 + unit * 3 / 2), rounded(-1 - unit / 2)] == [1.0, 1 + 2**-22, -1.0]
    least = Fraction(1, 2**149)
    assert [rounded(least / 2), rounded(least * 3 / 2), rounded(least * 5 / 8)] == [0.0, 2.0**-148, 2.0**-149]


# ---- against the reference ----


@ON_CPUS_AND_GPUS
@pytest.mark.parametrize("num_tokens", ([13], [9, 21], [5, 0, 17], [60, 1, 33, 0]), ids=str)
def test_equals_reference(num_tokens, backends):
    how = {"expert_alignment": 4, "with_bias": True, "backends": backends}
    kinds = itertools.product((torch.float32, torch.bfloat16, torch.float16), (1, 3, 4, 6), SUMS)
    check_cases([Case(num_tokens, dtype=dtype, num_topk=num_topk, sums=sums, **how) for dtype, num_topk, sums in kinds])


@ON_CPUS_AND_GPUS
def test_uneven_routings(backends):
    how = {"dtype": torch.bfloat16, "index_dtype": torch.int32, "backends": backends}
    kinds = itertools.product(("one_expert", "one_rank", "masked", "nobody"), SUMS)
    cases = [Case([40, 3, 0], pattern=pattern, sums=sums, **how) for pattern, sums in kinds]
    check_cases([*cases, Case([20, 7, 9], num_topk=1, sums="lanes", with_bias=True, **how), Case([0, 0, 0], sums="lanes", **how)])


@ON_CPUS_AND_GPUS
@pytest.mark.parametrize("mode", ("async", "hook"))
def test_modes(mode, backends):
    check_cases([Case([30, 21], dtype=torch.bfloat16, mode=mode, sums=sums, with_bias=True, backends=backends) for sums in SUMS])


@ON_CPUS_AND_GPUS
def test_large_rows(backends):
    check_cases([Case([33, 20], hidden=7168, num_topk=8, dtype=torch.bfloat16, sums=sums, backends=backends) for sums in SUMS])


def test_virtual_nodes():
    check_cases([Case([9, 14, 3, 8], ranks_per_node=n, dtype=torch.bfloat16, sums="lanes", with_bias=True) for n in (1, 2)])


# ---- the same bits on any number of ranks ----

CASE = Case([48], hidden=64, num_experts=8, num_topk=5, dtype=torch.bfloat16, pattern="masked")


def layer(rank, num_ranks, group, backend, sums, is_placed_backwards=False):
    """Run rows [48, 64], of which each rank has a share, through experts that scale them. Return this rank's results and gradients."""
    device_of(backend, dist.get_rank())
    poison_outputs()
    x, idx, weights = (tensor.tensor_split(num_ranks)[rank] for tensor in CASE.inputs(0))
    experts = torch.arange(CASE.num_experts)
    if is_placed_backwards:
        idx, experts = torch.where(idx < 0, idx, CASE.num_experts - 1 - idx), experts.flip(0)
    x, idx, weights = on_device(backend, dist.get_rank(), x.clone(), idx, weights.clone())
    buffer = Buffer(group, 48, CASE.hidden, CASE.num_experts, CASE.num_topk, backend=backend, sums=sums)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    out = buffer.dispatch(x, idx, weights)
    of_rank = experts.tensor_split(num_ranks)[rank].to(x.device)
    factors = (of_rank + 1).sqrt().repeat_interleave(out.num_recv_tokens_per_expert.long())
    y = buffer.combine((out.recv_x * factors[:, None]).to(x.dtype), out.handle, out.recv_topk_weights)
    (y.float() ** 2).sum().backward()
    return y.detach(), x.grad, weights.grad


@on_ranks((1, 2, 4, 8), backend=BACKENDS, sums=SUMS)
def test_same_bits(rank, num_ranks, backend, sums):
    alone = [dist.new_group([r]) for r in range(num_ranks)][rank]
    expected = layer(0, 1, alone, backend, sums)
    for is_placed_backwards in (False, True):
        actual = layer(rank, num_ranks, None, backend, sums, is_placed_backwards)
        assert_all_same("result and gradients", actual, (tensor.tensor_split(num_ranks)[rank] for tensor in expected))


# ---- gradients, compiled functions, fp8 ----


@on_ranks(2, backend=BACKENDS, sums=SUMS)
def test_gradients(rank, num_ranks, backend, sums):
    """Gradients are those of PyTorch's autograd, in double precision."""
    buffer, x, idx, weights = opened(replace(CASE, num_tokens=[11, 6], dtype=torch.float32), backend, rank, sums=sums)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    bias = torch.zeros_like(x, requires_grad=True)
    out = buffer.dispatch(x, idx, weights)
    y = buffer.combine(out.recv_x.sin(), out.handle, out.recv_topk_weights, bias=bias)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(rank)).to(y.device)
    y.backward(grad)
    wide, wide_weights = (tensor.detach().double().requires_grad_() for tensor in (x, weights))
    total = (wide_weights * (idx >= 0)).sum(1, keepdim=True)
    (wide.sin() * total).backward(grad.double())
    for name, ours, theirs in (("x", x.grad, wide.grad), ("weights", weights.grad, wide_weights.grad), ("bias", bias.grad, grad)):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(2, backend=BACKENDS, how=("async_op", "return_hook"))
def test_gradients_of_calls_in_flight(rank, num_ranks, backend, how):
    """The sum on the buffer's thread is no part of autograd, and may end after an inference mode."""
    results = []
    for options in ({}, {how: True}):
        buffer, x, idx, weights = opened(replace(CASE, num_tokens=[11, 6]), backend, rank, sums="lanes")
        bias = torch.ones_like(x, requires_grad=True)
        out = buffer.dispatch(x.requires_grad_(), idx, weights.requires_grad_())
        y = buffer.combine(out.recv_x * 3, out.handle, out.recv_topk_weights, bias=bias, **options)
        if options:
            y, end = y
            (end if how == "return_hook" else end.wait)()
        y.float().square().sum().backward()
        with torch.inference_mode():
            again = buffer.combine(out.recv_x.detach(), out.handle, **options)
        if options:
            again, end = again
            (end if how == "return_hook" else end.wait)()
        results.append((y.detach(), x.grad, weights.grad, bias.grad, again.clone()))
    assert_all_same("now and in flight", *results)


@on_ranks(2, backend=BACKENDS)
def test_along_a_handle(rank, num_ranks, backend):
    buffer, x, idx, weights = opened(replace(CASE, num_tokens=[11, 6], num_topk=3), backend, rank, sums="lanes")
    out = buffer.dispatch(x, idx)
    again = buffer.dispatch(2 * x, topk_weights=weights, handle=out.handle)
    assert torch.equal(again.recv_x, 2 * out.recv_x)
    assert torch.equal(again.recv_topk_weights, buffer.dispatch(x, idx, weights).recv_topk_weights)


@on_ranks(2, backend=BACKENDS)
def test_compiled(rank, num_ranks, backend):
    buffer, x, idx, weights = opened(replace(CASE, num_tokens=[11, 6]), backend, rank, sums="lanes")

    def run(x, idx, weights):
        out = buffer.dispatch(x, idx, weights)
        return buffer.combine(out.recv_x * 3, out.handle, out.recv_topk_weights)

    results = []
    for function in (run, torch.compile(run, backend="aot_eager")):
        own_x, own_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = function(own_x, idx, own_weights)
        y.float().sum().backward()
        results.append((y.detach(), own_x.grad, own_weights.grad))
    assert_all_same("eager and compiled", *results)


@on_ranks(2, backend=BACKENDS)
def test_fp8_rows(rank, num_ranks, backend):
    """Quantized rows of a token are the same in each lane."""
    case = replace(CASE, num_tokens=[11, 6], hidden=256)
    buffer, x, idx, _ = opened(case, backend, rank, sums="lanes")
    xs, idxs, _ = inputs_of(case)
    quantized = [reference.quantize_fp8(rows) for rows in xs]
    expected = reference.dispatch(
        [rows for rows, _ in quantized], idxs, None, case.num_experts, x_scales=[scales for _, scales in quantized]
    )
    out = buffer.dispatch(x, idx, fp8=True)
    assert_fields_same(out, expected[rank], "recv_x", "recv_x_scales")


@pytest.mark.gpu
@on_ranks(2, sums=SUMS)
def test_late_counts(rank, num_ranks, sums):
    """Rows that do not fit into the guess come again."""
    results = []
    for num_recv_rows in (None, "guess"):
        buffer, x, idx, weights = opened(replace(CASE, num_tokens=[11, 6], pattern="uniform"), "nvlink", rank, sums=sums)
        for experts in (1, 1, 1, CASE.num_experts):  # then more rows come
            out = buffer.dispatch(x, torch.where(idx < experts, idx, -1), weights, num_recv_rows=num_recv_rows, layer=1)
            settled = buffer.settle(out) if num_recv_rows else out
            y = buffer.combine(settled.recv_x, settled.handle, settled.recv_topk_weights)
        results.append((settled.recv_x, y))
    assert_all_same("late and early", *results)


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
def test_bad_routing_on_gpus(rank, num_ranks):
    buffer, x, idx, _ = opened(replace(CASE, num_tokens=[11, 6], pattern="uniform"), "nvlink", rank, sums="lanes")
    for wrong, message in ((CASE.num_experts, r"topk_idx\[3, 2\]"), (int(idx[3, 1]), r"topk_idx\[3\]")):
        bad = idx.clone()
        bad[3, 2] = wrong if rank == 0 else bad[3, 2]
        with refused(rank, 0, ValueError, message):
            buffer.dispatch(x, bad)


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


def test_refusals():
    with pytest.raises(ValueError, match="sums is 'lane'"):
        Buffer(None, 4, 8, 4, 2, sums="lane")
    with pytest.raises(ValueError, match="num_sms is 0; with sums='lanes' it must be 1 or more"):
        Buffer(None, 4, 8, 4, 2, sums="lanes", num_sms=0)
    buffer = Buffer(None, 4, 8, 4, 2, sums="lanes", backend="shm")
    assert (buffer.num_topk, buffer.num_max_tokens_per_rank, buffer.sums) == (2, 4, "lanes")
    x, idx = torch.ones(4, 8), torch.tensor([[0, 1]] * 4)
    with pytest.raises(ValueError, match=r"topk_idx has shape \[4, 1\]; it must be \[4, 2\]"):
        buffer.dispatch(x, idx[:, :1])
    with pytest.raises(ValueError, match="x has 5 tokens, more than the buffer's num_max_tokens_per_rank of 4"):
        buffer.dispatch(torch.ones(5, 8), torch.tensor([[0, 1]] * 5))
    with pytest.raises(ValueError, match="layout is 'rank'; with sums='lanes'"):
        buffer.dispatch(x, idx, layout="rank")
    for wrong, message in ((9, r"topk_idx\[2, 1\] is 9; it must be -1"), (0, r"topk_idx\[2\] names expert 0 twice, in lanes 0 and 1")):
        bad = idx.clone()
        bad[2, 1] = wrong
        with pytest.raises(ValueError, match=message):
            buffer.dispatch(x, bad)
    calls = buffer.num_calls
    with mock.patch("deepep_moe.exchange.calls.for_lanes", side_effect=MemoryError), pytest.raises(MemoryError):
        buffer.dispatch(x, idx)
    assert buffer.num_calls == calls + 1, "the peers were told"
    out = buffer.dispatch(x, idx)
    with pytest.raises(ValueError, match=r"bias has shape \[8, 8\]; it must be \[4, 8\]"):
        buffer.combine(out.recv_x, out.handle, bias=torch.ones(8, 8))
    assert torch.equal(buffer.combine(out.recv_x, out.handle), torch.full((4, 8), 2.0))


@on_ranks(2)
def test_ranks_that_disagree(rank, num_ranks):
    with pytest.raises(EPMismatchError, match="ranks disagree on sums"):
        Buffer(None, 4, 8, 4, 2, backend="shm", sums=("ranks", "lanes")[rank])
