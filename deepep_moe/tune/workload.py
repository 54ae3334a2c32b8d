"""The workload of the exchange benchmarks: sizes, inputs, one timed call, and the rows that it sends over the link."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe.ops.routing import is_token_in_rank

SCALE_BLOCK = 128


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
        short = {"bfloat16": "bf16", "float8_e4m3fn": "fp8"}[self.dtype]
        return " ".join([*([self.backend] if self.backend else []), self.op, short, self.layout])


def gather_counts(own: Tensor) -> Tensor:
    """Return `own` of every rank, a CPU tensor of one shape, as [num_ranks, ...]. Collective."""
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return torch.stack(gathered)


def tokens_per_rank(topk_idx: Tensor, shape: Shape) -> Tensor:
    """Return how many of the tokens go to each rank, [num_ranks] int64 on the CPU."""
    return is_token_in_rank(topk_idx, shape.num_ranks, shape.num_local_experts).sum(0).cpu()


def link_rows(num_tokens: Tensor) -> dict[str, int]:
    """Return, by operation, the most rows that one rank sends over the link, if num_tokens [num_ranks, num_ranks] go from rank to rank.

    A token goes to a remote rank once, however many of its experts it chose. Combine sends the same rows back.
    """
    remote = num_tokens.clone().fill_diagonal_(0)
    out, back = int(remote.sum(1).max()), int(remote.sum(0).max())
    return {"dispatch": out, "cached dispatch": out, "combine": back}
