"""Benchmark of Megatron-Core's MoELayer, forward and backward, with our dispatcher and with Megatron-Core's own.

All dispatchers take turns in one run, on the same inputs, router and experts. The `exchange` is all between the router and the layer's
output, with permutes and without experts (rows return as they came). Without TransformerEngine Megatron-Core's permutes are not fused, so
there is one more baseline: `rows alone` sends the rows of `alltoall` by all_to_all_single and does nothing else. Results of all dispatchers
are compared first. Times are of the slowest rank, by CUDA events on a GPU whose host is ahead.

"layer" is the whole layer as a training step has it, with grouped experts, ours and TransformerEngine's: see `megatron_steps`. Two of
these have Megatron-Core's SequentialMLP.
"""

import argparse
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.link import gather_counts, rows_to_others
from benchmarks.common.records import hardware_of, write_json
from benchmarks.layers import harness, megatron_steps, passes
from benchmarks.layers.megatron_steps import FLAG, GRAPH, SYNC_FREE, Graphed
from benchmarks.layers.passes import MeasuredLayer, Pass, Step
from deepep_moe.testing import run_ranks

OURS, ALONE = "deepep_moe", "rows alone"
DISPATCHERS = (OURS, "alltoall", "allgather")
_WARMUP = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = {"num_tokens": 4096, "hidden": 4096, "ffn_hidden": 2048, "num_topk": 8, "num_experts": 64, "repeats": 20}
    harness.add_arguments(parser, "all GPUs, on the CPU 2", **sizes)
    parser.set_defaults(device="cuda")


resolve = harness.resolve


# ---- what is timed ----


class Rows(Step):
    """Sends the rows of `alltoall`, one per (token, expert), there and back in the forward, and again in the backward."""

    def __init__(self, x: Tensor, routing_map: Tensor, num_ranks: int):
        counts = gather_counts(routing_map.sum(0).view(num_ranks, -1).sum(1))  # [from rank, to rank]
        self.sent, self.received = counts[dist.get_rank()].tolist(), counts[:, dist.get_rank()].tolist()
        self.there, self.here = (x.new_ones(sum(rows), x.shape[-1]) for rows in (self.sent, self.received))

    def forward(self) -> None:
        dist.all_to_all_single(self.here, self.there, self.received, self.sent)
        dist.all_to_all_single(self.there, self.here, self.sent, self.received)

    backward = forward


def compare(steps: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the largest difference from ours, by baseline, then by kind of result."""
    ours, by_rival = steps[OURS].results(), {}
    for name, rival in steps.items():
        if name != OURS and isinstance(rival, Pass):
            theirs = megatron_steps.by_expert(rival.results())
            by_rival[name] = passes.differences({kind: ours[kind] for kind in theirs}, theirs)
    return by_rival


def measure(rank: int, num_ranks: int, options: argparse.Namespace) -> MeasuredLayer:
    """Do the work of one rank: build layers, compare results, and time them in turns."""
    from megatron_ranks import model_parallel

    from benchmarks.layers import megatron_layers

    bound = {"num_max_tokens_per_rank": options.num_tokens, "backend": options.backend, "experts": "framework"}
    with model_parallel(options.device, ep=num_ranks, seed=1, options=bound) as device:
        sizes: dict[str, Any] = {name: getattr(options, name) for name in ("hidden", "ffn_hidden", "num_experts", "num_topk")}
        sizes |= {"ep": num_ranks, "dtype": torch.bfloat16}
        layers = megatron_layers.sharing_layers(DISPATCHERS, seed=1, **sizes)
        x, cotangent = passes.draw_inputs(rank, (options.num_tokens, 1, options.hidden), device, torch.bfloat16)
        with torch.no_grad():
            probs, routing_map = layers[OURS].router(x)
        leaves = {"input": x, "probs": probs.requires_grad_()}
        exchanges: dict[str, Any] = {}
        for name, layer in layers.items():
            run = partial(megatron_layers.exchange, layer.token_dispatcher, x, routing_map, probs)
            exchanges[name] = Pass(run, cotangent, leaves)
        exchanges[ALONE] = Rows(x, routing_map, num_ranks)
        steps: dict[str, Any] = {name: megatron_steps.pass_of(layers[name], x, cotangent) for name in (OURS, "alltoall")}
        steps |= megatron_steps.make_steps(layers[OURS], x, cotangent, seed=1, **sizes)
        both = {"exchange": exchanges, "layer": steps}
        compared = {(what, name): kinds for what, timed in both.items() for name, kinds in compare(timed).items()}
        sent = rows_to_others(routing_map.view(len(routing_map), num_ranks, -1).any(2)) * options.hidden * x.element_size()
        buffer = layers[OURS].token_dispatcher.buffer
        versions = f"{passes.versions_of('megatron-core')}; {megatron_steps.rivals()}"
        measured = MeasuredLayer(buffer.backend, hardware_of(device, num_ranks), versions, sent, compared)
        alone = {("exchange", name): each for name, each in exchanges.items()}
        measured.times = harness.in_turns(alone, harness.timer_of(device), _WARMUP, options.repeats)
        if device.type == "cuda":
            measured.peak_bytes = {("layer", name): megatron_steps.peak_bytes(step) for name, step in steps.items()}
            measured.workspace_bytes = buffer.memory().held
            steps[GRAPH] = Graphed(steps[SYNC_FREE])
        keyed = {("layer", name): step for name, step in steps.items()}
        measured.times |= harness.in_turns(keyed, partial(megatron_steps.time_step, device=device), 1, options.repeats)
        for key, step in keyed.items() if device.type == "cuda" else ():
            measured.kernel_us[key] = megatron_steps.kernel_us(step)
        return measured


# ---- report ----


def tolerance(options: argparse.Namespace) -> float:
    """Return how much dispatchers may differ, relative to the largest entry. They sum up to top-k terms in different orders and precisions.

    `alltoall` sums them in the rows' dtype, with a rounding of half an eps per term.
    """
    return options.num_topk * torch.finfo(torch.bfloat16).eps / 2


def records_of(ranks: list[MeasuredLayer], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a record of the exchange for each baseline; and of the layer with grouped experts for each who makes the same step."""
    first, sent = ranks[0], max(rank.link_bytes for rank in ranks)
    differences, ours = passes.worst(ranks), {"exchange": OURS, "layer": FLAG}
    records = []
    for what, name in (key for key in first.times if key[1] != ours[key[0]]):
        extra: dict[str, Any] = {"ffn_hidden": options.ffn_hidden if what == "layer" else None, "workspace_bytes": first.workspace_bytes}
        extra |= {"rival_permutes_are_fused": megatron_steps.te_version() is not None, "differences": differences.get((what, name))}
        keys = (what, ours[what]), (what, name)
        records.append(harness.record(ranks, options, f"megatron {what} forward+backward", "bfloat16", *keys, sent * 4, **extra))
    return records


def main(options: argparse.Namespace) -> None:
    """Print a table and write the records to `--json`. Exit with 1 if dispatchers disagree."""
    ranks = run_ranks(measure, options.num_ranks, options, timeout_s=900, bind=options.bind)
    records = records_of(ranks, options)
    permutes = "fused" if megatron_steps.te_version() else "not fused, as TransformerEngine is missing"
    harness.show(ranks, records, options, f"; Megatron-Core's permutes are {permutes}")
    print(f"{tolerance(options):.1e} is what rounding explains")
    write_json(options.json, records)
    wrong = passes.beyond(ranks, tolerance(options))
    if wrong:
        sys.exit(f"dispatchers disagree by more than rounding ({tolerance(options):.1e}): " + "; ".join(wrong))
