"""Draw the chart of the README from the records, by matplotlib: `python benchmarks/plots/figures.py`."""

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

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
STYLE = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "deepep_moe"}  # words stay words; the same bytes each time


def record_of(operation: str, library: str) -> dict[str, Any] | None:
    """Return the record of a library: with its default SMs, or of small batches in a graph. None if it has no such call."""
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


def draw(path: Path) -> None:
    """Write the chart: a group of bars for each operation."""
    with matplotlib.rc_context(STYLE):
        bars = [bars_of(operation) for _, operation in GROUPS]
        figure = Figure(figsize=(8, 0.24 * sum(len(of_group) + 2 for of_group in bars)), layout="constrained")
        all_axes = figure.subplots(len(GROUPS), height_ratios=[len(of_group) + 0.5 for of_group in bars])
        for axes, (title, _), of_group in zip(all_axes, GROUPS, bars, strict=True):
            drawn = axes.barh(list(of_group), list(of_group.values()), color=[COLOURS[library] for library in of_group])
            axes.bar_label(drawn, [f"{us:.0f} us" for us in of_group.values()], padding=4)
            axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
            axes.invert_yaxis()
            axes.set_xlim(0, 1.15 * max(of_group.values()))
            axes.tick_params(left=False, bottom=False, labelbottom=False)
            axes.spines[:].set_visible(False)
        figure.supxlabel(f"{_WORKLOAD}\n{_PEERS}", x=0.02, ha="left", fontsize=8)
        save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write `figure` without the date, so that equal records make equal files."""
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(CHART)
