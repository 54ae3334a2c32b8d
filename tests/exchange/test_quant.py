"""Rows to fp8: the definition by hand, the kernel against the operators, and a dispatch that quantizes on its way."""

import itertools

import pytest
import torch
from exchange_cases import BACKENDS, assert_all_same, assert_fields_same, assert_same, device_of
from on_ranks import on_ranks, refused

from deepep_moe import _C, Buffer, reference
from deepep_moe.device import DTYPE_NAMES
from deepep_moe.errors import EPMismatchError
from deepep_moe.ops import quantize_fp8, quantize_fp8_weights

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_by_hand():
    x = torch.zeros(1, 256)
    x[0, 0], x[0, 1], x[0, 2], x[0, 130] = 896.0, -448.0, 2.0, 7.0
    y, scales = quantize_fp8(x)
    assert scales.tolist() == [[2.0, 7.0 / 448.0]]
    assert y.float()[0, [0, 1, 2, 3, 130]].tolist() == [448.0, -224.0, 1.0, 0.0, 448.0]
    y, scales = quantize_fp8(torch.zeros(3, 128, dtype=torch.bfloat16))
    assert not y.float().any() and torch.isfinite(scales).all()
    assert quantize_fp8(torch.empty(0, 128))[0].shape == (0, 128)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_reference(dtype):
    for shape, scale in itertools.product(((1, 8), (5, 128), (3, 200), (7, 392)), (1.0, 1e-6, 1e4)):
        x = (torch.randn(shape, generator=torch.Generator().manual_seed(2)) * scale).to(dtype)
        assert_all_same(f"{shape}, scale {scale}", quantize_fp8(x), reference.quantize_fp8(x))


@pytest.mark.parametrize("bad", (torch.nan, torch.inf, -torch.inf), ids=str)
def test_what_is_not_finite_stays_in_its_block(bad, device):
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(2))
    good = x.clone()
    x[1, 7] = bad
    (y, scales), (good_y, good_scales) = ([t.cpu() for t in quantize_fp8(each.to(device))] for each in (x, good))
    torch.testing.assert_close(scales, reference.quantize_fp8(x)[1], rtol=0, atol=0, equal_nan=True)
    assert not scales[1, 0].isfinite() and not (y.float()[1, 7] * scales[1, 0]).isfinite()
    assert_same("y of other blocks", torch.cat([y[0], y[1, 128:]]).float(), torch.cat([good_y[0], good_y[1, 128:]]).float())
    assert_same("scales of other blocks", scales[[0, 0, 1], [0, 1, 1]], good_scales[[0, 0, 1], [0, 1, 1]])


def test_bad_rows():
    with pytest.raises(TypeError, match="x has dtype float64"):
        quantize_fp8(torch.zeros(2, 128, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"x has shape \[2, 12\]; it must be .* with hidden a multiple of 8"):
        quantize_fp8(torch.zeros(2, 12))


def how_of(dtype):
    return getattr(_C.DType, DTYPE_NAMES[dtype]), torch.cuda.current_stream().cuda_stream


@pytest.mark.gpu
@pytest.mark.parametrize("power_of_two", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_equals_operators(dtype, power_of_two):
    device = device_of("nvlink", 0)
    for scale in (1.0, 1e-6, 1e4, 1e-30):
        x = (torch.randn(33, 1024 + 8, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)
        on_device, y = x.to(device), torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(33, 9, device=device)
        _C.gpu_quantize(on_device, y, scales, power_of_two, *how_of(dtype))
        assert_all_same(f"scale {scale}", (y, scales), quantize_fp8(x, power_of_two=power_of_two))


@pytest.mark.gpu
@pytest.mark.parametrize("copies", ((False,), (True,), (False, True)), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_of_weights(dtype, copies):
    """copies: whether each that is made at once is transposed."""
    device, (num_experts, n, k) = device_of("nvlink", 0), (3, 256, 384)
    memory = (torch.randn(num_experts, n * k + 64, generator=torch.Generator().manual_seed(3)) * 0.02).to(dtype).to(device)
    w = memory[:, : n * k].view(num_experts, n, k)  # with other memory between the matrices
    w[1, 200, 300] = torch.inf
    copies_of = {}
    for transposed in copies:
        rows, columns = (k, n) if transposed else (n, k)
        y = torch.empty(num_experts, rows, columns, dtype=torch.float8_e4m3fn, device=device)
        copies_of[transposed] = y, torch.full((num_experts, rows // 128, columns // 128), -1.0, device=device)
    _C.gpu_quantize_weights(w, w.stride(0), *copies_of.get(False, (None, None)), *copies_of.get(True, (None, None)), *how_of(dtype))
    for transposed, pair in copies_of.items():
        for name, ours, theirs in zip(("y", "scales"), pair, quantize_fp8_weights(w.cpu(), transposed=transposed), strict=True):
            torch.testing.assert_close(ours.cpu().float(), theirs.float(), rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.gpu
def test_rows_that_begin_at_any_address():
    device = device_of("nvlink", 0)
    flat = torch.randn(1 + 5 * 136, generator=torch.Generator().manual_seed(2)).bfloat16()
    x = flat.to(device)[1:].view(5, 136)
    assert x.is_contiguous() and (x.data_ptr() % 16 or x.device.type == "cpu")
    assert_all_same("y and scales", quantize_fp8(x), reference.quantize_fp8(flat[1:].view(5, 136)))


@on_ranks(2, backend=BACKENDS)
def test_dispatch_quantizes(rank, backend):
    device = device_of(backend, rank)
    buffer = Buffer(None, 40, 256, 8, 2, backend=backend, timeout_s=60)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(33, 256, generator=generator).bfloat16().to(device)
    idx = torch.rand(33, 8, generator=generator).argsort(1)[:, :2].contiguous().to(device)
    y, scales = quantize_fp8(x)
    for layout in ("expert", "rank"):
        ours, theirs = buffer.dispatch(x, idx, layout=layout, fp8=True), buffer.dispatch(y, idx, x_scales=scales, layout=layout)
        assert_fields_same(ours, theirs, "recv_x", "recv_x_scales")
    with refused(rank, 0, ValueError, "fp8 and x_scales were both given"):
        buffer.dispatch(y, idx, x_scales=scales, fp8=rank == 0)
    with refused(rank, 0, TypeError, "x must be a torch.Tensor, not list"):
        buffer.dispatch(x.tolist() if rank == 0 else x, idx, fp8=True)
    with pytest.raises(EPMismatchError, match="float8_e5m2 rows"):
        buffer.dispatch(y if rank == 0 else y.float().to(torch.float8_e5m2), idx, x_scales=scales)
    with refused(rank, 0, ValueError, "fp8=True has no gradient and x requires one"):
        buffer.dispatch(x.float().requires_grad_() if rank == 0 else x.float(), idx, fp8=True)
