"""Records and table of the benchmark of exchanges on GPUs."""

import argparse
import statistics
from typing import Any

from benchmarks.common.report import number, show_head, show_table, sms_of, spread_of, with_version
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


_COLUMNS = {
    "operation": lambda r: r["name"], "EP": number("num_ranks", 0), "tokens": number("num_tokens", 0), "SMs": sms_of,
    "stream us": number("us_median"), "p10-p90": spread_of, "call us": number("call_us"), "MB": number("bytes_moved", 1, 1e-6),
    "GB/s": number("gbps"), "% link": number("percent_of_link", 0), "baseline us": number("rival_alone_us"),
    "permuted": number("rival_permuted_us"), "speed-up": number("ratio", 2, unit="x"),
}  # fmt: skip


def show(records: list[dict[str, Any]]) -> None:
    show_head(records)
    sizes = {(r["num_ranks"], r["num_tokens"]): r["workspace_bytes"] for r in records if r["workspace_bytes"] is not None}
    print("workspace per rank: " + ", ".join(f"EP{n} {t} tokens {size / 2**20:.0f} MiB" for (n, t), size in sizes.items()))
    print("baseline: all-to-all of every (token, expert) row, in the rank layout of every (token, rank) row, its permutes left out and")
    print("counted; speed-up over the latter. MB: over the link, of the rank that sends most. SMs: - is the buffer's own choice.")
    show_table(_COLUMNS, records)
