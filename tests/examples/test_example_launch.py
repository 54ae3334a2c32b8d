"""The training examples under a launcher: torchrun's ranks train, and the first of them reports."""

import json

import pytest
from scripts import ROOT, run_python

pytest.importorskip("matplotlib")

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


def train(framework: str, *options: str) -> str:
    """Two steps of an example on 2 x 2 virtual nodes. Returns what it prints."""
    script = ROOT / "examples" / framework / "train.py"
    done = run_python(*TORCHRUN, script, "--steps", "2", "--ranks-per-node", "2", "--bind", *options)
    lines = sorted(line for line in done.stderr.splitlines() if " bound: " in line)
    assert [line[:18] for line in lines] == [f"local rank {rank} bound" for rank in range(4)], done.stderr
    return done.stdout


def row(text: str, name: str) -> list[str]:
    """The cells of the only row called `name`: one rank prints the table."""
    (cells,) = [line.removeprefix(name).split() for line in text.splitlines() if line.startswith(name)]
    return cells


@pytest.mark.slow
def test_megatron(tmp_path):
    pytest.importorskip("megatron.core")
    text = train("megatron", "--compare", "alltoall", "--out", str(tmp_path))
    assert "loss curves of deepep_moe and alltoall agree" in text
    assert row(text, "nodes per token, last 10") == ["1.00", "-"], "a token chooses one group, which one rank has"
    ours, theirs = (float(cell.removesuffix("x")) for cell in row(text, "busiest node, last 10")[::2])
    assert ours == theirs and 1 <= ours <= 2, "the same tokens, counted for both dispatchers"
    (ours, theirs) = json.loads((tmp_path / "summary.json").read_text())
    assert ours["num_ranks"] == ours["ep"] == 4 and ours["nodes_per_token_last_10"] == 1.0 and "nodes_per_token_last_10" not in theirs


@pytest.mark.slow
def test_deepspeed(tmp_path):
    pytest.importorskip("deepspeed")
    text = train("deepspeed", "--no-compare", "--backend", "collective", "--out", str(tmp_path))
    assert row(text, "backend") == ["collective"]
    assert 0.5 < float(row(text, "nodes per token, last 10")[0]) <= 2, "two experts, of which a full one drops tokens"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2 and (tmp_path / "checkpoints" / "deepep_moe").is_dir()
