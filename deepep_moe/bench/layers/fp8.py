"""Benchmark of a MoE layer with fp8 experts, router to combine, forward and backward, against bf16 and TransformerEngine.

Ours is `deepep_moe.nn.MoELayer` with `GroupedExperts`, sync-free, in bf16, and in fp8 in three ways: weights quantized in each forward;
over the micro-batches of an optimizer step, of which the first quantizes and the others use its copies (`is_first_microbatch`); with
copies that are there. Where Megatron-Core and TransformerEngine are installed, its MoELayer runs too: dispatcher `alltoall`, fused permutes
and router, TEGroupedMLP, in bf16 and with the blockwise fp8 recipe. All take turns in one run, with random routers.

Times are of one forward and backward of the slowest rank: wall time of a chain of them, the host's part, and the sum over kernels.
Gradients are dropped after each pass, so none are accumulated. Copies must not change a bit, or the exit code is 1.
"""

import argparse
import contextlib
import gc
import importlib.util
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe.bench.common.records import record, write_json
from deepep_moe.bench.layers import fp8_layers, megatron_steps
from deepep_moe.bench.layers.fp8_layers import BF16, EACH, KEPT, SHARED, Layer, Wire
from deepep_moe.bench.layers.megatron_steps import StepTimes
from deepep_moe.bench.layers.passes import chain, describe, difference
from deepep_moe.testing import run_ranks

_WARMUP = 2
_MIN_CHAIN = 4  # passes between two looks at the clock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--backend", help="of deepep_moe.Buffer; default nvlink on GPUs, auto on the CPU")
    parser.add_argument("--num-ranks", type=int, default=1, help="expert-parallel size; ranks share the GPUs there are")
    defaults = [("num-tokens", 4096), ("hidden", 7168), ("ffn-hidden", 2048), ("num-topk", 8), ("num-experts", 32)]
    for name, default in (*defaults, ("micro-batches", 4), ("repeats", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kernels", type=int, default=12, help="how many kernels of each layer to print; the records have all")


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
    """What a chain of passes takes beyond the layer's parameters, by layer."""
    kept_bytes: int = 0


# ---- measurement ----


@contextlib.contextmanager
def _parallel(options: argparse.Namespace, num_ranks: int) -> Iterator[tuple[torch.device, str]]:
    """Yield the device, and why there are no layers of Megatron-Core, or ""."""
    why = _why_no_rivals(options, num_ranks)
    if not why:
        from deepep_moe.integrations.megatron.harness.ranks import model_parallel

        with model_parallel(options.device, ep=num_ranks, seed=1) as device:
            yield device, ""
    elif options.device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        yield torch.device("cuda", torch.cuda.current_device()), why
    else:
        yield torch.device("cpu"), why


def _why_no_rivals(options: argparse.Namespace, num_ranks: int) -> str:
    if options.device == "cpu":
        return "TransformerEngine needs a GPU"
    if num_ranks > torch.cuda.device_count():
        return "NCCL needs a GPU for each rank"
    if importlib.util.find_spec("megatron") is None:
        return "Megatron-Core is not installed"
    return "" if megatron_steps.has_te() else "TransformerEngine is not installed"


def measure(rank: int, num_ranks: int, options: argparse.Namespace) -> Measured:
    """Do the work of one rank: build layers, compare results, and time them in turns."""
    with _parallel(options, num_ranks) as (device, why):
        layers, wire = fp8_layers.make_layers(options, rank, num_ranks, device)
        rivals = megatron_steps.rivals()
        if why:
            rivals = why
        else:
            theirs, how = fp8_layers.make_rivals(options, rank, num_ranks, device)
            layers, rivals = layers | theirs, f"{rivals}, {how}"
        differences, num_different = _compare(layers)
        package = "torch" if why else "megatron-core"
        backend = next(iter(layers.values())).backend
        measured = Measured(backend, *describe(package, device, num_ranks), rivals, wire, differences, num_different)
        for name, layer in layers.items():
            measured.peak_bytes[name] = _peak_bytes(layer, device)
        measured.kept_bytes = layers[KEPT].kept_bytes()
        gc.collect()
        gc.freeze()  # collections stay short
        for turn in range(_WARMUP + options.repeats):
            for name, layer in layers.items():
                times = megatron_steps.time_step(layer, device, num_passes=_chain(layer))
                if turn >= _WARMUP:
                    measured.times.setdefault(name, []).append(times)
        for name, layer in layers.items() if device.type == "cuda" else ():
            measured.kernels[name] = megatron_steps.kernel_times(layer, _chain(layer))
        return measured


def _chain(layer: Layer) -> int:
    return layer.num_micro_batches * -(-_MIN_CHAIN // layer.num_micro_batches)


def _compare(layers: dict[str, Layer]) -> tuple[dict[str, dict[str, float]], int]:
    exact, each = layers[BF16].results(), layers[EACH].results()
    found = {EACH: {name: _distance(value, exact[name]) for name, value in each.items()}}
    found[EACH]["largest output"] = difference(each["output"].float(), exact["output"].float())
    num_different = 0
    for _ in range(3):  # the first one quantizes
        shared = layers[SHARED].results()
        num_different += sum(not torch.equal(value, shared[name]) for name, value in each.items())
    return found, num_different


def _distance(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((torch.dist(ours.float(), exact.float()) / exact.float().norm()).item())


def _peak_bytes(layer: Layer, device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    layer.clear()
    layer.release()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    chain(layer, _chain(layer))
    torch.cuda.synchronize()
    layer.clear()
    return torch.cuda.max_memory_allocated() - before


# ---- report ----


def _slowest(ranks: list[Measured], name: str) -> list[StepTimes]:
    return [max(turn, key=lambda times: times.wall) for turn in zip(*(rank.times[name] for rank in ranks), strict=True)]


def _kernel_us(ranks: list[Measured], name: str) -> float | None:
    return max(sum(rank.kernels[name].values()) for rank in ranks) if ranks[0].kernels else None


def records_of(ranks: list[Measured], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a record of each layer of ours in fp8 against each of the others: by wall time, host and kernel times beside."""
    first = ranks[0]
    ours = [name for name in (BF16, EACH, SHARED, KEPT) if name in first.times]
    settings = vars(options) | {"backend": first.backend, "num_ranks": len(ranks), "layout": "expert"}
    records = []
    for name in ours[1:]:
        for baseline in (BF16, *(other for other in first.times if other not in ours)):
            mine, theirs = _slowest(ranks, name), _slowest(ranks, baseline)
            extra = {
                "hardware": first.hardware, "rival_versions": f"{first.versions}; {first.rivals}", "ffn_hidden": options.ffn_hidden,
                "micro_batches": options.micro_batches if name == SHARED else None,
                "host_us": _median(mine, "host"), "rival_host_us": _median(theirs, "host"),
                "kernel_us": _kernel_us(ranks, name), "rival_kernel_us": _kernel_us(ranks, baseline),
                "peak_bytes": max(rank.peak_bytes[name] for rank in ranks),
                "rival_peak_bytes": max(rank.peak_bytes[baseline] for rank in ranks), "kept_bytes": first.kept_bytes if name != EACH else 0,
                "wire": first.wire.of_record(), "differences": first.differences[EACH],
                "kernels": {kernel: round(us, 1) for kernel, us in first.kernels.get(name, {}).items()},
            }  # fmt: skip
            records.append(
                record(
                    f"fp8 layer {name}", settings | {"dtype": "float8_e4m3fn"}, [times.wall for times in mine],
                    first.wire.num_rows * (first.wire.fp8_bytes + first.wire.bf16_bytes) * 2, baseline=baseline,
                    baseline_times=[times.wall for times in theirs], **extra,
                )
            )  # fmt: skip
    return records


def _median(times: list[StepTimes], name: str) -> float:
    return statistics.median(getattr(each, name) for each in times)


def show(ranks: list[Measured], options: argparse.Namespace) -> None:
    first = ranks[0]
    print(f"{first.hardware}; {first.versions}; {first.rivals}")
    print(
        f"MoELayer, EP {len(ranks)}, {options.num_tokens} tokens x {options.hidden} a rank, top-{options.num_topk} of "
        f"{options.num_experts} experts, ffn {options.ffn_hidden}; deepep_moe backend {first.backend}"
    )
    print(f"{'us a forward and backward':44}{'wall':>10}{'host':>10}{'kernels':>10}{'peak GB':>10}{'than bf16':>12}{'than TE':>10}")
    te = [name for name in first.times if name == fp8_layers.TE_EACH]
    for name in first.times:
        times, kernels = _slowest(ranks, name), _kernel_us(ranks, name)
        wall = _median(times, "wall")
        ratios = [f"{_median(_slowest(ranks, other), 'wall') / wall:.2f}x" for other in (BF16, *te)]
        cells = f"{wall:10.0f}{_median(times, 'host'):10.0f}" + ("-" if kernels is None else f"{kernels:.0f}").rjust(10)
        peak = max(rank.peak_bytes[name] for rank in ranks) / 1e9
        print(f"{name:44}{cells}{peak:10.2f}{ratios[0]:>12}{[*ratios, '-'][1]:>10}")
    print(
        f"wire, bytes of a row: dispatch and combine's gradient {first.wire.fp8_bytes} in fp8, {first.wire.bf16_bytes} in bf16 = "
        f"{first.wire.ratio:.4f}x; kept copies {first.kept_bytes / 1e9:.2f} GB"
    )
    print("distance of fp8 from bf16, relative: " + ", ".join(f"{kind} {value:.1e}" for kind, value in first.differences[EACH].items()))
    for name, of_layer in first.kernels.items():
        print(f"kernels of {name}, us a pass, the longest {options.kernels}:")
        for kernel, us in sorted(of_layer.items(), key=lambda item: -item[1])[: options.kernels]:
            print(f"  {us:9.1f}  {kernel[:120]}")


def resolve(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the machine. Raises ValueError for options that do not fit."""
    options.backend = options.backend or ("nvlink" if options.device == "cuda" else "auto")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU, and this machine has none; give --device cpu")
    if options.num_ranks < 1 or options.num_experts % options.num_ranks or not 0 < options.num_topk <= options.num_experts:
        raise ValueError(
            f"--num-experts {options.num_experts} must be a multiple of --num-ranks {options.num_ranks}, which is positive, and --num-topk "
            f"{options.num_topk} 1 to the experts"
        )
    if min(options.repeats, options.micro_batches, options.num_tokens) < 1:
        raise ValueError("--repeats, --micro-batches and --num-tokens must be at least 1")


def main(options: argparse.Namespace) -> None:
    """Print tables and write the records to `--json`. Exit with 1 if copies of weights change results."""
    try:
        resolve(options)
    except ValueError as error:
        sys.exit(str(error))
    ranks = run_ranks(measure, options.num_ranks, options, timeout_s=900, bind=options.bind)
    show(ranks, options)
    write_json(options.json, records_of(ranks, options))
    if any(rank.num_different for rank in ranks):
        sys.exit(f"{max(rank.num_different for rank in ranks)} results differ between forwards that quantize and those that share copies")
