"""The benchmarks as a user starts them, and what every record has."""

import argparse
import json
import subprocess
from pathlib import Path

from scripts import ROOT as ROOT
from scripts import run_python

RECORD_FIELDS = {
    "op", "backend", "num_ranks", "num_tokens", "hidden", "num_topk", "num_experts", "dtype", "layout", "us_median", "us_p10", "us_p90",
    "bytes_moved", "gbps", "rival", "rival_us", "ratio", "hardware", "versions", "command",
}  # fmt: skip


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def options_of(command, *arguments: str) -> argparse.Namespace:
    """Return what the module `command` makes of arguments."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = parser.parse_args(arguments)
    command.resolve(options)
    return options


def bench(
    folder: Path, *arguments: str, launcher: tuple[str, ...] = (), command="exchange", backend="shm"
) -> tuple[subprocess.CompletedProcess, list[dict]]:
    """Run a benchmark, which leaves its records in `folder`. Return what it printed, and the records."""
    file = folder / "records.json"
    done = run_python(*launcher, "benchmarks/run.py", command, "--backend", backend, *arguments, "--json", file)
    records = json.loads(file.read_text())
    assert all(set(record) >= RECORD_FIELDS for record in records)
    return done, records
