"""Which ranks are a node: those of one host, or as many consecutive ones as the caller says."""

import itertools
from dataclasses import replace

from deepep_moe.group.rendezvous import Introduction
from deepep_moe.group.settings import Settings


def find_nodes(settings: Settings, peers: list[Introduction]) -> Settings:
    """Return `settings` with `ranks_per_node` in force: the one that was given, else as the hosts of `peers`, by rank, have it.

    Raises ValueError, on all ranks alike, where hosts have different numbers of ranks, or ranks that are not consecutive.
    """
    if settings.ranks_per_node:
        return settings
    sizes = [(host, len(list(ranks))) for host, ranks in itertools.groupby(peer.host for peer in peers)]
    if len({host for host, _ in sizes}) < len(sizes) or len({size for _, size in sizes}) > 1:
        told, first = [], 0
        for host, size in sizes:
            told.append(f"{_ranks(first, size)} on {host}")
            first += size
        raise ValueError(
            f"ranks lie on hosts as {', '.join(told)}; every host must have the same number of ranks, one after the other. Start them so, "
            "or pass ranks_per_node, which may be 1"
        )
    return replace(settings, ranks_per_node=sizes[0][1])


def _ranks(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"
