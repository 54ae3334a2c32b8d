"""Weighing rows: the sum over a token's rows that came back one by one, and the gradients of weighing before and after a combine."""

import contextlib
from typing import Any

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.backends.base import DTYPES
from deepep_moe.backends.streams import current_stream

GPU = "cuda"  # the type of the devices that the CUDA kernels serve

# Rows or tokens at a time on the CPU: products in fp32 stay in the cache, and no memory is allocated for all of them.
_BLOCK = 64


def weigh_backward(grad: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and weights, from that of `x * weights[:, None]`.

    grad, x: [num_rows, hidden] contiguous, of the same dtype; on GPUs fp32, bf16 or fp16. weights: [num_rows] fp32.
    Returns [num_rows, hidden] in x's dtype and [num_rows] fp32, both computed in fp32.
    """
    grad_x, grad_weights = torch.empty_like(grad), torch.empty_like(weights)
    if not _has_kernels(grad):
        for rows in _blocks(x):
            wide = grad[rows].float()
            grad_x[rows] = wide * weights[rows, None]
            grad_weights[rows] = (wide * x[rows]).sum(1)
        return grad_x, grad_weights
    device = max(0, grad.get_device())
    _C.gpu_scale_rows_backward(grad, x, weights, grad_x, grad_weights, DTYPES[grad.dtype], device, current_stream(grad.device))
    return grad_x, grad_weights


def weighed_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """`(rows * weights.unsqueeze(-1)).sum(0)` in fp32, lanes ascending on GPUs, rounded once.

    rows: [num_topk, num_tokens, hidden] fp32, bf16 or fp16, on GPUs rows of whole 16 bytes. weights: [num_topk, num_tokens] fp32.
    Returns [num_tokens, hidden] in the dtype of the rows.
    """
    sums = rows.new_empty(rows.shape[1:])
    if _has_kernels(rows):
        rows, weights, params = _ordered(rows, weights)
        params.sums = sums.data_ptr()
        with _current(rows):
            _C.gpu_weighted_sum(params, current_stream(rows.device))
        return sums
    for tokens in _blocks(rows):
        sums[tokens] = (rows[:, tokens] * weights[:, tokens, None]).sum(0)
    return sums


def weighed_sum_backward(grad: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of rows and weights, from that of `weighed_sum`, [num_tokens, hidden] in the dtype of the rows; computed in fp32."""
    if _has_kernels(rows):
        rows, weights, params = _ordered(rows, weights)
        grad, grad_rows, grad_weights = aligned(grad), torch.empty_like(rows), torch.empty_like(weights)
        params.grad, params.grad_rows, params.grad_weights = grad.data_ptr(), grad_rows.data_ptr(), grad_weights.data_ptr()
        with _current(rows):
            _C.gpu_weighted_sum_backward(params, current_stream(rows.device))
        return grad_rows, grad_weights
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    for tokens in _blocks(rows):
        wide = grad[tokens].float()
        grad_rows[:, tokens] = wide * weights[:, tokens, None]
        grad_weights[:, tokens] = (wide * rows[:, tokens]).sum(-1)
    return grad_rows, grad_weights


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.device.type == GPU and hasattr(_C, "gpu_scale_rows_backward")


def _current(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Meanwhile the tensor's device is the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def aligned(rows: Tensor) -> Tensor:
    """`rows` as kernels read them: contiguous, in whole pieces."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % _C.ROW_ALIGNMENT else rows


def _ordered(rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Any]:
    """rows and weights in one order, lane by lane or token by token, whichever the rows have; and params that say which."""
    params = _C.GpuWeightedSumParams()
    params.num_topk, params.num_tokens, params.hidden = rows.shape
    params.lane_stride, params.token_stride, params.dtype = params.num_tokens, 1, DTYPES[rows.dtype]
    by_token = rows.transpose(0, 1)
    if by_token.is_contiguous() and not rows.is_contiguous():
        params.lane_stride, params.token_stride = 1, params.num_topk
        rows, weights = aligned(by_token).transpose(0, 1), weights.t().contiguous().t()
    else:
        rows, weights = aligned(rows), weights.contiguous()
    params.rows, params.weights = rows.data_ptr(), weights.data_ptr()
    return rows, weights, params


def _blocks(rows: Tensor) -> list[slice]:
    """Of its last dimension but one."""
    num_rows = rows.shape[-2]
    step = _BLOCK if rows.device.type == "cpu" else max(1, num_rows)
    return [slice(start, start + step) for start in range(0, num_rows, step)]
