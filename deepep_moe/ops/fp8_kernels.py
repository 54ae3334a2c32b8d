"""Grouped fp8 products of Hopper GPUs. `ops.fp8_products` documents all three functions. No call waits: all can be part of CUDA graphs."""

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.device import launch, on_device
from deepep_moe.ops.weighted import aligned  # as the tensor memory accelerator asks


def grouped_fp8_product(x: Tensor, x_scales: Tensor, w: Tensor, w_scales: Tensor, offsets: Tensor) -> Tensor:
    """Return each row times the transposed matrix of its expert: bf16 [num_rows, n]. Rows after the last group's are not set."""
    x, x_scales, w, w_scales = map(aligned, (x, x_scales, w, w_scales))
    y = torch.empty(len(x), w.shape[1], dtype=torch.bfloat16, device=x.device)
    launch(_C.gpu_fp8_product, x, x_scales, w, w_scales, offsets, y, on=x)
    return y


def grouped_fp8_weight_gradient(dy_t: Tensor, dy_t_scales: Tensor, x_t: Tensor, x_t_scales: Tensor, offsets: Tensor, out: Tensor) -> Tensor:
    """Fill and return out [num_experts, n, k]: for each expert the product of its columns of dy_t with those of x_t."""
    if out.dtype not in (torch.float32, torch.bfloat16) or not out.is_contiguous():
        raise ValueError(f"out has dtype {out.dtype} and strides {list(out.stride())}; pass contiguous float32 or bfloat16")
    dy_t, dy_t_scales, x_t, x_t_scales = map(aligned, (dy_t, dy_t_scales, x_t, x_t_scales))
    if dy_t.shape[1] == 0:
        return out.zero_()
    launch(_C.gpu_fp8_weight_gradient, dy_t, dy_t_scales, x_t, x_t_scales, offsets, out, out.dtype == torch.float32, on=out)
    return out


def rescale_transpose(x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return x_t [k, num_rows] e4m3 and its scales for 128 rows, [num_rows / 128, k] fp32."""
    from deepep_moe.ops import fp8_row_kernels  # it imports Triton

    with on_device(x):
        return fp8_row_kernels.rescale_transpose(x, scales)
