"""Draw how far losses of fp8 are from those of bf16, from the records: `python benchmarks/plots/losses.py`. A test compares the picture
with what this draws."""

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from figures import svg

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
_TITLE = "Loss against that of bf16, by 30 steps: fp8, and bf16 with a learning rate a millionth larger"
_NOTE = "Green: experts in fp8. Grey: bf16 again, with a learning rate a millionth larger. A line a seed, the mean of 30 steps a point."
_MANY = 10  # lines, which are thin
_LEFT, _WIDTH, _GAP, _TOP, _HEIGHT, _MOST = 56, 310, 60, 44, 190, 3.0


def record_of(file: str) -> dict[str, Any]:
    """Return what examples/megatron/fp8_curves.py has written."""
    return json.loads((ROOT / "benchmarks" / "examples" / file).read_text())


class Ends(NamedTuple):
    """How far losses at the end are from those of bf16, in percent."""

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


def picture() -> str:
    parts = []
    for nth, ((model, _, gpu), file) in enumerate(list(RECORDS.items())[:_NUM_DRAWN]):
        record, left = record_of(file), _LEFT + nth * (_WIDTH + _GAP)
        seeds = f"{len(record['seeds'])} seeds"
        parts.append(f'<text x="{left}" y="{_TOP - 16}" font-weight="bold">--model {model}, {record["steps"]} steps, {seeds}, {gpu}</text>')
        width = 2 if len(record["seeds"]) < _MANY else 1
        for percent in (-2, 0, 2):
            y = _height(percent)
            parts.append(f'<line x1="{left}" x2="{left + _WIDTH}" y1="{y}" y2="{y}" stroke="#e3e3ea"/>')
            parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{percent and f"{percent:+d}"}%</text>')
        for experts in (NUDGED, FP8):
            for line in differences(record, experts).values():
                step = _WIDTH / (len(line) - 1)
                points = " ".join(f"{left + i * step:.1f},{_height(percent)}" for i, percent in enumerate(line))
                parts.append(f'<polyline points="{points}" fill="none" stroke="{LINES[experts]}" stroke-width="{width}"/>')
    height = _TOP + _HEIGHT + 40
    parts.append(f'<text x="16" y="{height - 14}" font-size="12">{_NOTE}</text>')
    return svg(_TITLE, height, parts)


def _height(percent: float) -> float:
    return round(_TOP + _HEIGHT * (0.5 - percent / (2 * _MOST)), 1)


if __name__ == "__main__":
    PICTURE.write_text(picture())
