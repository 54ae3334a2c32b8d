"""silu(gate) * up * prob for rows grouped by expert, and its gradients: one kernel each on GPUs, PyTorch's operators elsewhere."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from deepep_moe import _C
from deepep_moe.device import DTYPES, is_gpu, launch, readable
from deepep_moe.ops.grouped_products import Groups
from deepep_moe.ops.weighted import aligned

_SERVED = (torch.float32, torch.bfloat16, torch.float16)


def swiglu(inner: Tensor, probs: Tensor | None, groups: Groups) -> Tensor:
    """Return `silu(gate) * up * probs`, where inner [num_rows, 2 * intermediate] is gate and up side by side.

    probs: [num_rows] floating point, or None for ones. Operations are rounded one after another to the dtype of inner, as PyTorch does; a
    product with a prob is rounded once. Rows of the tail are not set.
    """
    if not _has_kernels(inner, probs):
        gate, up = inner.chunk(2, dim=-1)
        return scaled(silu(gate).mul_(up), probs)
    inner, y = aligned(inner), inner.new_empty(len(inner), inner.shape[1] // 2)
    launch(_C.gpu_swiglu, inner, readable_probs(probs), groups.offsets, y, DTYPES[inner.dtype], on=inner)
    return y


def swiglu_backward(
    grad: Tensor, inner: Tensor, probs: Tensor | None, groups: Groups, with_output: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of inner and probs, and the output again if asked for. May overwrite grad [num_rows, intermediate].

    In the tail the gradient of probs is zero; the rest is not set.
    """
    if not _has_kernels(inner, probs):
        return _backward_by_operators(grad, inner, probs, groups, with_output)
    grad, inner, grad_inner = aligned(grad), aligned(inner), torch.empty_like(inner)
    y = torch.empty_like(grad) if with_output else None
    grad_probs = None if probs is None else torch.empty_like(probs, memory_format=torch.contiguous_format)
    arguments = inner, readable_probs(probs), groups.offsets, y, grad, grad_inner, grad_probs, DTYPES[inner.dtype]
    launch(_C.gpu_swiglu_backward, *arguments, on=inner)
    return grad_inner, grad_probs, y


def scaled(values: Tensor, probs: Tensor | None) -> Tensor:
    """Multiply values by probs in place, where they fit, with one rounding."""
    return values if probs is None else values.mul_(probs.unsqueeze(-1))


def readable_probs(probs: Tensor | None) -> Tensor | None:
    return None if probs is None else readable(probs)


def _has_kernels(inner: Tensor, probs: Tensor | None) -> bool:
    is_served = is_gpu(inner.device) and hasattr(_C, "gpu_swiglu") and inner.dtype in _SERVED
    has_pieces = inner.shape[1] // 2 * inner.element_size() % _C.ROW_ALIGNMENT == 0
    return is_served and has_pieces and (probs is None or probs.dtype == torch.float32)


def _backward_by_operators(
    grad: Tensor, inner: Tensor, probs: Tensor | None, groups: Groups, with_output: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    gate, up = inner.chunk(2, dim=-1)
    activated = silu(gate)
    product = activated * up
    grad_probs = None if probs is None else groups.clear_tail(grad.to(probs.dtype, copy=True).mul_(product).sum(-1))
    grad = scaled(grad, probs)
    grad_inner = torch.empty_like(inner)
    grad_gate, grad_up = grad_inner.chunk(2, dim=-1)
    torch.mul(grad, activated, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=grad_gate)
    return grad_inner, grad_probs, scaled(product, probs) if with_output else None
