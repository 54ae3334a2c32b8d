"""Finds which ranks are a node and which can reach each other's memory, from what the ranks have told."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from deepep_moe import _C
from deepep_moe.errors import BackendUnavailableError
from deepep_moe.group.rendezvous import Introduction, connect
from deepep_moe.group.settings import Settings


def find_nodes(settings: Settings, peers: list[Introduction]) -> Settings:
    """Return `settings` with `ranks_per_node` in force: the one that was given, else as the hosts of `peers`, by rank, have it.

    Raises ValueError, on all ranks alike, where hosts have different numbers of ranks, or ranks that are not consecutive.
    """
    if settings.ranks_per_node:
        return settings
    sizes = [(host, len(list(ranks))) for host, ranks in itertools.groupby(peer.host for peer in peers)]
    if len({host for host, _ in sizes}) < len(sizes) or len({size for _, size in sizes}) > 1:
        parts, first = [], 0
        for host, size in sizes:
            parts.append(f"{_ranks(first, size)} on {host}")
            first += size
        raise ValueError(
            f"ranks lie on hosts as {', '.join(parts)}; every host must have the same number of ranks, one after the other. Start them so, "
            "or pass ranks_per_node, which may be 1"
        )
    return replace(settings, ranks_per_node=sizes[0][1])


def _ranks(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"


def are_on_gpus(peers: list[Introduction]) -> bool:
    """Do all ranks see a GPU, in an NCCL group?"""
    return all(peer.has_gpu and "nccl" in peer.group_backend for peer in peers)


def _why_not_one_host(peers: list[Introduction], most: int) -> str | None:
    if len(peers) > most:
        return f"it serves at most {most} ranks, this group has {len(peers)}"
    hosts = {peer.host for peer in peers}
    if len(hosts) > 1:
        return f"its ranks must share one host and process namespace, this group spans {len(hosts)}: {sorted(hosts)}"
    return None


def why_not_shm(peers: list[Introduction]) -> str | None:
    """The reason the shm backend cannot serve these ranks, or None."""
    if reason := _why_not_one_host(peers, _C.MAX_RANKS):
        return reason
    if any(peer.group_backend != "none" and "cpu:" not in peer.group_backend for peer in peers):
        return f"it moves CPU tensors, and the group is for GPU tensors only ({peers[0].group_backend})"
    return None


def why_not_nvshmem(peers: list[Introduction], settings: Settings) -> str | None:
    """The reason the nvshmem backend cannot serve these ranks, or None."""
    if settings.num_nodes == 1:
        return f"it serves several nodes, and all {settings.num_ranks} ranks are one; backend='nvlink' serves that"
    if settings.num_nodes > _C.MAX_GPU_NODES:
        return f"it serves at most {_C.MAX_GPU_NODES} nodes, this group has {settings.num_nodes}"
    for first in range(0, settings.num_ranks, settings.ranks_per_node):
        why = why_not_nvlink(peers[first : first + settings.ranks_per_node])
        if why is not None:
            return f"of node {first // settings.ranks_per_node}, ranks {first} and up: {why}"
    return None


def why_not_one_node(settings: Settings) -> str | None:
    """The reason a backend of one node cannot serve these ranks, or None."""
    if settings.num_nodes == 1:
        return None
    return f"it serves one node, and ranks_per_node is {settings.ranks_per_node} for {settings.num_ranks} ranks; 'nvshmem' serves several"


def why_not_nvlink(peers: list[Introduction]) -> str | None:
    """The reason the nvlink backend cannot serve these ranks, or None."""
    if not hasattr(_C, "NvlinkExchange"):
        return "it was not compiled, as the build found no nvcc; install the CUDA toolkit and build again"
    if reason := _why_not_one_host(peers, _C.MAX_GPU_RANKS):
        return reason
    without = [rank for rank, peer in enumerate(peers) if not peer.has_gpu]
    return f"ranks {without} see no CUDA device" if without else None


def serve_on_gpus(
    name: str, make: Callable[[], Any], settings: Settings, peers: list[Introduction], group: "dist.ProcessGroup | None"
) -> Any:
    """Return the backend `name`, "nvlink" or "nvshmem", that `make` makes, or the reason why it cannot serve these ranks. Collective.

    Raises BackendUnavailableError where GPUs could serve, and the module `_torch` of a rank is missing."""
    spans_nodes = name == "nvshmem"
    reason = why_not_nvshmem(peers, settings) if spans_nodes else why_not_one_node(settings) or why_not_nvlink(peers)
    if reason is not None:
        return reason
    for rank, peer in enumerate(peers):
        if peer.lacks_torch:
            raise BackendUnavailableError(f"deepep_moe._torch of rank {rank} is {peer.lacks_torch}")
    if not spans_nodes:
        return connect(make, settings, group)
    from deepep_moe.group import nvshmem_rail  # it loads what only several nodes need

    return nvshmem_rail.make(make, settings, peers, group)
