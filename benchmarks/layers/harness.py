"""Shared parts of the benchmarks of layers: options, times in turns, records, and the table."""

import argparse
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import records
from benchmarks.common.report import Record, number, show_table, spread_of
from benchmarks.common.timing import Timer
from benchmarks.layers.passes import Key, MeasuredLayer, StepTimes, slowest


def add_arguments(parser: argparse.ArgumentParser, num_ranks: str, **sizes: int | None) -> None:
    """Add the options that the benchmarks share. `sizes` are defaults; None depends on the device. `num_ranks` says the default."""
    device = "cuda" if torch.cuda.device_count() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device, help="default %(default)s")
    parser.add_argument("--backend", help="of deepep_moe.Buffer; default nvlink on GPUs, auto on the CPU")
    parser.add_argument("--num-ranks", type=int, help=f"expert-parallel size; default {num_ranks}")
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)


def resolve(options: argparse.Namespace, sizes: Mapping[str, Any] | None = None, *, shares_gpus: bool = False) -> None:
    """Fill in `sizes` that were not given, the ranks and the backend. Raises ValueError for options that do not fit."""
    for name, value in (sizes or {}).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    on_gpu, num_gpus = options.device == "cuda", torch.cuda.device_count()
    if options.num_ranks is None:
        options.num_ranks = num_gpus if on_gpu else 2
    options.backend = options.backend or ("nvlink" if on_gpu else "auto")
    needed = min(1, options.num_ranks) if shares_gpus else options.num_ranks
    if on_gpu and not 0 < needed <= num_gpus:
        raise ValueError(
            f"--device cuda needs a GPU for each of {max(1, needed)} ranks, this machine has {num_gpus}; give --num-ranks, or --device cpu"
        )
    for name in ("num_ranks", "num_tokens", "repeats", "num_layers", "micro_batches"):
        if getattr(options, name, 1) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1")
    topks = options.num_topk if isinstance(options.num_topk, list) else [options.num_topk]
    if options.num_experts % options.num_ranks or not all(0 < num_topk <= options.num_experts for num_topk in topks):
        raise ValueError(
            f"--num-experts {options.num_experts} must be a multiple of --num-ranks {options.num_ranks}, each of --num-topk {topks} 1 to "
            "the experts"
        )


def device_of(options: argparse.Namespace) -> torch.device:
    """Return the device of this rank, and on GPUs make it the current one. Ranks share the GPUs there are."""
    if options.device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def timer_of(device: torch.device, num_layers: int = 1) -> Callable[[Any], StepTimes]:
    """Return a function that times a pass of `num_layers` layers on a busy stream, and returns the time of one of them. Collective."""
    timer = Timer(device)

    def time(timed: Any) -> StepTimes:
        timed.clear()
        us = timer.once(lambda: (timed.forward(), timed.backward()))
        timed.clear()
        return StepTimes(us / num_layers)

    return time


def in_turns(timed: Mapping[Key, Any], time: Callable[[Any], StepTimes], warmup: int, repeats: int) -> dict[Key, list[StepTimes]]:
    """Return what `time` returns for each of `timed` in each turn, without the first `warmup` turns."""
    gc.collect()
    gc.freeze()  # collections stay short
    turns = [{key: time(each) for key, each in timed.items()} for _ in range(warmup + repeats)]
    return {key: [turn[key] for turn in turns[warmup:]] for key in timed}


def record(
    ranks: Sequence[MeasuredLayer], options: argparse.Namespace, op: str, dtype: str, ours: Key, theirs: Key, num_bytes: int, **extra: Any
) -> Record:
    """Return the record of `ours` with the baseline `theirs`. Wall times are compared, times of host and kernels stand beside."""
    first = ranks[0]
    settings = vars(options) | {"backend": first.backend, "num_ranks": len(ranks), "dtype": dtype, "layout": "expert"}
    beside: dict[str, Any] = {"hardware": first.hardware, "rival_versions": first.versions}
    walls = []
    for prefix, key in (("", ours), ("rival_", theirs)):
        times = slowest(ranks, key)
        walls.append([each.wall for each in times])
        hosts = [each.host for each in times if each.host is not None]
        beside[f"{prefix}host_us"] = statistics.median(hosts) if hosts else None
        beside[f"{prefix}kernel_us"] = max((rank.kernel_us[key] for rank in ranks if key in rank.kernel_us), default=None)
        beside[f"{prefix}peak_bytes"] = max((rank.peak_bytes[key] for rank in ranks if key in rank.peak_bytes), default=None)
    return records.record(op, settings, walls[0], num_bytes, baseline=theirs[1], baseline_times=walls[1], **beside, **extra)


def shape_of(options: argparse.Namespace, num_ranks: int, backend: str) -> str:
    """Say the sizes of a layer."""
    return (
        f"EP {num_ranks}, {options.num_tokens} tokens x {options.hidden} a rank, top-{options.num_topk} of {options.num_experts} experts, "
        f"ffn {options.ffn_hidden}; deepep_moe backend {backend}"
    )


def show(ranks: Sequence[MeasuredLayer], records: Sequence[Record], options: argparse.Namespace, more: str = "") -> None:
    """Print the table of records, and how far results are from those of the baselines. `more` says what else was set."""
    columns = {
        "measured": lambda r: r["op"], "us": number("us_median", 0), "p10-p90": spread_of, "host us": number("host_us", 0),
        "kernels us": number("kernel_us", 0), "peak GB": number("peak_bytes", 2, 1e-9), "baseline us": number("rival_us", 0),
        "its host": number("rival_host_us", 0), "its kernels": number("rival_kernel_us", 0), "its GB": number("rival_peak_bytes", 2, 1e-9),
        "speed-up": number("ratio", 2, unit="x"), "baseline": lambda r: r["rival"],
    }  # fmt: skip
    print(f"{ranks[0].hardware}; {ranks[0].versions}")
    print(f"MoELayer, {shape_of(options, len(ranks), ranks[0].backend)}{more}")
    least = {"us_kernels": "kernel_us", "rival_us_kernels": "rival_kernel_us"}  # of the rank that waits least, where a benchmark says so
    show_table(columns, [r | {name: r[of_least] for of_least, name in least.items() if of_least in r} for r in records])
    print("largest differences, relative to the largest entry:")
    for r in {(r["op"].rpartition(" ")[0], r["rival"]): r for r in records if r["differences"]}.values():
        print(f"  {r['op']}, {r['rival']}: " + ", ".join(f"{kind} {value:.1e}" for kind, value in r["differences"].items()))
