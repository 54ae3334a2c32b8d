"""Draw the chart of the README from a record, by matplotlib: `python benchmarks/plots/figures.py`."""

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
CHART = ROOT / "docs" / "pictures" / "figures.svg"
RECORD = ROOT / "benchmarks" / "results" / "h200-peers-2026-11-26.json"
LIMIT_GBPS = 357  # the most that SMs push over NVLink: docs/limits.md
GROUPS = (  # title, operation of the records
    ("dispatch, bf16, rows by rank", "dispatch bf16 rank"),
    ("dispatch, fp8, rows by rank", "dispatch fp8 rank"),
    ("combine, bf16, rows by rank", "combine bf16 rank"),
    ("dispatch, bf16, rows by expert", "dispatch bf16 expert"),
    ("combine, bf16, rows by expert", "combine bf16 expert"),
)
LIBRARIES = {  # the name in the records, and the colour
    "deepep_moe, 12 or 14 SMs": ("", "#4d9a5f"),  # 14 in a combine of rows by expert
    "DeepEP V1, 24 SMs": ("deep_ep ", "#8fa8d8"),
    "DeepEP V2, 16 SMs": ("deep_ep_v2 ", "#5b7fc7"),
}
_NCCL = "NCCL all-to-all, permutes"
_BELOW = (
    "4 x H200, 4096 tokens a rank, hidden 7168, top-8 of 256 experts. "
    f"GB/s that a rank sends; the line is the most that SMs push, {LIMIT_GBPS}."
)
STYLE = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "deepep_moe"}  # words stay words; the same bytes each time


def bars_of(operation: str) -> dict[str, float]:
    """Return GB/s by library, in the order of the bars. Libraries without such a call are left out."""
    records: list[dict[str, Any]] = json.loads(RECORD.read_text())
    by_library = {
        library: record
        for library, (prefix, _) in LIBRARIES.items()
        for record in records
        if record["name"] == f"{prefix}{operation}" and record["num_sms"] != 0
    }
    ours = next(iter(by_library.values()))
    return {library: record["gbps"] for library, record in by_library.items()} | {_NCCL: ours["bytes_moved"] / ours["rival_us"] / 1e3}


def draw(path: Path) -> None:
    """Write the chart: a group of bars for each operation."""
    with matplotlib.rc_context(STYLE):
        bars = [bars_of(operation) for _, operation in GROUPS]
        figure = Figure(figsize=(8, 0.24 * sum(len(of_group) + 2 for of_group in bars)), layout="constrained")
        all_axes = figure.subplots(len(GROUPS), height_ratios=[len(of_group) + 0.5 for of_group in bars])
        colours = {library: colour for library, (_, colour) in LIBRARIES.items()} | {_NCCL: "#b9b9c4"}
        for axes, (title, _), of_group in zip(all_axes, GROUPS, bars, strict=True):
            drawn = axes.barh(list(of_group), list(of_group.values()), color=[colours[library] for library in of_group])
            axes.bar_label(drawn, [f"{gbps:.0f} GB/s" for gbps in of_group.values()], label_type="center")
            axes.axvline(LIMIT_GBPS, color="#c05050", linewidth=1)
            axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
            axes.invert_yaxis()
            axes.set_xlim(0, 1.2 * LIMIT_GBPS)
            axes.tick_params(left=False, bottom=False, labelbottom=False)
            axes.spines[:].set_visible(False)
        figure.supxlabel(_BELOW, x=0.02, ha="left", fontsize=8)
        figure.savefig(path, metadata={"Date": None})  # so that equal records make equal files


if __name__ == "__main__":
    draw(CHART)
