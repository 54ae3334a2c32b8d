"""The ranks of a benchmark: how many there are, how they start, and what each of them has."""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe import Buffer, config
from deepep_moe.errors import BackendUnavailableError, EPError
from deepep_moe.exchange.backends.nvlink import NvlinkBackend
from deepep_moe.testing import run_ranks
from deepep_moe.tune.timing import Timer
from deepep_moe.tune.workload import Inputs, Shape, make_inputs

NUM_RANKS = (2, 4)
TIMEOUT_S = 30.0  # how long a call waits for a peer


def add_ranks_and_tokens(parser: argparse.ArgumentParser, default_tokens: str) -> None:
    """Add options that take several values each."""
    helped = "EP sizes, one run each; default 2 and 4, as far as there are GPUs"
    parser.add_argument("--num-ranks", type=int, nargs="+", help=helped)
    parser.add_argument("--num-tokens", type=int, nargs="+", help=f"per rank; default {default_tokens}")


def resolve_ranks(options: argparse.Namespace) -> None:
    """Set `options.num_ranks`, the EP sizes, and `options.launched`, whether a launcher started this rank. Needs `options.on_gpu`.

    Raises ValueError for sizes that contradict the launcher, BackendUnavailableError for too few GPUs.
    """
    num_gpus = torch.cuda.device_count()
    options.launched = config.launched_rank() is not None
    if options.launched:
        world = config.world_size()
        if options.num_ranks not in (None, [world]):
            raise ValueError(f"--num-ranks {options.num_ranks} under a launcher that started {world} ranks; leave --num-ranks out")
        options.num_ranks = [world]
    elif options.num_ranks is None:
        options.num_ranks = [n for n in NUM_RANKS if n <= num_gpus] or [2] if options.on_gpu else [2]
    needed = 1 if options.launched or getattr(options, "shares_gpus", False) else max(options.num_ranks)
    if options.on_gpu and num_gpus < needed:
        raise BackendUnavailableError(
            f"backend {options.backend!r} needs a GPU for each of {max(options.num_ranks)} ranks, this machine has {num_gpus}; "
            "give --num-ranks, or --backend shm, which needs none"
        )


def start(measure: Callable[..., Any], options: argparse.Namespace) -> list[Any]:
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


class Rank:
    """One rank of one run. Every method is collective."""

    def __init__(self, rank: int, num_ranks: int, device_idx: int, options: argparse.Namespace):
        self.options, self.rank, self.started = options, rank, time.monotonic()
        sizes = num_ranks, options.hidden, options.num_experts, options.num_topk, options.expert_alignment
        self.shape = Shape(*sizes, getattr(options, "ranks_per_node", None))
        self.device = torch.device("cuda", device_idx) if options.on_gpu else torch.device("cpu")
        self.group: dist.ProcessGroup | None = None
        shares_gpus = getattr(options, "shares_gpus", False)
        if options.on_gpu:
            torch.cuda.set_device(self.device)
        if options.on_gpu and not shares_gpus:
            self.group = dist.new_group(backend="nccl")
        self.timer = Timer(self.device, self.group, meets_on_host=shares_gpus)
        self.failures: list[str] = []

    def say(self, text: str) -> None:
        """Print progress on rank 0."""
        if self.rank == 0:
            print(f"[{time.monotonic() - self.started:6.1f} s] EP{self.shape.num_ranks}: {text}", file=sys.stderr, flush=True)

    def new_buffer(self, num_tokens: int) -> Buffer:
        o = self.options
        group = self.group if o.backend == "collective" else None
        sizes = num_tokens, o.hidden, o.num_experts, o.num_topk
        buffer = Buffer(group, *sizes, backend=o.backend, timeout_s=TIMEOUT_S, ranks_per_node=self.shape.ranks_per_node)
        backend = buffer.calls.backend
        if isinstance(backend, NvlinkBackend):
            backend.use(backend.fitted)  # records of two machines are not to differ by a user's profile
        if getattr(o, "num_rail_sms", None) is not None:
            buffer.calls.backend.tuning.num_rail_sms = o.num_rail_sms  # type: ignore[attr-defined]
        return buffer

    def agreed(self, what: str, attempt: Callable[[], Any]) -> Any:
        """Return what `attempt` returns on this rank, or None on all ranks where it raised on any of them; `failures` says why."""
        result, reason = None, None
        try:
            result = attempt()
        except (EPError, ValueError, TypeError, RuntimeError) as error:
            reason = f"EP{self.shape.num_ranks}: {what}: rank {self.rank}: {type(error).__name__}: {error}"
        reasons: list[str | None] = [None] * self.shape.num_ranks
        dist.all_gather_object(reasons, reason)
        first = next((r for r in reasons if r is not None), None)
        if first is None:
            return result
        self.failures.append(first)
        self.say(f"not timed: {first}")
        return None

    def everyones_inputs(self, num_tokens: int) -> list[Inputs]:
        """Make the inputs of all ranks."""
        return [make_inputs(self.shape, num_tokens, rank, self.device) for rank in range(self.shape.num_ranks)]
