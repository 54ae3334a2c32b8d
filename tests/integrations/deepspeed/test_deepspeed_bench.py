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

from benchmarks.layers import deepspeed as bench
from deepep_moe.testing import RankFailedError, run_ranks

pytest.importorskip("deepspeed")

ROOT = Path(__file__).parents[3]
TINY = (
    "--num-tokens", "24", "--hidden", "32", "--ffn-hidden", "16", "--num-topk", "2", "--num-experts", "4", "--num-layers", "2",
    "--repeats", "2",
)  # fmt: skip
PARTS = ("forward", "backward", "forward+backward")


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
    assert "one by one" not in done.stdout + done.stderr, "grouped experts are grouped"
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
        f"deepspeed {what} {mode} top-2 {dtype} {part}"
        for dtype in ("fp32", "bf16")
        for what in ("exchange", "layer", "communication")
        for mode in ("exact", "fast", *(("grouped",) if what == "layer" else ()))
        for part in PARTS
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
    assert [r["op"] for r in records] == [f"deepspeed autoep {mode} top-2 fp32 {part}" for mode in ("exact", "fast") for part in PARTS]
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
        timed = r["op"].endswith("forward+backward")
        assert ("us_kernels" in r) == ("rival_us_kernels" in r) == timed
        assert not timed or (0 < r["us_kernels"] < 1e6 and 0 < r["rival_us_kernels"] < 1e6)


def _link_bytes_worker(rank: int, num_ranks: int) -> dict[str, int]:
    # Each rank has two of the 4 experts. Token 0 goes to both of rank 1, token 1 to one each, token 2 to one of rank 0 and is dropped.
    return bench.link_bytes(torch.tensor([[2, 3], [0, 2], [1, -1]]), 2, 10)


def test_link_bytes():
    assert run_ranks(_link_bytes_worker, 2) == [{"exact": 30, "fast": 20, "grouped": 20}, {"exact": 20, "fast": 20, "grouped": 20}]


def _measured(value: float, *times: list[float]) -> bench.Measured:
    turns = {("exchange", kind): list(times) for kind in ("exact", "fast", "deepspeed")}
    differences = {"exchange": {"exact": {"output": 0.0}, "fast": {"output": value}}}
    return bench.Measured("shm", "here", "these", {"exact": 640, "fast": 320}, differences, turns)


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_disagreement_fails(value, monkeypatch, capsys):
    monkeypatch.setattr(bench, "run_ranks", lambda *_, **__: [_measured(0.0, [1.0] * 3), _measured(value, [1.0] * 3)])
    options = options_of("--device", "cpu", "--dtype", "bf16")
    options.json = None
    with pytest.raises(SystemExit, match=r"top-2 bf16, exchange, fast: output differs by .*, more than rounding \(6.0e-02\)"):
        bench.main(options)
    assert "deepspeed exchange fast" in capsys.readouterr().out


def test_what_was_measured_is_kept(monkeypatch, capsys, tmp_path):
    """The second of three shapes passes its limit: the first was printed and written before, the third is measured after."""
    kept, path = [], tmp_path / "records.json"

    def run(_function, _num_ranks, _options, shape, *, timeout_s, bind):
        assert timeout_s == bench.LIMIT_S == 1800 and not bind
        kept.append((str(shape), len(json.loads(path.read_text())) if path.exists() else 0, capsys.readouterr().out))
        if shape.num_topk == 2:
            raise RankFailedError(1, "no result within 1800 s")
        return [_measured(0.0, [1.0] * 3)] * 2

    monkeypatch.setattr(bench, "run_ranks", run)
    options = options_of("--device", "cpu", "--num-topk", "1", "2", "4", "--dtype", "fp32")
    options.json = path
    with pytest.raises(SystemExit, match="top-2 fp32: rank 1 failed: no result within 1800 s"):
        bench.main(options)
    assert [(shape, num_records) for shape, num_records, _ in kept] == [("top-1 fp32", 0), ("top-2 fp32", 6), ("top-4 fp32", 6)]
    assert "deepspeed exchange fast" in kept[1][2] and "top-1 of 16 experts" in kept[1][2]
    assert len(json.loads(path.read_text())) == 12


def test_options(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    options = options_of()
    assert (options.device, options.num_ranks, options.num_topk, options.dtype) == ("cpu", 2, [2], ["fp32", "bf16"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    options = options_of()
    assert (options.device, options.num_ranks, options.backend, options.num_topk) == ("cuda", 4, "nvlink", [2, 8])
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    for arguments, message in (
        (("--num-ranks", "5"), "needs a GPU for each of 5 ranks, this machine has 4"),
        (("--num-experts", "6"), "--num-experts 6 must be a multiple of --num-ranks 4"),
        (("--device", "cpu", "--autoep", "--num-ranks", "1"), "--autoep needs --num-ranks 2 or more"),
        (("--device", "cpu", "--autoep"), "--autoep needs transformers"),
    ):
        with pytest.raises(ValueError, match=message):
            options_of(*arguments)
