"""Records and table of the low-latency benchmark."""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.common.report import number, show_head, show_table, spread_of, with_version
from benchmarks.low_latency.batches import Times
from benchmarks.low_latency.measure import Measurement, Report
from deepep_moe.tune.records import record


def records_of(reports: list[Report], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return for every measurement a record of the call as a graph (not on the CPU), of the eager call, and of each half."""
    return [made for report in reports for m in report.measurements for made in _records(report, m, options)]


def _records(report: Report, m: Measurement, options: argparse.Namespace) -> list[dict[str, Any]]:
    baseline_eager, baseline_graph = (None, None) if m.baseline is None else (m.baseline.eager, m.baseline.graph)
    made = [_record(report, m, options, "both", m.eager, baseline_eager)]
    if m.graph is not None:
        graph = _record(report, m, options, "both", m.graph, baseline_graph or baseline_eager, is_graph=True)
        made.insert(0, graph | {"rival_graph": baseline_graph is not None, "us_graph_of_20": m.graph_of_20_us})
    halves = [(half, times) for half, times in (("send", m.send), ("receive", m.receive)) if times is not None]
    made += [_record(report, m, options, half, times, None) for half, times in halves]
    return [with_version(r, r["backend"], m.version) for r in made]


def _record(
    report: Report, m: Measurement, options: argparse.Namespace, half: str, times: Times, baseline: Times | None, is_graph: bool = False
) -> dict[str, Any]:
    settings = {
        "backend": m.backend or options.backend, "num_ranks": report.num_ranks, "num_tokens": m.num_tokens, "hidden": options.hidden,
        "num_topk": options.num_topk, "num_experts": options.num_experts, "dtype": m.dtype, "layout": m.layout,
    }  # fmt: skip
    link_bytes = 0 if half == "receive" else m.link_bytes  # its rows have arrived before
    median = statistics.median(times.us)
    buffer_us = statistics.median(m.buffer_us) if m.buffer_us and half == "both" else None
    extra = {
        "name": f"low-latency {m.name}",
        "wire": m.wire,
        "half": half,
        "graph": is_graph,
        "us_p99": percentile(times.us, 99),
        "us_event": report.event_us,
        "us_host": times.host_us,
        "is_host_ahead": times.is_ahead,
        "num_sms": None if m.backend else report.num_sms,
        "link_gbps": report.link_gbps,
        "percent_of_link": None if report.link_gbps is None else 100 * link_bytes / median / 1e3 / report.link_gbps,
        "buffer_us": buffer_us,
        "buffer_ratio": None if buffer_us is None else buffer_us / median,
        "workspace_bytes": m.workspace_bytes,
        "iterations": len(times.us),
    }
    name = None
    if baseline is not None:
        in_bf16 = ", in bf16" if (m.op, m.wire) == ("combine", "fp8") else ""  # the all-to-all has no combine in fp8
        name = f"all-to-all of rows ({report.transport}) with permutes{in_bf16}"
    baseline_us = [] if baseline is None else baseline.us
    return record(m.op, settings, times.us, link_bytes, baseline=name, baseline_times=baseline_us, hardware=report.hardware, **extra)


def percentile(times: Sequence[float], percent: int) -> float:
    return sorted(times)[len(times) * percent // 100]


_COLUMNS = {
    "operation": lambda r: r["name"].removeprefix("low-latency ") + ("" if r["is_host_ahead"] else "*"),
    "EP": number("num_ranks", 0), "tokens": number("num_tokens", 0), "part": lambda r: "graph" if r["graph"] else r["half"],
    "us": number("us_median"), "p10-p90": spread_of, "p99": number("us_p99"), "of 20": number("us_graph_of_20"),
    "MB": number("bytes_moved", 3, 1e-6), "GB/s": number("gbps"), "% link": number("percent_of_link", 0),
    "baseline us": number("rival_us"), "speed-up": number("ratio", 2, unit="x"), "Buffer us": number("buffer_us"),
}  # fmt: skip


def show(reports: list[Report], records: list[dict[str, Any]]) -> None:
    show_head(records)
    for report in reports:
        if report.event_us is not None:
            print(f"EP{report.num_ranks}: {report.event_us:.2f} us from event to event, part of every time but `of 20`")
    print("graph: one call a CUDA graph; both: eager; send, receive: its halves, with the rows already there. of 20: mean of 20 calls in")
    print("one graph. MB: over the link, of the rank that sends most. baseline: all-to-all of all (token, expert) rows with its")
    print("permutes, in a graph where ours is. Neither it nor Buffer has a combine in fp8: theirs is in bf16 there too.")
    if not all(r["is_host_ahead"] for r in records):
        print("*: the host was not always ahead of the device")
    show_table(_COLUMNS, records)
