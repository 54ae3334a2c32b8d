"""The benchmark of the layer: its records and its refusals, on the CPU with tiny sizes."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from on_ranks import on_ranks

from benchmarks.layers import megatron, megatron_steps

pytest.importorskip("megatron.core")

ROOT = Path(__file__).parents[3]
TINY = {"num_tokens": 12, "hidden": 32, "ffn_hidden": 16, "num_topk": 3, "num_experts": 4, "repeats": 2}


def options_of(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    megatron.add_arguments(parser)
    options = parser.parse_args(arguments, argparse.Namespace(bind=False))  # as `python benchmarks/run.py` adds it
    megatron.resolve(options)
    return options


@pytest.mark.slow
def test_records(tmp_path):
    arguments = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "run.py"), "megatron", "--device", "cpu", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "records.json")], capture_output=True, text=True, env=environment, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "megatron exchange" in done.stdout and "megatron step" in done.stdout
    records = json.loads((tmp_path / "records.json").read_text())
    rivals = {"exchange": ["alltoall", "allgather", "rows alone"], "step": ["deepep_moe", "alltoall", "grouped products alone"]}
    assert [(r["op"], r["rival"]) for r in records] == [
        (f"megatron {what} forward+backward", rival) for what in rivals for rival in rivals[what]
    ]
    for r in records:
        assert (r["backend"], r["num_ranks"], r["num_tokens"], r["dtype"], r["layout"]) == ("shm", 2, 12, "bfloat16", "expert")
        assert r["us_median"] > 0 and r["ratio"] == pytest.approx(r["rival_us"] / r["us_median"])
        assert r["bytes_moved"] % 64 == 0 and 0 < r["bytes_moved"] <= 12 * 64 * 4
        what, differences = r["op"].split()[1], r["differences"]
        if what == "step":
            assert 0 < r["host_us"] <= r["us_median"] * 1.5 and r["rival_host_us"] > 0 and r["kernel_us"] is None
            assert "TransformerEngine" in r["rival_versions"]
        else:
            assert differences is None if r["rival"].startswith("rows") else set(differences) == {"output", "input", "probs"}


@on_ranks(2)
def test_steps_have_the_same_weights(rank: int, num_ranks: int) -> None:
    """Grouped experts have the weights of the layer that they are compared with, and gradients of the same names."""
    from megatron_ranks import model_parallel

    from benchmarks.layers.megatron_layers import sharing_layers
    from benchmarks.layers.passes import Pass

    sizes = {"ep": num_ranks, "dtype": torch.float32, "hidden": 32, "ffn_hidden": 16, "num_topk": 3, "num_experts": 4}
    with model_parallel("cpu", ep=num_ranks, seed=1, options={}):
        like = sharing_layers(("deepep_moe",), seed=1, **sizes)["deepep_moe"]
        x, cotangent = (torch.randn(12, 1, 32, generator=torch.Generator().manual_seed(rank)) for _ in range(2))
        x.requires_grad_()
        steps = megatron_steps.make_steps(like, x, cotangent, seed=2, **sizes)
        assert list(steps) == ["deepep_moe, grouped", "grouped products alone"]
        ours = Pass(lambda: like(x)[0], cotangent, {"input": x} | dict(like.named_parameters())).results()
        theirs = megatron_steps.by_expert(steps["deepep_moe, grouped"].results())
        assert theirs.keys() == ours.keys()
        for name, value in ours.items():
            torch.testing.assert_close(theirs[name], value)
        times = megatron_steps.time_step(steps["grouped products alone"], torch.device("cpu"))
        assert 0 < times.host <= times.wall


@on_ranks(2)
def test_rows_of_the_rival_return(rank: int, num_ranks: int) -> None:
    routing_map = torch.rand(5 + rank, 6, generator=torch.Generator().manual_seed(rank)).argsort(1) < 3
    rows = megatron.Rows(torch.zeros(5 + rank, 1, 8), routing_map, num_ranks)
    rank_of_expert = torch.arange(6) // (6 // num_ranks)
    assert rows.sent == [int(routing_map[:, rank_of_expert == r].sum()) for r in range(num_ranks)]
    numbers = rows.there.normal_().clone()
    rows.forward()
    assert torch.equal(rows.there, numbers) and len(rows.here) == sum(rows.received)


def _measured(difference: float, *times: float) -> megatron.Measured:
    differences = {"exchange": {"alltoall": {"output": difference}, "allgather": {"output": 0.0}}, "step": {}}
    turns = {("exchange", name): list(times) for name in ("deepep_moe", "alltoall")}
    steps = {name: [megatron_steps.StepTimes(2.0, 1.0)] for name in ("deepep_moe, grouped", "alltoall")}
    return megatron.Measured("shm", "here", "these", 640, differences, turns, steps=steps)


@pytest.mark.parametrize("difference", [0.5, float("nan")])
def test_disagreement_fails(difference, monkeypatch):
    """Times are those of the slowest rank, and a disagreement of results fails."""
    ranks = [_measured(0.0, 1.0, 3.0), _measured(difference, 2.0, 2.0)]
    assert megatron.slowest(ranks)["exchange", "alltoall"] == [2.0, 3.0]
    monkeypatch.setattr(megatron, "run_ranks", lambda *_, **__: ranks)
    options = options_of("--device", "cpu")
    options.json = None
    with pytest.raises(SystemExit, match="dispatchers disagree by more than rounding .* alltoall: output differs"):
        megatron.main(options)
