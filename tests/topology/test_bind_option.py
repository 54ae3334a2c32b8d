"""Programs with the option `--bind` bind each of their ranks once, and each rank says so in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepep_moe.testing import run_ranks
from deepep_moe.topology import place, read
from deepep_moe.topology.sysfs import format_cpulist

ROOT = Path(__file__).parents[2]
OWN = [each.cpus for each in place(read(), 2, "")]

pytestmark = pytest.mark.skipif(not all(OWN) or OWN[0] == OWN[1] or bool(read().gpus), reason="needs two cores, known to sysfs, and no GPU")


def run(*command: str, **variables: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def lines_of(errors: str) -> list[str]:
    """Return the lines of ranks about their CPUs, in the order of ranks."""
    return sorted(line.split(";")[0] for line in errors.splitlines() if line.startswith("local rank"))


def expected(*ranks: int) -> list[str]:
    return [f"local rank {rank} bound: CPUs {format_cpulist(OWN[rank])}" for rank in ranks]


def affinity(rank, num_ranks):
    return tuple(sorted(os.sched_getaffinity(0)))


def test_ranks_of_this_host():
    assert run_ranks(affinity, 2, bind=True) == OWN
    everything = tuple(sorted(os.sched_getaffinity(0)))
    assert run_ranks(affinity, 2) == [everything, everything]


@pytest.mark.slow
def test_launcher_of_megatron(tmp_path):
    pytest.importorskip("megatron.core")
    (tmp_path / "script.py").write_text("import os, sys; print(sys.argv[1:], sorted(os.sched_getaffinity(0)))")
    launcher = ("-m", "deepep_moe.integrations.megatron", "--bind", str(tmp_path / "script.py"), "--bind")
    done = run(*launcher, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    assert done.stdout.strip().endswith(f"['--bind'] {list(OWN[1])}") and lines_of(done.stderr) == expected(1)
