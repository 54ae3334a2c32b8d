"""Products of fp8 rows, grouped by expert, with fp8 matrices: on CPUs the arithmetic of the kernels, on GPUs the kernels.

Groups of rows are padded to multiples of `GROUP_ALIGNMENT`. `offsets`, on the device of the rows, are the ends of the groups, so the host
waits for nothing, and all can be part of CUDA graphs. docs/design/fp8_training.md describes blocks and scales.
"""

import functools
import importlib.util
import itertools

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.device import launch, on_device
from deepep_moe.errors import BackendUnavailableError
from deepep_moe.installed import without_nvcc
from deepep_moe.ops.quant import BLOCK, FP8, dequantize_fp8
from deepep_moe.ops.weighted import aligned

GROUP_ALIGNMENT = BLOCK


@functools.cache
def why_no_products(device: torch.device) -> str | None:
    """Return why products of fp8 rows cannot be made on the device; None if they can."""
    if device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"{torch.cuda.get_device_name(device)} has no fp8 products; take a Hopper GPU (capability 9.0), or leave out fp8"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed, in which some fp8 kernels are written; pip install triton"
    if not hasattr(_C, "gpu_fp8_product"):
        return without_nvcc("fp8 products")
    return None


def check_products(device: torch.device) -> None:
    """Raise BackendUnavailableError if the device has no products of fp8 rows."""
    if (reason := why_no_products(device)) is not None:
        raise BackendUnavailableError(f"fp8 experts cannot run: {reason}")


def check_widths(**widths: int) -> None:
    """Raise ValueError for a width that is no multiple of the block size."""
    for name, width in widths.items():
        if width % BLOCK:
            raise ValueError(f"{name} is {width}, but fp8 experts need multiples of {BLOCK}; choose one, or switch fp8 off")


def check_alignment(name: str, value: int) -> None:
    """Raise ValueError if `value` is no multiple of `GROUP_ALIGNMENT`."""
    if value % GROUP_ALIGNMENT:
        next_one = -(-value // GROUP_ALIGNMENT) * GROUP_ALIGNMENT
        raise ValueError(f"{name} is {value}, but fp8 experts need a multiple of {GROUP_ALIGNMENT}; pass {next_one}")


def grouped_fp8_product(x: Tensor, x_scales: Tensor, w: Tensor, w_scales: Tensor, offsets: Tensor) -> Tensor:
    """Return each row times the transposed matrix of its expert: [num_rows, n] bf16, from fp32 sums. Rows behind the groups are not set.

    Args:
        x: [num_rows, k] e4m3. x_scales: [num_rows, k / 128] fp32.
        w: [num_experts, n, k] e4m3, contiguous. w_scales: [num_experts, n / 128, k / 128] fp32.
        offsets: [num_experts] int32. The rows of each expert end there, at multiples of 128.
    """
    if x.is_cuda:
        x, x_scales, w, w_scales = map(aligned, (x, x_scales, w, w_scales))
        y = torch.empty(len(x), w.shape[1], dtype=torch.bfloat16, device=x.device)
        launch(_C.gpu_fp8_product, x, x_scales, w, w_scales, offsets, y, on=x)
        return y
    y = x.new_empty(len(x), w.shape[1], dtype=torch.bfloat16)
    for expert, rows in enumerate(_groups(offsets)):
        matrix = dequantize_fp8(w[expert], w_scales[expert].repeat_interleave(BLOCK, dim=0))
        y[rows] = _in_fp32(dequantize_fp8(x[rows], x_scales[rows]), matrix).bfloat16()
    return y


def grouped_fp8_weight_gradient(dy_t: Tensor, dy_t_scales: Tensor, x_t: Tensor, x_t_scales: Tensor, offsets: Tensor, out: Tensor) -> Tensor:
    """Fill and return `out`: for each expert the product of its columns of dy_t with those of x_t. An expert without rows has zeros.

    Args:
        dy_t: [n, num_rows] e4m3, num_rows a multiple of 128. dy_t_scales: [num_rows / 128, n] fp32.
        x_t: [k, num_rows] e4m3. x_t_scales: [num_rows / 128, k] fp32. Both as `rescale_transpose` returns them.
        offsets: as in `grouped_fp8_product`. Columns behind the last group are not read.
        out: [num_experts, n, k] fp32 or bf16.
    """
    if out.dtype not in (torch.float32, torch.bfloat16) or not out.is_contiguous():
        raise ValueError(f"out has dtype {out.dtype} and strides {list(out.stride())}; pass contiguous float32 or bfloat16")
    if dy_t.is_cuda:
        if dy_t.shape[1] == 0:
            return out.zero_()
        operands = map(aligned, (dy_t, dy_t_scales, x_t, x_t_scales))
        launch(_C.gpu_fp8_weight_gradient, *operands, offsets, out, out.dtype == torch.float32, on=out)
        return out
    dy_scales, x_scales = dy_t_scales.t(), x_t_scales.t()  # as those of rows of dy_t and x_t
    for expert, columns in enumerate(_groups(offsets)):
        blocks = slice(columns.start // BLOCK, columns.stop // BLOCK)
        dy, x = dequantize_fp8(dy_t[:, columns], dy_scales[:, blocks]), dequantize_fp8(x_t[:, columns], x_scales[:, blocks])
        out[expert] = _in_fp32(dy, x)
    return out


def rescale_transpose(x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return x transposed, with scales for 128 rows: x_t [k, num_rows] e4m3, x_t_scales [num_rows / 128, k] fp32.

    The 128 rows of a block get the largest of their scales, so values of the other rows get smaller exponents. This is exact for the
    values that docs/design/fp8_training.md names; others are rounded to nearest even. The idea is from FP8-Flow-MoE (arXiv:2511.02302).

    x: [num_rows, k] e4m3, both multiples of 128. scales: [num_rows, k / 128] fp32, powers of two, or 0 in rows of zeros.
    """
    if x.is_cuda:
        from deepep_moe.ops import fp8_row_kernels  # it imports Triton

        with on_device(x):
            return fp8_row_kernels.rescale_transpose(x, scales)
    blocks, of_blocks = x.float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)), scales.unflatten(0, (-1, BLOCK))
    largest = of_blocks.amax(1, keepdim=True)
    factors = torch.where(largest == 0, 0.0, of_blocks / largest)
    y = (blocks * factors.unsqueeze(-1)).to(FP8).view(x.shape)
    return y.t().contiguous(), largest.squeeze(1).repeat_interleave(BLOCK, dim=1)


def _in_fp32(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return a @ b.t()


def _groups(offsets: Tensor) -> list[slice]:
    return [slice(start, end) for start, end in itertools.pairwise([0, *offsets.tolist()])]
