"""Routings, and the rows that they send: to which node, in which chunk, for which of its ranks."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.model.queues import Floats, Ints
from deepep_moe.exchange.routing import is_token_in_rank
from deepep_moe.ops import gate, nodes_per_token

ROUTINGS = ("uniform", "group-limited", "skewed")


@dataclass(frozen=True)
class Cluster:
    """The sizes of a call."""

    num_nodes: int
    ranks_per_node: int
    num_tokens: int
    num_topk: int
    num_experts: int
    topk_groups: int = 4  # of a group-limited routing, whose groups are the nodes

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


def choose(cluster: Cluster, routing: str, seed: int = 0) -> Tensor:
    """Return topk_idx [num_sources, num_tokens, num_topk] as the gate chooses.

    `uniform` has equal scores for all experts. `group-limited` has too, and a token chooses `topk_groups` nodes first. Neither prefers a
    node, so the ranks of node 0 stand for those of every node: of node n, rotated by n nodes. `skewed` prefers some experts on all ranks
    (popularity falls with the root of an expert's place, and places are random), so it has all ranks as sources.
    """
    generator = torch.Generator().manual_seed(seed)
    is_grouped = routing == "group-limited" and cluster.topk_groups < cluster.num_nodes
    groups: dict[str, Any] = {"num_groups": cluster.num_nodes, "topk_groups": cluster.topk_groups} if is_grouped else {}
    places = torch.randperm(cluster.num_experts, generator=generator) + 1.0
    bias = -0.5 * places.log() if routing == "skewed" else torch.zeros(cluster.num_experts)
    chosen = []
    for _ in range(cluster.num_ranks if routing == "skewed" else cluster.ranks_per_node):
        noise = torch.empty(cluster.num_tokens, cluster.num_experts).exponential_(generator=generator)
        chosen.append(gate((bias - noise.log()).sigmoid(), cluster.num_topk, **groups).topk_idx)
    return torch.stack(chosen)


@dataclass(frozen=True)
class Chunks:
    """The chunks that cross the network, or the pieces that stay in a node. All arrays are [num_chunks]; ranks are those simulated."""

    source: Ints  # the tokens' rank
    forwarder: Ints  # the rank of the same index of the other node; in a node: the rank that the rows go to
    rows: Ints
    order: Floats  # of those of a source, from 0 to 1
    parts: Ints  # [num_chunks, ranks_per_node], rows for each rank of the node; in a node none


class Traffic:
    """The rows of a routing, `topk_idx` [num_sources, num_tokens, num_topk] as `choose` returns it."""

    def __init__(self, cluster: Cluster, topk_idx: Tensor):
        if len(topk_idx) not in (cluster.ranks_per_node, cluster.num_ranks):
            raise ValueError(f"topk_idx has {len(topk_idx)} sources; it must have {cluster.ranks_per_node} or {cluster.num_ranks}")
        self.cluster, self.num_sources = cluster, len(topk_idx)
        self.is_symmetric = self.num_sources < cluster.num_ranks
        nodes = nodes_per_token(topk_idx.flatten(0, 1), cluster.num_experts, cluster.num_nodes)
        self.nodes_per_token = float(nodes.double().mean())  # the own node among them
        self._targets: list[np.ndarray] = []
        counts, own = [], []
        for source, chosen in enumerate(topk_idx):
            targets, count, kept = self._of_source(source, chosen)
            self._targets.append(targets)
            counts.append(count)
            own.append(kept)
        self.counts = np.stack(counts)  # [num_sources, num_nodes - 1], rows to the node so many after the own one
        self.own = np.stack(own)  # [num_sources, ranks_per_node], rows to the ranks of the own node, without the source itself

    def _of_source(self, source: int, topk_idx: Tensor) -> tuple[np.ndarray, Ints, Ints]:
        c, node = self.cluster, source // self.cluster.ranks_per_node
        in_rank = is_token_in_rank(topk_idx, c.num_ranks, c.num_experts // c.num_ranks).numpy()
        by_node = np.roll(in_rank.reshape(c.num_tokens, c.num_nodes, c.ranks_per_node), -node, axis=1).transpose(1, 0, 2)
        goes = by_node[1:].any(2)
        own = by_node[0].sum(0)
        own[source % c.ranks_per_node] = 0
        return by_node[1:][goes].astype(np.int16), goes.sum(1), own

    def chunks(self, chunk_rows: int) -> Chunks:
        """Return the rows to other nodes in chunks of `chunk_rows`, which a source sends to the nodes by turns."""
        made = [self._chunks_of(source, chunk_rows) for source in range(self.num_sources)]
        return Chunks(*(np.concatenate([getattr(part, name) for part in made]) for name in Chunks.__dataclass_fields__))

    def _chunks_of(self, source: int, chunk_rows: int) -> Chunks:
        c, counts = self.cluster, self.counts[source]
        per_node = -(-counts // chunk_rows)
        distance = np.repeat(np.arange(c.num_nodes - 1), per_node)
        turn = np.arange(len(distance)) - np.repeat(np.cumsum(per_node) - per_node, per_node)
        first = np.repeat(np.cumsum(counts) - counts, per_node) + turn * chunk_rows
        rows = np.minimum(counts[distance] - turn * chunk_rows, chunk_rows)
        parts = np.add.reduceat(self._targets[source], first, axis=0) if len(first) else np.zeros((0, c.ranks_per_node))
        away = 0 if self.is_symmetric else (distance + 1) * c.ranks_per_node
        forwarder = np.broadcast_to((source + away) % self.num_sources, len(rows))
        order = np.lexsort((distance, turn)).argsort()
        return Chunks(np.full(len(rows), source), forwarder, rows, _fraction(order), parts.astype(np.int64))

    def pieces(self, chunk_rows: int) -> Chunks:
        """Return the rows to other ranks of the node in pieces of `chunk_rows`, which a source sends to the ranks by turns."""
        c, source, target = self.cluster, *np.nonzero(self.own)
        per_rank = -(-self.own[source, target] // chunk_rows)
        turn = np.arange(per_rank.sum()) - np.repeat(np.cumsum(per_rank) - per_rank, per_rank)
        rows = np.minimum(np.repeat(self.own[source, target], per_rank) - turn * chunk_rows, chunk_rows)
        source, target = np.repeat(source, per_rank), np.repeat(target, per_rank)
        distance = (target - source) % c.ranks_per_node
        order = np.empty(len(rows))
        for one in range(self.num_sources):
            mine = np.flatnonzero(source == one)
            order[mine] = _fraction(np.lexsort((distance[mine], turn[mine])).argsort())
        node = source // c.ranks_per_node * c.ranks_per_node
        return Chunks(source, node + target, rows, order, np.zeros((len(rows), 0), dtype=np.int64))


def _fraction(order: Ints) -> Floats:
    return (order + 0.5) / max(len(order), 1)
