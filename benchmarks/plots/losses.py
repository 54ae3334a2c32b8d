"""Draw how far losses of fp8 are from those of bf16, from the records: `python benchmarks/plots/losses.py`. A test compares the picture
with what this draws."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from figures import svg

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "pictures" / "losses.svg"
MODELS = ("small", "tiny")
FP8, NUDGED = "fp8", "bf16, nudged"
LINES = {FP8: "#4d9a5f", NUDGED: "#b9b9c4"}
_TITLE = "Loss against that of bf16, by 30 steps: fp8, and bf16 with a learning rate a millionth larger"
_NOTE = "Green: experts in fp8. Grey: bf16 again, with a learning rate a millionth larger. A line a seed, the mean of 30 steps a point."
_LEFT, _WIDTH, _GAP, _TOP, _HEIGHT, _MOST = 56, 310, 60, 44, 190, 3.0


def record_of(model: str) -> dict[str, Any]:
    """Return what examples/megatron/fp8_curves.py has written of a model."""
    (file,) = (ROOT / "benchmarks" / "examples").glob(f"h200-fp8-curves-{model}-*.json")
    return json.loads(file.read_text())


def differences(record: dict[str, Any], experts: str) -> dict[int, np.ndarray]:
    """Return by seed the percent by which the loss of each window is above that of bf16."""
    means = {(run["seed"], run["experts"]): np.reshape(run["losses"], (-1, record["window"])).mean(1) for run in record["runs"]}
    return {seed: 100 * (loss / means[seed, "bf16"] - 1) for (seed, name), loss in means.items() if name == experts}


def picture() -> str:
    parts = []
    for nth, model in enumerate(MODELS):
        record, left = record_of(model), _LEFT + nth * (_WIDTH + _GAP)
        parts.append(f'<text x="{left}" y="{_TOP - 16}" font-weight="bold">--model {model}, {record["steps"]} steps</text>')
        for percent in (-2, 0, 2):
            y = _height(percent)
            parts.append(f'<line x1="{left}" x2="{left + _WIDTH}" y1="{y}" y2="{y}" stroke="#e3e3ea"/>')
            parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{percent and f"{percent:+d}"}%</text>')
        for experts in (NUDGED, FP8):
            for line in differences(record, experts).values():
                step = _WIDTH / (len(line) - 1)
                points = " ".join(f"{left + i * step:.1f},{_height(percent)}" for i, percent in enumerate(line))
                parts.append(f'<polyline points="{points}" fill="none" stroke="{LINES[experts]}" stroke-width="2"/>')
    height = _TOP + _HEIGHT + 40
    parts.append(f'<text x="16" y="{height - 14}" font-size="12">{_NOTE}</text>')
    return svg(_TITLE, height, parts)


def _height(percent: float) -> float:
    return round(_TOP + _HEIGHT * (0.5 - percent / (2 * _MOST)), 1)


if __name__ == "__main__":
    PICTURE.write_text(picture())
