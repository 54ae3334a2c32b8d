"""The training example: it learns, both ways learn the same, checkpoints go both ways, and it leaves the files it promises."""

import pytest
from example_page import USED, read_training
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

    records, *_ = read_training(tmp_path, "deepspeed", STEPS)
    assert max(map(float, losses)) < records[0]["loss"] - 1, "of trained weights, not of those that an engine begins with"
    losses = [record["loss"] for record in records[:STEPS]]
    assert losses[-1] < losses[0] - 1.5
    assert losses[0] == records[STEPS]["loss"], "the first step has the bits of DeepSpeed's"
    for name in ("loss.png", "expert_load.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "; ".join(f"{name}: {value}" for name, value in USED.items()) in done.stdout
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"deepep_moe", "deepspeed"}
