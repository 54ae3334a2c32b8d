"""The sum over a token's experts, as DeepSpeed computes it."""

from typing import Any

import torch
from torch import Tensor

from deepep_moe.backends import weigh


def weighed_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """rows [num_topk, num_tokens, hidden] fp32, bf16 or fp16, weights [num_topk, num_tokens] fp32 -> [num_tokens, hidden], rows' dtype.

    Products and their sum in fp32, rounded once; in forward and backward bit for bit `(rows * weights.unsqueeze(-1)).sum(0)` and the
    cast that DeepSpeed 0.19.4 and newer has there. On GPUs, one pass each, that holds for sums of one and two lanes, more being added
    in ascending order, and not for the gradient of weights, a sum over columns.
    """
    return _WeighedSum.apply(rows, weights)


class _WeighedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return weigh.weighed_sum(rows, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return weigh.weighed_sum_backward(grad, rows, weights)
        wide = grad.float()  # to be differentiated once more
        return (wide * weights.unsqueeze(-1)).to(rows.dtype), (wide * rows.float()).sum(-1)
