"""FP8 rows, matrices and products: small cases by hand, all against the reference, errors within their bounds."""

from types import SimpleNamespace

import pytest
import torch

from deepep_moe import ops, reference
from deepep_moe.errors import BackendUnavailableError
from deepep_moe.ops import QuantizedRows, fp8_products, quantize_fp8, quantize_fp8_weights
from deepep_moe.ops.fp8_products import rescale_transpose
from deepep_moe.ops.quant import dequantize_fp8

HIDDEN, WIDTH = 256, 128
NAN = float("nan")


def randn(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_equal(name, ours, theirs):
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{name}: {text}")


# ---- quantization ----


def test_scale_is_the_next_power_of_two():
    x = torch.zeros(1, 384)
    x[0, 0], x[0, 1], x[0, 128], x[0, 256] = 448.0, 3.0, 449.0, 1e-9
    y, scales = quantize_fp8(x, power_of_two=True)
    assert scales.tolist() == [[1.0, 2.0, 2.0**-38]]
    assert y.float()[0, [0, 1, 2, 128]].tolist() == [448.0, 3.0, 0.0, 224.0]
    assert y.float()[0, 256].item() * 2.0**-38 == pytest.approx(1e-9, rel=2**-4)


@pytest.mark.parametrize("scale", (1.0, 1e4, 1e-12, 1e-37))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_rows_and_matrices_equal_reference(dtype, scale):
    x = (randn(256, 384, dtype=torch.float32) * scale).to(dtype)
    x[3, 130], x[4, 5], x[5] = NAN, torch.inf, 0
    for name, ours, theirs in zip("ys", quantize_fp8(x, power_of_two=True), reference.fp8.quantize_blocks(x, 1), strict=True):
        assert_equal(name, ours, theirs)
    y, scales = quantize_fp8_weights(x.view(2, 128, 384))
    for expert in range(2):
        expected = reference.fp8.quantize_blocks(x[expert * 128 :][:128], 128)
        for name, ours, theirs in zip("ys", (y[expert], scales[expert]), expected, strict=True):
            assert_equal(name, ours, theirs)
    for name, ours, theirs in zip("ys", quantize_fp8_weights(x.view(2, 128, 384), transposed=True), (y, scales), strict=True):
        assert ours.is_contiguous()
        assert_equal(name, ours, theirs.transpose(1, 2))


def test_error_of_each_element():
    x = randn(64, HIDDEN) * torch.logspace(-8, 3, 64)[:, None].bfloat16()
    y, scales = quantize_fp8(x, power_of_two=True)
    error, step = (dequantize_fp8(y, scales) - x.float()).abs(), scales.repeat_interleave(128, 1)
    assert (error <= torch.maximum(x.float().abs() / 16, step * 2**-10)).all()
    largest = x.float().abs().unflatten(1, (-1, 128)).amax(2)
    assert (largest <= 448 * scales).all() and (largest > 224 * scales).all()
    assert_equal("rows in bf16", QuantizedRows(y, scales).dequantized(), dequantize_fp8(y, scales))


# ---- rescale and transpose ----


@pytest.mark.parametrize(("shift", "expected"), ((6, 1.875 * 2**-6), (7, 8 * 2**-9), (8, 4 * 2**-9), (10, 2**-9), (11, 0.0)), ids=str)
def test_rescale_is_exact_down_to_the_least_value_and_then_rounds(shift, expected):
    """Row 0 has the scale 1, row 1 has 2^-shift. 1.875 * 2^-6 is 15 * 2^-9, the last exact value. Others are rounded."""
    y, scales, want = torch.zeros(128, 128).to(torch.float8_e4m3fn), torch.zeros(128, 1), torch.zeros(128, 128)
    y[0, 0], y[1, 0], y[1, 1] = 448.0, 1.875, -448.0
    scales[0], scales[1] = 1.0, 2.0**-shift
    want[0, 0], want[0, 1], want[1, 1] = 448.0, expected, -448.0 * 2**-shift
    y_t, scales_t = rescale_transpose(y, scales)
    assert scales_t.shape == (1, 128) and (scales_t == 1).all()
    assert_equal("values", y_t, want)


def test_rescale_leaves_nothing_of_a_block_that_is_not_finite():
    x = randn(128, HIDDEN)
    x[7, 3], x[8, 200] = NAN, -torch.inf
    x_t, scales = rescale_transpose(*quantize_fp8(x, power_of_two=True))
    assert dequantize_fp8(x_t, scales.t()).isnan().all()


# ---- experts ----


@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("quantized_grad", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_mlp_equals_reference(dtype, quantized_grad, recompute):
    counts, total = [128, 0, 256], 384
    x, grad = (randn(512, HIDDEN, seed=seed) for seed in (1, 2))
    grad *= 1e-6  # gradients are small
    probs = torch.rand(512, generator=torch.Generator().manual_seed(3))
    w1, w2 = (randn(3, *shape, seed=4, dtype=torch.float32).mul(0.06).to(dtype) for shape in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    for rows in (x, grad, probs):
        rows[total:] = NAN
    expected = reference.fp8.fp8_mlp(x[:total], counts, w1, w2, probs[:total], grad[:total])
    rows = QuantizedRows.of(x).requires_grad_()
    leaves = [leaf.clone().requires_grad_() for leaf in (w1, w2, probs)]
    y = ops.grouped_mlp(rows, counts, leaves[0], leaves[1], probs=leaves[2], recompute_activation=recompute)
    y.backward(QuantizedRows.of(grad) if quantized_grad else grad)
    assert type(rows.grad) is torch.Tensor and rows.grad.dtype == torch.bfloat16 and leaves[0].grad.dtype == dtype
    got = y.detach(), rows.grad, leaves[0].grad, leaves[1].grad, leaves[2].grad
    for name, ours, theirs in zip(expected._fields, got, expected, strict=True):
        ours = ours[:total] if len(ours) == 512 else ours
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=float(theirs.abs().max()) * 2**-8, msg=name)
    assert not y[total:].any() and not rows.grad[total:].any() and not leaves[2].grad[total:].any()


def run_mlp(rows, counts, grad, **options):
    leaves = [randn(2, 2 * WIDTH, HIDDEN, seed=3) * 0.06, randn(2, HIDDEN, WIDTH, seed=4) * 0.09]
    rows, leaves = rows.requires_grad_(), [leaf.requires_grad_() for leaf in leaves]
    y = ops.grouped_mlp(rows, counts, *leaves, **options)
    y.backward(grad)
    return y.detach(), rows.grad, *(leaf.grad for leaf in leaves)


def test_another_activation_than_swiglu():
    """The same function, given as one, kept and computed again."""
    x, grad = randn(256, HIDDEN), randn(256, HIDDEN, seed=2)
    first, *others = (
        run_mlp(QuantizedRows.of(x), [128, 128], grad, activation=activation, recompute_activation=recompute)
        for activation in ("swiglu", lambda inner: torch.nn.functional.silu(inner[:, :WIDTH]) * inner[:, WIDTH:])
        for recompute in (False, True)
    )
    for other in others:
        for ours, theirs in zip(other, first, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=float(theirs.abs().max()) * 2**-7)


def test_delayed_gradients_and_no_rows():
    due = {}
    w1, w2 = torch.ones(2, 2 * WIDTH, HIDDEN).requires_grad_(), torch.ones(2, HIDDEN, WIDTH).requires_grad_()
    rows = QuantizedRows.of(randn(0, HIDDEN)).requires_grad_()
    y = ops.grouped_mlp(rows, [0, 0], w1, w2, delay=lambda name, compute: due.update({name: compute}))
    y.backward(y)
    assert list(due) == ["w2", "w1"] and w1.grad is None
    assert [tuple(compute().shape) for compute in due.values()] == [tuple(w2.shape), tuple(w1.shape)]
    assert not due["w1"]().any()


# ---- refusals ----


@pytest.mark.parametrize(
    ("rows", "counts", "width", "bias", "message"),
    (
        (256, [128, 100], 128, False, r"counts is \[128, 100\]; .*expert_alignment=128"),
        (200, [128, 0], 128, False, "the number of rows is 200"),
        (256, [128, 128], 192, False, "the columns of w2 is 192"),
        (256, [128, 128], 128, True, "b1 or b2 is given"),
    ),
)
def test_bad_shapes(rows, counts, width, bias, message):
    w1, w2 = torch.ones(2, 2 * width, HIDDEN), torch.ones(2, HIDDEN, width)
    b1 = torch.ones(2, 2 * width).bfloat16() if bias else None
    with pytest.raises(ValueError, match=message):
        ops.grouped_mlp(QuantizedRows.of(randn(rows, HIDDEN)), counts, w1, w2, b1=b1)


def test_other_operations_say_what_to_do():
    rows = QuantizedRows.of(randn(2, 128))
    assert repr(rows) == "QuantizedRows([2, 128] on cpu)" and rows.dtype == torch.bfloat16
    assert rows.detach().values is rows.values and rows.view(-1, 128).scales is rows.scales
    broken = torch.tensor([[1.0], [NAN]]).expand(2, 128).contiguous()
    assert QuantizedRows.of(broken).isnan().tolist() == [[False] * 128, [True] * 128], "torch.autograd.detect_anomaly asks"
    with pytest.raises(NotImplementedError, match="which only grouped_mlp takes"):
        _ = rows + 1
    with pytest.raises(ValueError, match=r"values is bfloat16 \[2, 128\]"):
        QuantizedRows(randn(2, 128), rows.scales)
    with pytest.raises(ValueError, match=r"scales is float32 \[2, 1\] for values \[2, 256\]"):
        QuantizedRows(torch.zeros(2, 256).to(torch.float8_e4m3fn), rows.scales)
    with pytest.raises(ValueError, match=r"w has shape \[1, 128, 100\]"):
        quantize_fp8_weights(torch.zeros(1, 128, 100))


@pytest.mark.parametrize(
    ("place", "name", "value", "message"),
    (
        (torch.cuda, "get_device_capability", lambda device: (8, 0), "NVIDIA A100 has no fp8 products"),
        (fp8_products.importlib.util, "find_spec", lambda name: None, "Triton is not installed"),
        (fp8_products, "_C", SimpleNamespace(), "deepep_moe was built without nvcc"),
    ),
)
def test_where_there_are_no_products(place, name, value, message, monkeypatch):
    """A GPU that lacks one thing has no products."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(fp8_products.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(fp8_products, "_C", SimpleNamespace(gpu_fp8_product=None))
    fp8_products.why_no_products.cache_clear()
    fp8_products.check_products(torch.device("cuda", 0))
    monkeypatch.setattr(place, name, value)
    fp8_products.why_no_products.cache_clear()
    try:
        with pytest.raises(BackendUnavailableError, match=f"fp8 experts cannot run: {message}"):
            fp8_products.check_products(torch.device("cuda", 0))
    finally:
        fp8_products.why_no_products.cache_clear()
