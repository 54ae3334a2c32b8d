"""Benchmark of Megatron-Core's MoELayer, forward and backward, with our dispatcher and with Megatron-Core's own.

All dispatchers take turns in one run, on the same inputs, router and experts. "exchange" is what lies between the router and the layer's
output, with permutes and without experts (rows return as they came). "layer" is the whole layer with SwiGLU experts (Megatron-Core's
SequentialMLP). Without TransformerEngine Megatron-Core's permutes are not fused, so there are two more baselines. "rows alone" sends the
rows of `alltoall` by all_to_all_single and does nothing else. "rows, gathers" adds its permutes at one gather each, with all counts known
beforehand. Results of all dispatchers are compared first. Times are of the slowest rank, by CUDA events on a GPU whose host is ahead.

"step" is the layer as a training step has it, with grouped experts, ours and TransformerEngine's: see `megatron_steps`.
"""

import argparse
import gc
import statistics
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.report import show_layers
from benchmarks.layers import megatron_steps
from benchmarks.layers.megatron_steps import GROUPED, StepTimes
from benchmarks.layers.passes import PARTS, Pass, check_ranks, describe, difference, draw_inputs, slowest, times_of
from deepep_moe.testing import run_ranks
from deepep_moe.tune.records import DTYPES, record, write_json
from deepep_moe.tune.timing import Timer

OURS, ALONE, GATHERS = "deepep_moe", "rows alone", "rows, gathers"
DISPATCHERS = (OURS, "alltoall", "allgather")
_WARMUP = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--backend", help="of deepep_moe.Buffer; default nvlink on GPUs, auto on the CPU")
    parser.add_argument("--num-ranks", type=int, help="expert-parallel size; default all GPUs, on the CPU 2")
    defaults = [("num-tokens", 4096), ("hidden", 4096), ("ffn-hidden", 2048), ("num-topk", 8), ("num-experts", 64), ("repeats", 20)]
    for name, default in defaults:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")


# ---- what is timed ----


class Rows:
    """Sends the rows of `alltoall`, one per (token, expert), there and back in the forward, and again in the backward.

    With `permutes`, a gather sorts the rows by expert before they are sent, another sorts those that arrive by local expert, and both are
    undone on the way back. The last one sums the rows of a token.
    """

    def __init__(self, x: Tensor, routing_map: Tensor, num_ranks: int, *, permutes: bool):
        experts, tokens = routing_map.t().nonzero(as_tuple=True)
        counts = x.new_empty(num_ranks, routing_map.shape[1], dtype=torch.int64)
        dist.all_gather(list(counts), experts.bincount(minlength=routing_map.shape[1]))
        counts = counts.view(num_ranks, num_ranks, -1)  # [from rank, to rank, local expert]
        self.sent, self.received = counts[dist.get_rank()].sum(1).tolist(), counts[:, dist.get_rank()].sum(1).tolist()
        self.x = x.detach().view(len(routing_map), -1)
        self.there, self.here = (self.x.new_ones(sum(rows), self.x.shape[1]) for rows in (self.sent, self.received))
        self.permutes, self.tokens, self.output = permutes, tokens, self.x
        self.of_token = tokens.argsort(stable=True).view(len(routing_map), -1)
        arriving = torch.arange(counts.shape[2], device=x.device).repeat(num_ranks)
        self.to_expert = arriving.repeat_interleave(counts[:, dist.get_rank()].flatten()).argsort(stable=True)
        self.from_expert = self.to_expert.argsort()

    def forward(self) -> None:
        there = _gather(self.x, self.tokens) if self.permutes else self.there
        dist.all_to_all_single(self.here, there, self.received, self.sent)
        here = _gather(_gather(self.here, self.to_expert), self.from_expert) if self.permutes else self.here
        dist.all_to_all_single(self.there, here, self.sent, self.received)
        if self.permutes:
            self.output = torch.nn.functional.embedding_bag(self.of_token, self.there, mode="sum")

    backward = forward

    def clear(self) -> None:
        """Do nothing, as no gradients are kept."""


def _gather(rows: Tensor, idx: Tensor) -> Tensor:
    """Gather rows in words of 8 bytes, which PyTorch copies at the speed of the memory."""
    return rows.view(torch.int64).index_select(0, idx).view(rows.dtype)


def make_passes(layers: dict[str, Any], x: Tensor, cotangent: Tensor, num_ranks: int) -> dict[str, dict[str, Any]]:
    """Return the passes by what is timed and by dispatcher."""
    from benchmarks.layers.megatron_layers import echo_experts, exchange

    with torch.no_grad():
        probs, routing_map = layers[OURS].router(x)
    probs.requires_grad_()
    exchanges: dict[str, Any] = {
        name: Pass(partial(exchange, layer.token_dispatcher, x, routing_map, probs, echo_experts), cotangent, {"input": x, "probs": probs})
        for name, layer in layers.items()
    }
    exchanges[ALONE] = Rows(x, routing_map, num_ranks, permutes=False)
    exchanges[GATHERS] = Rows(x, routing_map, num_ranks, permutes=True)
    whole = {
        name: Pass(partial(_run_layer, layer, x), cotangent, {"input": x} | dict(layer.named_parameters()))
        for name, layer in layers.items()
    }
    return {"exchange": exchanges, "layer": whole}


def _run_layer(layer: Any, x: Tensor) -> Tensor:
    return layer(x)[0]


def link_bytes(routing_map: Tensor, row_bytes: int, num_ranks: int) -> int:
    """Return the bytes that this rank must send in a dispatch: a row for each other rank that a token goes to."""
    goes = routing_map.view(len(routing_map), num_ranks, -1).any(2)
    return (int(goes.sum()) - int(goes[:, dist.get_rank()].sum())) * row_bytes


# ---- comparison ----


def kind_of(name: str) -> str:
    """Return the first part of a name: "experts.local_experts.3.linear_fc1.weight" -> "experts"."""
    return name.split(".")[0]


def compare(passes: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the largest difference from ours, by baseline, then by kind of result."""
    ours = passes[OURS].results()
    found: dict[str, dict[str, float]] = {}
    for baseline, rival in passes.items():
        if baseline == OURS or not isinstance(rival, Pass):
            continue
        kinds = found.setdefault(baseline, {})
        for name, expected in megatron_steps.by_expert(rival.results()).items():
            value = difference(ours[name].float(), expected.float())
            kinds[kind_of(name)] = max(kinds.get(kind_of(name), 0.0), value) if value == value else value
    return found


# ---- timing ----


@dataclass
class Measured:
    """The measurements of one rank."""

    backend: str
    hardware: str
    versions: str
    permutes_are_fused: bool
    """Whether Megatron-Core's permutes are fused."""
    link_bytes: int
    differences: dict[str, dict[str, dict[str, float]]]
    """Differences by what is timed, baseline and kind of result."""
    times: dict[tuple[str, str], list[list[float]]] = field(default_factory=dict)
    """Times by what is timed and dispatcher: an entry per turn, as `times_of` returns it."""
    steps: dict[str, list[StepTimes]] = field(default_factory=dict)
    """Times of training steps by who does them: an entry per turn."""


def measure(rank: int, num_ranks: int, options: argparse.Namespace) -> Measured:
    """Do the work of one rank: build layers, compare results, and time them in turns."""
    from megatron_ranks import model_parallel

    from benchmarks.layers.megatron_layers import permutes_are_fused, sharing_layers

    bound = {"num_max_tokens_per_rank": options.num_tokens, "backend": options.backend}
    with model_parallel(options.device, ep=num_ranks, seed=1, options=bound) as device:
        sizes = {name: getattr(options, name) for name in ("hidden", "ffn_hidden", "num_experts", "num_topk")}
        layers = sharing_layers(DISPATCHERS, ep=num_ranks, dtype=DTYPES[options.dtype], seed=1, **sizes)
        x, cotangent = draw_inputs(rank, (options.num_tokens, 1, options.hidden), device, DTYPES[options.dtype])
        passes = make_passes(layers, x, cotangent, num_ranks)
        steps = megatron_steps.make_steps(layers[OURS], x, cotangent, seed=1, ep=num_ranks, dtype=DTYPES[options.dtype], **sizes)
        differences = {what: compare(of_one) for what, of_one in passes.items()}
        differences["step"] = compare({OURS: passes["layer"][OURS], **steps})
        with torch.no_grad():
            sent = link_bytes(layers[OURS].router(x)[1], options.hidden * x.element_size(), num_ranks)
        backend = layers[OURS].token_dispatcher.buffer.backend
        measured = Measured(backend, *describe("megatron-core", device, num_ranks), permutes_are_fused(), sent, differences)
        timer = Timer(device)
        gc.collect()
        gc.freeze()  # collections stay short
        for turn in range(_WARMUP + options.repeats):
            for what, of_one in passes.items():
                for name, timed in of_one.items():
                    times = times_of(timed, timer)
                    if turn >= _WARMUP:
                        measured.times.setdefault((what, name), []).append(times)
        measured.steps = _time_steps(
            {OURS: passes["layer"][OURS], "alltoall": passes["layer"]["alltoall"], **steps}, device, options.repeats
        )
        return measured


def _time_steps(steps: dict[str, Any], device: torch.device, repeats: int) -> dict[str, list[StepTimes]]:
    megatron_steps.add_graph(steps)
    times: dict[str, list[StepTimes]] = {name: [] for name in steps}
    for turn in range(-1, repeats):
        for name, step in steps.items():
            of_turn = megatron_steps.time_step(step, device, with_kernels=turn == repeats - 1)
            if turn >= 0:
                times[name].append(of_turn)
    return times


# ---- report ----


def tolerance(options: argparse.Namespace) -> float:
    """Return how much dispatchers may differ, relative to the largest entry. They sum up to top-k terms in different orders and precisions.

    `alltoall` sums them in the rows' dtype, with a rounding of half an eps per term.
    """
    return options.num_topk * torch.finfo(DTYPES[options.dtype]).eps / 2


def worst(ranks: list[Measured]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the differences, each the maximum over ranks. NaN counts as the largest."""
    return {
        what: {
            baseline: {kind: max((rank.differences[what][baseline][kind] for rank in ranks), key=lambda d: (d != d, d)) for kind in kinds}
            for baseline, kinds in baselines.items()
        }
        for what, baselines in ranks[0].differences.items()
    }


def records_of(ranks: list[Measured], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a record per thing timed, part and baseline."""
    first, times, differences = ranks[0], slowest(ranks), worst(ranks)
    dtype = str(DTYPES[options.dtype]).removeprefix("torch.")
    settings = vars(options) | {"backend": first.backend, "num_ranks": len(ranks), "dtype": dtype, "layout": "expert"}
    records = []
    for what, baseline in times:
        for part in PARTS if baseline != OURS else ():
            num_bytes = max(rank.link_bytes for rank in ranks) * (4 if part == PARTS[2] else 2)
            extra = {
                "hardware": first.hardware,
                "rival_versions": first.versions,
                "rival_permutes_are_fused": first.permutes_are_fused,
                "ffn_hidden": options.ffn_hidden if what == "layer" else None,
                "differences": differences[what].get(baseline),
            }
            op = f"megatron {what} {part}"
            records.append(
                record(
                    op, settings, times[what, OURS][part], num_bytes, baseline=baseline, baseline_times=times[what, baseline][part], **extra
                )
            )
    return records


def step_records(ranks: list[Measured], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a record of the layer with grouped experts for each who makes the same step: by wall time, host and kernel times beside."""
    first, steps = ranks[0], slowest_steps(ranks)
    dtype = str(DTYPES[options.dtype]).removeprefix("torch.")
    settings = vars(options) | {"backend": first.backend, "num_ranks": len(ranks), "dtype": dtype, "layout": "expert"}
    ours = steps.get(GROUPED, [])
    return [
        record(
            "megatron step forward+backward", settings, [times.wall for times in ours], max(rank.link_bytes for rank in ranks) * 4,
            baseline=name, baseline_times=[times.wall for times in theirs], hardware=first.hardware,
            rival_versions=f"{first.versions}; {megatron_steps.rivals()}", ffn_hidden=options.ffn_hidden,
            host_us=_median(ours, "host"), rival_host_us=_median(theirs, "host"), kernel_us=ours[-1].kernels,
            rival_kernel_us=theirs[-1].kernels, differences=worst(ranks)["step"].get(name),
        )
        for name, theirs in steps.items() if name != GROUPED
    ]  # fmt: skip


def slowest_steps(ranks: list[Measured]) -> dict[str, list[StepTimes]]:
    """Return the slowest rank of every turn, by wall time."""
    return {
        name: [max(turn, key=lambda times: times.wall) for turn in zip(*(rank.steps[name] for rank in ranks), strict=True)]
        for name in ranks[0].steps
    }


def _median(steps: list[StepTimes], name: str) -> float:
    return statistics.median(getattr(times, name) for times in steps)


def show(ranks: list[Measured], records: list[dict[str, Any]], options: argparse.Namespace) -> None:
    first = ranks[0]
    print(f"{first.hardware}; {first.versions}; {megatron_steps.rivals()}")
    print(
        f"MoELayer, EP {len(ranks)}, {options.num_tokens} tokens x {options.hidden} {options.dtype} a rank, top-{options.num_topk} of "
        f"{options.num_experts} experts, ffn {options.ffn_hidden}; deepep_moe backend {first.backend}; "
        f"Megatron-Core's permutes are {'fused' if first.permutes_are_fused else 'not fused, as TransformerEngine is missing'}"
    )
    show_layers(records)
    print(f"{tolerance(options):.1e} is what rounding explains")


def resolve(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the machine. Raises ValueError for options that do not fit."""
    on_gpu = options.device == "cuda"
    options.num_ranks = options.num_ranks or (torch.cuda.device_count() if on_gpu else 2)
    options.backend = options.backend or ("nvlink" if on_gpu else "auto")
    check_ranks(options.device, options.num_ranks)
    if options.num_experts % options.num_ranks or not 0 < options.num_topk <= options.num_experts or options.repeats < 1:
        raise ValueError(
            f"--num-experts {options.num_experts} must be a multiple of --num-ranks {options.num_ranks}, --num-topk {options.num_topk} "
            f"1 to the experts, --repeats {options.repeats} at least 1"
        )


def main(options: argparse.Namespace) -> None:
    """Print a table and write the records to `--json`. Exit with 1 if dispatchers disagree."""
    try:
        resolve(options)
    except ValueError as error:
        sys.exit(str(error))
    ranks = run_ranks(measure, options.num_ranks, options, timeout_s=900, bind=options.bind)
    records = records_of(ranks, options) + step_records(ranks, options)
    show(ranks, records, options)
    write_json(options.json, records)
    wrong = [
        f"{what}, {baseline}: {kind} differs by {value:.1e}"
        for what, baselines in worst(ranks).items()
        for baseline, kinds in baselines.items()
        for kind, value in kinds.items()
        if not value <= tolerance(options)
    ]
    if wrong:
        sys.exit(f"dispatchers disagree by more than rounding ({tolerance(options):.1e}): " + "; ".join(wrong))
