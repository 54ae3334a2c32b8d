"""Low-latency calls over nodes, simulated row by row: ours in two hops, and DeepEP's with a message for each (token, expert).

 dispatch   SMs pack rows -> NIC, a put a row -> network -> the rail's rank tells its node -> NVLink -> SMs place rows
 combine    SMs sum -> NVLink -> SMs add up a node's sums -> NIC -> network -> SMs add up nodes

Assumptions, all of them:
- Each GPU has a NIC of its own, and nothing else is on the network, which has no other bound.
- A NIC takes puts one after the other, each for the time of its bytes or for `message_us`, whichever is longer, and receives at the same
  rate. `put_us` lies between its last byte and the moment that the word is seen. A rank puts to its nodes by turns, the next one first.
- SMs take rows in parallel, with the latencies of `Latencies`: guesses from our kernels of one host. NVLink has one rate at each end.
- Ranks start as late as `late` says. Experts are chosen evenly.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from deepep_moe.bench.model.machine import MACHINES, Machine
from deepep_moe.bench.model.queues import Floats, Ints, pass_through, serve


@dataclass(frozen=True)
class Latencies:
    """Of kernels at a few rows, microseconds: `benchmarks/results/h200-low-latency-*` say what a whole call of one host takes, in which all
    of these occur."""

    start_us: float = 4.0  # from a launch to the first row that leaves, or that is looked for
    pack_us: float = 3.0  # of a row that is put
    hop_us: float = 4.0  # of a row that comes, until ranks of the node have it, without the bytes
    place_us: float = 6.0  # from the last row to the end of a call


@dataclass(frozen=True)
class Batch:
    """One call of all ranks. `experts_of` [num_ranks, num_tokens, num_ranks]: how many experts of each rank a token chooses."""

    ranks_per_node: int
    experts_of: Ints

    @property
    def num_ranks(self) -> int:
        return self.experts_of.shape[0]

    @property
    def nodes_of(self) -> Ints:
        """[num_ranks, num_tokens, num_nodes] how many experts of each node."""
        shape = (*self.experts_of.shape[:2], -1, self.ranks_per_node)
        return self.experts_of.reshape(shape).sum(3)


def draw(num_ranks: int, ranks_per_node: int, num_tokens: int, num_topk: int, num_experts: int, seed: int) -> Batch:
    """Return a batch whose tokens choose experts evenly, each at most once."""
    generator = np.random.default_rng(seed)
    chosen = generator.random((num_ranks, num_tokens, num_experts)).argpartition(num_topk, axis=2)[:, :, :num_topk]
    ranks = chosen // (num_experts // num_ranks)
    experts_of = (ranks[..., None] == np.arange(num_ranks)).sum(2)
    return Batch(ranks_per_node, experts_of)


class _Call:
    """What the two directions share."""

    def __init__(self, batch: Batch, machine: Machine, latencies: Latencies, row_bytes: int, late: Floats):
        self.batch, self.machine, self.latencies, self.row_bytes, self.late = batch, machine, latencies, row_bytes, late
        source, self.token, self.node = np.nonzero(batch.nodes_of)
        own = source // batch.ranks_per_node == self.node
        self.source, self.token, self.node = source[~own], self.token[~own], self.node[~own]
        self.rail = self.node * batch.ranks_per_node + self.source % batch.ranks_per_node

    def network(self, sender: Ints, receiver: Ints, ready: Floats, num_bytes: Floats) -> Floats:
        """Return when puts have landed. Those that are ready together go to the next rank first, then the one behind."""
        wire = num_bytes / (self.machine.nic_gbps * 1e3)
        turn = _place_among_equals(sender * self.batch.num_ranks + receiver)
        order = turn * self.batch.num_ranks + (receiver - sender) % self.batch.num_ranks
        sent = serve(sender, ready, np.maximum(wire, self.machine.message_us), order.astype(np.float64))
        return pass_through(receiver, sent + self.machine.put_us, wire)

    def nvlink(self, sender: Ints, receiver: Ints, ready: Floats, row_bytes: float) -> Floats:
        """Return when rows have arrived within a node."""
        work = np.full(len(sender), row_bytes / (self.machine.nvlink_gbps * 1e3))
        return pass_through(receiver, pass_through(sender, ready, work), work)

    def ends(self, *arrivals: tuple[Ints, Floats]) -> Floats:
        """Return when each rank has all that it waits for, behind its own start."""
        end = self.late + self.latencies.start_us
        for rank, arrived in arrivals:
            np.maximum.at(end, rank, arrived)
        return end + self.latencies.place_us - self.late


def _place_among_equals(key: Ints) -> Ints:
    """Return how many elements before each one equal it."""
    order = np.argsort(key, kind="stable")
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    place = np.empty(len(key), dtype=np.int64)
    place[order] = np.arange(len(key)) - np.repeat(first, np.diff(np.append(first, len(key))))
    return place


def dispatch(batch: Batch, machine: Machine, latencies: Latencies, row_bytes: int, late: Floats) -> Floats:
    """Return how long each rank's dispatch takes, microseconds from its own launch, [num_ranks]."""
    c = _Call(batch, machine, latencies, row_bytes, late)
    ready = late[c.source] + latencies.start_us + latencies.pack_us
    landed = c.network(c.source, c.rail, ready, np.full(len(c.source), float(row_bytes)))
    to = batch.experts_of.reshape(*batch.experts_of.shape[:2], -1, batch.ranks_per_node)[c.source, c.token, c.node]
    row, rank = np.nonzero(to)
    rail = c.rail[row]
    rank = c.node[row] * batch.ranks_per_node + rank
    told = np.maximum(landed[row], np.maximum(late[rail], late[rank]) + latencies.start_us) + latencies.hop_us
    source, _, target = np.nonzero(batch.experts_of)
    own = source // batch.ranks_per_node == target // batch.ranks_per_node
    source, target = source[own], target[own]
    arrived = c.nvlink(
        np.concatenate([rail, source]), np.concatenate([rank, target]),
        np.concatenate([told, late[source] + latencies.start_us + latencies.hop_us]), row_bytes,
    )  # fmt: skip
    return c.ends((np.concatenate([rank, target]), arrived))


def combine(batch: Batch, machine: Machine, latencies: Latencies, row_bytes: int, late: Floats) -> Floats:
    """Return how long each rank's combine takes, as `dispatch`."""
    c = _Call(batch, machine, latencies, row_bytes, late)
    source, token, rank = np.nonzero(batch.experts_of)
    order = np.lexsort(((source - rank - 1) % batch.num_ranks, token))  # as a rank pushes: of all sources by turns
    source, token, rank = source[order], token[order], rank[order]
    node, own_node = rank // batch.ranks_per_node, source // batch.ranks_per_node
    at = node * batch.ranks_per_node + source % batch.ranks_per_node
    ready = late[rank] + latencies.start_us + latencies.hop_us
    arrived = c.nvlink(rank, at, ready, row_bytes)
    summed = np.zeros((batch.num_ranks, batch.experts_of.shape[1], batch.num_ranks // batch.ranks_per_node))
    np.maximum.at(summed, (source, token, node), arrived)
    # A put waits for all sums of its row, and for the entry of its node's ranks.
    ready = np.maximum(summed[c.source, c.token, c.node], late[c.rail] + latencies.start_us) + latencies.pack_us
    landed = c.network(c.rail, c.source, ready, np.full(len(ready), float(row_bytes)))
    own = node == own_node
    return c.ends((c.source, landed), (source[own], arrived[own]))


def by_message(batch: Batch, machine: Machine, latencies: Latencies, row_bytes: int, late: Floats) -> Floats:
    """Return how long each rank takes where every (token, expert) is a message of its own to the expert's rank over the network, none over
    NVLink, as DeepEP's tables have it. Either direction has these messages."""
    source, token, target = np.nonzero(batch.experts_of)
    count = batch.experts_of[source, token, target]
    source, target = np.repeat(source, count), np.repeat(target, count)
    c = _Call(batch, machine, latencies, row_bytes, late)
    away = source != target
    source, target = source[away], target[away]
    landed = c.network(source, target, late[source] + latencies.start_us + latencies.pack_us, np.full(len(source), float(row_bytes)))
    return c.ends((target, landed))


HIDDEN = 7168
ROW_BYTES = {"dispatch": HIDDEN + 4 * HIDDEN // 128, "combine": 2 * HIDDEN}  # fp8 with its scales; bf16
CALLS = {"dispatch": dispatch, "combine": combine}
PUBLISHED_US = {
    "dispatch": {8: 163, 16: 173, 32: 182, 64: 186, 128: 192, 256: 194},
    "combine": {8: 318, 16: 329, 32: 350, 64: 353, 128: 369, 256: 360},
}
"""DeepEP's table of low-latency calls: 128 tokens a rank, hidden 7168, top-8, by the number of ranks; over the network alone."""


@dataclass(frozen=True)
class Line:
    """What is simulated of one call, microseconds: medians and 99th percentiles over ranks and seeds."""

    op: str
    num_ranks: int
    us: float
    us_p99: float
    by_message_us: float
    published_us: float | None  # at the rate of the machine: beside `by_message_us`

    @property
    def error(self) -> float | None:
        """How much longer the model of their messages takes than they have published, as a share of the latter."""
        return None if self.published_us is None else self.by_message_us / self.published_us - 1


def lines(
    machine: Machine = MACHINES["h100"], nums_ranks: tuple[int, ...] = (16, 32, 64, 128, 256), *, num_tokens: int = 128,
    num_seeds: int = 3, late_us: float = 0.0,
) -> Iterator[Line]:  # fmt: skip
    """Yield a line for each call and number of ranks, with 8 ranks a node, 256 experts, top-8. `late_us`: ranks start within it."""
    for num_ranks in nums_ranks:
        batches = [draw(num_ranks, 8, num_tokens, 8, 256, seed) for seed in range(num_seeds)]
        late = [np.random.default_rng(seed).random(num_ranks) * late_us for seed in range(num_seeds)]
        for op, call in CALLS.items():
            ours, theirs = (
                np.concatenate(
                    [made(batch, machine, Latencies(), ROW_BYTES[op], start) for batch, start in zip(batches, late, strict=True)]
                )
                for made in (call, by_message)
            )
            published = PUBLISHED_US[op].get(num_ranks) if num_tokens == 128 else None
            median, p99 = float(np.median(ours)), float(np.percentile(ours, 99))
            yield Line(op, num_ranks, median, p99, float(np.median(theirs)), published)


def show(machine: Machine, target_gbps: float = 50.0) -> None:
    """Print low-latency calls at the machine's NIC, which DeepEP's table is held against, and at one of `target_gbps`."""
    for one in (machine, replace(machine, nic_gbps=target_gbps)):
        print(f"low latency, 128 tokens a rank, hidden {HIDDEN}, top-8 of 256, dispatch fp8, combine bf16; NICs of {one.nic_gbps:g} GB/s")
        print(f"{'operation':10}{'EP':>5}{'us':>8}{'p99':>8}{'a message each':>16}{'DeepEP':>8}{'error':>7}")
        for line in lines(one):
            beside = "" if line.error is None or one is not machine else f"{line.published_us:8.0f}{line.error:+7.0%}"
            print(f"{line.op:10}{line.num_ranks:5}{line.us:8.1f}{line.us_p99:8.1f}{line.by_message_us:16.1f}{beside}")
