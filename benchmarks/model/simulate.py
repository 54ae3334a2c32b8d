"""Dispatch and combine by the two-hop protocol, chunk by chunk.

 dispatch   SMs pack a chunk -> NIC -> network -> NIC of the same index -> SMs forward its rows -> NVLink -> the node's ranks
 combine    SMs push rows -> NVLink -> the rank of the same index, which adds a chunk up -> NIC -> network -> NIC

Rows for the own node go by NVLink alone, and share the SMs and the links with the others.
"""

from dataclasses import dataclass

import numpy as np

from benchmarks.model.machine import Machine
from benchmarks.model.queues import Floats, Ints, busiest, pass_through, serve
from benchmarks.model.traffic import Traffic


@dataclass(frozen=True)
class Setting:
    """How a call is made. `num_sms` move rows over NVLink; in a dispatch over several nodes half of them forward. The other SMs make
    the sums of a combine, as on one host, and do not bound it."""

    row_bytes: int
    chunk_rows: int
    num_sms: int
    waits_for_counts: bool = False


@dataclass(frozen=True)
class Call:
    """One simulated call. Times are microseconds, from the launch on the slowest rank."""

    us: float
    busy_us: dict[str, float]  # how long the busiest NIC, NVLink and SMs of a role have work, and a host that waits for counts
    network_bytes: int  # of the rank that sends most
    logical_bytes: int  # of a mean rank, one row for each (token, node), its own node among them, as DeepEP's tables count

    @property
    def bound(self) -> str:
        """What has the most work; or latency, if that is busy for less than half of the call."""
        name, busy = max(self.busy_us.items(), key=lambda item: item[1])
        return name if busy >= self.us / 2 else "latency"


class _Simulation:
    """The parts of a call that both directions share. Ranks are those of `Traffic`, work is in microseconds."""

    def __init__(self, traffic: Traffic, machine: Machine, setting: Setting):
        if setting.num_sms < 2 or setting.chunk_rows < 1:
            raise ValueError(f"num_sms is {setting.num_sms} and chunk_rows {setting.chunk_rows}; they must be at least 2 and 1")
        self.traffic, self.machine, self.setting = traffic, machine, setting
        self.chunks, self.pieces = traffic.chunks(setting.chunk_rows), traffic.pieces(setting.chunk_rows)
        self.chunk, self.rank = np.nonzero(self.chunks.parts)  # of the rows of one chunk for one rank of the node
        self.parts = self.chunks.parts[self.chunk, self.rank]
        per_node = traffic.cluster.ranks_per_node
        self.forwarder = self.chunks.forwarder[self.chunk]
        self.rank = self.forwarder // per_node * per_node + self.rank
        self.is_away = self.rank != self.forwarder  # rows of the others stay on their GPU
        self.busy: dict[str, float] = {}

    def bytes_of(self, rows: Ints) -> Floats:
        return rows.astype(np.float64) * self.setting.row_bytes

    def nvlink(self, sender: Ints, receiver: Ints, pushed: Floats, rows: Ints) -> Floats:
        """Return when rows have arrived that SMs have pushed, in whole by `pushed`, and which share both ends of the links."""
        work = self.bytes_of(rows) / (self.machine.nvlink_gbps * 1e3)
        self._note("NVLink", busiest(sender, work), busiest(receiver, work))
        return pass_through(receiver, pass_through(sender, pushed, work), work)

    def network(self, sender: Ints, receiver: Ints, ready: Floats, rows: Ints) -> Floats:
        """Return when chunks have landed, each by one put."""
        wire = self.bytes_of(rows) / (self.machine.nic_gbps * 1e3)
        work = wire + self.machine.message_us
        self._note("NIC", busiest(sender, work), busiest(receiver, wire))
        return pass_through(receiver, serve(sender, ready, work) + self.machine.put_us, wire)

    def by_sms(self, num_sms: int, rank: Ints, ready: Floats, rows: Ints, order: Floats | None = None) -> Floats:
        """Return when `num_sms` of each rank are done with rows. They take each job together."""
        work = self.bytes_of(rows) / (num_sms * self.machine.sm_gbps * 1e3)
        self._note("SMs", busiest(rank, work))
        return serve(rank, ready, work, order)

    def _note(self, name: str, *busy: float) -> None:
        self.busy[name] = max(self.busy.get(name, 0.0), *busy)

    def result(self, sender: Ints, *ends: Floats) -> Call:
        """Return the call whose chunks left by the NIC of rank `sender` [num_chunks], and whose last jobs ended at `ends`."""
        machine, traffic, row_bytes = self.machine, self.traffic, self.setting.row_bytes
        start_us = machine.start_us + (machine.put_us if traffic.cluster.num_nodes > 1 else 0.0)  # peers' words cross before the first row
        us = start_us + max((float(end.max()) for end in ends if len(end)), default=0.0)
        if self.setting.waits_for_counts:
            self._note("host", machine.host_us)
            us = max(us, machine.host_us)
        return Call(
            us,
            self.busy,
            int(busiest(sender, self.bytes_of(self.chunks.rows))),
            round(traffic.nodes_per_token * traffic.cluster.num_tokens * row_bytes),
        )


def dispatch(traffic: Traffic, machine: Machine, setting: Setting) -> Call:
    """Simulate a dispatch."""
    s = _Simulation(traffic, machine, setting)
    chunks, pieces, count = s.chunks, s.pieces, len(s.chunks.rows)
    forwarding = setting.num_sms // 2 if count else 0
    packed = _sent(s, setting.num_sms - forwarding)
    landed = s.network(chunks.source, chunks.forwarder, packed[:count], chunks.rows)
    forwarded = s.by_sms(max(forwarding, 1), s.forwarder, landed[s.chunk], s.parts)
    away = s.is_away
    arrived = s.nvlink(
        np.concatenate([s.forwarder[away], pieces.source]),
        np.concatenate([s.rank[away], pieces.forwarder]),
        np.concatenate([forwarded[away], packed[count:]]),
        np.concatenate([s.parts[away], pieces.rows]),
    )
    return s.result(chunks.source, forwarded, arrived)


def _sent(s: _Simulation, num_sms: int) -> Floats:
    """Return when a source's SMs have packed its chunks and pushed its pieces, both from the start and evenly mixed."""
    parts = (s.chunks, s.pieces)
    source, rows, order = (np.concatenate([getattr(part, name) for part in parts]) for name in ("source", "rows", "order"))
    return s.by_sms(num_sms, source, np.zeros(len(rows)), rows, order)


def combine(traffic: Traffic, machine: Machine, setting: Setting) -> Call:
    """Simulate a combine: the same rows, the other way."""
    s = _Simulation(traffic, machine, setting)
    chunks, pieces, away = s.chunks, s.pieces, s.is_away
    sender, receiver = np.concatenate([s.rank[away], pieces.forwarder]), np.concatenate([s.forwarder[away], pieces.source])
    rows = np.concatenate([s.parts[away], pieces.rows])
    order = np.concatenate([chunks.order[s.chunk[away]], pieces.order])
    pushed = s.by_sms(setting.num_sms, sender, np.zeros(len(rows)), rows, order)
    arrived = s.nvlink(sender, receiver, pushed, rows)
    count = int(away.sum())
    ready = np.zeros(len(chunks.rows))
    np.maximum.at(ready, s.chunk[away], arrived[:count])
    landed = s.network(chunks.forwarder, chunks.source, ready, chunks.rows)
    return s.result(chunks.forwarder, landed, arrived[count:])


CALLS = {"dispatch": dispatch, "combine": combine}
