"""Draw the chart of the README from the records: `python benchmarks/plots/figures.py`. A test compares the chart with what this draws."""

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[2]
CHART = ROOT / "docs" / "pictures" / "figures.svg"
_DEEPEP, _NCCL_EP = "h100-peers-2026-11-26.json", "h100-peers-nccl-ep-2026-11-26.json"
_SMALL_V1, _SMALL_V2 = (f"h100-peers-low-latency-{version}-2026-11-26.json" for version in ("v1", "v2"))
GROUPS = (  # title, operation of the records
    ("dispatch, bf16, rows by rank, 4096 tokens a rank", "dispatch bf16 rank"),
    ("combine, bf16, rows by rank, 4096 tokens a rank", "combine bf16 rank"),
    ("dispatch, fp8, rows by rank, 4096 tokens a rank", "dispatch fp8 rank"),
    ("dispatch, bf16, rows by expert, 4096 tokens a rank", "dispatch bf16 expert"),
    ("combine, bf16, rows by expert, 4096 tokens a rank", "combine bf16 expert"),
    ("low-latency dispatch, fp8, 128 tokens a rank", "low-latency dispatch fp8"),
    ("low-latency combine, bf16, 128 tokens a rank", "low-latency combine bf16"),
)
LIBRARIES = {  # the record of 4096 tokens, that of 128, and the name in both
    "deepep_moe": (_DEEPEP, _SMALL_V1, ""),
    "DeepEP V1": (_DEEPEP, _SMALL_V1, "deep_ep "),
    "DeepEP V2": (_DEEPEP, _SMALL_V2, "deep_ep_v2 "),
    "NCCL EP": (_NCCL_EP, None, "nccl_ep "),
}
COLOURS = {"deepep_moe": "#4d9a5f", "DeepEP V1": "#8fa8d8", "DeepEP V2": "#5b7fc7", "NCCL EP": "#c79a5b", "NCCL all-to-all": "#b9b9c4"}
_WORKLOAD = "2 x H100, hidden 7168, top-8 of 256 experts. Shorter is better; each group has its own scale."
_PEERS = "One kind of machine; NCCL EP and small batches in runs of their own. On a busy stream, or from CUDA graphs."
_WIDTH, _LEFT, _LONGEST = 760, 130, 500


def record_of(operation: str, library: str) -> dict[str, Any] | None:
    """Return the record of a library: with its default SMs, or of small batches in a graph. None where it has no such call."""
    large, small, prefix = LIBRARIES[library]
    small_operation = operation.removeprefix("low-latency ")
    is_small = small_operation != operation
    file = small if is_small else large
    if file is None:
        return None
    kind = {"name": f"low-latency {prefix}{small_operation}" if is_small else f"{prefix}{operation}"}
    kind |= {"half": "both", "graph": True} if is_small else {} if prefix else {"num_sms": None}
    records = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    found = [record for record in records if {field: record[field] for field in kind} == kind]
    assert len(found) < 2, f"{file}: {kind}"
    return found[0] if found else None


def bars_of(operation: str) -> dict[str, float]:
    """Return microseconds by library, in the order of the bars."""
    found = {library: record for library in LIBRARIES if (record := record_of(operation, library)) is not None}
    return {library: record["us_median"] for library, record in found.items()} | {"NCCL all-to-all": found["deepep_moe"]["rival_us"]}


def chart() -> str:
    parts, y = [], 34
    for title, operation in GROUPS:
        bars = bars_of(operation)
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
    parts.append(f'<text x="16" y="{y - 12}" font-size="12">{_PEERS}</text>')
    return svg("Microseconds of a call on 2 H100s: deepep_moe, DeepEP, NCCL EP and NCCL", y, parts)


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
