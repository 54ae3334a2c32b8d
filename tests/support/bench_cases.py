"""The benchmarks as a user starts them, and what every record has."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
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


def bench(*arguments: str, launcher: tuple[str, ...] = (), command="exchange", backend="shm") -> subprocess.CompletedProcess:
    command = [sys.executable, *launcher, "benchmarks/run.py", command, "--backend", backend, *arguments]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
