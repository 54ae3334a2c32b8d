"""Start the ranks of a run on this host, or be one of those that a launcher such as torchrun has started on some."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe import config
from deepep_moe.testing.launch import run_ranks
from deepep_moe.topology.option import bind_this_rank


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
            "give --num-ranks, or --device cpu"
        )


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
