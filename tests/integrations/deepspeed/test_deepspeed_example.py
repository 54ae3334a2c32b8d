"""The training example: it learns, both ways learn the same, checkpoints go both ways, and it leaves the files it promises."""

import json
import math

import pytest
from example_page import read
from scripts import ROOT, run_python

pytest.importorskip("deepspeed")
pytest.importorskip("matplotlib")

STEPS = 10


@pytest.mark.slow
def test_training_learns_and_equals_deepspeed(tmp_path):
    old = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}  # DeepSpeed before 0.15 loads its own checkpoints in newer PyTorch only so
    done = run_python(ROOT / "examples" / "deepspeed" / "train.py", "--steps", STEPS, "--out", tmp_path, **old)
    assert "loss curves of deepep_moe and deepspeed agree" in done.stdout
    losses = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("checkpoint saved by")]
    assert len(losses) == 4 and losses[0] == losses[1] and losses[2] == losses[3], done.stdout

    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["dispatcher"], r["step"]) for r in records] == [
        (name, step) for name in ("deepep_moe", "deepspeed") for step in range(STEPS)
    ]
    assert max(map(float, losses)) < records[0]["loss"] - 1, "of trained weights, not of those that an engine begins with"
    losses = [record["loss"] for record in records[:STEPS]]
    assert abs(losses[0] - math.log(256)) < 0.2 and losses[-1] < losses[0] - 1.5
    assert losses[0] == records[STEPS]["loss"], "the first step has the bits of DeepSpeed's"
    for name in ("loss.png", "expert_load.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    page = read(tmp_path / "report.html")
    used = {"optimizer": "torch.optim.adamw.AdamW", "norms": "torch.nn.modules.normalization.RMSNorm"}
    assert page.about.items() >= used.items() and "; ".join(f"{name}: {value}" for name, value in used.items()) in done.stdout
    (runs,) = page.tables
    ours, theirs = (dict(zip(runs.columns, row, strict=True)) for row in runs.rows)
    assert all(run[column] > 0 for run in (ours, theirs) for column in ("exchange, ms", "step, ms"))
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"deepep_moe", "deepspeed"}
