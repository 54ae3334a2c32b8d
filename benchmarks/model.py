"""A model of dispatch and combine over nodes: `python benchmarks/run.py model`. It measures nothing, and needs no GPU and no network.

 dispatch   SMs pack rows -> NIC -> network -> NIC of the same index -> SMs forward rows -> NVLink -> the node's ranks
 combine    SMs push rows -> NVLink -> the rank of the same index, which adds them up -> NIC -> network -> NIC

It assumes:

- Each GPU has its own NIC, which handles puts one after the other. The network has no other traffic or bound.
- A ConnectX-7 of 400 Gb/s carries 46 GB/s, as in DeepEP's low-latency table at 8 ranks. NVLink and SMs have the rates of our records.
- A put is seen 5 us after its last byte and costs a NIC 0.1 us. Both are guesses.
- All ranks start together. The library's gate chooses experts evenly, so one node stands for all.
- NVLink has one rate at each end. Rows for the own node use NVLink alone, and share SMs and links.

It leaves out congestion, routes, NICs that GPUs share, credits, the CPU of a proxy, other traffic, metadata of rows, and whatever happens
on GPUs beside the call. Its times are what these sizes allow at best. Published tables stand beside it, with its error.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common.records import record, write_json
from benchmarks.common.report import Record
from benchmarks.common.workload import DTYPE_OF_WIRE
from deepep_moe.ops import gate
from deepep_moe.ops.routing import is_token_in_rank

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
HIDDEN, NUM_TOPK, PER_NODE = 7168, 8, 8
ROW_BYTES = {"fp8": HIDDEN + 4 * HIDDEN // 128, "bf16": 2 * HIDDEN}
OPERATIONS = (("dispatch", "fp8"), ("dispatch", "bf16"), ("combine", "bf16"))
CHUNK_ROWS = (4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Machine:
    """A node's GPUs and network. GB/s are of one GPU in one direction. What our kernels do is from `h200-nvlink-2026-11-22.json`."""

    name: str
    nvlink_gbps: float = 362.1
    nic_gbps: float = 46.0
    put_us: float = 5.0
    message_us: float = 0.1  # of a put, beside its bytes
    sm_gbps: float = 40.6  # of one SM that moves rows
    start_us: float = 33.6  # from the launch to the first row, and from the last row to the end


MACHINES = {"h100": Machine("H100 or H200"), "h800": Machine("H800", nvlink_gbps=160.0)}


def serve(server: Ints, arrival: Floats, service: Floats, order: Floats | None = None, *, is_through: bool = False) -> Floats:
    """Return when each job ends, if it begins once it is there and the jobs before it on its `server` have ended.

    Jobs are taken by arrival, those that arrive together by `order`, else as they are listed. With `is_through` the last byte of a job is
    there at `arrival`, and others may have gone before: a lone job passes without delay, and the server bounds the rate of many.
    """
    if len(server) == 0:
        return np.zeros(0)
    sequence = np.lexsort((arrival, server)) if order is None else np.lexsort((order, arrival, server))
    starts = np.flatnonzero(np.diff(server[sequence], prepend=-1))
    end = np.empty(len(server))
    for jobs in np.split(sequence, starts[1:]):
        busy = np.cumsum(service[jobs])
        earliest = arrival[jobs] - busy if is_through else arrival[jobs] - busy + service[jobs]
        end[jobs] = busy + np.maximum.accumulate(earliest)
    return end


def busiest(server: Ints, service: Floats) -> float:
    """Return how long the server with the most work is busy."""
    return float(np.bincount(server, weights=service).max()) if len(server) else 0.0


@dataclass(frozen=True)
class Chunks:
    """Rows that cross the network, or stay in a node, in pieces. All arrays are [num_chunks]; ranks are those of one node."""

    source: Ints
    target: Ints  # the rank that the rows go to: of another node the one of the same index
    rows: Ints
    order: Floats  # among those of a source, from 0 to 1
    parts: Ints  # [num_chunks, ranks_per_node], rows for each rank of the other node


@functools.cache
def choose(num_nodes: int, num_tokens: int, num_experts: int, topk_groups: int | None, seed: int = 0, per_node: int = PER_NODE) -> Ints:
    """Return the choices of the tokens of one node's ranks: [sources, num_tokens, num_nodes, ranks_per_node], its own node first.

    A token first chooses `topk_groups` nodes, if that is not None.
    """
    generator = torch.Generator().manual_seed(seed)
    torch.randperm(num_experts, generator=generator)  # the figures of the record were drawn behind it
    groups: dict[str, Any] = {}
    if topk_groups is not None and topk_groups < num_nodes:
        groups = {"num_groups": num_nodes, "topk_groups": topk_groups}
    num_ranks, chosen = num_nodes * per_node, []
    for _ in range(per_node):
        noise = torch.empty(num_tokens, num_experts).exponential_(generator=generator)
        topk_idx = gate((-noise.log()).sigmoid(), NUM_TOPK, **groups).topk_idx
        in_rank = is_token_in_rank(topk_idx, num_ranks, num_experts // num_ranks).numpy()
        chosen.append(in_rank.reshape(num_tokens, num_nodes, per_node))
    return np.stack(chosen)


def chunks_of(goes: Ints, chunk_rows: int, *, crosses: bool) -> Chunks:
    """Return the rows to other nodes where `crosses`, else those to other ranks of the node. A source sends to these in turn."""
    chunks, count = [], len(goes)
    for source, chosen in enumerate(goes):
        for distance in range(1, chosen.shape[1] if crosses else count):
            rows = chosen[:, distance] if crosses else chosen[:, 0, (source + distance) % count, None]
            rows = rows[rows.any(1)].astype(np.int64)
            for turn, first in enumerate(range(0, len(rows), chunk_rows)):
                piece = rows[first : first + chunk_rows]
                chunks.append((source, turn, distance, len(piece), piece.sum(0)))
    if not chunks:
        none = np.zeros(0, dtype=np.int64)
        return Chunks(none, none, none, np.zeros(0), np.zeros((0, count), dtype=np.int64))
    chunks.sort(key=lambda one: one[:3])
    sources, _, distances, num_rows, parts = (np.array(column) for column in zip(*chunks, strict=True))
    order = np.concatenate([(np.arange(num) + 0.5) / max(num, 1) for num in np.bincount(sources, minlength=count)])
    return Chunks(sources, sources if crosses else (sources + distances) % count, num_rows, order, parts)


@dataclass(frozen=True)
class Call:
    """One simulated call, microseconds from the launch on the slowest rank."""

    us: float
    busy_us: dict[str, float]  # of the busiest NIC, NVLink and SMs of a role
    network_bytes: int  # of the rank that sends most
    logical_bytes: int  # of a mean rank, a row for each (token, node), the own among them, as DeepEP's tables count

    @property
    def bound(self) -> str:
        """Return what has the most work, or latency, if that is busy for less than half of the call."""
        name, busy = max(self.busy_us.items(), key=lambda item: item[1])
        return name if busy >= self.us / 2 else "latency"

    @property
    def logical_gbps(self) -> float:
        return self.logical_bytes / self.us / 1e3


def simulate(op: str, goes: Ints, machine: Machine, row_bytes: int, chunk_rows: int, num_sms: int) -> Call:
    """Simulate a dispatch or a combine of the rows that `choose` returned."""
    chunks, pieces = (chunks_of(goes, chunk_rows, crosses=crosses) for crosses in (True, False))
    busy: dict[str, float] = {}

    def work(name: str, rows: Ints, gbps: float, *ends: Ints, extra_us: float = 0.0) -> Floats:
        service = rows * row_bytes / (gbps * 1e3) + extra_us
        busy[name] = max([busy.get(name, 0.0), *(busiest(end, service) for end in ends)])
        return service

    def nvlink(sender: Ints, receiver: Ints, pushed: Floats, rows: Ints) -> Floats:
        service = work("NVLink", rows, machine.nvlink_gbps, sender, receiver)
        return serve(receiver, serve(sender, pushed, service, is_through=True), service, is_through=True)

    def network(ready: Floats) -> Floats:
        service = work("NIC", chunks.rows, machine.nic_gbps, chunks.source, extra_us=machine.message_us)
        sent = serve(chunks.source, ready, service) + machine.put_us
        return serve(chunks.target, sent, work("NIC", chunks.rows, machine.nic_gbps, chunks.target), is_through=True)

    def by_sms(count: int, rank: Ints, ready: Floats, rows: Ints, order: Floats | None = None) -> Floats:
        return serve(rank, ready, work("SMs", rows, count * machine.sm_gbps, rank), order)

    chunk, rank = np.nonzero(chunks.parts)  # the rows of one chunk for one rank of the node
    parts, rail = chunks.parts[chunk, rank], chunks.target[chunk]
    away, count = rank != rail, len(chunks.rows)  # rows of the others stay on their GPU
    if op == "dispatch":
        forwarding = num_sms // 2 if count else 0
        source, rows, order = (np.concatenate([getattr(both, name) for both in (chunks, pieces)]) for name in ("source", "rows", "order"))
        packed = by_sms(num_sms - forwarding, source, np.zeros(len(rows)), rows, order)
        forwarded = by_sms(max(forwarding, 1), rail, network(packed[:count])[chunk], parts)
        last = nvlink(
            np.concatenate([rail[away], pieces.source]), np.concatenate([rank[away], pieces.target]),
            np.concatenate([forwarded[away], packed[count:]]), np.concatenate([parts[away], pieces.rows]),
        )  # fmt: skip
        ends = [forwarded, last]
    else:
        sender, receiver = np.concatenate([rank[away], pieces.target]), np.concatenate([rail[away], pieces.source])
        rows = np.concatenate([parts[away], pieces.rows])
        order = np.concatenate([chunks.order[chunk[away]], pieces.order])
        arrived = nvlink(sender, receiver, by_sms(num_sms, sender, np.zeros(len(rows)), rows, order), rows)
        num_away, ready = int(away.sum()), np.zeros(count)
        np.maximum.at(ready, chunk[away], arrived[:num_away])
        ends = [network(ready), arrived[num_away:]]
    start_us = machine.start_us + (machine.put_us if goes.shape[2] > 1 else 0.0)  # peers' words cross before the first row
    us = start_us + max((float(end.max()) for end in ends if len(end)), default=0.0)
    network_bytes = int(busiest(chunks.source, chunks.rows.astype(np.float64) * row_bytes))
    return Call(us, busy, network_bytes, round(float(goes.any(3).sum(2).mean()) * goes.shape[1] * row_bytes))


# Rates that others have published, for hidden 7168, top-8 and 8 GPUs a node. Fields: source, machine, SMs, tokens, experts of a rank (None:
# 256 experts in all, of 4 nodes). Then, by number of ranks, the GB/s of dispatch fp8, dispatch bf16 and combine bf16. They count a row for
# each (token, node), including the own node. Chunks have 16 rows here; others tune theirs.
Rates = tuple[float | None, float | None, float]
PUBLISHED: list[tuple[str, str, int, int, int | None, dict[int, Rates]]] = [
    ("DeepEP V1, first table", "h800", 24, 4096, None, {16: (43, None, 43), 32: (44, None, 47), 64: (46, None, 45)}),
    ("DeepEP V1, later table", "h800", 24, 4096, None, {16: (43, None, 43), 32: (58, None, 57), 64: (51, None, 50)}),
    ("DeepEP V2", "h100", 12, 8192, None, {16: (90, None, 81)}),
    ("DeepEP V2", "h100", 6, 8192, None, {32: (61, None, 61)}),
    ("DeepEP V1 on Azure ND H100 v5", "h100", 24, 4096, None, {16: (45.9, 60.3, 61.3)}),
    ("DeepEP V1, a third party", "h100", 24, 4096, None, {16: (40.9, 54.2, 50.8)}),
    ("HybridEP", "h100", 4, 4096, 8, {16: (34.0, 44.4, 52.0), 32: (38.5, 52.6, 51.0), 64: (37.5, 48.0, 46.0)}),
    ("HybridEP", "h100", 8, 4096, 8, {16: (62.0, 76.8, 68.0), 32: (51.3, 54.5, 56.4), 64: (46.6, 50.6, 51.0)}),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-nodes", type=int, nargs="+", default=(2, 4, 8, 16, 32, 64), help="of 8 ranks; default 2 to 64")
    parser.add_argument("--num-tokens", type=int, default=4096)
    parser.add_argument("--num-sms", type=int, default=16, help="SMs that move rows; half of them forward in a dispatch")
    parser.add_argument("--machine", choices=MACHINES, default="h100")
    for name in ("nvlink_gbps", "nic_gbps", "put_us", "message_us", "sm_gbps"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, help="of the machine, instead of its own")


def main(options: argparse.Namespace) -> None:
    rates = {field.name: getattr(options, field.name, None) for field in dataclasses.fields(Machine)}
    sizes = {"num_tokens": options.num_tokens, "num_nodes": min(options.num_nodes), "num_sms": options.num_sms // 2}
    if wrong := [name for name, value in (rates | sizes).items() if value is not None and value <= 0]:
        sys.exit(f"--{wrong[0].replace('_', '-')} is too small; sizes and rates are positive, and --num-sms is at least 2")
    machine = dataclasses.replace(MACHINES[options.machine], **{name: value for name, value in rates.items() if value is not None})
    written = []
    for one in records(machine, options):
        written.append(one)
        beside = "" if one["rival"] is None else f"  {one['rival']}: {one['rival_us']:.0f} us, error {one['error']:+.0%}"
        print(f"EP{one['num_ranks']:<4} {one['name']:26} {one['part']:20} {one['us_median']:8.1f} us{beside}", flush=True)
    write_json(options.json, written)


def _record(
    part: str, op: str, dtype: str, num_ranks: int, times: list[float], num_bytes: int, machine: Machine, sizes: Record, **more: Any
) -> Record:  # fmt: skip
    settings = {"backend": "model", "num_ranks": num_ranks, "hidden": HIDDEN, "num_topk": NUM_TOPK, "dtype": DTYPE_OF_WIRE[dtype]}
    baseline: dict[str, Any] = {"baseline": more.pop("baseline", None), "baseline_times": more.pop("baseline_times", [])}
    entry = record(f"model {op}", settings | sizes, times, num_bytes, **baseline)
    return entry | {"part": part, "name": f"{op} {dtype}", "hardware": f"modelled: {machine.name}", **more}


def records(machine: Machine, options: argparse.Namespace) -> Iterator[Record]:
    """Yield each call of `Buffer` at each size, with the smallest chunks that come within 1% of the best, and each published one."""
    for num_nodes in options.num_nodes:
        sizes = {"num_tokens": options.num_tokens, "num_experts": max(256, num_nodes * PER_NODE), "layout": "rank"}
        for routing, topk_groups in {"uniform": None, "group-limited": 4}.items():
            drawn = [choose(num_nodes, sizes["num_tokens"], sizes["num_experts"], topk_groups, seed) for seed in range(3)]
            for op, dtype in OPERATIONS:
                call = functools.partial(simulate, op, machine=machine, row_bytes=ROW_BYTES[dtype], num_sms=options.num_sms)
                by_chunk = {chunk_rows: call(goes=drawn[0], chunk_rows=chunk_rows) for chunk_rows in CHUNK_ROWS}
                least = min(run.us for run in by_chunk.values())
                best = next(chunk_rows for chunk_rows, run in by_chunk.items() if run.us <= 1.01 * least)
                first, times = by_chunk[best], [call(goes=goes, chunk_rows=best).us for goes in drawn]
                yield _record(
                    routing, op, dtype, num_nodes * PER_NODE, times, first.network_bytes, machine, sizes=sizes, chunk_rows=best,
                    us_by_chunk_rows={str(rows): run.us for rows, run in by_chunk.items()}, bound=first.bound, busy_us=first.busy_us,
                    nodes_per_token=float(drawn[0].any(3).sum(2).mean()),
                    network_workspace_bytes=2 * (num_nodes - 1) * options.num_tokens * ROW_BYTES["bf16"],
                )  # fmt: skip
    for source, name, num_sms, num_tokens, local_experts, by_ranks in PUBLISHED:
        for num_ranks, rates in by_ranks.items():
            sizes = {"num_tokens": num_tokens, "num_experts": local_experts * num_ranks if local_experts else 256, "layout": "rank"}
            goes = choose(num_ranks // PER_NODE, num_tokens, sizes["num_experts"], None if local_experts else 4)
            for op, dtype, gbps in ((*each, gbps) for each, gbps in zip(OPERATIONS, rates, strict=True) if gbps is not None):
                run = simulate(op, goes, MACHINES[name], ROW_BYTES[dtype], 16, num_sms)
                theirs = {"baseline": source, "baseline_times": [run.logical_bytes / gbps / 1e3], "rival_logical_gbps": gbps}
                yield _record(
                    "published", op, dtype, num_ranks, [run.us], run.network_bytes, MACHINES[name], sizes=sizes, num_sms=num_sms,
                    bound=run.bound, logical_gbps=run.logical_gbps, error=run.logical_gbps / gbps - 1, **theirs,
                )  # fmt: skip
