"""Benchmark of DeepSpeed's MoE layer, forward and backward, with packed tokens through deepep_moe and with its own padded slots.

All kinds take turns in one run, on the same inputs, gate and experts. "exchange" is the layer with experts that cost nothing (rows return
as they came), so it includes the gate, the encoding, both all-to-alls and the decoding. "communication" is the same with a gate that has
decided before. "layer" has experts of two matrices. "exact" and "fast" are the modes of deepep_moe (see replace_moe_layers), "grouped" is
the fast one with `grouped_experts`, and "deepspeed" is the layer's own forward. Results are compared first. Times are of the slowest rank,
for one of `--num-layers` layers. These run forward one after another and then backward, as in a model, so that the backward's thread is
woken only once. On GPUs a profile of other runs tells the time of the kernels alone.

The defaults on the CPU are 2 ranks, 4096 tokens, hidden 1024, top-2 of 16 experts, fp32 and bf16, a layer at a time. On GPUs they are all
GPUs, hidden 4096, top-2 and top-8 of 64 experts, bf16, 4 layers at a time. `--autoep` times whole layers instead, "autoep", which AutoEP
makes of a Mixtral's; it needs transformers.
"""

import argparse
import gc
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common.report import show_layers
from benchmarks.layers.deepspeed_passes import AutoEPPass, CommunicationPass, LayerPass
from benchmarks.layers.passes import PARTS, check_ranks, describe, difference, draw_inputs, slowest, times_of
from deepep_moe import torch_module
from deepep_moe.testing import RankFailedError, run_ranks
from deepep_moe.tune.records import DTYPES, record, write_json
from deepep_moe.tune.timing import Timer

DEEPSPEED = "deepspeed"
LIMIT_S = 1800
"""Seconds that a shape may take."""
_WARMUP = 3
_PROFILED = 5  # runs that are profiled
_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "backend": "auto",
        "hidden": 1024,
        "ffn_hidden": 512,
        "num_experts": 16,
        "num_topk": [2],
        "dtype": ["fp32", "bf16"],
        "num_layers": 1,
    },
    "cuda": {
        "backend": "nvlink",
        "hidden": 4096,
        "ffn_hidden": 2048,
        "num_experts": 64,
        "num_topk": [2, 8],
        "dtype": ["bf16"],
        "num_layers": 4,
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there are GPUs")
    parser.add_argument("--backend", help="of deepep_moe.Buffer; default nvlink on GPUs, auto on the CPU")
    parser.add_argument("--num-ranks", type=int, help="expert-parallel size; default all GPUs, on the CPU 2")
    for name in ("hidden", "ffn-hidden", "num-experts"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--num-tokens", type=int, default=4096)
    parser.add_argument("--num-topk", type=int, nargs="+")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), nargs="+")
    parser.add_argument("--capacity-factor", type=float, default=1.25, help="of DeepSpeed's gates: what exceeds it is dropped")
    parser.add_argument(
        "--num-layers", type=int, help="timed in one forward and one backward, all with the same input; default 1, on GPUs 4"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--autoep", action="store_true", help="a layer that AutoEP makes, with three matrices an expert and no capacity")


@dataclass(frozen=True)
class Shape:
    """What differs between the measurements of a run."""

    num_topk: int
    dtype: str

    def __str__(self) -> str:
        return f"top-{self.num_topk} {self.dtype}"


@dataclass
class Measured:
    """The measurements of one rank and shape."""

    backend: str
    hardware: str
    versions: str
    link_bytes: dict[str, int]
    """Bytes that this rank must send in a dispatch, by mode."""
    differences: dict[str, dict[str, dict[str, float]]]
    """The largest difference from DeepSpeed's results, by what is timed, mode and kind of result."""
    times: dict[tuple[str, str], list[list[float]]] = field(default_factory=dict)
    """Times by what is timed and kind of layer: an entry per turn, as `times_of` returns it."""
    kernel_us: dict[tuple[str, str], float] = field(default_factory=dict)
    """On GPUs, the time of the kernels of a forward and a backward, without the time between them, by the same keys."""


def kind_of(name: str) -> str:
    """Return the kind of a result: "deepspeed_moe.experts.deepspeed_experts.3.up.weight" -> "experts"."""
    return name.removeprefix("deepspeed_moe.").split(".")[0]


def modes_of(kinds: Iterable[str]) -> list[str]:
    """Return those that are ours."""
    return [kind for kind in kinds if kind != DEEPSPEED]


def compare(passes: dict[str, LayerPass]) -> dict[str, dict[str, float]]:
    """Return the largest difference from DeepSpeed's results, by mode, then by kind of result."""
    expected = passes[DEEPSPEED].results()
    found: dict[str, dict[str, float]] = {}
    for mode in modes_of(passes):
        kinds = found.setdefault(mode, {})
        for name, value in passes[mode].results().items():
            distance = difference(value.float(), expected[name].float())
            kinds[kind_of(name)] = max(kinds.get(kind_of(name), 0.0), distance) if distance == distance else distance
    return found


def link_bytes(topk_idx: Tensor, num_local_experts: int, row_bytes: int) -> dict[str, int]:
    """Return the bytes of a dispatch of topk_idx [num_tokens, num_topk] over the link, by mode.

    Exact mode sends a row for each remote expert of a token, the others one for each remote rank.
    """
    ranks = topk_idx.div(num_local_experts, rounding_mode="floor")
    elsewhere = (topk_idx >= 0) & (ranks != dist.get_rank())
    per_rank = [((ranks == rank) & elsewhere).any(1).sum() for rank in range(dist.get_world_size())]
    fast = int(sum(per_rank)) * row_bytes
    return {"exact": int(elsewhere.sum()) * row_bytes, "fast": fast, "grouped": fast}


def measure(rank: int, num_ranks: int, options: argparse.Namespace, shape: Shape) -> Measured:
    """Do the work of one rank for one shape: build layers, compare results, and time them in turns."""
    from deepspeed_ranks import engine_ready

    with engine_ready(options.device) as device:
        return _measure(shape, rank, num_ranks, options, device)


def _measure(shape: Shape, rank: int, num_ranks: int, options: argparse.Namespace, device: torch.device) -> Measured:
    from deepep_moe.integrations.common.registry import all_buffers, destroy_all

    dtype = DTYPES[shape.dtype]
    x, cotangent = draw_inputs(rank, (options.num_tokens, options.hidden), device, dtype)
    settings = {name: getattr(options, name) for name in ("hidden", "num_experts", "backend")}
    settings |= {"num_topk": shape.num_topk, "ep": num_ranks, "num_max_tokens_per_rank": options.num_tokens}
    settings |= {"device": device, "dtype": dtype}
    torch.manual_seed(1)
    make = _autoep_passes if options.autoep else _native_passes
    passes, topk_idx = make(x, cotangent, options, settings)
    differences = {what: compare(of_one) for what, of_one in passes.items()}
    for kinds in differences.get("exchange", {}).values():
        del kinds["gate"]  # as all experts are the same, its gradient is only rounding
    sent = link_bytes(topk_idx, options.num_experts // num_ranks, options.hidden * x.element_size())
    hardware, versions = describe("deepspeed", device, num_ranks)
    if device.type == "cuda" and torch_module.MODULE is None:
        versions += ", deepep_moe without its autograd functions in C++"
    measured = Measured(all_buffers()[0].backend, hardware, versions, sent, differences)
    _time(passes, measured, options, device)
    if device.type == "cuda":
        measured.kernel_us = {(what, kind): _kernel_us(timed) for what, of_one in passes.items() for kind, timed in of_one.items()}
    destroy_all()
    return measured


Passes = dict[str, dict[str, LayerPass]]
"""Passes by what is timed and kind of layer."""


def _native_passes(x: Tensor, cotangent: Tensor, options: argparse.Namespace, settings: dict[str, Any]) -> tuple[Passes, Tensor]:
    """Return the passes of DeepSpeed's own layers, and the experts of tokens, [num_tokens, num_topk]."""
    from benchmarks.layers.deepspeed_layers import experts_of, feed_forward, into_one_memory, sharing_layers

    settings["capacity_factor"] = options.capacity_factor
    layers = {
        "exchange": sharing_layers(nn.Identity(), **settings),
        "layer": sharing_layers(feed_forward(options.hidden, options.ffn_hidden), grouped=True, **settings),
    }
    passes: Passes = {what: {kind: LayerPass(layer, x, cotangent) for kind, layer in of_one.items()} for what, of_one in layers.items()}
    passes["communication"] = {kind: CommunicationPass(layer, x, cotangent) for kind, layer in layers["exchange"].items()}
    for parameter in layers["layer"][DEEPSPEED].deepspeed_moe.experts.parameters():  # else copies of one
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    into_one_memory(list(layers["layer"][DEEPSPEED].deepspeed_moe.experts.parameters()))
    torch.manual_seed(dist.get_rank())
    return passes, experts_of(layers["exchange"][DEEPSPEED], x)


def _autoep_passes(x: Tensor, cotangent: Tensor, options: argparse.Namespace, settings: dict[str, Any]) -> tuple[Passes, Tensor]:
    """Return the passes of AutoEP's layers, and the experts of tokens, [num_tokens, num_topk]."""
    from benchmarks.layers.deepspeed_layers import autoep_experts_of, autoep_layers

    layers = autoep_layers(ffn_hidden=options.ffn_hidden, **settings)
    passes: Passes = {"autoep": {kind: AutoEPPass(layer, x, cotangent) for kind, layer in layers.items()}}
    return passes, autoep_experts_of(layers[DEEPSPEED], x.detach().unsqueeze(0))


def _time(passes: Passes, measured: Measured, options: argparse.Namespace, device: torch.device) -> None:
    timer = Timer(device)
    gc.collect()
    gc.freeze()  # collections stay short
    for turn in range(_WARMUP + options.repeats):
        for what, of_one in passes.items():
            for kind, timed in of_one.items():
                timed.num_layers = options.num_layers
                times = [time / options.num_layers for time in times_of(timed, timer)]
                if turn >= _WARMUP:
                    measured.times.setdefault((what, kind), []).append(times)
    if device.type == "cuda":
        torch.cuda.synchronize()
        dist.barrier()


def _kernel_us(timed: LayerPass) -> float:
    """Return the time of the kernels of one layer, the shortest of some runs, as kernels that wait for a late peer take longer."""
    runs = []
    for _ in range(_PROFILED):
        timed.clear()
        dist.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            timed.forward()
            timed.backward()
            torch.cuda.synchronize()
        spans = (event.time_range.elapsed_us() for event in profile.events() or () if event.device_type == torch.autograd.DeviceType.CUDA)
        runs.append(sum(spans) / timed.num_layers)
    return min(runs)


# ---- report ----


def tolerance(shape: Shape) -> float:
    """Return how much results may differ, relative to the largest entry, which is far less than the effect of a wrong row.

    DeepSpeed pads the rows of the experts' matrix products, which regroups their sums. Gradients of the gate are differences of such sums.
    """
    return {"fp32": 1e-4, "bf16": 6e-2}[shape.dtype]


def fewest_kernel_us(ranks: list[Measured], what: str, kind: str) -> float:
    """Return the time of the kernels on the rank that waits least for others."""
    return min(rank.kernel_us[what, kind] for rank in ranks)


def disagreements(ranks: list[Measured], shape: Shape) -> list[str]:
    """Return a line for each result that differs from DeepSpeed's by more than rounding, or is NaN."""
    return sorted(
        {
            f"{shape}, {what}, {mode}: {kind} differs by {value:.1e}, more than rounding ({tolerance(shape):.1e})"
            for rank in ranks
            for what, modes in rank.differences.items()
            for mode, kinds in modes.items()
            for kind, value in kinds.items()
            if not value <= tolerance(shape)
        }
    )


def records_of(ranks: list[Measured], shape: Shape, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a record per thing timed, mode and part."""
    first, times = ranks[0], slowest(ranks)
    dtype = str(DTYPES[shape.dtype]).removeprefix("torch.")
    settings = vars(options) | {"backend": first.backend, "num_ranks": len(ranks), "layout": "expert"}
    settings |= {"num_topk": shape.num_topk, "dtype": dtype}
    records = []
    for what, modes in first.differences.items():
        for mode in modes:
            for part in PARTS:
                num_bytes = max(rank.link_bytes[mode] for rank in ranks) * (4 if part == PARTS[2] else 2)
                extra = {
                    "hardware": first.hardware,
                    "rival_versions": first.versions,
                    "capacity_factor": None if options.autoep else options.capacity_factor,
                    "num_layers": options.num_layers,
                    "ffn_hidden": options.ffn_hidden if what in ("layer", "autoep") else None,
                    "differences": modes[mode],
                }
                op = f"deepspeed {what} {mode} {shape} {part}"
                if part == PARTS[2] and first.kernel_us:
                    extra["us_kernels"], extra["rival_us_kernels"] = (fewest_kernel_us(ranks, what, kind) for kind in (mode, DEEPSPEED))
                ours, theirs = times[what, mode][part], times[what, DEEPSPEED][part]
                records.append(record(op, settings, ours, num_bytes, baseline=DEEPSPEED, baseline_times=theirs, **extra))
    return records


def show(ranks: list[Measured], records: list[dict[str, Any]], shape: Shape, options: argparse.Namespace) -> None:
    capacity = "AutoEP" if options.autoep else f"capacity factor {options.capacity_factor:g}"
    print(
        f"\nMoE, EP {len(ranks)}, {options.num_tokens} tokens x {options.hidden} {shape.dtype} a rank, top-{shape.num_topk} of "
        f"{options.num_experts} experts, {capacity}, ffn {options.ffn_hidden}, layers at a time: {options.num_layers}; deepep_moe backend "
        f"{ranks[0].backend}"
    )
    show_layers(records)


def resolve(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the machine. Raises ValueError for options that do not fit."""
    num_gpus = torch.cuda.device_count()
    options.device = options.device or ("cuda" if num_gpus else "cpu")
    options.num_ranks = options.num_ranks or (num_gpus if options.device == "cuda" else 2)
    for name, value in _DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    check_ranks(options.device, options.num_ranks)
    if options.autoep:
        _check_autoep(options.num_ranks)
    fits = all(0 < num_topk <= options.num_experts for num_topk in options.num_topk)
    if options.num_experts % options.num_ranks or not fits or min(options.repeats, options.num_layers) < 1:
        raise ValueError(
            f"--num-experts {options.num_experts} must be a multiple of --num-ranks {options.num_ranks}, each of --num-topk "
            f"{options.num_topk} 1 to the experts, --repeats {options.repeats} and --num-layers {options.num_layers} at least 1"
        )


def _check_autoep(num_ranks: int) -> None:
    if num_ranks < 2:
        raise ValueError("--autoep needs --num-ranks 2 or more: on one rank AutoEP moves nothing")
    for module, advice in (("transformers", "transformers>=5"), ("deepspeed.module_inject.auto_ep_layer", "deepspeed>=0.19.2")):
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"--autoep needs {module}: pip install '{advice}'")


def main(options: argparse.Namespace) -> None:
    """Print a table per shape, and write the records to `--json`, as soon as a shape is measured. Exit with 1 if results disagree or a
    shape could not be measured."""
    try:
        resolve(options)
    except ValueError as error:
        sys.exit(str(error))
    records: list[dict[str, Any]] = []
    wrong: list[str] = []
    for shape in [Shape(num_topk, dtype) for num_topk in options.num_topk for dtype in options.dtype]:
        try:
            ranks = run_ranks(measure, options.num_ranks, options, shape, timeout_s=LIMIT_S, bind=options.bind)
        except RankFailedError as error:
            wrong.append(f"{shape}: {error}")
            continue
        if not records:
            print(f"{ranks[0].hardware}; {ranks[0].versions}")
        made = records_of(ranks, shape, options)
        show(ranks, made, shape, options)
        records += made
        wrong += disagreements(ranks, shape)
        write_json(options.json, records)
        sys.stdout.flush()
    if wrong:
        sys.exit("; ".join(wrong))
