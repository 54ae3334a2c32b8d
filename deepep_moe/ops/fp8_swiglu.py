"""SwiGLU between two fp8 products: its result, and the gradient of its input, as fp8. One kernel each on GPUs."""

import torch
from torch import Tensor

from deepep_moe.device import on_device
from deepep_moe.ops.grouped_products import Groups
from deepep_moe.ops.quant import quantize_fp8
from deepep_moe.ops.quantized import QuantizedRows
from deepep_moe.ops.swiglu import swiglu, swiglu_backward


def swiglu_fp8(inner: Tensor, probs: Tensor | None, groups: Groups) -> tuple[Tensor, Tensor]:
    """Return `swiglu` of the same arguments as fp8: values [num_rows, intermediate] e4m3 and scales [num_rows, intermediate / 128].

    inner: [num_rows, 2 * intermediate] bf16, intermediate a multiple of 128. Rows of the tail are not set.
    """
    if _has_kernels(inner, probs):
        from deepep_moe.ops import fp8_row_kernels  # which imports Triton

        with on_device(inner):
            return fp8_row_kernels.swiglu_quantized(inner, _contiguous(probs), groups.offsets)
    return quantize_fp8(swiglu(inner, probs, groups).contiguous(), power_of_two=True)


def swiglu_backward_fp8(grad: Tensor, inner: Tensor, probs: Tensor | None, groups: Groups) -> tuple[QuantizedRows, Tensor | None]:
    """Return the gradients of inner, as fp8, and of probs, which is zero in the tail. May overwrite grad [num_rows, intermediate] bf16."""
    if _has_kernels(inner, probs):
        from deepep_moe.ops import fp8_row_kernels

        with on_device(inner):
            rows, grad_probs = fp8_row_kernels.swiglu_backward_quantized(grad, inner, _contiguous(probs), groups.offsets)
        return QuantizedRows(*rows), grad_probs
    grad_inner, grad_probs, _ = swiglu_backward(grad, inner, probs, groups, with_output=False)
    return QuantizedRows.of(grad_inner), grad_probs


def _contiguous(probs: Tensor | None) -> Tensor | None:
    return None if probs is None else probs.contiguous()


def _has_kernels(inner: Tensor, probs: Tensor | None) -> bool:
    return inner.is_cuda and (probs is None or probs.dtype == torch.float32)
