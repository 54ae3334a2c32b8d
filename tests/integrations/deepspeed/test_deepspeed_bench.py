"""The benchmark of DeepSpeed's layer: its records and its refusals, on the CPU with tiny sizes."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed_cases import repeats_bits
from on_ranks import on_ranks

from benchmarks.layers import deepspeed as bench

pytest.importorskip("deepspeed")

ROOT = Path(__file__).parents[3]
TINY = (
    "--num-tokens", "24", "--hidden", "32", "--ffn-hidden", "16", "--num-topk", "2", "--num-experts", "4", "--num-layers", "2",
    "--repeats", "2",
)  # fmt: skip


def options_of(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    options = parser.parse_args(arguments, argparse.Namespace(bind=False))  # as `python benchmarks/run.py` adds it
    bench.resolve(options)
    return options


def run_tiny(tmp_path: Path, *more: str) -> tuple[str, list[dict]]:
    """Run the command with tiny sizes; return its output and its records."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "run.py"), "deepspeed", "--device", "cpu", *TINY, *more]
    command += ["--json", str(tmp_path / "records.json")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "without grouped products" not in done.stdout + done.stderr, "grouped experts are grouped"
    records = json.loads((tmp_path / "records.json").read_text())
    for r in records:
        assert (r["backend"], r["num_ranks"], r["num_tokens"], r["num_topk"], r["rival"]) == ("shm", 2, 24, 2, "deepspeed")
        assert r["us_median"] > 0 and r["num_layers"] == 2
        assert r["ratio"] == pytest.approx(r["rival_us"] / r["us_median"])
        row_bytes = 32 * {"float32": 4, "bfloat16": 2}[r["dtype"]]
        assert r["bytes_moved"] % row_bytes == 0 and 0 < r["bytes_moved"] <= 24 * 2 * 4 * row_bytes
    return done.stdout, records


@pytest.mark.slow
def test_records(tmp_path):
    printed, records = run_tiny(tmp_path)
    assert "deepspeed exchange exact" in printed and "deepspeed layer" in printed
    assert [r["op"] for r in records] == [
        f"deepspeed {what} {mode} top-2 {dtype} forward+backward"
        for dtype in ("fp32", "bf16")
        for what in ("exchange", "layer", "communication")
        for mode in ("exact", "fast", *(("grouped",) if what == "layer" else ()))
    ]
    for r in records:
        more = {"exchange": set(), "communication": {"gate"}, "layer": {"gate", "experts"}}
        assert set(r["differences"]) == {"output", "input"} | more[r["op"].split()[1]]
    if not repeats_bits():
        return
    exact = [r["differences"] for r in records if r["op"].split()[1:3] in (["exchange", "exact"], ["communication", "exact"])]
    assert all(value == 0 for differences in exact for value in differences.values()), "to the bit, where experts change nothing"


@pytest.mark.slow
def test_records_of_autoep(tmp_path):
    pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="AutoEP came with DeepSpeed 0.19.2")
    printed, records = run_tiny(tmp_path, "--autoep", "--dtype", "fp32")
    assert "deepspeed autoep exact" in printed and ", AutoEP, " in printed
    assert [r["op"] for r in records] == [f"deepspeed autoep {mode} top-2 fp32 forward+backward" for mode in ("exact", "fast")]
    for r in records:
        assert set(r["differences"]) == {"output", "input", "router", "experts"}
        assert 0 <= max(r["differences"].values()) < 1e-5 and r["capacity_factor"] is None


@pytest.mark.gpu
def test_kernels_are_timed_on_a_gpu(tmp_path):
    options = options_of("--device", "cuda", "--num-ranks", "1", *TINY)
    options.json = tmp_path / "records.json"
    bench.main(options)
    records = json.loads((tmp_path / "records.json").read_text())
    for r in records:
        assert 0 < r["us_kernels"] < 1e6 and 0 < r["rival_us_kernels"] < 1e6


@on_ranks(2)
def test_link_bytes(rank):
    """Each rank has two of the 4 experts. Token 0 goes to both of rank 1, token 1 to one each, token 2 to one of rank 0 and is dropped."""
    num_bytes = bench.link_bytes(torch.tensor([[2, 3], [0, 2], [1, -1]]), 2, 10)
    assert num_bytes == {"exact": (30, 20)[rank], "fast": 20, "grouped": 20}


def _measured(value: float, *times: float) -> bench.Measured:
    turns = {("exchange", kind): list(times) for kind in ("exact", "fast", "deepspeed")}
    differences = {"exchange": {"exact": {"output": 0.0}, "fast": {"output": value}}}
    return bench.Measured("shm", "here", "these", {"exact": 640, "fast": 320}, differences, turns)


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_disagreement_fails(value, monkeypatch, capsys):
    monkeypatch.setattr(bench, "run_ranks", lambda *_, **__: [_measured(0.0, 1.0), _measured(value, 1.0)])
    options = options_of("--device", "cpu", "--dtype", "bf16")
    options.json = None
    with pytest.raises(SystemExit, match=r"top-2 bf16, exchange, fast: output differs by .*, more than rounding \(6.0e-02\)"):
        bench.main(options)
    assert "deepspeed exchange fast" in capsys.readouterr().out
