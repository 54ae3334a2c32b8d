"""Rows and matrices to fp8 with a scale for each block of 128 values, or of 128 x 128."""

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.arguments import check_memory
from deepep_moe.device import DTYPES, FLOATS, is_lazy, launch
from deepep_moe.library import call, refuse_transforms, register
from deepep_moe.ops.weighted import aligned

BLOCK = _C.SCALE_BLOCK
FP8 = torch.float8_e4m3fn
_COLUMNS = 8  # columns that a thread of the kernel loads at once
_LARGEST = torch.finfo(FP8).max
_LEAST, _LEAST_TRAINED = 1e-4, 2.0**-100  # kFp8Least and kFp8LeastTrained of csrc/common/types.h
_FRACTION_BITS = 23  # of fp32
_Quantized = tuple[Tensor, Tensor]  # values and scales


def quantize_fp8(x: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Return `x` as fp8 and its scales: x is about y * scales, with one scale per 128 columns of a row. Without gradient.

    This is the scheme of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2). Let m be the largest magnitude of a block, at least 1e-4. The
    scale is m / 448, and y is x * (448 / m) rounded to nearest even. With `power_of_two` the scale is the next power of two, so x / scale
    is exact before rounding. m is then at least 2^-100, so that small gradients keep their bits (docs/design/fp8_training.md).

    x: [num_tokens, hidden] contiguous fp32, bf16 or fp16, hidden a multiple of 8.
    Returns y [num_tokens, hidden] float8_e4m3fn, scales [num_tokens, ceil(hidden / 128)] fp32. The scale of a block with NaN or infinity is
    not finite.

    Raises:
        TypeError: another dtype.
        ValueError: another shape.
    """
    refuse_transforms("quantize_fp8", {"x": x})
    _check_dtype("x", x)
    if x.dim() != 2 or x.shape[1] % _COLUMNS or not x.is_contiguous():
        raise ValueError(f"x has shape {list(x.shape)}; it must be contiguous [num_tokens, hidden] with hidden a multiple of {_COLUMNS}")
    quantized: _Quantized = call("quantize_fp8", (x.detach(),), power_of_two)
    return quantized


def _quantize(x: Tensor, power_of_two: bool) -> _Quantized:
    if not (x.is_cuda and hasattr(_C, "gpu_quantize")):
        return _with_operators(x, power_of_two)
    x = aligned(x)  # the kernel loads whole pieces
    y, scales = _empty_rows(x, power_of_two)
    launch(_C.gpu_quantize, x, y, scales, power_of_two, DTYPES[x.dtype], on=x)
    return y, scales


def _empty_rows(x: Tensor, _power_of_two: bool) -> _Quantized:
    return x.new_empty(x.shape, dtype=FP8), x.new_empty(x.shape[0], -(-x.shape[1] // BLOCK), dtype=torch.float32)


register("quantize_fp8(Tensor x, bool power_of_two) -> (Tensor, Tensor)", _quantize, _empty_rows)


def quantize_fp8_weights(w: Tensor, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """Return matrices as fp8 and their scales, powers of two, one for each 128 x 128 block. Without gradient.

    w: [num_experts, n, k] fp32, bf16 or fp16, n and k multiples of 128, each matrix contiguous; there may be memory between them.
    Returns y [num_experts, n, k] float8_e4m3fn, scales [num_experts, n / 128, k / 128] fp32; with `transposed` the last two dimensions of
    both are exchanged in memory, with the same values. Rounding is that of `quantize_fp8` with powers of two.

    Raises: as `quantize_fp8`.
    """
    plain, other = _quantized_weights(w, with_plain=not transposed, with_transposed=transposed)
    return other if transposed else plain  # type: ignore[return-value]


def quantize_fp8_weights_both(w: Tensor) -> tuple[_Quantized, _Quantized]:
    """Return the results of `quantize_fp8_weights`, plain and transposed. On GPUs one kernel reads w once for both."""
    return _quantized_weights(w, with_plain=True, with_transposed=True)  # type: ignore[return-value]


def _quantized_weights(w: Tensor, *, with_plain: bool, with_transposed: bool) -> tuple[_Quantized | None, _Quantized | None]:
    _check_dtype("w", w)
    if w.dim() != 3 or w.shape[1] % BLOCK or w.shape[2] % BLOCK or (w.numel() > 0 and not w[0].is_contiguous()):
        raise ValueError(
            f"w has shape {list(w.shape)}; it must be [num_experts, n, k] of contiguous matrices, n and k multiples of {BLOCK}"
        )
    num_experts, n, k = w.shape
    refuse_transforms("quantize_fp8_weights", {"w": w})
    if not (w.is_cuda and hasattr(_C, "gpu_quantize_weights")):
        blocks = w.detach().float().reshape(num_experts, n // BLOCK, BLOCK, k // BLOCK, BLOCK)
        scales = _power_of_two_scales(blocks.abs().amax((2, 4)))
        y = (blocks / scales[:, :, None, :, None]).to(FP8).reshape(num_experts, n, k)
        turned = (y.transpose(1, 2).contiguous(), scales.transpose(1, 2).contiguous()) if with_transposed else None
        return (y, scales) if with_plain else None, turned
    if is_lazy(w) or w.data_ptr() % _C.ROW_ALIGNMENT or w.stride(0) * w.element_size() % _C.ROW_ALIGNMENT:
        w = w.clone(memory_format=torch.contiguous_format)
    plain = _empty_weights(w, num_experts, n, k) if with_plain else None
    turned = _empty_weights(w, num_experts, k, n) if with_transposed else None
    launch(_C.gpu_quantize_weights, w, w.stride(0), *(plain or (None, None)), *(turned or (None, None)), DTYPES[w.dtype], on=w)
    return plain, turned


def _empty_weights(like: Tensor, num_experts: int, n: int, k: int) -> _Quantized:
    y = torch.empty(num_experts, n, k, dtype=FP8, device=like.device)
    return y, torch.empty(num_experts, n // BLOCK, k // BLOCK, dtype=torch.float32, device=like.device)


def dequantize_fp8(y: Tensor, scales: Tensor) -> Tensor:
    """Return [num_rows, columns] fp32, the product of rows y [num_rows, columns] fp8 and their scales [num_rows, ceil(columns / 128)]."""
    return y.float() * scales.repeat_interleave(BLOCK, dim=1)[:, : y.shape[1]]


def _check_dtype(name: str, values: Tensor) -> None:
    check_memory(name, values)
    if values.dtype not in FLOATS:
        raise TypeError(f"{name} has dtype {str(values.dtype).removeprefix('torch.')}; float32, bfloat16 or float16 can be made fp8")


def _with_operators(x: Tensor, power_of_two: bool) -> _Quantized:
    num_scales = -(-x.shape[1] // BLOCK)
    blocks = torch.nn.functional.pad(x.float(), (0, num_scales * BLOCK - x.shape[1])).unflatten(1, (num_scales, -1))
    largest = blocks.abs().amax(2)
    if power_of_two:
        scales = _power_of_two_scales(largest)
        y = blocks / scales[:, :, None]
    else:
        largest = largest.clamp(min=_LEAST)
        range_ = torch.full_like(largest, _LARGEST)  # a tensor: division by a number may be a multiplication
        scales = largest / range_
        y = (blocks * (range_ / largest)[:, :, None]).clamp(-range_[:1, :1, None], range_[:1, :1, None]) if len(x) else blocks
    return y.to(FP8).flatten(1)[:, : x.shape[1]].contiguous(), scales


def _power_of_two_scales(largest: Tensor) -> Tensor:
    """Return the next powers of two of largest / 448."""
    return next_powers_of_two(largest.clamp(min=_LEAST_TRAINED) / torch.full_like(largest, _LARGEST))


def next_powers_of_two(scales: Tensor) -> Tensor:
    """Round positive fp32 up to powers of two, as rounded_exponent of csrc/common/types.h does; infinity for what is not finite."""
    exponents = (scales.view(torch.int32).long() + ((1 << _FRACTION_BITS) - 1)) >> _FRACTION_BITS
    return (exponents.clamp(max=255).int() << _FRACTION_BITS).view(torch.float32)
