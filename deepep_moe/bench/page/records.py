"""The page of a benchmark's records: what `--report` writes."""

import statistics
from typing import Any

from deepep_moe.bench.page.page import Page, Table

_COLUMNS = ["call", "median, us", "p10", "p90", "GB/s", "baseline", "its median, us", "speed-up"]


def name_of(record: dict[str, Any]) -> str:
    """Return what tells a record from others of its run."""
    words = [record.get("name") or record["op"]]
    words += [f"{record[name]} {word}" for name, word in (("num_ranks", "ranks"), ("num_tokens", "tokens")) if record.get(name)]
    words += [f"layout {record['layout']}"] if record.get("layout") else []
    words += [f"{record['num_sms']} SMs"] if record.get("num_sms") is not None else []
    return ", ".join(map(str, words))


def page_of(records: list[dict[str, Any]]) -> Page:
    """Return the page of the records of one run, which has at least one."""
    first, rows = records[0], []
    for record in records:
        times = [record["us_median"], record["us_p10"], record["us_p90"], record["gbps"]]
        rows.append([name_of(record), *times, record["rival"] or "-", record["rival_us"], record["ratio"]])
    versions = {name: str(value) for name, value in first["versions"].items() if value}
    about = {"hardware": first["hardware"], **versions, "command": first["command"]}
    return Page(f"Benchmark of {first['op']}", _told(records), about, [Table("Calls", _COLUMNS, rows, bars="median, us")])


def _told(records: list[dict[str, Any]]) -> str:
    ratios = [record["ratio"] for record in records if record["ratio"] is not None]
    if not ratios:
        return f"{len(records)} calls were timed, none of them beside a baseline."
    faster = sum(ratio > 1 for ratio in ratios)
    return (
        f"{faster} of {len(ratios)} comparisons with a baseline are faster. "
        f"The speed-up is {statistics.median(ratios):.2f} in the median, {min(ratios):.2f} at least and {max(ratios):.2f} at most."
    )
