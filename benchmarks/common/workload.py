"""The workload of exchange benchmarks: sizes, inputs, and the calls that are timed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepep_moe import Buffer

SCALE_BLOCK = 128
DTYPE_OF_WIRE = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True)
class Shape:
    """The sizes that the ranks of a run share."""

    num_ranks: int
    hidden: int
    num_experts: int
    num_topk: int
    expert_alignment: int
    ranks_per_node: int | None = None
    """None: all ranks are one node."""

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def num_scales(self) -> int:
        return -(-self.hidden // SCALE_BLOCK)

    def row_bytes(self, dtype: str) -> int:
        """Return the bytes of a row that travel, scales included. dtype: "bfloat16" or "float8_e4m3fn"."""
        return 2 * self.hidden if dtype == "bfloat16" else self.hidden + 4 * self.num_scales


@dataclass(frozen=True)
class Inputs:
    """The inputs of one rank: random rows and a uniform random routing."""

    x: Tensor  # [num_tokens, hidden] bf16
    x_fp8: Tensor  # [num_tokens, hidden] float8_e4m3fn
    x_scales: Tensor  # [num_tokens, num_scales] fp32
    topk_idx: Tensor  # [num_tokens, num_topk] int64
    topk_weights: Tensor  # [num_tokens, num_topk] fp32


def make_inputs(shape: Shape, num_tokens: int, rank: int, device: torch.device) -> Inputs:
    """Make the inputs of `rank`. Every rank that asks for them gets the same."""
    generator = torch.Generator(device).manual_seed(1000 + rank)

    def random(columns: int) -> Tensor:
        return torch.rand(num_tokens, columns, generator=generator, device=device)

    topk_idx = random(shape.num_experts).topk(shape.num_topk, dim=1).indices
    weights, scales = random(shape.num_topk), random(shape.num_scales)
    x = torch.randn(num_tokens, shape.hidden, generator=generator, device=device, dtype=torch.bfloat16)
    return Inputs(x, x.to(torch.float8_e4m3fn), scales, topk_idx, weights)


@dataclass(frozen=True)
class Operation:
    """One call, and what its record says of it."""

    op: str  # "dispatch", "cached dispatch" or "combine"
    dtype: str
    layout: str
    row_bytes: int  # scales included
    call: Callable[[], Any]
    num_sms: int | None = None
    backend: str | None = None  # the name of another library; None stands for that of the buffer

    @property
    def name(self) -> str:
        short = next(wire for wire, dtype in DTYPE_OF_WIRE.items() if dtype == self.dtype)
        return " ".join([*([self.backend] if self.backend else []), self.op, short, self.layout])


def operations(buffer: Buffer, shape: Shape, inputs: Inputs, num_sms: int | None) -> list[Operation]:
    """Return the calls of a buffer with `num_sms` SMs. None is its default; 0 is the copy engine, in bf16 and the expert layout only.

    Collective: combine and the cached dispatch need the results of a dispatch.
    """
    sms: dict[str, Any] = {} if num_sms is None else {"num_sms": num_sms}
    x, idx, weights = inputs.x, inputs.topk_idx, inputs.topk_weights
    listed = []
    for layout in ("expert",) if num_sms == 0 else ("rank", "expert"):
        is_expert = layout == "expert"
        how: dict[str, Any] = {"layout": layout, "expert_alignment": shape.expert_alignment if is_expert else 1, **sms}
        out = buffer.dispatch(x, idx, weights, **how)
        calls = {("dispatch", "bfloat16"): partial(buffer.dispatch, x, idx, weights, **how)}
        if num_sms != 0:
            calls["dispatch", "float8_e4m3fn"] = partial(buffer.dispatch, inputs.x_fp8, idx, weights, x_scales=inputs.x_scales, **how)
        calls["combine", "bfloat16"] = partial(buffer.combine, out.recv_x, out.handle, out.recv_topk_weights if is_expert else None, **sms)
        if is_expert and num_sms != 0:
            calls["cached dispatch", "bfloat16"] = partial(buffer.dispatch, x, topk_weights=weights, handle=out.handle, **sms)
        listed += [Operation(op, dtype, layout, shape.row_bytes(dtype), call, num_sms) for (op, dtype), call in calls.items()]
    return listed
