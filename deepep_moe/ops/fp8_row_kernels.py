"""Triton kernels for fp8 rows between products: the transposed copy for weights' gradients, and SwiGLU that quantizes its result.

A scale is the smallest power of two that is 1/448 of its block's largest magnitude or more, as `quantize_fp8` has it; magnitudes below
2^-100 count as that.
"""

import torch
import triton
import triton.language as tl

BLOCK = 128
_BLOCKS = 2  # blocks of 128 columns that a program of SwiGLU serves at a time
_ROWS = 16  # of such a program


@triton.jit
def _rescale_transpose(x_ptr, scales_ptr, y_ptr, y_scales_ptr, num_rows, k, BLOCK: tl.constexpr):
    """Handle one block of 128 rows and 128 columns."""
    blocks = k // BLOCK
    block_row, block_column = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    rows, columns = block_row * BLOCK + tl.arange(0, BLOCK), block_column * BLOCK + tl.arange(0, BLOCK)
    scales = tl.load(scales_ptr + rows * blocks + block_column)
    # Not tl.max, which would not give NaN for NaN.
    largest = tl.max(tl.where(scales == scales, scales, float("inf")), 0)
    factors = tl.where(largest == 0, 0.0, scales / largest)  # powers of two: exact
    x = tl.load(x_ptr + rows[:, None] * k + columns[None, :]).to(tl.float32)
    y = (x * factors[:, None]).to(tl.float8e4nv)
    tl.store(y_ptr + columns.to(tl.int64)[:, None] * num_rows + rows[None, :], tl.trans(y))
    tl.store(y_scales_ptr + block_row * k + columns, tl.zeros((BLOCK,), tl.float32) + largest)


@triton.jit
def _rounded(x):
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _quantized(x, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return x [ROWS, BLOCKS * BLOCK] fp32 as e4m3, and the scales [ROWS, BLOCKS]."""
    blocks = tl.reshape(x, (ROWS, BLOCKS, BLOCK))
    magnitudes = tl.abs(blocks)
    magnitudes = tl.where(magnitudes == magnitudes, magnitudes, float("inf"))
    largest = tl.maximum(tl.max(magnitudes, 2), 7.888609052210118e-31)  # 2^-100
    bits = tl.div_rn(largest, tl.full((ROWS, BLOCKS), 448.0, tl.float32)).to(tl.int32, bitcast=True)
    # Any bit of the fraction raises the exponent.
    scales = (tl.minimum((bits + 0x7FFFFF) >> 23, 255) << 23).to(tl.float32, bitcast=True)
    y = tl.div_rn(blocks, tl.broadcast_to(scales[:, :, None], (ROWS, BLOCKS, BLOCK))).to(tl.float8e4nv)
    return tl.reshape(y, (ROWS, BLOCKS * BLOCK)), scales


@triton.jit
def _swiglu(
    inner_ptr,  # [num_rows, 2 * width] bf16
    probs_ptr,  # [num_rows] fp32
    end_ptr,  # int32: rows from there on have no expert
    y_ptr,  # [num_rows, width] e4m3
    scales_ptr,  # [num_rows, width / 128] fp32
    num_rows,
    width,
    HAS_PROBS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows, columns = (
        tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS),
        tl.program_id(1) * BLOCKS * BLOCK + tl.arange(0, BLOCKS * BLOCK),
    )
    is_row = rows < tl.minimum(tl.load(end_ptr), num_rows)
    inside = is_row[:, None] & (columns < width)[None, :]
    at = inner_ptr + rows[:, None] * (2 * width) + columns[None, :]
    gate, up = tl.load(at, mask=inside, other=0.0).to(tl.float32), tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    y = _rounded(_rounded(gate / (1.0 + tl.exp(-gate))) * up)
    if HAS_PROBS:
        y = _rounded(y * tl.load(probs_ptr + rows, mask=is_row, other=0.0)[:, None])
    values, scales = _quantized(y, ROWS, BLOCKS, BLOCK)
    tl.store(y_ptr + rows[:, None] * width + columns[None, :], values, mask=inside)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    of_block = is_row[:, None] & (blocks < width // BLOCK)[None, :]
    tl.store(scales_ptr + rows[:, None] * (width // BLOCK) + blocks[None, :], scales, mask=of_block)


@triton.jit
def _swiglu_backward(
    grad_ptr,  # [num_rows, width] bf16
    inner_ptr,  # [num_rows, 2 * width] bf16
    probs_ptr,  # [num_rows] fp32
    end_ptr,  # int32: rows from there on have no expert
    grad_inner_ptr,  # [num_rows, 2 * width] e4m3
    scales_ptr,  # [num_rows, 2 * width / 128] fp32
    grad_probs_ptr,  # [num_rows] fp32
    num_rows,
    width,
    HAS_PROBS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program serves whole rows, so that it can sum what they say of the prob."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = rows < tl.minimum(tl.load(end_ptr), num_rows)
    if HAS_PROBS:
        probs = tl.load(probs_ptr + rows, mask=is_row, other=0.0)[:, None]
    sums = tl.zeros((ROWS,), tl.float32)
    for first in range(0, width, BLOCKS * BLOCK):
        columns = first + tl.arange(0, BLOCKS * BLOCK)
        inside = is_row[:, None] & (columns < width)[None, :]
        at = rows[:, None] * (2 * width) + columns[None, :]
        gate = tl.load(inner_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(inner_ptr + at + width, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + rows[:, None] * width + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        activated = _rounded(gate / (1.0 + tl.exp(-gate)))
        if HAS_PROBS:
            sums += tl.sum(grad * _rounded(activated * up), 1)
            grad = _rounded(grad * probs)
        of_gate = _rounded(_rounded(grad * up) * sigmoid * (1.0 + gate * (1.0 - sigmoid)))
        blocks = first // BLOCK + tl.arange(0, BLOCKS)
        of_block = is_row[:, None] & (blocks < width // BLOCK)[None, :]
        to = scales_ptr + rows[:, None] * (2 * width // BLOCK) + blocks[None, :]
        values, scales = _quantized(of_gate, ROWS, BLOCKS, BLOCK)
        tl.store(grad_inner_ptr + at, values, mask=inside)
        tl.store(to, scales, mask=of_block)
        values, scales = _quantized(_rounded(grad * activated), ROWS, BLOCKS, BLOCK)
        tl.store(grad_inner_ptr + at + width, values, mask=inside)
        tl.store(to + width // BLOCK, scales, mask=of_block)
    if HAS_PROBS:
        tl.store(grad_probs_ptr + rows, sums, mask=rows < num_rows)


def rescale_transpose(x: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x_t [k, rows] e4m3 and its scales [rows / 128, k] fp32, as `fp8_products.rescale_transpose` documents it."""
    num_rows, k = x.shape
    x_t = torch.empty(k, num_rows, dtype=x.dtype, device=x.device)
    x_t_scales = torch.empty(num_rows // BLOCK, k, dtype=torch.float32, device=x.device)
    if x.numel():
        blocks = num_rows // BLOCK * (k // BLOCK)
        _rescale_transpose[(blocks,)](x.contiguous(), scales.contiguous(), x_t, x_t_scales, num_rows, k, BLOCK, num_warps=8)
    return x_t, x_t_scales


def swiglu_quantized(inner: torch.Tensor, probs: torch.Tensor | None, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return silu(gate) * up * probs of inner [rows, 2 * width] bf16, gate and up side by side, as e4m3 [rows, width] and its scales.

    Each operation rounds to bf16, as in `swiglu`. The result is quantized in blocks of 128 columns with scales that are powers of two.
    The width is a multiple of 128. The probs are [rows] fp32, or None for ones. The offsets, [experts] int32, are the ends of the experts'
    rows. Rows after the last end are not set. The scales are [rows, width / 128] fp32.
    """
    num_rows, width = inner.shape[0], inner.shape[1] // 2
    y = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=inner.device)
    scales = torch.empty(num_rows, width // BLOCK, dtype=torch.float32, device=inner.device)
    if num_rows:
        grid = triton.cdiv(num_rows, _ROWS), triton.cdiv(width, _BLOCKS * BLOCK)
        _swiglu[grid](
            inner.contiguous(), probs, offsets[-1:], y, scales, num_rows, width, probs is not None, _ROWS, _BLOCKS, BLOCK, num_warps=8
        )  # fmt: skip
    return y, scales


def swiglu_backward_quantized(
    grad: torch.Tensor, inner: torch.Tensor, probs: torch.Tensor | None, offsets: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
    """Return the gradient of inner as e4m3 [rows, 2 * width] with scales [rows, 2 * width / 128], and that of probs, or None without probs.

    grad: [rows, width] bf16, that of the result. The rest is as in `swiglu_quantized`; the gradient of a prob without expert is 0.
    """
    num_rows, width = grad.shape
    grad_inner = torch.empty(num_rows, 2 * width, dtype=torch.float8_e4m3fn, device=grad.device)
    scales = torch.empty(num_rows, 2 * width // BLOCK, dtype=torch.float32, device=grad.device)
    grad_probs = None if probs is None else torch.empty(num_rows, dtype=torch.float32, device=grad.device)
    if num_rows:
        _swiglu_backward[(triton.cdiv(num_rows, _ROWS // 4),)](
            grad.contiguous(), inner.contiguous(), probs, offsets[-1:], grad_inner, scales, grad_probs, num_rows, width, probs is not None,
            _ROWS // 4, _BLOCKS, BLOCK, num_warps=4,
        )  # fmt: skip
    return (grad_inner, scales), grad_probs
