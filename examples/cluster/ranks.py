"""One rank of a cluster run: its process group and device, its buffer, and the block that rank 0 prints."""

import argparse
import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe import Buffer, config

_TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class Rank:
    """This rank."""

    options: argparse.Namespace
    device: torch.device

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def num_ranks(self) -> int:
        return dist.get_world_size()

    def new_buffer(self, num_tokens: int, hidden: int, num_experts: int, num_topk: int) -> Buffer:
        """Return a buffer over all ranks. Collective."""
        o = self.options
        return Buffer(None, num_tokens, hidden, num_experts, num_topk, backend=o.backend, ranks_per_node=o.ranks_per_node)

    def gather(self, value: Any) -> list[Any]:
        """Return `value` of every rank. Collective."""
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values

    def shape(self, buffer: Buffer) -> str:
        """Say how ranks lie on nodes, and what moves their rows."""
        num_nodes = self.num_ranks // buffer.ranks_per_node
        virtual = " (virtual nodes)" if self.options.ranks_per_node is not None else ""
        return f"{num_nodes} x {buffer.ranks_per_node} ranks{virtual} on {self.device.type}, backend {buffer.backend}"


@contextlib.contextmanager
def joined(options: argparse.Namespace) -> Iterator[Rank]:
    """Join the ranks that torchrun started, and yield this one.

    Raises ValueError where no launcher started it, or where a host has fewer GPUs than ranks.
    """
    if config.launched_rank() is None:
        raise ValueError("no launcher started this process; run it by examples/cluster/run.sh, or by torchrun")
    device = torch.device("cpu")
    if options.device == "cuda":
        if config.local_rank() >= torch.cuda.device_count():
            raise ValueError(
                f"--device cuda needs a GPU for local rank {config.local_rank()}, this host has {torch.cuda.device_count()}; "
                "start fewer ranks on it, or give --device cpu"
            )
        device = torch.device("cuda", config.local_rank())
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        yield Rank(options, device)
    finally:
        dist.destroy_process_group()


def block(title: str, lines: list[str]) -> str:
    """Return the text to paste into an issue."""
    return "\n".join(["---- paste from here ----", f"### {title}", "", *lines, "---- to here ----"])
