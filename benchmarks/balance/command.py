"""Benchmark of what a layer loses to unbalanced ranks: forward and backward of `deepep_moe.nn.MoELayer` with `GroupedExperts`, in bf16.

The routing is given, not learned. Each one takes turns with the same layer where all experts have the same number of rows, so "ratio" is
what balancing could gain at best. Without --max-vio, --workload and --trace it is `--max-vio 0 0.5 1 2 4`.

`MaxVio` is the rows of the busiest expert over the mean, less 1. `ranks` is the rows of the busiest rank over the mean. Both are means of
all steps. Times are medians of the slowest rank. `layer` is the wall time of the whole layer, dispatch to combine. `experts` is that of the
experts alone, each rank while the others wait. `copies` is the layer with `Balance(--slots)`, and `bounded` the same with room for
`--shares` of the rows. Ranks that share a GPU time the work of all ranks, which the routing hardly changes. Then only `experts` counts.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.balance import workloads
from benchmarks.balance.workloads import WORKLOADS, Routing
from benchmarks.common.link import rows_to_others
from benchmarks.common.records import hardware_of, record, spread, write_json
from benchmarks.common.report import Record, number, show_table
from benchmarks.layers import harness
from benchmarks.layers.megatron_steps import time_step
from benchmarks.layers.passes import Pass, chain, draw_inputs, versions_of
from deepep_moe import Buffer
from deepep_moe.nn import Balance, GroupedExperts, MoELayer
from deepep_moe.nn.overload import overloads
from deepep_moe.ops.routing import is_token_in_rank
from deepep_moe.testing import run_ranks
from deepep_moe.tune.timing import slowest

SHAPES = {  # tokens of a rank, hidden, ffn_hidden, experts of a token, experts
    "gpt-oss-20b": (8192, 2880, 2880, 4, 32),
    "deepseek-v3": (4096, 7168, 2048, 8, 256),
    "qwen3-235b": (8192, 4096, 1536, 8, 128),
    "small": (512, 128, 128, 2, 16),
}
_SIZES = ("num_tokens", "hidden", "ffn_hidden", "num_topk", "num_experts")
_SEED = 0  # of the routings
_MAX_VIO = (0.0, 0.5, 1.0, 2.0, 4.0)
_UNTIMED = 2  # passes after a change of the routing: by then the buffer predicts the rows that a dispatch receives


def add_arguments(parser: argparse.ArgumentParser) -> None:
    listed = "; ".join(f"{name}: {what}" for name, what in WORKLOADS.items())
    parser.add_argument("--max-vio", type=float, nargs="+", default=[], help="of experts with lognormal popularity")
    parser.add_argument("--workload", choices=WORKLOADS, nargs="+", default=[], help=listed)
    parser.add_argument("--trace", type=Path, nargs="+", default=[], help="a trace that DEEPEP_MOE_TRACE wrote: the files of all ranks")
    parser.add_argument("--slots", type=int, default=0, help="time the layer with copies of experts too: expert slots of a rank")
    parser.add_argument("--shares", type=float, help="with --slots: time it with room for so many even shares of the rows too")
    parser.add_argument("--shape", choices=SHAPES, help="where no size is given; default gpt-oss-20b, on the CPU small")
    harness.add_arguments(parser, "all GPUs, on the CPU 2; ranks share the GPUs there are", repeats=10, **dict.fromkeys(_SIZES))


def resolve(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the machine. Raises ValueError for what does not fit, OSError for a trace that is not there."""
    options.shape = options.shape or ("gpt-oss-20b" if options.device == "cuda" else "small")
    harness.resolve(options, dict(zip(_SIZES, SHAPES[options.shape], strict=True)), shares_gpus=True)
    for routing in routings_of(options):
        for step in range(options.repeats):
            routing.rows_per_expert(options.num_tokens * options.num_ranks, options.num_topk, step)


def routings_of(options: argparse.Namespace) -> list[Routing]:
    max_vio = options.max_vio or ([] if options.workload or options.trace else _MAX_VIO)
    settings = options.num_experts, _SEED
    wanted = [workloads.lognormal(each, *settings) for each in max_vio] + [workloads.workload(name, *settings) for name in options.workload]
    return wanted + ([workloads.trace(options.trace, *settings)] if options.trace else [])


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
    """A layer with one routing, on this rank. `turn` is collective."""

    def __init__(
        self, routing: Routing, options: argparse.Namespace, buffer: Buffer, experts: GroupedExperts, device: torch.device,
        balance: Balance | None = None, num_recv_rows: int | None = None,
    ):  # fmt: skip
        self.routing, self.options, self.experts, self.device = routing, options, experts, device
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.own_tokens = routing.tokens_of(self.rank, self.num_ranks, self.num_ranks * options.num_tokens)
        num_tokens = self.own_tokens.stop - self.own_tokens.start
        self.router = GivenRouting(options, num_tokens, device)
        self.layer = MoELayer(self.router, experts, buffer=buffer, balance=balance, num_recv_rows=num_recv_rows)  # type: ignore[arg-type]
        self.has_copies = balance is not None
        self.x, cotangent = draw_inputs(self.rank, (num_tokens, options.hidden), device, torch.bfloat16)
        self.step = Pass(partial(self.layer, self.x), cotangent, {"input": self.x} | dict(self.layer.named_parameters()))
        self.us: list[float] = []
        self.experts_us: list[float] = []
        self.rows: list[Tensor] = []
        """Rows of this rank's experts in each turn, [num_local_experts]."""

    def turn(self, step: int) -> None:
        """Draw the routing of a step, and time the layer and its experts."""
        drawn = self.routing.draw(self.num_ranks * self.options.num_tokens, self.options.num_topk, step)
        self.rows.append(drawn.flatten().bincount(minlength=self.options.num_experts).view(self.num_ranks, -1)[self.rank])
        self.router.topk_idx = drawn[self.own_tokens].contiguous().to(self.device)
        chain(self.step, _UNTIMED)
        self.us.append(time_step(self.step, self.device).wall)
        self.step.clear()
        if self.has_copies:
            return
        with torch.no_grad():
            out = self.layer.buffer.dispatch(self.x, self.router.topk_idx, self.router.weights)
        self._time_experts(out.recv_x.requires_grad_(), out.handle.num_rows_per_expert)

    def _time_experts(self, rows: Tensor, counts: Tensor) -> None:
        """Time the experts with the rows of a dispatch, one rank after the other."""
        alone = Pass(lambda: self.experts(rows, counts), torch.ones_like(rows), {"rows": rows} | dict(self.experts.named_parameters()))
        time_step(alone, self.device, 1)  # afterwards no rank has work left
        for rank in range(self.num_ranks):
            if rank == self.rank:
                self.experts_us.append(time_step(alone, self.device).wall)
            else:
                dist.barrier()  # that of time_step
        dist.barrier()
        alone.clear()


def measure(rank: int, num_ranks: int, options: argparse.Namespace) -> list[Record]:
    """Do the work of one rank: time each routing and the balanced one in turns. Return the records, which are those of all ranks."""
    device, routings = harness.device_of(options), routings_of(options)
    slices = [routing.tokens_of(r, num_ranks, num_ranks * options.num_tokens) for routing in routings for r in range(num_ranks)]
    most = max(options.num_tokens, *(tokens.stop - tokens.start for tokens in slices))
    torch.manual_seed(1 + rank)
    sizes = options.num_experts // num_ranks, options.hidden, options.ffn_hidden
    experts = GroupedExperts(*sizes, device=device, dtype=torch.bfloat16)
    num_slots = 0, num_ranks * options.slots if num_ranks > 1 else 0
    buffers = [
        Buffer(None, most, options.hidden, options.num_experts + more, options.num_topk, backend=options.backend) for more in num_slots
    ]
    balance = Balance(options.slots) if options.slots else None
    return [_record(routing, options, buffers, balance, experts, device) for routing in routings]


def _record(
    routing: Routing, options: argparse.Namespace, buffers: list[Buffer], balance: Balance | None, experts: GroupedExperts,
    device: torch.device,
) -> Record:  # fmt: skip
    """Time a routing and the balanced one in turns. Return the record of the balanced one, whose baseline is the other. Collective."""
    both, buffer = (routing, workloads.workload("W0", options.num_experts, _SEED)), buffers[0]
    sides = [Side(each, options, buffer, experts, device) for each in both]
    bounds = [None, round(options.shares * options.num_tokens * options.num_topk)] if options.shares else [None]
    sides += [Side(routing, options, buffers[1], experts, device, balance, bound) for bound in bounds] if balance else []
    for turn in range(options.repeats):
        for side in sides:
            side.turn(turn)
    (theirs, their_experts), (us, experts_us) = ((slowest(side.us), statistics.median(slowest(side.experts_us))) for side in sides[:2])
    with_copies = {name: statistics.median(slowest(side.us)) for name, side in zip(("copies_us", "bounded_us"), sides[2:], strict=False)}
    (overload,) = overloads([torch.stack(sides[0].rows)], [(0, buffer.num_ranks)])
    goes = is_token_in_rank(sides[1].router.topk_idx, buffer.num_ranks, buffer.num_local_experts)
    num_bytes = 4 * 2 * options.hidden * int(slowest([float(rows_to_others(goes))])[0])
    settings = vars(options) | {"backend": buffer.backend, "num_ranks": buffer.num_ranks, "dtype": "bfloat16", "layout": "expert"}
    where = {"hardware": hardware_of(device, buffer.num_ranks), "rival_versions": versions_of("torch")}
    return record(
        f"balance {routing.name}", settings, us, num_bytes, baseline="unbalanced", baseline_times=theirs, rival_us_p90=spread(theirs)[2],
        experts_us=experts_us, rival_experts_us=their_experts, ffn_hidden=options.ffn_hidden, seed=_SEED, **where, **overload,
        **with_copies, num_slots=options.slots, shares=options.shares,
    )  # fmt: skip


_COLUMNS = {
    "routing": lambda r: r["op"].removeprefix("balance "), "MaxVio": number("max_vio", 2), "ranks": number("rank_overload", 2),
    "layer ms": number("rival_us", 2, 1e-3), "p90": number("rival_us_p90", 2, 1e-3), "balanced": number("us_median", 2, 1e-3),
    "ratio": number("ratio", 2, unit="x"), "experts ms": number("rival_experts_us", 2, 1e-3),
    "balanced ": number("experts_us", 2, 1e-3), "ratio ": lambda r: f"{r['rival_experts_us'] / r['experts_us']:.2f}x",
    "copies": number("copies_us", 2, 1e-3), "bounded": number("bounded_us", 2, 1e-3),
}  # fmt: skip


def main(options: argparse.Namespace) -> None:
    """Print a table and write the records to `--json`."""
    records = run_ranks(measure, options.num_ranks, options, timeout_s=1800, bind=options.bind)[0]
    print(f"{records[0]['hardware']}; {records[0]['rival_versions']}")
    print(f"MoELayer, {harness.shape_of(options, options.num_ranks, records[0]['backend'])}")
    if options.device == "cuda" and options.num_ranks > torch.cuda.device_count():
        print("ranks share GPUs: the time of a layer is that of all ranks' work; compare the times of experts")
    show_table(_COLUMNS, records)
    write_json(options.json, records)
