"""The benchmark of the layer: its records, on the CPU with tiny sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

ROOT = Path(__file__).parents[3]
TINY = {"num_tokens": 12, "hidden": 32, "ffn_hidden": 16, "num_topk": 3, "num_experts": 4, "repeats": 2}


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
