"""Benchmark of a MoE layer with fp8 experts, router to combine, forward and backward, against bf16 and TransformerEngine.

Ours is `deepep_moe.nn.MoELayer` with `GroupedExperts`, sync-free, in bf16 and in fp8. In fp8 there are two ways: each forward quantizes
the weights; or the first micro-batch of a step quantizes them and the others use its copies (`is_first_microbatch`).
On GPUs ours runs from CUDA graphs too: a replay runs all micro-batches of an optimizer step and quantizes the weights (see `graphs`).

The baseline, if Megatron-Core and TransformerEngine are installed, is Megatron-Core's MoELayer in bf16 and with the blockwise fp8 recipe.
It has the dispatcher `alltoall`, fused permutes and router, and TEGroupedMLP. It is not captured, because `alltoall` waits for its counts.
All take turns in one run, with random routers.

Times are of one forward and backward of the slowest rank: wall time of a chain of them, the host's part, and the sum over kernels. The
host's part of a graph is the launch of its replay. Gradients are dropped after each pass, so none are accumulated. Copies and graphs must
not change a bit, or the exit code is 1.
"""

import argparse
import contextlib
import gc
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.records import write_json
from benchmarks.common.report import show_layers
from benchmarks.layers import fp8_layers, harness, megatron_steps
from benchmarks.layers.fp8_layers import BF16, BF16_GRAPH, EACH, GRAPHS, OURS, SHARED, Layer, Wire, graph_of
from benchmarks.layers.graphs import Graphed
from benchmarks.layers.passes import StepTimes, chain, describe, difference, slowest_steps
from deepep_moe.testing import run_ranks

_WARMUP = 2
_SHOWN_KERNELS = 12  # of each layer; the records have all
_MIN_CHAIN = 4  # passes between two looks at the clock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = {"num_tokens": 4096, "hidden": 7168, "ffn_hidden": 2048, "num_topk": 8, "num_experts": 32, "micro_batches": 4, "repeats": 20}
    harness.add_arguments(parser, "cuda", "1; ranks share the GPUs there are", **sizes)
    parser.set_defaults(num_ranks=1)


resolve = partial(harness.resolve, shares_gpus=True)


@dataclass
class Measured:
    """The measurements of one rank."""

    backend: str
    hardware: str
    versions: str
    rivals: str
    wire: Wire
    differences: dict[str, dict[str, float]]
    """Relative distances (L2) from ours in bf16, by layer and kind of result."""
    num_different: int
    """Results that copies of weights have changed."""
    times: dict[str, list[StepTimes]] = field(default_factory=dict)
    kernels: dict[str, dict[str, float]] = field(default_factory=dict)
    """Microseconds a pass by layer and kernel."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """Memory that a chain of passes needs beyond the layer's parameters, by layer."""
    kept_bytes: int = 0
    not_captured: dict[str, str] = field(default_factory=dict)
    """The reasons why a layer has no CUDA graph, by the name that it would have."""
    num_different_from_eager: int = 0
    """Results that a CUDA graph has changed."""


# ---- measurement ----


@contextlib.contextmanager
def _parallel(options: argparse.Namespace, num_ranks: int) -> Iterator[tuple[torch.device, str]]:
    """Yield the device, and why there are no layers of Megatron-Core, or ""."""
    why = _why_no_rivals(options, num_ranks)
    if not why:
        from megatron_ranks import model_parallel

        with model_parallel(options.device, ep=num_ranks, seed=1) as device:
            yield device, ""
    else:
        yield harness.device_of(options), why


def _why_no_rivals(options: argparse.Namespace, num_ranks: int) -> str:
    if options.device == "cpu":
        return "TransformerEngine needs a GPU"
    if num_ranks > torch.cuda.device_count():
        return "NCCL needs a GPU for each rank"
    if importlib.util.find_spec("megatron") is None:
        return "Megatron-Core is not installed"
    return "" if megatron_steps.te_version() else "TransformerEngine is not installed"


def measure(rank: int, num_ranks: int, options: argparse.Namespace) -> Measured:
    """Do the work of one rank: build layers, compare results, and time them in turns."""
    with _parallel(options, num_ranks) as (device, why):
        ours, wire, kept = fp8_layers.make_layers(options, rank, num_ranks, device)
        theirs: dict[str, Layer] = {}
        rivals = megatron_steps.rivals()
        if why:
            rivals = why
        else:
            theirs, how = fp8_layers.make_rivals(options, rank, num_ranks, device)
            rivals = f"{rivals}, {how}"
        differences, num_different = _compare(ours)
        package = "torch" if why else "megatron-core"
        measured = Measured(ours[BF16].backend, *describe(package, device, num_ranks), rivals, wire, differences, num_different)
        for name, layer in (ours | theirs).items():
            measured.peak_bytes[name] = _peak_bytes(layer, device, _chain_of(options))
            measured.kept_bytes = max(measured.kept_bytes, kept.num_bytes)
        steps: dict[str, Layer | Graphed] = {**ours, **_add_graphs(measured, ours, device, options.micro_batches), **theirs}
        time = partial(megatron_steps.time_step, device=device, num_passes=_chain_of(options))
        measured.times = harness.in_turns(steps, time, _WARMUP, options.repeats)
        for name, step in steps.items() if device.type == "cuda" else ():
            measured.kernels[name] = megatron_steps.kernel_times(step, _chain_of(options))
        return measured


def _chain_of(options: argparse.Namespace) -> int:
    """Return the passes between two looks at the clock, the same for all layers: whole optimizer steps."""
    return options.micro_batches * -(-_MIN_CHAIN // options.micro_batches)


def _add_graphs(measured: Measured, layers: dict[str, Layer], device: torch.device, num_micro_batches: int) -> dict[str, Graphed]:
    """Return our layers that run from CUDA graphs. Collective. Compare each with the eager layer, and say why others have no graph."""
    graphs = {}
    for name in OURS:
        graph, why = _capture(layers[name], device, num_micro_batches)
        if graph is None:
            measured.not_captured[graph_of(name)] = why
            continue
        eager, replayed = layers[name].results(), graph.results()
        measured.num_different_from_eager += sum(not torch.equal(value, eager[kind]) for kind, value in replayed.items())
        measured.peak_bytes[graph_of(name)] = graph.peak_bytes
        graphs[graph_of(name)] = graph
        layers[name].release()
    return graphs


def _capture(layer: Layer, device: torch.device, num_micro_batches: int) -> tuple[Graphed | None, str]:
    """Return the graph of a layer, or None and why there is none: on one rank, or on all. Collective."""
    graph, why = None, "" if device.type == "cuda" else "CUDA graphs need a GPU"
    if not why:
        try:
            graph = Graphed(layer, num_micro_batches)
        except Exception as error:  # whatever PyTorch, the driver or a kernel raises
            # The end of a capture that has failed may raise by itself.
            why = "; before that: ".join(f"{type(each).__name__}: {str(each)[:200]}" for each in (error, error.__context__) if each)
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, why)
    first = next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), "")
    return (None, why or first) if first else (graph, "")


def _compare(layers: dict[str, Layer]) -> tuple[dict[str, dict[str, float]], int]:
    exact, each = layers[BF16].results(), layers[EACH].results()
    distances = {EACH: {name: _distance(value, exact[name]) for name, value in each.items()}}
    distances[EACH]["largest output"] = difference(each["output"].float(), exact["output"].float())
    num_different = 0
    for _ in range(3):  # the first one quantizes
        shared = layers[SHARED].results()
        num_different += sum(not torch.equal(value, shared[name]) for name, value in each.items())
    return distances, num_different


def _distance(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((torch.dist(ours.float(), exact.float()) / exact.float().norm()).item())


def _peak_bytes(layer: Layer, device: torch.device, num_passes: int) -> int:
    if device.type != "cuda":
        return 0
    layer.clear()
    layer.release()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    chain(layer, num_passes)
    torch.cuda.synchronize()
    layer.clear()
    return torch.cuda.max_memory_allocated() - before


# ---- report ----


def _kernel_us(ranks: list[Measured], name: str) -> float | None:
    return max(sum(rank.kernels[name].values()) for rank in ranks) if ranks[0].kernels else None


def records_of(ranks: list[Measured], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a record of each layer of ours in fp8, and of each from a CUDA graph, against each baseline.

    Baselines are ours in bf16, eager and from a CUDA graph, and TransformerEngine's. Records compare wall times; host and kernel times
    stand beside.
    """
    names = list(ranks[0].times)
    mine = [name for name in names if name in (*OURS, *GRAPHS)]
    baselines = [name for name in names if name in (BF16, BF16_GRAPH) or name not in mine]
    return [_record(ranks, options, name, baseline) for name in mine if name != BF16 for baseline in baselines if baseline != name]


def _record(ranks: list[Measured], options: argparse.Namespace, name: str, baseline: str) -> dict[str, Any]:
    first, (mine, theirs) = ranks[0], (slowest_steps([rank.times[each] for rank in ranks]) for each in (name, baseline))
    is_fp8 = name != BF16_GRAPH
    dtype, row_bytes = ("float8_e4m3fn", first.wire.fp8_bytes) if is_fp8 else ("bfloat16", first.wire.bf16_bytes)
    shares, row_sizes = name in (SHARED, graph_of(SHARED)), {"fp8": first.wire.fp8_bytes, "bf16": first.wire.bf16_bytes}
    extra = {
        "rival_versions": f"{first.versions}; {first.rivals}", "ffn_hidden": options.ffn_hidden,
        "micro_batches": options.micro_batches if shares else None,
        "graph_passes": options.micro_batches if name in GRAPHS else None,
        "rival_graph_passes": options.micro_batches if baseline in GRAPHS else None, "not_captured": first.not_captured,
        "kernel_us": _kernel_us(ranks, name), "rival_kernel_us": _kernel_us(ranks, baseline),
        "peak_bytes": max(rank.peak_bytes[name] for rank in ranks),
        "rival_peak_bytes": max(rank.peak_bytes[baseline] for rank in ranks), "kept_bytes": first.kept_bytes if shares else 0,
        "wire": {"rows": first.wire.num_rows, "row_bytes": row_sizes}, "differences": first.differences[EACH] if is_fp8 else None,
        "kernels": {kernel: round(us, 1) for kernel, us in first.kernels.get(name, {}).items()},
    }  # fmt: skip
    num_bytes = first.wire.num_rows * (row_bytes + first.wire.bf16_bytes) * 2
    return harness.record(f"fp8 layer {name}", options, first, len(ranks), dtype, mine, num_bytes, baseline, theirs, **extra)


def show(ranks: list[Measured], records: list[dict[str, Any]], options: argparse.Namespace) -> None:
    first = ranks[0]
    print(f"{first.hardware}; {first.versions}; {first.rivals}")
    print(f"MoELayer, {harness.shape_of(options, len(ranks), first.backend)}")
    show_layers(records)
    for name, why in first.not_captured.items():
        print(f"{name}: not captured: {why}")
    if graphs := [name for name in first.times if name in GRAPHS]:
        print(f"CUDA graphs of {options.micro_batches} forwards and backwards, a replay's times divided by them: {'; '.join(graphs)}")
    print(f"wire, bytes of a row in a dispatch and in combine's gradient: {first.wire.fp8_bytes} in fp8, {first.wire.bf16_bytes} in bf16")
    print(f"kept copies of weights: {first.kept_bytes / 1e9:.2f} GB")
    for name, of_layer in first.kernels.items():
        print(f"kernels of {name}, us a pass, the longest {_SHOWN_KERNELS}:")
        for kernel, us in sorted(of_layer.items(), key=lambda item: -item[1])[:_SHOWN_KERNELS]:
            print(f"  {us:9.1f}  {kernel[:120]}")


def main(options: argparse.Namespace) -> None:
    """Print tables and write the records to `--json`. Exit with 1 if copies of weights, or graphs, change results."""
    ranks = run_ranks(measure, options.num_ranks, options, timeout_s=900, bind=options.bind)
    records = records_of(ranks, options)
    show(ranks, records, options)
    write_json(options.json, records)
    counts = {
        "forwards that quantize and those that share copies": max(rank.num_different for rank in ranks),
        "passes and their CUDA graphs": max(rank.num_different_from_eager for rank in ranks),
    }
    if wrong := [f"{count} results differ between {what}" for what, count in counts.items() if count]:
        sys.exit("; ".join(wrong))
