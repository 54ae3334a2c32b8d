"""FP8 with powers of two as scales: rows, matrices, their products, and the experts of one rank, forward and backward.

docs/design/fp8_training.md has the arithmetic. Every function here is a loop over its blocks.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from deepep_moe.reference.grouped_mlp import swiglu, times
from deepep_moe.reference.quant import BLOCK

_LEAST = 2.0**-100


def power_of_two_scale(block: Tensor) -> float:
    """Return the scale of a block of values: the least power of two that is at least its largest magnitude / 448."""
    largest = float(block.float().abs().max())
    if not math.isfinite(largest):
        return math.inf
    mantissa, exponent = math.frexp(float(torch.tensor(max(largest, _LEAST)) / torch.tensor(448.0)))
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


def quantize_blocks(x: Tensor, rows_of_block: int) -> tuple[Tensor, Tensor]:
    """Quantize x [num_rows, columns] to e4m3 in blocks of `rows_of_block` x 128: y, scales [num_rows / rows_of_block, columns / 128]."""
    y = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(x.shape[0] // rows_of_block, x.shape[1] // BLOCK)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * rows_of_block, (i + 1) * rows_of_block), slice(j * BLOCK, (j + 1) * BLOCK)
            scales[i, j] = power_of_two_scale(x[block])
            y[block] = (x[block].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return y, scales


def dequantize_blocks(y: Tensor, scales: Tensor, rows_of_block: int) -> Tensor:
    """The fp32 values of what `quantize_blocks` returned."""
    return y.float() * scales.repeat_interleave(rows_of_block, 0).repeat_interleave(BLOCK, 1)


def rescale(y: Tensor, scales: Tensor) -> Tensor:
    """Return the fp32 values of rows y [num_rows, columns] e4m3, scales [num_rows, columns / 128], once the 128 rows of a block have one
    scale."""
    values = torch.empty(y.shape)
    for block in range(0, y.shape[0], BLOCK):
        for j in range(scales.shape[1]):
            columns, largest = slice(j * BLOCK, (j + 1) * BLOCK), float(scales[block : block + BLOCK, j].max())
            for row in range(block, block + BLOCK):
                factor = float(scales[row, j]) / largest if largest else 0.0
                values[row, columns] = (y[row, columns].float() * factor).to(torch.float8_e4m3fn).float() * largest
    return values


class Gradients(NamedTuple):
    """The result of `fp8_mlp`: the output and the gradients."""

    y: Tensor
    x: Tensor
    w1: Tensor
    w2: Tensor
    probs: Tensor


def fp8_mlp(x: Tensor, counts: list[int], w1: Tensor, w2: Tensor, probs: Tensor, grad: Tensor) -> Gradients:
    """Compute SwiGLU experts whose products take fp8. x is bf16 [num_rows, hidden] grouped by expert in multiples of 128, grad like it.

    Intermediate results are bf16, as `deepep_moe.ops.grouped_mlp` has them.
    """
    result = Gradients(torch.empty_like(x), torch.empty_like(x), torch.empty_like(w1), torch.empty_like(w2), torch.empty_like(probs))
    start = 0
    for expert, count in enumerate(counts):
        rows, start = slice(start, start + count), start + count
        own_x, own_grad = quantize_blocks(x[rows], 1), quantize_blocks(grad[rows], 1)
        first, second = (dequantize_blocks(*quantize_blocks(w[expert], BLOCK), BLOCK) for w in (w1, w2))
        inner = (dequantize_blocks(*own_x, 1) @ first.t()).bfloat16().requires_grad_()
        own_probs = probs[rows].clone().requires_grad_()
        activated = times(swiglu(inner), own_probs, slice(None))
        own_a = quantize_blocks(activated.detach(), 1)
        result.y[rows] = (dequantize_blocks(*own_a, 1) @ second.t()).bfloat16()
        grad_activated = (dequantize_blocks(*own_grad, 1) @ second).bfloat16()
        grad_inner, result.probs[rows] = torch.autograd.grad(activated, (inner, own_probs), grad_activated)
        own_inner = quantize_blocks(grad_inner, 1)
        result.x[rows] = (dequantize_blocks(*own_inner, 1) @ first).bfloat16()
        result.w2[expert] = rescale(*own_grad).t() @ rescale(*own_a)
        result.w1[expert] = rescale(*own_inner).t() @ rescale(*own_x)
    return result
