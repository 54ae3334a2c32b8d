"""SwiGLU and its gradients by hand and against PyTorch's operators, on CPUs and by the kernels. Memory not to be read holds NaN."""

import math

import emulated_gpu
import pytest
import torch
from torch.nn.functional import silu

from deepep_moe.ops.grouped_products import Groups
from deepep_moe.ops.swiglu import swiglu, swiglu_backward

NAN = float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def groups_of(counts, rows):
    return Groups(torch.tensor(counts, device=rows.device), len(counts), rows)


def test_by_hand(device):
    """silu is 0 with slope 1/2 at 0, x with slope 1 far above, 0 with slope 0 far below. Rows of 8 columns; the last row has no expert."""
    gate, up, probs = [0.0, 100.0, -100.0, NAN], [6.0, 3.0, 5.0, NAN], [0.5, 2.0, 1.0, NAN]
    inner = torch.tensor([[g] * 8 + [u] * 8 for g, u in zip(gate, up, strict=True)], device=device)
    weights = torch.tensor(probs, device=device)
    grad = torch.tensor([[4.0] * 8, [1.0] * 8, [1.0] * 8, [NAN] * 8], device=device)
    groups = groups_of([1, 2], inner)
    y = swiglu(inner, weights, groups)
    assert y[:3, 0].tolist() == [0.0, 600.0, pytest.approx(0.0, abs=1e-30)]
    grad_inner, grad_probs, again = swiglu_backward(grad, inner, weights, groups, True)
    # Gate: 4 * 0.5 * 6 * 1/2, 1 * 2 * 3 * 1, 0. Up: grad * prob * silu(gate). Prob: 8 columns of grad * silu(gate) * up.
    assert grad_inner[:3, 0].tolist() == [6.0, 6.0, pytest.approx(0.0, abs=1e-30)]
    assert grad_inner[:3, 8].tolist() == [0.0, 200.0, pytest.approx(0.0, abs=1e-30)]
    assert grad_probs[:3].tolist() == [0.0, 2400.0, pytest.approx(0.0, abs=1e-30)]
    assert torch.equal(again[:3], y[:3])
    assert swiglu_backward(grad, inner, None, groups, False)[1:] == (None, None)


def expected(inner, probs, grad):
    """The operators, each rounded to the dtype."""
    gate, up = inner.cpu().chunk(2, -1)
    weight = torch.ones(len(inner), 1) if probs is None else probs.cpu()[:, None]
    activated, grad = silu(gate), grad.cpu()
    product = activated * up
    y = (product.float() * weight).to(inner.dtype)
    grad_probs = (grad.double() * product.double()).sum(-1)
    grad = (grad.float() * weight).to(inner.dtype)
    grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
    return y, torch.cat([grad_gate, grad * activated], -1), grad_probs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("counts", "num_rows", "columns"), [([3], 3, 8), ([2, 0, 5], 13, 264), ([0, 0], 4, 16), ([40, 9], 49, 1032)])
@pytest.mark.parametrize("with_probs", [True, False])
def test_equals_the_operators(device, dtype, counts, num_rows, columns, with_probs):
    generator = torch.Generator().manual_seed(columns)
    filled = sum(counts)
    inner = (3 * torch.randn(num_rows, 2 * columns, generator=generator)).to(dtype)
    grad, probs = torch.randn(num_rows, columns, generator=generator).to(dtype), torch.rand(num_rows, 2, generator=generator)[:, 0]
    for values in (inner, grad, probs):
        values[filled:] = NAN
    here = [tensor.to(device) for tensor in (inner, grad)]
    weights = probs.to(device) if with_probs else None
    groups = groups_of(counts, here[0])
    y = swiglu(here[0], weights, groups).cpu()
    want_y, want_inner, want_probs = expected(inner, probs if with_probs else None, grad)
    grad_inner, grad_probs, again = swiglu_backward(here[1].clone(), here[0], weights, groups, True)
    # exp differs in last bits between a CPU and a GPU, and a last bit may round otherwise in each of three operations.
    tolerance = {"rtol": 2e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4e-6}
    torch.testing.assert_close(y[:filled], want_y[:filled], **tolerance)
    torch.testing.assert_close(grad_inner.cpu()[:filled], want_inner[:filled], **tolerance)
    assert torch.equal(again.cpu()[:filled], y[:filled])
    if not with_probs:
        assert grad_probs is None and swiglu_backward(here[1], here[0], None, groups, False)[1:] == (None, None)
        return
    scale = float((grad[:filled].double().abs().sum(-1)).max()) * 20 if filled else 1.0
    bound = scale * (math.sqrt(columns) * 2**-24 + torch.finfo(dtype).eps)
    assert grad_probs.dtype == torch.float32 and bool(((grad_probs.cpu()[:filled] - want_probs[:filled]).abs() <= bound).all())
    if device.type == "cuda" or emulated_gpu.is_chosen():
        assert not grad_probs[filled:].any(), "the tail of the probs' gradient is zero"


def test_rows_that_no_kernel_takes(device):
    """Columns that are no whole pieces of 16 bytes, and probs of another dtype, are left to the operators."""
    generator = torch.Generator().manual_seed(0)
    for columns, dtype in ((3, torch.float32), (8, torch.float64)):
        inner = torch.randn(4, 2 * columns, generator=generator).to(device)
        probs = torch.rand(4, generator=generator).to(device, dtype)
        y = swiglu(inner, probs, groups_of([4], inner)).cpu()
        want = silu(inner.cpu()[:, :columns]) * inner.cpu()[:, columns:] * probs.cpu()[:, None]
        torch.testing.assert_close(y, want.float(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("columns", (8, 3, 520))
@pytest.mark.parametrize(("counts", "num_rows"), (([2, 0, 3], 9), ([0, 0], 4), ([40], 40)))
def test_tails_are_cleared_and_nothing_else(device, columns, counts, num_rows):
    """The kernel writes pieces of 16 bytes; rows that have no whole number of them are left to PyTorch."""
    values = torch.arange(1.0, num_rows * columns + 1, device=device).view(num_rows, columns).bfloat16()
    expected, filled = values.clone(), sum(counts)
    expected[filled:] = 0
    values[filled:] = NAN
    assert torch.equal(groups_of(counts, values).clear_tail(values), expected)
