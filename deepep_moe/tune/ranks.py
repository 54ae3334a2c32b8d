"""The ranks of the tuner and of benchmarks: how many there are, and how they start."""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe import config
from deepep_moe.testing import run_ranks
from deepep_moe.tune.workload import Shape

NUM_RANKS = (2, 4)
TIMEOUT_S = 30.0  # how long a call waits for a peer


class Rank:
    """One rank of one run, on the GPU `device_idx` or on the CPU, as `options.on_gpu` says. Every method is collective."""

    def __init__(self, rank: int, num_ranks: int, device_idx: int, options: argparse.Namespace):
        self.options, self.rank, self.started = options, rank, time.monotonic()
        sizes = num_ranks, options.hidden, options.num_experts, options.num_topk, options.expert_alignment
        self.shape = Shape(*sizes, getattr(options, "ranks_per_node", None))
        self.device = torch.device("cuda", device_idx) if options.on_gpu else torch.device("cpu")
        if options.on_gpu:
            torch.cuda.set_device(self.device)
        gc.collect()
        gc.freeze()  # collections stay short

    def say(self, text: str) -> None:
        """Print progress on rank 0."""
        if self.rank == 0:
            print(f"[{time.monotonic() - self.started:6.1f} s] EP{self.shape.num_ranks}: {text}", file=sys.stderr, flush=True)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the option that takes several EP sizes."""
    parser.add_argument("--num-ranks", type=int, nargs="+", help="EP sizes, one run each; default 2 and 4, as far as there are GPUs")


def resolve_ranks(options: argparse.Namespace) -> None:
    """Set `options.num_ranks`, the EP sizes, and `options.launched`, whether a launcher started this rank. Needs `options.on_gpu`.

    Raises ValueError for sizes that contradict the launcher.
    """
    options.launched = config.launched_rank() is not None
    if options.launched:
        world = config.world_size()
        if options.num_ranks not in (None, [world]):
            raise ValueError(f"--num-ranks {options.num_ranks} under a launcher that started {world} ranks; leave --num-ranks out")
        options.num_ranks = [world]
    elif options.num_ranks is None:
        options.num_ranks = [n for n in NUM_RANKS if n <= torch.cuda.device_count()] or [2] if options.on_gpu else [2]


def start(measure: Callable[..., object], options: argparse.Namespace) -> list[Any]:
    """Run `measure(rank, num_ranks, options, device_idx)` on every rank, once for each EP size.

    Returns what it returns on rank 0 of each EP size; under a launcher, what it returns on this rank.
    """
    if not options.launched:
        return [
            run_ranks(measure, num_ranks, options, timeout_s=max(900, getattr(options, "time_limit", 0) + 300), bind=options.bind)[0]
            for num_ranks in options.num_ranks
        ]
    dist.init_process_group("gloo")
    try:
        return [measure(dist.get_rank(), dist.get_world_size(), options, config.local_rank())]
    finally:
        dist.destroy_process_group()
