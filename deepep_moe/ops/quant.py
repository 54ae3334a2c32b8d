"""Rows to fp8 with one scale for every 128 columns."""

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.device import DTYPES, FLOATS, current_stream, on_device

_COLUMNS = 8  # that a thread of the kernel loads at once


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` as fp8 and its scales: x is about y * scales, a scale for 128 columns of a row.

    The scheme of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2): with m the largest magnitude of a block, 1e-4 at least, the scale is
    m / 448 and y is x * (448 / m) rounded to nearest even. Without gradient.

    x: [num_tokens, hidden] contiguous fp32, bf16 or fp16, hidden a multiple of 8.
    Returns y [num_tokens, hidden] float8_e4m3fn, scales [num_tokens, ceil(hidden / 128)] fp32.
    Raises TypeError for another dtype, ValueError for another shape.
    """
    if x.dtype not in FLOATS:
        raise TypeError(f"x has dtype {str(x.dtype).removeprefix('torch.')}; float32, bfloat16 or float16 can be made fp8")
    if x.dim() != 2 or x.shape[1] % _COLUMNS or not x.is_contiguous():
        raise ValueError(f"x has shape {list(x.shape)}; it must be contiguous [num_tokens, hidden] with hidden a multiple of {_COLUMNS}")
    num_scales = -(-x.shape[1] // _C.SCALE_BLOCK)
    if not (x.is_cuda and hasattr(_C, "gpu_quantize")):
        return _with_operators(x, num_scales)
    x = x.clone() if x.data_ptr() % _C.ROW_ALIGNMENT else x  # the kernel loads whole pieces
    y = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(x.shape[0], num_scales, device=x.device)
    with on_device(x):
        _C.gpu_quantize(x, y, scales, DTYPES[x.dtype], current_stream(x.device))
    return y, scales


def _with_operators(x: Tensor, num_scales: int) -> tuple[Tensor, Tensor]:
    blocks = torch.nn.functional.pad(x.detach().float(), (0, num_scales * _C.SCALE_BLOCK - x.shape[1])).unflatten(1, (num_scales, -1))
    largest = blocks.abs().amax(2).clamp(min=1e-4)
    range_ = torch.full_like(largest, torch.finfo(torch.float8_e4m3fn).max)  # a tensor: division by a number may be a multiplication
    y = (blocks * (range_ / largest)[:, :, None]).clamp(-range_[:1, :1, None], range_[:1, :1, None]) if len(x) else blocks
    return y.to(torch.float8_e4m3fn).flatten(1)[:, : x.shape[1]].contiguous(), largest / range_
