"""Gradients of weighing rows, which a weighted combine does before it adds them up."""

import contextlib

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.backends.base import DTYPE_NAMES

GPU = "cuda"  # the type of the devices that the CUDA kernel serves


def weigh_backward(grad: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and weights, from that of `x * weights[:, None]`.

    grad, x: [num_rows, hidden] contiguous, of the same dtype; on GPUs fp32, bf16 or fp16. weights: [num_rows] fp32.
    Returns [num_rows, hidden] in x's dtype and [num_rows] fp32, both computed in fp32.
    """
    if not (grad.device.type == GPU and hasattr(_C, "gpu_weigh_backward")):
        return (grad.float() * weights[:, None]).to(x.dtype), (grad.float() * x.float()).sum(1)
    grad_x, grad_weights = torch.empty_like(x), torch.empty_like(weights)
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        _C.gpu_weigh_backward(
            grad=grad.data_ptr(), x=x.data_ptr(), weights=weights.data_ptr(), grad_x=grad_x.data_ptr(),
            grad_weights=grad_weights.data_ptr(),
            num_rows=x.shape[0], hidden=x.shape[1], dtype=getattr(_C.DType, DTYPE_NAMES[x.dtype]),
            stream=torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
    return grad_x, grad_weights
