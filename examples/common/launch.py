"""Start the ranks of a run on this host, or be one of those that a launcher such as torchrun has started on some."""

import argparse
import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe import config
from deepep_moe.testing.launch import run_ranks
from deepep_moe.topology.binding import bind_this_rank


def is_launched() -> bool:
    """Return whether a launcher has started this process as one of several ranks."""
    return config.launched_rank() is not None


def is_reporting() -> bool:
    """Return whether this process writes the results: it has started the ranks, or is the first of them."""
    return not config.launched_rank()


def settle_ranks(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Fill in `num_ranks`: those of a launcher, else 2 on CPUs and a rank for each GPU. Refuses what the launcher or the host has not."""
    if is_launched():
        world = config.world_size()
        if arguments.num_ranks not in (None, world):
            parser.error(f"--num-ranks {arguments.num_ranks} under a launcher that started {world} ranks; leave it out")
        arguments.num_ranks = world
        return
    num_gpus = torch.cuda.device_count()
    if arguments.num_ranks is None:
        arguments.num_ranks = num_gpus if arguments.device == "cuda" else 2
    most = max(arguments.num_ranks, 1) if num_gpus and getattr(arguments, "shares_gpus", False) else num_gpus
    if arguments.device == "cuda" and not 0 < arguments.num_ranks <= most:
        parser.error(
            f"--device cuda needs a GPU for each of {max(1, arguments.num_ranks)} ranks, this machine has {num_gpus}; "
            f"give --num-ranks, {'--share-gpus, ' if hasattr(arguments, 'shares_gpus') else ''}or --device cpu"
        )


def num_nodes(size: int, ranks_per_node: int | None) -> int:
    """Return the nodes of an expert-parallel group of `size` ranks: with as many ranks as given, or else as a host has."""
    per_node = ranks_per_node or (config.local_world_size() if is_launched() else size)
    return max(1, size // per_node)


@contextlib.contextmanager
def joined(device: str, *, bind: bool) -> Iterator[None]:
    """Join the other ranks, if a launcher has started them; first bind this rank, if `bind` says so."""
    if not is_launched():
        yield
        return
    if bind:
        bind_this_rank()
    if device == "cuda":
        torch.cuda.set_device(config.local_rank())
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def on_ranks(fn: Callable[..., Any], num_ranks: int, settings: Any, timeout_s: float, *, bind: bool) -> Any:
    """Return what `fn(rank, num_ranks, settings)` returns on rank 0, or on this rank if a launcher has started it.

    `bind` binds the ranks that it starts; `joined` has bound those of a launcher.
    """
    if is_launched():
        return fn(dist.get_rank(), dist.get_world_size(), settings)
    return run_ranks(fn, num_ranks, settings, timeout_s=timeout_s, start_method="spawn", bind=bind)[0]


class Turn:
    """The place of a run among runs that alternate their steps, each in its own processes. So a busy machine slows all of them alike.

    One made without arguments belongs to a run that is alone, and waits for nobody.
    """

    def __init__(self, index: int = 0, semaphores: Sequence[Any] = (), failed: Any = None):
        self.index, self._semaphores, self._failed = index, semaphores, failed

    def take(self) -> float:
        """Wait until it is this run's turn. Collective. Returns the seconds that this took."""
        if not self._semaphores:
            return 0.0
        began = time.perf_counter()
        if dist.get_rank() == 0:
            self._semaphores[self.index].acquire()
            if self._failed.is_set():
                raise RuntimeError("the other run has failed; its error is above or below")
        dist.barrier()
        return time.perf_counter() - began

    def give(self) -> None:
        """Let the next run go on, once all ranks of this one are done. Collective."""
        if self._semaphores:
            dist.barrier()
            if dist.get_rank() == 0:
                self._semaphores[(self.index + 1) % len(self._semaphores)].release()


def take_turns(num_runs: int, device: str) -> bool:
    """Return whether runs alternate their steps: two on CPUs do. On GPUs, in a sweep and under a launcher one run follows the other."""
    return num_runs == 2 and device == "cpu" and not is_launched()


def all_runs(fn: Callable[..., Any], num_ranks: int, runs: Sequence[Any], timeout_s: float, *, device: str, bind: bool) -> list[Any]:
    """Return the result of `fn` on rank 0 of each run. Runs alternate or follow one another."""
    if take_turns(len(runs), device):
        return by_turns(fn, num_ranks, runs, timeout_s, bind=bind)
    return [on_ranks(fn, num_ranks, run, timeout_s, bind=bind) for run in runs]


def order(num_runs: int, device: str) -> dict[str, str]:
    """Return how the runs were made, if there are several, for their page."""
    how = "steps by turns" if take_turns(num_runs, device) else "one run after the other"
    return {"order": how} if num_runs > 1 else {}


def by_turns(fn: Callable[..., Any], num_ranks: int, runs: Sequence[Any], timeout_s: float, *, bind: bool) -> list[Any]:
    """Start the ranks of all runs at once, and return what `fn(rank, num_ranks, settings, turn)` returns on rank 0 of each.

    Every run takes and gives its turn equally often. Where one fails, so do the others.
    """
    context = multiprocessing.get_context("spawn")
    semaphores, failed = [context.Semaphore(int(index == 0)) for index in range(len(runs))], context.Event()

    def run(index: int) -> Any:
        try:
            turn = Turn(index, semaphores, failed)
            return run_ranks(fn, num_ranks, runs[index], turn, timeout_s=timeout_s, start_method="spawn", bind=bind)[0]
        except BaseException:
            failed.set()
            for semaphore in semaphores:
                semaphore.release()
            raise

    with ThreadPoolExecutor(len(runs)) as pool:
        return list(pool.map(run, range(len(runs))))
