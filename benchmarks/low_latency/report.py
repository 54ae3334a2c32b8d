"""Records, table and plot of the low-latency benchmark."""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import load_pyplot, save_figure, show_peers, with_version
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


_COLUMNS = (
    f"{'operation':25}{'EP':>3}{'tokens':>7}{'graph us':>10} {'[p10-p90]':15}{'p99':>7}{'of 20':>8}{'eager us':>10}{'send us':>9}"
    f"{'receive us':>12}{'MB':>8}{'GB/s':>7}{'% link':>7}{'baseline us':>12}{'speed-up':>10}{'Buffer us':>11}"
)


def show(reports: list[Report], records: list[dict[str, Any]]) -> None:
    first = records[0]
    shape = f"hidden {first['hidden']}, top-{first['num_topk']} of {first['num_experts']} experts, backend {first['backend']}"
    print(f"{records[-1]['hardware']}; {shape}")
    for report in reports:
        link = "no link" if report.link_gbps is None else f"link {report.link_gbps:.0f} GB/s"
        event = "" if report.event_us is None else f", {report.event_us:.2f} us from event to event, part of every time but `of 20`"
        print(f"EP{report.num_ranks}: {link}{event}")
    show_peers(records)
    print("graph: one call a CUDA graph, with the percentiles; on the CPU these are of eager calls. of 20: mean of 20 calls in one graph.")
    print(
        "receive: with the rows already there. MB: over the link, of the rank that sends most. baseline: all-to-all of all (token, expert)"
    )
    print("rows with its permutes, in a graph where ours is. Neither it nor Buffer has a combine in fp8: theirs is in bf16 there too.")
    if not all(r["is_host_ahead"] for r in records):
        print("*: the host was not always ahead of the device")
    print(_COLUMNS)
    lines: dict[tuple[int, int, str], dict[tuple[str, bool], dict[str, Any]]] = {}
    for r in records:
        lines.setdefault((r["num_ranks"], r["num_tokens"], r["name"]), {})[r["half"], r["graph"]] = r
    for found in lines.values():
        print(_line(found))


def _line(found: dict[tuple[str, bool], dict[str, Any]]) -> str:
    eager, send, receive = (found.get((half, False)) for half in ("both", "send", "receive"))
    assert eager is not None
    r = found.get(("both", True), eager)
    name = r["name"].removeprefix("low-latency ") + ("" if all(each["is_host_ahead"] for each in found.values()) else "*")
    percent = "-" if r["percent_of_link"] is None else f"{r['percent_of_link']:.0f}"
    spread = f"[{r['us_p10']:.1f}-{r['us_p90']:.1f}]"
    graph, of_20 = (f"{r['us_median']:.1f}", f"{r['us_graph_of_20']:.1f}") if r["graph"] else ("-", "-")
    graph = f"{graph:>10} {spread:15}{r['us_p99']:7.1f}{of_20:>8}"
    halves = ["-" if half is None else f"{half['us_median']:.1f}" for half in (send, receive)]
    times = f"{eager['us_median']:10.1f}{halves[0]:>9}{halves[1]:>12}"
    link = f"{r['bytes_moved'] / 1e6:8.3f}{r['gbps']:7.1f}{percent:>7}"
    baseline = f"{'-':>12}{'-':>10}" if r["rival_us"] is None else f"{r['rival_us']:12.1f}{r['ratio']:9.2f}x"
    buffer = "-" if r["buffer_us"] is None else f"{r['buffer_us']:.1f}"
    return f"{name:25}{r['num_ranks']:3}{r['num_tokens']:7}{graph}{times}{link}{baseline}{buffer:>11}"


def plot(path: Path, records: list[dict[str, Any]]) -> None:
    """Plot microseconds over tokens, a line per operation and EP size, and thin lines for the baseline."""
    pyplot = load_pyplot()
    is_graph = any(r["graph"] for r in records)
    lines: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for r in records:
        if r["half"] == "both" and r["graph"] == is_graph:
            lines.setdefault((r["name"], r["num_ranks"]), []).append(r)
    names, sizes = (list(dict.fromkeys(key[axis] for key in lines)) for axis in (0, 1))
    figure, axes = pyplot.subplots(figsize=(10, 6), layout="constrained")
    for (name, num_ranks), points in lines.items():
        style, color = ("-", "--", ":", "-.")[sizes.index(num_ranks) % 4], f"C{names.index(name) % 10}"
        label = f"{name.removeprefix('low-latency ')}, EP{num_ranks}"
        axes.plot([r["num_tokens"] for r in points], [r["us_median"] for r in points], style, color=color, marker=".", label=label)
        against = [r for r in points if r["rival_us"] is not None]
        axes.plot([r["num_tokens"] for r in against], [r["rival_us"] for r in against], style, color=color, linewidth=0.7, alpha=0.5)
    tokens = sorted({r["num_tokens"] for r in records})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [str(n) for n in tokens])
    how = "a CUDA graph" if is_graph else "eagerly"
    axes.set(xlabel="tokens per rank", ylabel=f"us a call, {how} (thin: all-to-all with permutes)", title=records[-1]["hardware"])
    figure.legend(loc="outside lower center", fontsize=8, ncols=4)
    save_figure(figure, path)
