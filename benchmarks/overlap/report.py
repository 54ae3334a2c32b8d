"""Records and table of exchanges beside GEMMs."""

import argparse
import statistics
from typing import Any

from benchmarks.common.report import number, show_head, show_table, sms_of, spread_of
from benchmarks.exchange.measure import Report
from benchmarks.overlap.measure import Overlap, Schedule
from deepep_moe.tune.records import record, spread


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


_COLUMNS = {
    "operation": lambda r: r["name"], "EP": number("num_ranks", 0), "tokens": number("num_tokens", 0), "SMs": sms_of,
    "GEMMs": number("num_gemms", 0), "both us": number("us_median"), "p10-p90": spread_of, "start": number("start_us"),
    "GEMMs us": number("gemms_us"), "hook": number("hook_us"), "exchange alone": number("exchange_us"),
    "GEMMs alone": number("alone_gemms_us"), "GEMM speed": number("gemm_speed", 2),
    "hidden": lambda r: "?" if r["exchange_hidden"] is None else f"{r['exchange_hidden']:.0%}",
}  # fmt: skip


def show(records: list[dict[str, Any]]) -> None:
    show_head(records)
    rows, columns, depth = records[0]["gemm"]
    print(f"GEMMs of {rows} x {columns}, sums of {depth}, bf16, between start and hook of an exchange. us of the slowest rank, medians.")
    print("GEMM speed: beside the exchange, 1 is alone. hidden: part of the exchange that costs no time beside the GEMMs.")
    if any(r["exchange_hidden"] is None for r in records):
        print("?: the GEMMs took longer alone than beside the exchange, as on a busy machine; what is hidden cannot be said.")
    show_table(_COLUMNS, records)
