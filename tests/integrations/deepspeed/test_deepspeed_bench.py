"""The benchmark of DeepSpeed's layer: its records, on the CPU with tiny sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed_cases import repeats_bits

pytest.importorskip("deepspeed")

ROOT = Path(__file__).parents[3]
TINY = (
    "--num-tokens", "24", "--hidden", "32", "--ffn-hidden", "16", "--num-topk", "2", "--num-experts", "4", "--num-layers", "2",
    "--repeats", "2",
)  # fmt: skip


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
