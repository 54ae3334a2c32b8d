"""Records, table and plot of the benchmark of exchanges on GPUs."""

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.common.report import load_pyplot, save_figure, show_peers, with_version
from benchmarks.exchange.baselines import PLANNED
from benchmarks.exchange.measure import Measurement, Report
from deepep_moe.tune.records import record, spread


def records_of(reports: list[Report], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one record per measurement. The baseline is the all-to-all of as many rows as the layout has, with its permutes."""
    return [_record(report, measurement, options) for report in reports for measurement in report.measurements]


def _record(report: Report, m: Measurement, options: argparse.Namespace) -> dict[str, Any]:
    is_expert = m.layout == "expert"
    settings = {
        "backend": m.backend,
        "num_ranks": report.num_ranks,
        "num_tokens": m.num_tokens,
        "hidden": options.hidden,
        "num_topk": options.num_topk,
        "num_experts": options.num_experts,
        "dtype": m.dtype,
        "layout": m.layout,
    }
    (call_us, call_p10, call_p90), median_s = spread(m.call_us), statistics.median(m.stream_us) / 1e6
    extra = {
        "name": m.name,
        "num_sms": m.num_sms,
        "expert_alignment": options.expert_alignment if is_expert else 1,
        "call_us": call_us,
        "call_us_p10": call_p10,
        "call_us_p90": call_p90,
        "link_gbps": report.link_gbps,
        "percent_of_link": None if report.link_gbps is None else 100 * m.link_bytes / median_s / 1e9 / report.link_gbps,
        "rival_alone_us": statistics.median(m.baseline.alone_us),
        "rival_permuted_us": statistics.median(m.baseline.permuted_us),
        "workspace_bytes": m.workspace_bytes,
        "iterations": len(m.stream_us),
        "ranks_per_node": options.ranks_per_node or report.num_ranks,
        "num_rail_sms": options.num_rail_sms,
    }
    baseline, times = f"{PLANNED[m.layout].name} ({report.transport}) with permutes", m.baseline.permuted_us
    made = record(m.op, settings, m.stream_us, m.link_bytes, baseline=baseline, baseline_times=times, hardware=report.hardware, **extra)
    return with_version(made, m.backend, m.version)


_COLUMNS = (
    f"{'operation':31}{'EP':>3}{'tokens':>7}{'SMs':>5}{'stream us':>11} {'[p10-p90]':15}{'call us':>9}{'MB':>8}{'GB/s':>7}{'% link':>7}"
    f"{'baseline us':>12}{'permuted':>10}{'speed-up':>10}"
)


def show(records: list[dict[str, Any]]) -> None:
    first = records[0]
    print(f"{records[-1]['hardware']}; hidden {first['hidden']}, top-{first['num_topk']} of {first['num_experts']} experts")
    links = {r["num_ranks"]: r["link_gbps"] for r in records if r["link_gbps"] is not None}
    print("link, every rank copying to its neighbour: " + (", ".join(f"EP{n} {g:.0f} GB/s" for n, g in links.items()) or "none"))
    sizes = {(r["num_ranks"], r["num_tokens"]): r["workspace_bytes"] for r in records if r["workspace_bytes"] is not None}
    print("workspace per rank: " + ", ".join(f"EP{n} {t} tokens {size / 2**20:.0f} MiB" for (n, t), size in sizes.items()))
    show_peers(records)
    print("baseline: all-to-all of every (token, expert) row, in the rank layout of every (token, rank) row, its permutes left out and")
    print("counted; speed-up over the latter. MB: over the link, of the rank that sends most. SMs: - is the buffer's own choice.")
    print(_COLUMNS)
    for r in records:
        print(_line(r))


def _line(r: dict[str, Any]) -> str:
    sms = {None: "-", 0: "copy"}.get(r["num_sms"], r["num_sms"])
    percent = "-" if r["percent_of_link"] is None else f"{r['percent_of_link']:.0f}"
    spread = f"[{r['us_p10']:.0f}-{r['us_p90']:.0f}]"
    times = f"{r['us_median']:11.1f} {spread:15}{r['call_us']:9.1f}{r['bytes_moved'] / 1e6:8.1f}{r['gbps']:7.1f}{percent:>7}"
    baseline = f"{r['rival_alone_us']:12.1f}{r['rival_permuted_us']:10.1f}{r['ratio']:9.2f}x"
    return f"{r['name']:31}{r['num_ranks']:3}{r['num_tokens']:7}{sms:>5}{times}{baseline}"


def plot(path: Path, records: list[dict[str, Any]]) -> None:
    """Plot GB/s over tokens, a line per operation and EP size, at the buffer's own number of SMs (or the first of `--num-sms`)."""
    pyplot = load_pyplot()
    num_sms = records[0]["num_sms"]
    lines: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for r in records:
        if r["num_sms"] == num_sms or r["workspace_bytes"] is None:
            lines.setdefault((r["name"], r["num_ranks"]), []).append((r["num_tokens"], r["gbps"]))
    names, sizes = (list(dict.fromkeys(key[axis] for key in lines)) for axis in (0, 1))
    figure, axes = pyplot.subplots(figsize=(10, 6), layout="constrained")
    for (name, num_ranks), points in lines.items():
        style = ("-", "--", ":", "-.")[sizes.index(num_ranks) % 4]
        axes.plot(*zip(*sorted(points), strict=True), style, color=f"C{names.index(name) % 10}", marker=".", label=f"{name}, EP{num_ranks}")
    for rate in {r["link_gbps"] for r in records} - {None}:
        axes.axhline(rate, color="grey", linewidth=0.8)
    tokens = sorted({r["num_tokens"] for r in records})
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [str(n) for n in tokens])
    axes.set(xlabel="tokens per rank", ylabel="GB/s over the link, one direction (grey: copy engine)", title=records[-1]["hardware"])
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", fontsize=8, ncols=3)
    save_figure(figure, path)
