"""Draw the chart of the README from the records: `python benchmarks/plots/figures.py`. A test compares the chart with what this draws."""

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[2]
CHART = ROOT / "docs" / "pictures" / "figures.svg"
DEEPEP = "deepep-h200-2026-11-21.json"
NVLINK = "h200-nvlink-2026-11-22.json"
GROUPS = (  # title, name of the records, file of ours
    ("dispatch, bf16, 4096 tokens a rank", "dispatch bf16 rank", NVLINK),
    ("combine, bf16, 4096 tokens a rank", "combine bf16 rank", NVLINK),
    ("dispatch, fp8, 4096 tokens a rank", "dispatch fp8 rank", NVLINK),
    ("low-latency dispatch, fp8, 128 tokens a rank", "low-latency dispatch fp8", "h200-low-latency-dispatch-2026-11-22.json"),
    ("low-latency combine, bf16, 128 tokens a rank", "low-latency combine bf16", "h200-low-latency-combine-2026-11-22.json"),
)
COLOURS = {"deepep_moe": "#4d9a5f", "DeepEP V1": "#8fa8d8", "DeepEP V2": "#5b7fc7", "NCCL all-to-all": "#b9b9c4"}
_WORKLOAD = "4 x H200, hidden 7168, top-8 of 256 experts, rows by rank. Shorter is better; each group has its own scale."
_PEER = "DeepEP: on another host of the same kind, by its own benchmark; V2 is its kernel and the copy after it."
_WIDTH, _LEFT, _LONGEST = 760, 130, 500


def record_of(file: str, name: str) -> dict[str, Any]:
    """Return our record for 4 ranks: of 4096 tokens with the default SMs, or of 128 tokens in a graph."""
    is_low_latency = name.startswith("low-latency")
    kind: dict[str, Any] = {"num_ranks": 4, "name": name, "num_tokens": 128 if is_low_latency else 4096}
    kind |= {"half": "both", "graph": True} if is_low_latency else {"num_sms": None}
    records = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    (record,) = [record for record in records if {field: record[field] for field in kind} == kind]
    return record


def deepep_of(name: str) -> dict[str, float]:
    """Return what DeepEP took, by version."""
    rows = json.loads((ROOT / "benchmarks" / "peers" / DEEPEP).read_text())
    (row,) = [row for row in rows if row.get("operation") == name]
    times = {"DeepEP V1": row.get("v1_us"), "DeepEP V2": sum(row["v2_us"]) if "v2_us" in row else None}
    return {version: us for version, us in times.items() if us is not None}


def bars_of(name: str, file: str) -> dict[str, float]:
    """Return microseconds by library, in the order of the bars."""
    record = record_of(file, name)
    return {"deepep_moe": record["us_median"], **deepep_of(name), "NCCL all-to-all": record["rival_us"]}


def chart() -> str:
    parts, y = [], 34
    for title, name, file in GROUPS:
        bars = bars_of(name, file)
        parts.append(f'<text x="16" y="{y}" font-weight="bold">{escape(title)}</text>')
        y += 10
        for library, us in bars.items():
            width = round(_LONGEST * us / max(bars.values()), 1)
            parts.append(f'<rect x="{_LEFT}" y="{y}" width="{width}" height="16" rx="2" fill="{COLOURS[library]}"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{library}</text>')
            parts.append(f'<text x="{_LEFT + width + 8}" y="{y + 13}">{us:.0f} us</text>')
            y += 20
        y += 26
    y += 26
    parts.append(f'<text x="16" y="{y - 28}" font-size="12">{_WORKLOAD}</text>')
    parts.append(f'<text x="16" y="{y - 12}" font-size="12">{_PEER}</text>')
    return svg("Microseconds of a call on 4 H200s: deepep_moe, DeepEP and NCCL", y, parts)


def svg(title: str, height: int, parts: list[str]) -> str:
    """Return a picture of the width that all have."""
    body = "\n".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img"
 font-family="Helvetica, Arial, 'DejaVu Sans', sans-serif" font-size="13" fill="#22242e">
<title>{title}</title>
<rect width="{_WIDTH}" height="{height}" rx="8" fill="#ffffff"/>
{body}
</svg>
"""


if __name__ == "__main__":
    CHART.write_text(chart())
