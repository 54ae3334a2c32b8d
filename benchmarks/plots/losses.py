"""Draw how far losses of fp8 are from those of bf16, from the records, by matplotlib: `python benchmarks/plots/losses.py`."""

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from figures import STYLE, save
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "pictures" / "losses.svg"
# Records in benchmarks/examples, by model, ranks and GPU. Those that are drawn come first.
RECORDS = {
    ("small", 1, "H200"): "h200-fp8-curves-small-2026-11-26.json",
    ("tiny", 1, "H100"): "h100-fp8-curves-tiny-2026-11-26.json",
    ("tiny", 1, "H200"): "h200-fp8-curves-tiny-2026-11-26.json",
    ("tiny", 2, "H100"): "h100-fp8-curves-tiny-ep2-2026-11-26.json",
}
_NUM_DRAWN = 2
_T = {2: 4.303, 32: 2.037}  # 97.5% quantiles of Student's distribution, by degrees of freedom
FP8, NUDGED = "fp8", "bf16, nudged"
LINES = {FP8: "#4d9a5f", NUDGED: "#b9b9c4"}
_NOTE = "Green: experts in fp8. Grey: bf16 again, with a learning rate a millionth larger. A line a seed, the mean of 30 steps a point."
_MANY = 10  # lines, which are thin
_MOST = 3.0  # percent, of the axis


def record_of(file: str) -> dict[str, Any]:
    """Return what examples/megatron/fp8_curves.py has written."""
    return json.loads((ROOT / "benchmarks" / "examples" / file).read_text())


class Ends(NamedTuple):
    """Difference of the final losses from those of bf16, in percent."""

    mean: float
    interval: float
    """Half of the 95% interval of the mean; NaN where no quantile is known for so many seeds."""
    least: float
    most: float


def ends(record: dict[str, Any], key: str) -> Ends:
    """Return them for "difference_at_end" or "nudged_at_end", of all seeds that have it."""
    found = [100 * each[key] for each in record["compared"] if key in each]
    half = _T.get(len(found) - 1, float("nan")) * statistics.stdev(found) / len(found) ** 0.5
    return Ends(statistics.mean(found), half, min(found), max(found))


def differences(record: dict[str, Any], experts: str) -> dict[int, np.ndarray]:
    """Return by seed the percent by which the loss of each window is above that of bf16."""
    means = {(run["seed"], run["experts"]): np.reshape(run["losses"], (-1, record["window"])).mean(1) for run in record["runs"]}
    return {seed: 100 * (loss / means[seed, "bf16"] - 1) for (seed, name), loss in means.items() if name == experts}


def draw(path: Path) -> None:
    """Write the picture: a plot for each of the records that are drawn, a line for each seed."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 3), layout="constrained")
        all_axes = figure.subplots(1, _NUM_DRAWN, sharey=True)
        for axes, ((model, _, gpu), file) in zip(all_axes, list(RECORDS.items())[:_NUM_DRAWN], strict=True):
            record = record_of(file)
            width = 1.5 if len(record["seeds"]) < _MANY else 0.7
            for experts in (NUDGED, FP8):
                for line in differences(record, experts).values():
                    axes.plot(line, color=LINES[experts], linewidth=width)
            axes.set_title(f"--model {model}, {record['steps']} steps, {len(record['seeds'])} seeds, {gpu}", fontsize=9, fontweight="bold")
            axes.yaxis.set_major_formatter("{x:+.0f}%")
            axes.set(ylim=(-_MOST, _MOST), yticks=(-2, 0, 2), xticks=())
            axes.grid(axis="y", color="#e3e3ea")
            axes.spines[:].set_visible(False)
        figure.supxlabel(_NOTE, fontsize=8)
        save(figure, path)


if __name__ == "__main__":
    draw(PICTURE)
