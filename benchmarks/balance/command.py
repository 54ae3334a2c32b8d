"""Benchmark of what a layer loses to unbalanced ranks: forward and backward of `deepep_moe.nn.MoELayer` with `GroupedExperts`, in bf16.

The routing is given, not learned. Each one takes turns with the same layer where all experts have the same number of rows, so "ratio" is
what balancing could gain at best. Without --max-vio, --workload and --trace it is `--max-vio 0 0.5 1 2 4`.

"MaxVio" is the rows of the busiest expert over the mean, less 1. "ranks" is the rows of the busiest rank over the mean. Both are means of
all steps. Times are medians of the slowest rank. "layer" is the wall time of the whole layer, dispatch to combine. "experts" is that of the
experts alone, each rank while the others wait. Where ranks share a GPU, the time of a layer is that of all ranks' work, which no routing
changes much; then only "experts" tells.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.balance import workloads
from benchmarks.balance.workloads import WORKLOADS, Routing
from benchmarks.common.records import spread, write_json
from benchmarks.common.report import Record, number, show_table
from benchmarks.layers import harness
from benchmarks.layers.megatron_steps import time_step
from benchmarks.layers.passes import Pass, StepTimes, chain, describe, draw_inputs, slowest_steps
from deepep_moe import Buffer
from deepep_moe.nn import GroupedExperts, MoELayer
from deepep_moe.nn.overload import overloads
from deepep_moe.ops.routing import is_token_in_rank
from deepep_moe.testing import run_ranks

UNBALANCED, BALANCED = "unbalanced", "force-balanced"
SHAPES = {
    name: dict(zip(("num_tokens", "hidden", "ffn_hidden", "num_topk", "num_experts"), sizes, strict=True))
    for name, sizes in {
        "gpt-oss-20b": (8192, 2880, 2880, 4, 32),
        "deepseek-v3": (4096, 7168, 2048, 8, 256),
        "qwen3-235b": (8192, 4096, 1536, 8, 128),
        "small": (512, 128, 128, 2, 16),
    }.items()
}
_MAX_VIO = (0.0, 0.5, 1.0, 2.0, 4.0)
_UNTIMED = 2  # passes after a change of the routing: by then the buffer predicts the rows that a dispatch receives


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-vio", type=float, nargs="+", default=[], help="of experts with lognormal popularity")
    told = "; ".join(f"{name}: {what}" for name, what in WORKLOADS.items())
    parser.add_argument("--workload", choices=WORKLOADS, nargs="+", default=[], help=f"workloads of Megatron-LM#7488. {told}")
    parser.add_argument("--trace", type=Path, nargs="+", default=[], help="a trace that DEEPEP_MOE_TRACE wrote: the files of all ranks")
    parser.add_argument("--seed", type=int, default=0, help="of the routings")
    parser.add_argument("--shape", choices=SHAPES, help="of the layer, where no size is given; default gpt-oss-20b, on the CPU small")
    harness.add_arguments(
        parser, None, "all GPUs, on the CPU 2; ranks share the GPUs there are", repeats=10, **dict.fromkeys(SHAPES["small"])
    )


def resolve(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the machine. Raises ValueError for options that do not fit, OSError for a trace that is missing."""
    options.device = options.device or ("cuda" if torch.cuda.device_count() else "cpu")
    options.shape = options.shape or ("gpt-oss-20b" if options.device == "cuda" else "small")
    harness.fill(options, SHAPES[options.shape])
    harness.resolve(options, shares_gpus=True)
    for routing in routings_of(options):
        for step in range(options.repeats):
            routing.rows_per_expert(options.num_tokens * options.num_ranks, options.num_topk, step)


def routings_of(options: argparse.Namespace) -> list[Routing]:
    max_vio = options.max_vio or ([] if options.workload or options.trace else _MAX_VIO)
    return [
        *(workloads.lognormal(each, options.num_experts, options.seed) for each in max_vio),
        *(workloads.workload(name, options.num_experts, options.seed) for name in options.workload),
        *([workloads.trace(options.trace, options.num_experts, options.seed)] if options.trace else []),
    ]


# ---- what is timed ----


class GivenRouting(nn.Module):
    """Takes the place of a `Router`. The experts of tokens are set before a forward, and all weights are equal."""

    topk_idx: Tensor
    """[num_tokens, num_topk] int64."""

    def __init__(self, options: argparse.Namespace, num_tokens: int, device: torch.device):
        super().__init__()
        self.hidden, self.num_experts, self.num_topk = options.hidden, options.num_experts, options.num_topk
        self.weights = nn.Parameter(torch.full((num_tokens, self.num_topk), 1 / self.num_topk, device=device))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, None]:
        return self.topk_idx, self.weights, None


class Side:
    """A layer with one routing, on this rank. Every method is collective."""

    def __init__(self, routing: Routing, options: argparse.Namespace, buffer: Buffer, experts: GroupedExperts, device: torch.device):
        self.routing, self.options, self.experts, self.device = routing, options, experts, device
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.own = routing.tokens_of(self.rank, self.num_ranks, self.num_ranks * options.num_tokens)
        num_tokens = self.own.stop - self.own.start
        self.router = GivenRouting(options, num_tokens, device)
        self.layer = MoELayer(self.router, experts, buffer=buffer)  # type: ignore[arg-type]
        self.x, cotangent = draw_inputs(self.rank, (num_tokens, options.hidden), device, torch.bfloat16)
        self.step = Pass(partial(self.layer, self.x), cotangent, {"input": self.x} | dict(self.layer.named_parameters()))
        self.times: list[StepTimes] = []
        self.of_experts: list[StepTimes] = []
        self.rows: list[Tensor] = []
        """Rows of this rank's experts in each turn, [num_local_experts]."""
        self.sent = 0
        """Rows that this rank sends over the link in a dispatch, the most of all turns."""

    def turn(self, step: int) -> None:
        """Draw the routing of a step, and time the layer and its experts."""
        o = self.options
        drawn = self.routing.draw(self.num_ranks * o.num_tokens, o.num_topk, step)
        self.rows.append(drawn.flatten().bincount(minlength=o.num_experts).view(self.num_ranks, -1)[self.rank])
        own = drawn[self.own].contiguous()
        goes = is_token_in_rank(own, self.num_ranks, o.num_experts // self.num_ranks).sum(0)
        self.sent = max(self.sent, int(goes.sum() - goes[self.rank]))
        self.router.topk_idx = own.to(self.device)
        chain(self.step, _UNTIMED)
        self.times.append(time_step(self.step, self.device))
        self.step.clear()
        self.of_experts.append(self._time_experts())

    def _time_experts(self) -> StepTimes:
        """Time the experts with the rows of a dispatch, one rank after the other."""
        with torch.no_grad():
            out = self.layer.buffer.dispatch(self.x, self.router.topk_idx, self.router.weights)
        rows, counts = out.recv_x.detach().requires_grad_(), out.handle.num_rows_per_expert
        alone = Pass(lambda: self.experts(rows, counts), torch.ones_like(rows), {"rows": rows} | dict(self.experts.named_parameters()))
        chain(alone, 1)
        for rank in range(self.num_ranks):
            if rank == self.rank:
                times = time_step(alone, self.device)
            else:
                dist.barrier()  # that of time_step
        dist.barrier()
        alone.clear()
        return times


@dataclass
class Measured:
    """The measurements of one rank."""

    backend: str
    hardware: str
    versions: str
    sides: dict[str, dict[str, tuple[list[StepTimes], list[StepTimes], int]]] = field(default_factory=dict)
    """By routing, then for unbalanced and balanced: times of the layer, of its experts, and rows over the link."""
    overloads: dict[str, dict[str, Any]] = field(default_factory=dict)


def measure(rank: int, num_ranks: int, options: argparse.Namespace) -> Measured:
    """Do the work of one rank: time each routing and the balanced one in turns."""
    device, routings = harness.device_of(options), routings_of(options)
    num_tokens = num_ranks * options.num_tokens
    slices = [routing.tokens_of(r, num_ranks, num_tokens) for routing in routings for r in range(num_ranks)]
    most = max(options.num_tokens, *(tokens.stop - tokens.start for tokens in slices))
    torch.manual_seed(1 + rank)
    sizes = options.num_experts // num_ranks, options.hidden, options.ffn_hidden
    experts = GroupedExperts(*sizes, device=device, dtype=torch.bfloat16)
    buffer = Buffer(None, most, options.hidden, options.num_experts, options.num_topk, backend=options.backend)
    measured = Measured(buffer.backend, *describe("torch", device, num_ranks))
    for routing in routings:
        both = {UNBALANCED: routing, BALANCED: workloads.balanced(options.num_experts, options.seed)}
        sides = {name: Side(of, options, buffer, experts, device) for name, of in both.items()}
        for turn in range(options.repeats):
            for side in sides.values():
                side.turn(turn)
        measured.sides[routing.name] = {name: (side.times, side.of_experts, side.sent) for name, side in sides.items()}
        (measured.overloads[routing.name],) = overloads([torch.stack(sides[UNBALANCED].rows)], [(0, num_ranks)])
    return measured


# ---- report ----


def records_of(ranks: list[Measured], options: argparse.Namespace) -> list[Record]:
    """Return a record of the balanced layer for each routing, which is its baseline."""
    return [_record(ranks, options, name) for name in ranks[0].sides]


def _record(ranks: list[Measured], options: argparse.Namespace, name: str) -> Record:
    times, of_experts = (
        {side: slowest_steps([rank.sides[name][side][i] for rank in ranks]) for side in (UNBALANCED, BALANCED)} for i in (0, 1)
    )
    experts_us = {side: statistics.median(each.wall for each in of_side) for side, of_side in of_experts.items()}
    _, p10, p90 = spread([each.wall for each in times[UNBALANCED]])
    num_bytes = 4 * 2 * options.hidden * max(rank.sides[name][BALANCED][2] for rank in ranks)
    return harness.record(
        f"balance {name}", options, ranks[0], len(ranks), "bfloat16", times[BALANCED], num_bytes, UNBALANCED, times[UNBALANCED],
        rival_us_p10=p10, rival_us_p90=p90, experts_us=experts_us[BALANCED], rival_experts_us=experts_us[UNBALANCED],
        experts_ratio=experts_us[UNBALANCED] / experts_us[BALANCED], ffn_hidden=options.ffn_hidden, seed=options.seed,
        **ranks[0].overloads[name],
    )  # fmt: skip


_COLUMNS = {
    "routing": lambda r: r["op"].removeprefix("balance "), "MaxVio": number("max_vio", 2), "ranks": number("rank_overload", 2),
    "layer ms": number("rival_us", 2, 1e-3), "p90": number("rival_us_p90", 2, 1e-3), "balanced ms": number("us_median", 2, 1e-3),
    "ratio": number("ratio", 2, unit="x"), "experts ms": number("rival_experts_us", 2, 1e-3),
    "balanced": number("experts_us", 2, 1e-3), "their ratio": number("experts_ratio", 2, unit="x"),
}  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print a table and write the records to `--json`."""
    try:
        resolve(options)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    ranks = run_ranks(measure, options.num_ranks, options, timeout_s=1800, bind=options.bind)
    records = records_of(ranks, options)
    print(f"{ranks[0].hardware}; {ranks[0].versions}")
    print(f"MoELayer, {harness.shape_of(options, len(ranks), ranks[0].backend)}")
    if options.device == "cuda" and options.num_ranks > torch.cuda.device_count():
        print("ranks share GPUs: the time of a layer is that of all ranks' work; compare the times of experts")
    show_table(_COLUMNS, records)
    write_json(options.json, records)
