"""Rows times weights: the weighted sum over a token's rows that came back one by one, and the gradients of scaling rows before and after a
combine.
"""

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.device import DTYPES, is_gpu, launch, readable
from deepep_moe.library import Context, Function, register

# Rows or tokens at a time on the CPU: products in fp32 stay in the cache, and no memory is allocated for all of them.
_BLOCK = 64


# ---- weighted sum ----


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """Return `(rows * weights.unsqueeze(-1)).sum(0)`, computed in fp32 and rounded once. Differentiable in both.

    rows: [num_topk, num_tokens, hidden] fp32, bf16 or fp16, on GPUs rows of whole 16 bytes. weights: [num_topk, num_tokens] fp32.
    Returns [num_tokens, hidden] in the dtype of the rows.

    Forward and backward are bit for bit those of this expression and the cast that DeepSpeed 0.19.4 and newer has there. On GPUs that
    holds for sums of one and two lanes; more are added in ascending order. It does not hold there for the gradient of weights, a sum over
    columns.
    """
    summed: Tensor = _WeightedSum.apply(rows, weights)
    return summed


class _WeightedSum(Function):
    @staticmethod
    def forward(ctx: Context, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return _weighted_sum(rows, weights)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return weighted_sum_backward(grad, rows, weights)
        return differentiable_scale_rows_backward(grad, rows, weights)


def _weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    sums = rows.new_empty(rows.shape[1:])
    if _has_kernels(rows):
        _run_weighted_sum(rows, weights, False, sums)
        return sums
    for tokens in _blocks(rows):
        sums[tokens] = (rows[:, tokens] * weights[:, tokens, None]).sum(0)
    return sums


def _run_weighted_sum(rows: Tensor, weights: Tensor, is_fused: bool, sums: Tensor) -> None:
    rows, weights, is_by_token = _ordered(rows, weights)
    launch(_C.gpu_weighted_sum, rows, weights, is_by_token, is_fused, sums, DTYPES[rows.dtype], on=rows)


def weighted_sum_backward(grad: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and weights from `grad`, that of `weighted_sum` [num_tokens, hidden] in the rows' dtype. Uses fp32."""
    if _has_kernels(rows):
        rows, weights, is_by_token = _ordered(rows, weights)
        grad, grad_rows, grad_weights = aligned(grad), torch.empty_like(rows), torch.empty_like(weights)
        arguments = rows, weights, is_by_token, grad, grad_rows, grad_weights, DTYPES[rows.dtype]
        launch(_C.gpu_weighted_sum_backward, *arguments, on=rows)
        return grad_rows, grad_weights
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    for tokens in _blocks(rows):
        wide = grad[tokens].float()
        grad_rows[:, tokens] = wide * weights[:, tokens, None]
        grad_weights[:, tokens] = (wide * rows[:, tokens]).sum(-1)
    return grad_rows, grad_weights


def _ordered(rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Return rows and weights in one order, lane by lane or token by token, whichever the rows have; and whether it is by token."""
    by_token = rows.transpose(0, 1)
    if by_token.is_contiguous() and not rows.is_contiguous():
        return aligned(by_token).transpose(0, 1), readable(weights.t()).t(), True
    return aligned(rows), readable(weights), False


# ---- sums by lanes ----


@torch.inference_mode()  # PyTorch takes no part in it, on any thread
def sum_lanes(sums: Tensor, rows: Tensor, weights: Tensor | None, bias: Tensor | None, is_fused: bool) -> None:
    """Write the sums of `Buffer(sums="lanes")` to `sums` [num_tokens, hidden], without gradient.

    rows: [num_tokens * num_topk, hidden] in the dtype of `sums`, token by token. weights: as many, fp32, 0 where there is no row. None
    stands for ones. bias: [num_tokens, hidden] or None. is_fused: a product is not rounded before it is added.
    """
    num_topk = len(rows) // max(1, len(sums))
    lanes = rows.view(len(sums), num_topk, sums.shape[1]).transpose(0, 1)
    of_lanes = None if weights is None else weights.view(len(sums), num_topk).t()
    if bias is None and of_lanes is not None and len(sums) > 0 and _has_kernels(rows):
        _run_weighted_sum(lanes, of_lanes, is_fused, sums)
        return
    total = torch.zeros(sums.shape, dtype=torch.float32, device=sums.device)
    for lane, row in enumerate(lanes):
        if of_lanes is None:
            total += row
        else:
            weight, term = of_lanes[lane, :, None], row.float()
            total = fused_multiply_add(weight, term, total) if is_fused else total + weight * term
    sums.copy_(total if bias is None else total + bias)


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of fp32 tensors with one rounding.

    The product is exact in double precision. The sum is rounded to odd there: to the neighbour with an odd last bit, unless it is exact.
    Then the rounding to fp32 is that of the exact sum (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product, wide = a.double() * b.double(), c.double()
    total = product + wide
    back = total - product
    rest = (product - (total - back)) + (wide - back)  # what the rounding of `total` has lost, exactly (Knuth's TwoSum)
    bits = total.view(torch.int64)
    is_inexact_even = (rest != 0) & (bits & 1 == 0) & total.isfinite()
    towards = torch.where((rest > 0) == (total > 0), 1, -1)  # away from zero, or towards it
    return torch.where(is_inexact_even, bits + towards, bits).view(torch.float64).float()


# ---- gradients of scaled rows ----


def scale_rows_backward(grad: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weights from `grad`, that of `x * weights[:, None]`. Computes in fp32.

    grad, x: [num_rows, hidden] contiguous, of the same dtype; on GPUs fp32, bf16 or fp16. weights: [num_rows] fp32.
    Returns [num_rows, hidden] in x's dtype and [num_rows] fp32.
    """
    grad_x, grad_weights = weighted_sum_backward(grad, x[None], weights[None])
    return grad_x[0], grad_weights[0]


def differentiable_scale_rows_backward(grad: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `scale_rows_backward` so that it can be differentiated again."""
    wide = grad.float()
    return (wide * weights.unsqueeze(-1)).to(x.dtype), (wide * x.float()).sum(-1)


def _fake_scale_rows_backward(grad: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weights)


_SCHEMA = "scale_rows_backward(Tensor grad, Tensor x, Tensor weights) -> (Tensor, Tensor)"
register(_SCHEMA, scale_rows_backward, _fake_scale_rows_backward)


# ---- rows as calls and kernels take them ----


def for_lanes(rows: Tensor, num_lanes: int) -> Tensor:
    """Return each of `rows` `num_lanes` times, one after another."""
    return rows.repeat_interleave(num_lanes, 0)


def repeated(rows: Tensor, times: int) -> Tensor:
    """Return the whole of `rows`, `times` times in a row."""
    return rows if times == 1 else rows.expand(times, *rows.shape).reshape(-1, rows.shape[1]).contiguous()  # a single row stays a view


def aligned(rows: Tensor) -> Tensor:
    """Return `rows` as kernels read them: contiguous, in whole pieces."""
    rows = readable(rows)
    return rows.clone() if rows.data_ptr() % _C.ROW_ALIGNMENT else rows


def _has_kernels(tensor: Tensor) -> bool:
    return is_gpu(tensor.device) and hasattr(_C, "gpu_weighted_sum")


def _blocks(rows: Tensor) -> list[slice]:
    """Return slices of the last dimension but one."""
    num_rows = rows.shape[-2]
    step = _BLOCK if rows.device.type == "cpu" else max(1, num_rows)
    return [slice(start, start + step) for start in range(0, num_rows, step)]
