"""Products of fp8 rows, grouped by expert, with one fp8 matrix per expert, in Triton.

A program serves one tile after another. It reads the ends of the groups on the device, so that nothing waits for them. The tensor cores
sum 128 products at a time; CUDA cores scale this sum and add it to the accumulator in fp32 (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

BLOCK = 128
"""The columns, or rows, that share a scale."""


class Tiling(NamedTuple):
    """The tile of a program, `rows` by `parts * columns`: each part has an accumulator of its own."""

    rows: int
    columns: int
    parts: int
    num_warps: int
    num_stages: int
    programs: int = 1  # of an SM


PRODUCT = Tiling(128, 128, 2, 8, 3)
WEIGHT_GRADIENT = Tiling(128, 128, 1, 8, 3)


@triton.jit
def _bounds(offsets_ptr, E: tl.constexpr, E_BLOCK: tl.constexpr):
    groups = tl.arange(0, E_BLOCK)
    ends = tl.load(offsets_ptr + groups, mask=groups < E, other=0)
    starts = tl.load(offsets_ptr + groups - 1, mask=(groups > 0) & (groups < E), other=0)
    return groups, starts, ends


@triton.jit
def _place(tile, tiles, groups, starts, ends):
    """The tile's group, its number in the group, and where the group starts and ends. tiles: how many tiles each group has."""
    last = tl.cumsum(tiles, 0)
    group = tl.sum((last <= tile).to(tl.int32), 0)
    is_it = groups == group
    inner = tile - tl.sum(tl.where(is_it, last - tiles, 0), 0)
    return group, inner, tl.sum(tl.where(is_it, starts, 0), 0), tl.sum(tl.where(is_it, ends, 0), 0)


@triton.jit
def _store_rows(y, y_ptr, tile, row, column, end, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    if row + ROWS <= end:
        y.store([row, column], tile)
    else:  # the rows after `end` belong to another group
        rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        tl.store(y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :], tile, mask=(rows < end)[:, None])


@triton.jit
def _product(
    x,  # descriptor of [num_rows, K] e4m3
    x_scales_ptr,  # [num_rows, K / 128] fp32
    w,  # descriptor of [E * N, K] e4m3
    w_scales_ptr,  # [E, N / 128, K / 128] fp32
    offsets_ptr,  # [E] int32
    y,  # descriptor of [num_rows, N] bf16
    y_ptr,
    num_rows,
    row_stride,  # of x_scales
    column_stride,
    N,
    K,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    groups, starts, ends = _bounds(offsets_ptr, E, E_BLOCK)
    num_columns = N // (PARTS * COLUMNS)
    tiles = (ends - starts + ROWS - 1) // ROWS * num_columns
    for tile in range(tl.program_id(0), tl.sum(tiles, 0), NUM_PROGRAMS):
        group, inner, start, end = _place(tile, tiles, groups, starts, ends)
        num_tile_rows = (end - start + ROWS - 1) // ROWS
        row = start + inner % num_tile_rows * ROWS
        column = inner // num_tile_rows * (PARTS * COLUMNS)
        scale_rows = x_scales_ptr + tl.minimum(row + tl.arange(0, ROWS), num_rows - 1).to(tl.int64) * row_stride
        scales = w_scales_ptr + (group * (N // 128) + column // 128) * (K // 128)
        first = tl.zeros((ROWS, COLUMNS), tl.float32)
        second = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(K // 128):
            a = x.load([row, k * 128])
            row_scales = tl.load(scale_rows + k * column_stride)
            b = w.load([group * N + column, k * 128])
            first += tl.dot(a, b.T) * (row_scales * tl.load(scales + k))[:, None]
            if PARTS == 2:
                b = w.load([group * N + column + COLUMNS, k * 128])
                scale = tl.load(scales + COLUMNS // 128 * (K // 128) + k)
                second += tl.dot(a, b.T) * (row_scales * scale)[:, None]
        _store_rows(y, y_ptr, first.to(tl.bfloat16), row, column, end, N, ROWS, COLUMNS)
        if PARTS == 2:
            _store_rows(y, y_ptr, second.to(tl.bfloat16), row, column + COLUMNS, end, N, ROWS, COLUMNS)


@triton.jit
def _weight_gradient(
    dy,  # descriptor of [N, num_rows] e4m3
    dy_scales_ptr,  # [num_rows / 128, N] fp32
    x,  # descriptor of [K, num_rows] e4m3
    x_scales_ptr,  # [num_rows / 128, K] fp32
    offsets_ptr,  # [E] int32
    out,  # descriptor of [E * N, K]
    N,
    K,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    TO: tl.constexpr,
):
    groups, starts, ends = _bounds(offsets_ptr, E, E_BLOCK)
    num_tile_rows = N // ROWS
    num_tiles = num_tile_rows * (K // (PARTS * COLUMNS))
    for tile in range(tl.program_id(0), E * num_tiles, NUM_PROGRAMS):
        is_it = groups == tile // num_tiles
        start, end = tl.sum(tl.where(is_it, starts, 0), 0), tl.sum(tl.where(is_it, ends, 0), 0)
        inner = tile % num_tiles
        row, column = inner % num_tile_rows * ROWS, inner // num_tile_rows * (PARTS * COLUMNS)
        dy_scales = dy_scales_ptr + row + tl.arange(0, ROWS)
        x_scales = x_scales_ptr + column + tl.arange(0, COLUMNS)
        first = tl.zeros((ROWS, COLUMNS), tl.float32)
        second = tl.zeros((ROWS, COLUMNS), tl.float32)
        for block in range(start // 128, end // 128):
            a = dy.load([row, block * 128])
            row_scales = tl.load(dy_scales + block * N)[:, None]
            b = x.load([column, block * 128])
            first += tl.dot(a, b.T) * row_scales * tl.load(x_scales + block * K)[None, :]
            if PARTS == 2:
                b = x.load([column + COLUMNS, block * 128])
                second += tl.dot(a, b.T) * row_scales * tl.load(x_scales + block * K + COLUMNS)[None, :]
        to = tile // num_tiles * N + row
        out.store([to, column], first.to(TO))
        if PARTS == 2:
            out.store([to, column + COLUMNS], second.to(TO))


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _fitting(tiling: Tiling, columns: int) -> Tiling:
    """Return the tiling, with one part where two do not divide the columns."""
    return tiling if columns % (tiling.parts * tiling.columns) == 0 else tiling._replace(parts=1)


def product(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, offsets: torch.Tensor, tiling: Tiling = PRODUCT
) -> torch.Tensor:
    """Return bf16 [rows, n]: each row times the transposed matrix of its expert, as `fp8_products.grouped_fp8_product` documents it."""
    (num_rows, k), (num_experts, n, _) = x.shape, w.shape
    tiling = _fitting(tiling, n)
    y = torch.empty(num_rows, n, dtype=torch.bfloat16, device=x.device)
    if num_rows:
        programs = _num_sms(x.device) * tiling.programs
        _product[(programs,)](
            TensorDescriptor.from_tensor(x, [tiling.rows, BLOCK]), x_scales,
            TensorDescriptor.from_tensor(w.view(num_experts * n, k), [tiling.columns, BLOCK]), w_scales, offsets,
            TensorDescriptor.from_tensor(y, [tiling.rows, tiling.columns]), y, num_rows, x_scales.stride(0), x_scales.stride(1),
            n, k, num_experts, triton.next_power_of_2(num_experts), tiling.rows, tiling.columns, tiling.parts, programs,
            num_warps=tiling.num_warps, num_stages=tiling.num_stages,
        )  # fmt: skip
    return y


def weight_gradient(
    dy_t: torch.Tensor,
    dy_t_scales: torch.Tensor,
    x_t: torch.Tensor,
    x_t_scales: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor,
    tiling: Tiling = WEIGHT_GRADIENT,
) -> torch.Tensor:
    """Write out [experts, n, k] and return it, as `fp8_products.grouped_fp8_weight_gradient` documents it."""
    num_experts, n, k = out.shape
    if dy_t.shape[1] == 0:
        return out.zero_()
    tiling = _fitting(tiling, k)
    programs = _num_sms(out.device) * tiling.programs
    _weight_gradient[(programs,)](
        TensorDescriptor.from_tensor(dy_t, [tiling.rows, BLOCK]), dy_t_scales,
        TensorDescriptor.from_tensor(x_t, [tiling.columns, BLOCK]), x_t_scales, offsets,
        TensorDescriptor.from_tensor(out.view(num_experts * n, k), [tiling.rows, tiling.columns]),
        n, k, num_experts, triton.next_power_of_2(num_experts), tiling.rows, tiling.columns, tiling.parts, programs,
        tl.float32 if out.dtype == torch.float32 else tl.bfloat16, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    return out
