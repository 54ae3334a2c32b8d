"""Low-latency calls over nodes, simulated row by row: ours in two hops, and DeepEP's with a message for each (token, expert).

 dispatch   SMs pack rows -> NIC, a put a row -> network -> the rail's rank tells its node -> NVLink -> SMs place rows
 combine    SMs sum -> NVLink -> SMs add up a node's sums -> NIC -> network -> SMs add up nodes

`ASSUMPTIONS` are all that it assumes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.model.machine import MACHINES, Machine
from benchmarks.model.published import LOW_LATENCY, PublishedCall
from benchmarks.model.queues import Floats, Ints, pass_through, serve

ASSUMPTIONS = (
    "Each GPU has a NIC of its own, and nothing else is on the network, which has no other bound.",
    "A put and its word are one message. A NIC takes messages one after the other, each for the time of its bytes or for `message_us`, "
    "whichever is longer, and receives at the same rate.",
    "`put_us` lies between the last byte of a put and the moment that its word is seen.",
    "A rank puts to its nodes by turns, the next one first.",
    "`chunk_rows` rows of one rank for one node share a put and its word. A block packs them one after the other, `stage_us` for each but "
    "the first, and none is seen before all have landed.",
    "SMs take rows in parallel, with the latencies of `Latencies`.",
    "NVLink has one rate at each end.",
    "Ranks start as late as is said, by default together.",
    "Experts are chosen evenly.",
)


@dataclass(frozen=True)
class Latencies:
    """Of kernels at a few rows, microseconds: guesses, but for `stage_us`. `benchmarks/results/h200-low-latency-*` say what a whole
    call of one host takes, in which the first four occur."""

    start_us: float = 4.0  # from a launch to the first row that leaves, or that is looked for
    pack_us: float = 3.0  # of a row that is put
    hop_us: float = 4.0  # of a row that comes, until ranks of the node have it, without the bytes
    place_us: float = 6.0  # from the last row to the end of a call
    stage_us: float = 1.0  # a row more that shares a put: two of fp8 were measured on an H100; two of bf16 took 1.7 more


GUESSED = {"dispatch": Latencies(), "combine": Latencies()}
MEASURED = {"dispatch": Latencies(4.0, 5.7, 4.0, 10.2), "combine": Latencies(4.0, 18.6, 4.0, 7.0)}
"""What kernels take with a GPU each, at its longest: no row leaves before the half that sends has ended, and the whole hook comes behind
the last row. `benchmarks/results/h200-low-latency-nodes-2x2-four-gpus-2026-11-26.json`; a test compares them."""


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

    def network(self, sender: Ints, receiver: Ints, ready: Floats, chunk_rows: int = 1) -> Floats:
        """Return when rows have landed, `chunk_rows` of a sender and receiver by one put, as they are listed. Puts that are ready together
        go to the next rank first, then to the one behind."""
        pair = sender * self.batch.num_ranks + receiver
        place = _place_among_equals(pair) // chunk_rows
        chunks, chunk = np.unique(pair * (len(pair) + 1) + place, return_inverse=True)
        pair, turn = np.divmod(chunks, len(ready) + 1)
        sender, receiver = np.divmod(pair, self.batch.num_ranks)
        num_rows = np.bincount(chunk, minlength=len(chunks))
        packed = np.zeros(len(chunks))
        np.maximum.at(packed, chunk, ready)
        packed += (num_rows - 1) * self.latencies.stage_us
        wire = num_rows * self.row_bytes / (self.machine.nic_gbps * 1e3)
        order = turn * self.batch.num_ranks + (receiver - sender) % self.batch.num_ranks
        sent = serve(sender, packed, np.maximum(wire, self.machine.message_us), order.astype(np.float64))
        landed: Floats = pass_through(receiver, sent + self.machine.put_us, wire)[chunk]
        return landed

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


def dispatch(batch: Batch, machine: Machine, latencies: Latencies, row_bytes: int, late: Floats, chunk_rows: int = 1) -> Floats:
    """Return how long each rank's dispatch takes, microseconds from its own launch, [num_ranks]."""
    c = _Call(batch, machine, latencies, row_bytes, late)
    ready = late[c.source] + latencies.start_us + latencies.pack_us
    landed = c.network(c.source, c.rail, ready, chunk_rows)
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


def combine(batch: Batch, machine: Machine, latencies: Latencies, row_bytes: int, late: Floats, chunk_rows: int = 1) -> Floats:
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
    landed = c.network(c.rail, c.source, ready, chunk_rows)
    own = node == own_node
    return c.ends((c.source, landed), (source[own], arrived[own]))


def by_message(batch: Batch, machine: Machine, latencies: Latencies, row_bytes: int, late: Floats, over_nvlink: bool = False) -> Floats:
    """Return how long each rank takes where every (token, expert) is a message of its own to the expert's rank, as DeepEP's tables have it.
    Either direction has these messages. All go over the network, or with `over_nvlink` those of other nodes."""
    source, token, target = np.nonzero(batch.experts_of)
    count = batch.experts_of[source, token, target]
    source, target = np.repeat(source, count), np.repeat(target, count)
    c = _Call(batch, machine, latencies, row_bytes, late)
    ready = late[source] + latencies.start_us
    is_own = source // batch.ranks_per_node == target // batch.ranks_per_node if over_nvlink else source == target
    away = ~is_own
    landed = c.network(source[away], target[away], ready[away] + latencies.pack_us)
    if not over_nvlink:
        return c.ends((target[away], landed))
    arrived = c.nvlink(source[is_own], target[is_own], ready[is_own] + latencies.hop_us, row_bytes)
    return c.ends((target[away], landed), (target[is_own], arrived))


HIDDEN = 7168
ROW_BYTES = {"dispatch": HIDDEN + 4 * HIDDEN // 128, "combine": 2 * HIDDEN}  # fp8 with its scales; bf16
CALLS = {"dispatch": dispatch, "combine": combine}
NUM_EXPERTS, NUM_TOPK = 256, 8


@dataclass(frozen=True)
class Line:
    """What is simulated of one call, microseconds, of all ranks and seeds."""

    op: str
    num_ranks: int
    times: Floats
    by_message_us: float  # the median
    published_us: float | None  # by DeepEP's own table, at the rate of the machine: beside `by_message_us`

    @property
    def us(self) -> float:
        return float(np.median(self.times))

    @property
    def us_p99(self) -> float:
        return float(np.percentile(self.times, 99))

    @property
    def error(self) -> float | None:
        """How much longer the model of their messages takes than they have published, as a share of the latter."""
        return None if self.published_us is None else self.by_message_us / self.published_us - 1


def batches_of(num_ranks: int, num_tokens: int = 128, num_seeds: int = 3) -> list[Batch]:
    """Return a batch for each seed, with 8 ranks a node, 256 experts, top-8."""
    return [draw(num_ranks, 8, num_tokens, NUM_TOPK, NUM_EXPERTS, seed) for seed in range(num_seeds)]


def times_of(
    op: str, batches: list[Batch], machine: Machine, late: list[Floats] | None = None, *, chunk_rows: int = 1,
    latencies: Mapping[str, Latencies] = GUESSED,
) -> Floats:  # fmt: skip
    """Return the microseconds of all ranks and batches. `late` has when ranks start, for each batch."""
    starts = late or [np.zeros(batch.num_ranks) for batch in batches]
    each = zip(batches, starts, strict=True)
    return np.concatenate([CALLS[op](batch, machine, latencies[op], ROW_BYTES[op], start, chunk_rows) for batch, start in each])


def message_times_of(
    op: str, batches: list[Batch], machine: Machine, late: list[Floats] | None = None, *, over_nvlink: bool = False
) -> Floats:
    """Return those of `by_message`."""
    starts = late or [np.zeros(batch.num_ranks) for batch in batches]
    each = zip(batches, starts, strict=True)
    return np.concatenate([by_message(batch, machine, GUESSED[op], ROW_BYTES[op], start, over_nvlink) for batch, start in each])


def lines(
    machine: Machine = MACHINES["h100"], nums_ranks: tuple[int, ...] = (16, 32, 64, 128, 256), *, num_tokens: int = 128,
    num_seeds: int = 3, late_us: float = 0.0,
) -> Iterator[Line]:  # fmt: skip
    """Yield a line for each call and number of ranks. `late_us`: ranks start within it."""
    published = {(row.num_ranks, row.op): row.us for row in LOW_LATENCY if row.source == "DeepEP V1"} if num_tokens == 128 else {}
    for num_ranks in nums_ranks:
        batches = batches_of(num_ranks, num_tokens, num_seeds)
        late = [np.random.default_rng(seed).random(num_ranks) * late_us for seed in range(num_seeds)]
        for op in CALLS:
            theirs = float(np.median(message_times_of(op, batches, machine, late)))
            yield Line(op, num_ranks, times_of(op, batches, machine, late), theirs, published.get((num_ranks, op)))


def compared(row: PublishedCall, machine: Machine = MACHINES["h100"], num_seeds: int = 3) -> Floats:
    """Return the times of the messages of a published call, in the model."""
    return message_times_of(row.op, batches_of(row.num_ranks, num_seeds=num_seeds), machine, over_nvlink=row.over_nvlink)
