"""Check results before a call is timed: compare them with what they must be by definition."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.workload import SCALE_BLOCK, Inputs, Operation, Shape
from deepep_moe import Buffer
from deepep_moe.errors import EPError


def compare_bits(what: str, actual: Tensor, expected: Tensor, source: str = "the definition") -> None:
    """Raise EPError unless both tensors are equal bit for bit. `source` says where `expected` comes from."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise EPError(f"{what} is {actual.dtype} {list(actual.shape)}, and not {expected.dtype} {list(expected.shape)}")
    num_rows = len(expected)
    if num_rows == 0:
        return
    same = actual.contiguous().view(torch.uint8).view(num_rows, -1) == expected.contiguous().view(torch.uint8).view(num_rows, -1)
    num_wrong = int((~same.all(1)).sum())
    if num_wrong:
        raise EPError(f"{what} differs from {source} in {num_wrong} of {num_rows} rows")


def dequantized(rows: Any) -> Tensor:
    """Return rows [..., hidden] in bf16, of what a dispatch returns or takes: a tensor, or a pair of fp8 rows and scales."""
    if not isinstance(rows, (tuple, list)):
        return rows
    y, scales = rows
    columns = scales.repeat_interleave(SCALE_BLOCK, dim=-1)[..., : y.shape[-1]]
    return (y.float() * columns).bfloat16()


def dequantized_inputs(inputs: Inputs) -> Inputs:
    """Return inputs whose rows in bf16 are what those in fp8 stand for."""
    return dataclasses.replace(inputs, x=dequantized((inputs.x_fp8, inputs.x_scales)))


def in_bf16(rows: Tensor) -> Tensor:
    return rows.bfloat16().float()


def expected_combine(
    inputs: Inputs, shape: Shape, layout: str, home: int = 0, factors: Tensor | None = None, travelled: Callable[[Tensor], Tensor] = in_bf16
) -> Tensor:
    """Return the combined_x of the rank `home`, whose inputs these are, when rows are combined as they were dispatched, with weights in the
    expert layout. Experts multiply rows by `factors` [num_experts]. `travelled` rounds what crosses a link, in fp32."""
    x, ranks = inputs.x.float(), inputs.topk_idx // shape.num_local_experts
    per_node = shape.ranks_per_node or shape.num_ranks
    total = torch.zeros_like(x)
    for first in range(0, shape.num_ranks, per_node):
        of_node = torch.zeros_like(x)
        for rank in range(first, first + per_node):
            here = ranks == rank
            row = torch.where(here.any(1)[:, None], x, 0.0)
            if layout == "expert":
                row = torch.zeros_like(x)
                for lane in range(shape.num_topk):
                    y = x if factors is None else in_bf16(x * factors[inputs.topk_idx[:, lane, None]])
                    row = row + torch.where(here[:, lane, None], inputs.topk_weights[:, lane, None] * y, 0.0)
            of_node = of_node + travelled(row)
        total = total + (of_node if home // per_node == first // per_node else travelled(of_node))
    return total.to(inputs.x.dtype)


def verify(operation: Operation, buffer: Buffer, inputs: Inputs, shape: Shape, rank: int) -> bool:
    """Make the call, and compare the sums of its rows, which a combine makes, bit for bit. Return True or raise EPError. Collective."""
    result = operation.call()
    if operation.op == "combine":
        sums = result
    else:
        rows = result.recv_x if result.recv_x_scales is None else dequantized((result.recv_x, result.recv_x_scales))
        sums = buffer.combine(rows, result.handle, result.recv_topk_weights if operation.layout == "expert" else None)
    sent = inputs if operation.dtype == "bfloat16" else dequantized_inputs(inputs)
    compare_bits("combined_x", sums, expected_combine(sent, shape, operation.layout, rank))
    return True


def close_to(what: str, actual: Tensor, expected: Tensor) -> None:
    """Raise EPError unless both tensors agree to a few roundings of bf16."""
    worst = float((actual.float() - expected.float()).abs().max()) if len(expected) else 0.0
    largest = float(expected.float().abs().max()) if len(expected) else 0.0
    if not worst <= 0.03 * largest:
        raise EPError(f"{what} is off by {worst:g} where values reach {largest:g}")
