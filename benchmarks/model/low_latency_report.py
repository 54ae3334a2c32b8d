"""Records and tables of simulated low-latency calls: each size, what is assumed of puts, kernels as they were measured, published calls."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from benchmarks.model.low_latency import (
    ASSUMPTIONS,
    CALLS,
    GUESSED,
    HIDDEN,
    MEASURED,
    NUM_EXPERTS,
    NUM_TOPK,
    ROW_BYTES,
    Batch,
    Floats,
    batches_of,
    compared,
    lines,
    times_of,
)
from benchmarks.model.machine import Machine
from benchmarks.model.published import LOW_LATENCY
from deepep_moe.tune.records import record

TARGET_GBPS = 50.0
CHUNK_ROWS, MESSAGE_US, SMALL = (1, 2, 4, 8), (0.1, 0.2, 0.3), (16, 32)
"""What is assumed of puts, and the ranks for which that is varied: those that a buffer serves today."""


def records_of(machine: Machine) -> list[dict[str, Any]]:
    """Return the records of all tables. `part` names the table."""
    fast = replace(machine, nic_gbps=TARGET_GBPS)
    made = [one for each in dict.fromkeys((machine, fast)) for one in _sizes(each)]
    for num_ranks in SMALL:
        batches = batches_of(num_ranks)
        made += _puts(fast, batches)
        for op in CALLS:
            times = times_of(op, batches, fast, latencies=MEASURED)
            made.append(_record("measured kernels", op, fast, num_ranks, times, latencies=asdict(MEASURED[op])))
    return made + list(_published(machine))


def _sizes(machine: Machine) -> Iterator[dict[str, Any]]:
    for line in lines(machine):
        yield _record("sizes", line.op, machine, line.num_ranks, line.times, us_by_message=line.by_message_us)


def _puts(machine: Machine, batches: list[Batch]) -> Iterator[dict[str, Any]]:
    for op in CALLS:
        for chunk_rows in CHUNK_ROWS:
            for message_us in MESSAGE_US:
                changed = replace(machine, message_us=message_us)
                times = times_of(op, batches, changed, chunk_rows=chunk_rows)
                yield _record("puts", op, changed, batches[0].num_ranks, times, chunk_rows=chunk_rows)


def _published(machine: Machine) -> Iterator[dict[str, Any]]:
    for row in LOW_LATENCY:
        times = compared(row, machine)
        yield _record(
            "published", row.op, machine, row.num_ranks, times, baseline=row.source, baseline_us=row.us, rival_us_to=row.us_to,
            over_nvlink=row.over_nvlink, error=float(np.median(times)) / row.us - 1,
        )  # fmt: skip


def _record(
    part: str, op: str, machine: Machine, num_ranks: int, times: Floats, *, baseline: str | None = None, baseline_us: float | None = None,
    chunk_rows: int = 1, latencies: dict[str, float] | None = None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """`bytes_moved` are those of a rank's rows to other nodes, or of messages to other ranks, by the mean of even choices."""
    settings = {"backend": "model", "num_ranks": num_ranks, "num_tokens": 128, "hidden": HIDDEN, "num_topk": NUM_TOPK}
    settings |= {"num_experts": NUM_EXPERTS, "dtype": "float8_e4m3fn" if op == "dispatch" else "bfloat16", "layout": "expert"}
    return record(
        f"model low-latency {op}", settings, times.tolist(), _bytes(num_ranks, ROW_BYTES[op], part == "published", more.get("over_nvlink")),
        baseline=baseline, baseline_times=[] if baseline_us is None else [baseline_us],
        hardware=f"modelled: {num_ranks // 8} x 8 {machine.name}", part=part, ranks_per_node=8, chunk_rows=chunk_rows,
        us_p99=float(np.percentile(times, 99)), **more, machine={name: value for name, value in vars(machine).items() if name != "name"},
        latencies=latencies or asdict(GUESSED[op]), assumptions=ASSUMPTIONS,
    )  # fmt: skip


def _bytes(num_ranks: int, row_bytes: int, are_messages: bool, over_nvlink: bool | None) -> int:
    if are_messages:
        away = 1 - (8 if over_nvlink else 1) / num_ranks
        return round(128 * NUM_TOPK * away * row_bytes)
    of_node = 8 * NUM_EXPERTS // num_ranks
    missed = float(np.prod([(NUM_EXPERTS - of_node - place) / (NUM_EXPERTS - place) for place in range(NUM_TOPK)]))
    return round(128 * (num_ranks // 8 - 1) * (1 - missed) * row_bytes)


# ---- tables ----


def show(records: list[dict[str, Any]]) -> None:
    """Print the tables of `records_of`."""
    print(f"low latency, 128 tokens a rank, hidden {HIDDEN}, top-{NUM_TOPK} of {NUM_EXPERTS}, dispatch fp8, combine bf16")
    _show_sizes(records)
    _show_puts(records)
    print("\nkernels as measured with a GPU each, at their longest, us")
    for r in _of(records, "measured kernels"):
        print(f"{_name(r):10}{r['num_ranks']:5}{r['us_median']:8.1f}")
    print("\npublished calls, us, and a message for each (token, expert) in the model; error: how much longer the model takes")
    print(f"{'source':34}{'operation':10}{'EP':>5}{'published':>11}{'model':>7}{'error':>7}  own node over")
    for r in _of(records, "published"):
        where = f"{r['rival']:34}{_name(r):10}{r['num_ranks']:5}"
        print(f"{where}{r['rival_us']:11.0f}{r['us_median']:7.0f}{r['error']:+7.0%}  {'NVLink' if r['over_nvlink'] else 'network'}")
    print("\nassumed:", *ASSUMPTIONS, sep="\n- ")


def _of(records: list[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    return [r for r in records if r["part"] == part]


def _name(r: dict[str, Any]) -> str:
    return str(r["op"].rpartition(" ")[2])


def _show_sizes(records: list[dict[str, Any]]) -> None:
    print(f"{'operation':10}{'EP':>5}{'NIC GB/s':>10}{'us':>8}{'p99':>8}{'a message each':>16}")
    for r in _of(records, "sizes"):
        where = f"{_name(r):10}{r['num_ranks']:5}{r['machine']['nic_gbps']:10g}"
        print(f"{where}{r['us_median']:8.1f}{r['us_p99']:8.1f}{r['us_by_message']:16.1f}")


def _show_puts(records: list[dict[str, Any]]) -> None:
    print(f"\nrows that share a put and its word, NICs of {TARGET_GBPS:g} GB/s, us by the time that a message takes a NIC")
    print(f"{'operation':10}{'EP':>5}{'rows':>6}" + "".join(f"{f'{us:g} us':>9}" for us in MESSAGE_US))
    rows = _of(records, "puts")
    for at in range(0, len(rows), len(MESSAGE_US)):
        group = rows[at : at + len(MESSAGE_US)]
        where = f"{_name(group[0]):10}{group[0]['num_ranks']:5}{group[0]['chunk_rows']:6}"
        print(where + "".join(f"{r['us_median']:9.1f}" for r in group))
