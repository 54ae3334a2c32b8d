"""Records, table, timelines and figure of exchanges beside GEMMs."""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.report import load_pyplot, save_figure
from benchmarks.exchange.measure import Report
from benchmarks.overlap.measure import Overlap, Schedule
from deepep_moe.tune.records import record, spread

_WIDTH = 60  # columns of a timeline
_COLORS = {"start": "C0", "GEMMs": "C2", "hook": "C1"}


@dataclass(frozen=True)
class Bar:
    """A phase between two times, in microseconds from the start."""

    schedule: str
    phase: str
    begin: float
    end: float
    spread: tuple[float, float]
    """10th and 90th percentiles of its length."""


# ---- records ----


def records_of(reports: list[Report], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one record per exchange with GEMMs between its halves.

    The baseline of `ratio` is the same two halves, and then the GEMMs. A plain call, which has no halves, takes less time.
    """
    return [_record(report, overlap, options) for report in reports for overlap in report.overlaps]


def _record(report: Report, o: Overlap, options: argparse.Namespace) -> dict[str, Any]:
    settings = {
        "backend": o.backend,
        "num_ranks": report.num_ranks,
        "num_tokens": o.num_tokens,
        "hidden": options.hidden,
        "num_topk": options.num_topk,
        "num_experts": options.num_experts,
        "dtype": "bfloat16",
        "layout": "expert",
    }
    extra = {
        "name": o.name,
        "num_sms": o.num_sms,
        "expert_alignment": options.expert_alignment,
        "gemm": list(o.gemm),
        "num_gemms": o.num_gemms,
        "gemm_speed": o.gemm_speed,
        "exchange_hidden": o.hidden,
        "link_gbps": report.link_gbps,
        **_phases("", o.both),
        **_phases("exchange_", o.exchange),
        **_phases("alone_", o.gemms),
        "exchange_us": statistics.median(o.exchange.total),
        "workspace_bytes": o.workspace_bytes,
        "iterations": len(o.both.ends),
    }
    one_by_one = [a + b for a, b in zip(o.exchange.total, o.gemms.total, strict=True)]
    baseline = "the same two halves, then the GEMMs"
    return record(
        f"{o.op}+gemm",
        settings,
        o.both.total,
        o.link_bytes,
        baseline=baseline,
        baseline_times=one_by_one,
        hardware=report.hardware,
        **extra,
    )


def _phases(prefix: str, schedule: Schedule) -> dict[str, float]:
    found = {}
    for phase in schedule.phases:
        name = prefix + phase.lower()
        found[f"{name}_us"], found[f"{name}_us_p10"], found[f"{name}_us_p90"] = spread(schedule.length(phase))
    return found


# ---- timelines ----


def bars_of(overlap: Overlap) -> list[Bar]:
    """Return the bars of the exchange alone, of the GEMMs alone, and of both."""
    return _bars("exchange alone", overlap.exchange) + _bars("GEMMs alone", overlap.gemms) + _bars("both", overlap.both)


def _bars(name: str, schedule: Schedule) -> list[Bar]:
    ends = [statistics.median(column) for column in zip(*schedule.ends, strict=True)]
    moments = zip(schedule.phases, [0.0, *ends], ends, strict=False)
    return [Bar(name, phase, begin, end, spread(schedule.length(phase))[1:]) for phase, begin, end in moments]


def timeline(bars: Sequence[Bar], width: int = _WIDTH) -> list[str]:
    """Return a line per bar: its begin and end, the percentiles of its length, and a drawing in `width` columns for all bars."""
    scale = width / max(bar.end for bar in bars)
    lines, shown = [], ""
    for bar in bars:
        schedule, shown = "" if bar.schedule == shown else bar.schedule, bar.schedule
        first = min(round(bar.begin * scale), width - 1)
        drawn = " " * first + "#" * max(1, round(bar.end * scale) - first)
        percentiles = f"[{bar.spread[0]:.0f}-{bar.spread[1]:.0f}]"
        lines.append(f"{schedule:15}{bar.phase:9}{bar.begin:8.1f} -{bar.end:8.1f}  {percentiles:13}|{drawn:{width}}|")
    return lines


# ---- what is printed ----

_COLUMNS = (
    f"{'operation':26}{'EP':>3}{'tokens':>7}{'SMs':>5}{'GEMMs':>6}{'both us':>10} {'[p10-p90]':15}{'exchange':>9}{'GEMMs us':>9}"
    f"{'GEMM speed':>11}{'hidden':>8}"
)


def show(reports: Sequence[Report], records: list[dict[str, Any]]) -> None:
    """Print timelines, then a table of `records`."""
    first = records[0]
    rows, columns, depth = first["gemm"]
    print(f"{first['hardware']}; GEMMs of {rows} x {columns}, sums of {depth}, bf16, between start and hook of an exchange")
    print("microseconds from the start, of the slowest rank, medians; in brackets p10 and p90 of a phase's length")
    for report in reports:
        for overlap in report.overlaps:
            print(f"\n{overlap.name}, EP{report.num_ranks}, {overlap.num_tokens} tokens, {_sender(overlap)}")
            print("\n".join(timeline(bars_of(overlap))))
    print("\nexchange, GEMMs us: each alone. GEMM speed: beside the exchange, 1 is alone. hidden: part of the exchange that costs no time")
    print("beside the GEMMs. SMs: - is the default.")
    if any(r["exchange_hidden"] is None for r in records):
        print("?: the GEMMs took longer alone than beside the exchange, as on a busy machine; what is hidden cannot be said.")
    links = [f"EP{report.num_ranks} {report.link_gbps:.0f} GB/s" for report in reports if report.link_gbps is not None]
    print("link, every rank copying to its neighbour: " + (", ".join(links) or "none"))
    print(_COLUMNS)
    for r in records:
        print(_line(r))


def _sender(overlap: Overlap) -> str:
    if overlap.backend != "nvlink":
        return f"backend {overlap.backend}"
    return {None: "the default number of SMs sends", 0: "copy engines send"}.get(overlap.num_sms, f"{overlap.num_sms} SMs send")


def _percent(part: float | None) -> str:
    return "?" if part is None else f"{100 * part:.0f}%"


def _line(r: dict[str, Any]) -> str:
    sms = {None: "-", 0: "copy"}.get(r["num_sms"], r["num_sms"])
    percentiles = f"[{r['us_p10']:.0f}-{r['us_p90']:.0f}]"
    both = f"{r['us_median']:10.1f} {percentiles:15}"
    figures = f"{r['exchange_us']:9.1f}{r['alone_gemms_us']:9.1f}{r['gemm_speed']:11.2f}{_percent(r['exchange_hidden']):>8}"
    name = f"{r['name']:26}{r['num_ranks']:3}{r['num_tokens']:7}{sms:>5}{r['num_gemms']:6}"
    return f"{name}{both}{figures}"


def plot(path: Path, reports: Sequence[Report]) -> None:
    """Plot the timelines, one above the other."""
    pyplot = load_pyplot()
    shown = [(report, overlap) for report in reports for overlap in report.overlaps]
    figure, all_axes = pyplot.subplots(len(shown), figsize=(10, 1.7 * len(shown) + 1), layout="constrained", squeeze=False)
    for axes, (report, overlap) in zip(all_axes[:, 0], shown, strict=True):
        bars = bars_of(overlap)
        rows = list(dict.fromkeys(bar.schedule for bar in bars))
        for bar in bars:
            place = (rows.index(bar.schedule) - 0.4, 0.6)
            axes.broken_barh([(bar.begin, bar.end - bar.begin)], place, color=_COLORS[bar.phase], label=bar.phase)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        title = f"{overlap.op}, EP{report.num_ranks}, {overlap.num_tokens} tokens, {_sender(overlap)}: "
        axes.set_title(f"{title}GEMM speed {overlap.gemm_speed:.2f}, {_percent(overlap.hidden)} hidden", fontsize=9, loc="left")
    all_axes[-1, 0].set_xlabel("microseconds from the start, slowest rank, medians")
    handles = {label: handle for axes in all_axes[:, 0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=8)
    save_figure(figure, path)
