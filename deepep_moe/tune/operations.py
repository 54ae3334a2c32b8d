"""The calls of a `Buffer` that are timed, and the comparison of their results."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepep_moe import Buffer
from deepep_moe.errors import EPError
from deepep_moe.tune.workload import Inputs, Operation, Shape


def operations(buffer: Buffer, shape: Shape, inputs: Inputs, num_sms: int | None) -> list[Operation]:
    """Return the calls of a buffer with `num_sms` SMs. None is its default; 0 is the copy engine, in bf16 and the expert layout only.

    Collective: combine and the cached dispatch need the results of a dispatch.
    """
    layouts = ("expert",) if num_sms == 0 else ("rank", "expert")
    return [operation for layout in layouts for operation in _of_layout(buffer, shape, inputs, layout, num_sms)]


def _of_layout(buffer: Buffer, shape: Shape, inputs: Inputs, layout: str, num_sms: int | None) -> list[Operation]:
    is_expert = layout == "expert"
    sms: dict[str, Any] = {} if num_sms is None else {"num_sms": num_sms}
    how: dict[str, Any] = {"layout": layout, "expert_alignment": shape.expert_alignment if is_expert else 1, **sms}
    x, idx, weights = inputs.x, inputs.topk_idx, inputs.topk_weights
    out = buffer.dispatch(x, idx, weights, **how)
    calls = {("dispatch", "bfloat16"): partial(buffer.dispatch, x, idx, weights, **how)}
    if num_sms != 0:
        calls["dispatch", "float8_e4m3fn"] = partial(buffer.dispatch, inputs.x_fp8, idx, weights, x_scales=inputs.x_scales, **how)
    calls["combine", "bfloat16"] = partial(buffer.combine, out.recv_x, out.handle, out.recv_topk_weights if is_expert else None, **sms)
    if is_expert and num_sms != 0:
        calls["cached dispatch", "bfloat16"] = partial(buffer.dispatch, x, topk_weights=weights, handle=out.handle, **sms)
    return [Operation(op, dtype, layout, shape.row_bytes(dtype), call, num_sms) for (op, dtype), call in calls.items()]


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
