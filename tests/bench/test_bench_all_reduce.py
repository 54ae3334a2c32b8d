"""The benchmark of all-reduces with and without binding: its records, its turns and its refusals, on the CPU."""

import argparse
import json
import subprocess
import sys

import pytest
import torch
from bench_cases import RECORD_FIELDS, ROOT

from deepep_moe.bench.all_reduce import command


def options_of(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.slow
def test_records(tmp_path):
    sizes = ("--num-bytes", "8", "4096", "--turns", "2", "--repeats", "3", "--json", str(tmp_path / "out.json"))
    done = subprocess.run(
        [sys.executable, "-m", "deepep_moe.bench", "all-reduce", "--device", "cpu", *sizes], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads((tmp_path / "out.json").read_text())
    assert [(r["op"], r["bytes_moved"], r["backend"], r["num_ranks"]) for r in records] == [
        ("all_reduce", 8, "gloo", 2), ("all_reduce", 4096, "gloo", 2),
    ]  # fmt: skip
    for r in records:
        assert r.keys() >= RECORD_FIELDS and len(r["us_median_of_turns"]) == len(r["rival_us_of_turns"]) == 2
        assert r["us_median"] > 0 and r["ratio"] == r["rival_us"] / r["us_median"] and r["rival"] == "without binding"
    bound = sorted(line.split()[2] for line in done.stderr.splitlines() if line.startswith("local rank"))
    assert bound == ["0", "0", "1", "1"], "each rank of two turns, and none of the other two"


def test_turns_alternate_and_are_kept_apart(monkeypatch, capsys):
    begun = []

    def made_up(fn, num_ranks, options, *, timeout_s, bind):
        begun.append(bind)
        return [{8: [10.0, 10.0 + len(begun)] if bind else [30.0, 50.0]}]

    monkeypatch.setattr(command, "run_ranks", made_up)
    options = options_of("--num-bytes", "8", "--turns", "3", "--device", "cpu", "--num-ranks", "2")
    (record,) = command.records_of(*command.by_turns(options), options)
    assert begun == [True, False, False, True, True, False]
    assert record["us_median_of_turns"] == [10.5, 12.0, 12.5] and record["rival_us_of_turns"] == [40.0, 40.0, 40.0]
    assert record["us_median"] == 10.5 and record["rival_us"] == 40.0
    for nodes, told in ((1, True), (2, False)):
        command.show([record | {"num_numa_nodes": nodes}])
        text = capsys.readouterr().out
        assert "bound 10.5 us (10.5 to 12.5), not bound 40.0 us (40.0 to 40.0), 3.81x" in text
        assert ("This machine shows no two NUMA nodes" in text) is told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-ranks", "1"), "--num-ranks is 1 with 1 GPUs; give at least 2, on GPUs at most one for each"),
        (("--device", "cuda"), "--num-ranks is 1 with 1 GPUs; give at least 2"),
        (("--num-bytes", "8", "6"), r"--num-bytes is \[8, 6\]; give positive multiples of 4"),
        (("--turns", "0"), "--repeats is 300 and --turns 0; give at least 1"),
    ],
)
def test_refusals(arguments, message, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=message):
        command.resolve(options_of(*arguments))


def test_launched(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit, match="this benchmark starts its own ranks, bound and not; start it without a launcher"):
        command.main(options_of())
