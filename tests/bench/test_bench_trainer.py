"""The benchmark of a training step, with a stand-in for Megatron-LM's script."""

import json

import pytest
from bench_cases import RECORD_FIELDS

from benchmarks.run import main

SCRIPT = """
import json, os, sys
words = sys.argv
def value(name):
    return words[words.index(name) + 1]
ours = "--moe-flex-dispatcher-backend" in words
ms = 90 if "--cuda-graph-impl" in words else 100 if ours else 200 if value("--moe-token-dispatcher-type") == "alltoall" else 150
if int(os.environ["RANK"]) == 0:
    for i in range(int(value("--train-iters"))):
        timed = 6 <= i < int(value("--profile-step-start")) - 2
        print(f" iteration {i} | elapsed time per iteration (ms): {ms + 10 * (i % 2) if timed else 9999} | lm loss: {8 - i:.2E} |")
    print("[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 2500.5 |")
    events = [{"cat": "kernel", "ts": t, "dur": 30000} for t in (0, 20000, 90000)] + [{"cat": "cpu_op", "ts": 0, "dur": 1e9}]
    os.makedirs(value("--tensorboard-dir") + "/../torch_profile")
    with open(value("--tensorboard-dir") + "/../torch_profile/rank-0.json", "w") as file:
        json.dump({"traceEvents": events}, file)
sys.exit(3 if "--fail" in words and not ours else 0)
"""


@pytest.fixture
def megatron_lm(tmp_path):
    folder = tmp_path / "megatron_lm"
    folder.mkdir()
    (folder / "pretrain_gpt.py").write_text(SCRIPT)
    return folder


def trainer(megatron_lm, *arguments):
    logs = megatron_lm.parent
    words = ["--num-ranks", "1", "--rounds", "1", "--iterations", "13", "--logs", str(logs), "--json", str(logs / "records.json")]
    main(["trainer", str(megatron_lm), *words, *arguments])
    return json.loads((logs / "records.json").read_text())


def test_times_are_against_the_best_baseline(megatron_lm, capsys):
    """The first six iterations and those that the profiler slows down are left out. Kernels that overlap count once."""
    pytest.importorskip("megatron.core")
    records = {record["op"]: record for record in trainer(megatron_lm)}
    assert list(records) == ["trainer alltoall", "trainer allgather", "trainer flag"]
    assert {name: (r["us_median"], r["us_least"], r["ratio"]) for name, r in records.items()} == {
        "trainer alltoall": (200e3, 200e3, 0.75), "trainer allgather": (150e3, 150e3, 1.0), "trainer flag": (100e3, 100e3, 1.5),
    }  # fmt: skip
    for record in records.values():
        assert set(record) >= RECORD_FIELDS
        assert (record["us_kernels"], record["peak_bytes"], record["losses"]) == (40e3, 2500.5e6, ["8.0000", "-4.0000"])
    assert "1.50x" in capsys.readouterr().out


def test_what_failed_is_said_beside_what_ran(megatron_lm):
    with pytest.raises(SystemExit, match="alltoall ended with 1 and 1 traces; see .*/alltoall-1/log.txt"):
        trainer(megatron_lm, "--runs", "alltoall", "deepep", "--extra=--fail")
    (record,) = json.loads((megatron_lm.parent / "records.json").read_text())
    assert (record["op"], record["rival"], record["ratio"]) == ("trainer deepep", None, None)
