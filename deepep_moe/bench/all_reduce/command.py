"""Benchmark of small all-reduces with and without binding: NCCL on GPUs, gloo on CPUs. It starts its own ranks, by turns bound
(`deepep_moe.topology.bind`) and not, so that what else runs on the machine meets both. A time is that of the slowest rank."""

import argparse
import itertools
import os
import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe import config
from deepep_moe.bench.common.records import cpu_name, record, write_json
from deepep_moe.bench.common.timing import Timer
from deepep_moe.errors import EPError
from deepep_moe.testing import run_ranks
from deepep_moe.topology import read

_Turns = list[dict[int, list[float]]]  # of each turn: microseconds of each call, by bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where PyTorch sees two GPUs or more")
    parser.add_argument("--num-ranks", type=int, help="default: 2, on GPUs all of them")
    parser.add_argument(
        "--num-bytes", type=int, nargs="+", default=[8, 1024, 65536], help="of each rank, in float32 (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=300, help="calls of a size in a turn (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="turns with binding, and as many without (default: %(default)s)")


def resolve(options: argparse.Namespace) -> None:
    """Fill in the device and the ranks. Raises ValueError for what makes no sense."""
    if config.launched_rank() is not None:
        raise ValueError("this benchmark starts its own ranks, bound and not; start it without a launcher")
    num_gpus = torch.cuda.device_count()
    options.device = options.device or ("cuda" if num_gpus > 1 else "cpu")
    if options.num_ranks is None:
        options.num_ranks = num_gpus if options.device == "cuda" else 2
    if options.num_ranks < 2 or (options.device == "cuda" and options.num_ranks > num_gpus):
        raise ValueError(f"--num-ranks is {options.num_ranks} with {num_gpus} GPUs; give at least 2, on GPUs at most one for each")
    if min(options.num_bytes) < 4 or any(count % 4 for count in options.num_bytes):
        raise ValueError(f"--num-bytes is {options.num_bytes}; give positive multiples of 4")
    if min(options.repeats, options.turns) < 1:
        raise ValueError(f"--repeats is {options.repeats} and --turns {options.turns}; give at least 1")


def measure(rank: int, num_ranks: int, options: argparse.Namespace) -> dict[int, list[float]]:
    """Return the times of the slowest rank by bytes. Collective."""
    is_gpu = options.device == "cuda"
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl") if is_gpu else None
    timer, times = Timer(device, group), {}
    for num_bytes in options.num_bytes:
        x = torch.ones(num_bytes // 4, device=device)
        dist.all_reduce(x, group=group)
        if not bool((x == num_ranks).all()):
            raise EPError(f"an all-reduce of ones over {num_ranks} ranks has {x[0].item():g} on rank {rank}; check the process group")
        x.zero_()
        times[num_bytes] = timer.stream(lambda x=x: dist.all_reduce(x, group=group), options.repeats)  # type: ignore[misc]
    return times


def by_turns(options: argparse.Namespace) -> tuple[_Turns, _Turns]:
    """Return the times with binding and without."""
    found: dict[bool, _Turns] = {True: [], False: []}
    for turn in range(options.turns):
        for bind in (turn % 2 == 0, turn % 2 == 1):  # who is first changes
            found[bind].append(run_ranks(measure, options.num_ranks, options, timeout_s=300, bind=bind)[0])
    return found[True], found[False]


def records_of(bound: _Turns, unbound: _Turns, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a record for each size, with the median of each turn."""
    is_gpu = options.device == "cuda"
    settings = {"backend": "nccl" if is_gpu else "gloo", "num_ranks": options.num_ranks, "dtype": "float32"}
    gpus = f"{options.num_ranks} x {torch.cuda.get_device_name()}; " if is_gpu else ""
    records = []
    for num_bytes in options.num_bytes:
        ours, theirs = ([turn[num_bytes] for turn in turns] for turns in (bound, unbound))
        extra = {
            "us_median_of_turns": [statistics.median(times) for times in ours],
            "rival_us_of_turns": [statistics.median(times) for times in theirs],
            "num_numa_nodes": len(read().nodes),
            "load_average": os.getloadavg()[0],  # processes that ran or waited for a CPU in the last minute, these ranks included
            "hardware": gpus + cpu_name(),
        }
        flat = [list(itertools.chain.from_iterable(turns)) for turns in (ours, theirs)]
        records.append(record("all_reduce", settings, flat[0], num_bytes, baseline="without binding", baseline_times=flat[1], **extra))
    return records


def show(records: list[dict[str, Any]]) -> None:
    """Print a line for each size: the medians, and between what the medians of turns lie."""
    for r in records:
        ours, theirs = (f"{min(r[name]):.1f} to {max(r[name]):.1f}" for name in ("us_median_of_turns", "rival_us_of_turns"))
        print(
            f"all-reduce of {r['bytes_moved']:6} bytes, {r['num_ranks']} ranks, {r['backend']}: bound {r['us_median']:.1f} us ({ours})",
            end="",
        )
        print(f", not bound {r['rival_us']:.1f} us ({theirs}), {r['ratio']:.2f}x; {r['hardware']}")
    if records[0]["num_numa_nodes"] < 2:
        print("This machine shows no two NUMA nodes, so no memory is far: what differs is only that a rank has cores of its own.")


def main(options: argparse.Namespace) -> None:
    try:
        resolve(options)
        records = records_of(*by_turns(options), options)
    except (EPError, ValueError) as error:
        sys.exit(str(error))
    show(records)
    write_json(options.json, records)
