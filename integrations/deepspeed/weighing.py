"""The sum over a token's experts, as DeepSpeed computes it."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Tokens at a time on the CPU: products in fp32 stay in the cache, and no memory is allocated for all of them.
_BLOCK = 64


def weighed_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """rows [num_topk, num_tokens, hidden] fp32, bf16 or fp16, weights [num_topk, num_tokens] fp32 -> [num_tokens, hidden], rows' dtype.

    Products and their sum in fp32, rounded once; in forward and backward bit for bit `(rows * weights.unsqueeze(-1)).sum(0)` and the
    cast that DeepSpeed 0.19.4 and newer has there.
    """
    return _WeighedSum.apply(rows, weights)


class _WeighedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        output = rows.new_empty(rows.shape[1:])
        for tokens in _blocks(rows):
            output[tokens] = (rows[:, tokens] * weights[:, tokens, None]).sum(0)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights = ctx.saved_tensors
        grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
        for tokens in _blocks(rows):
            wide = grad[tokens].float()
            grad_rows[:, tokens] = wide * weights[:, tokens, None]
            grad_weights[:, tokens] = (wide * rows[:, tokens]).sum(-1)
        return grad_rows, grad_weights


def _blocks(rows: Tensor) -> list[slice]:
    num_tokens = rows.shape[1]
    step = _BLOCK if rows.device.type == "cpu" else max(1, num_tokens)
    return [slice(start, start + step) for start in range(0, num_tokens, step)]
