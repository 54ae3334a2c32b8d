"""The scripts for clusters, on virtual nodes: started as users start them, and what they say of wrong results."""

import argparse
import contextlib
import io
import os
import platform
import re
import socket
import subprocess
import sys

import pytest
import torch
from scripts import ROOT, modules_of

from deepep_moe import Buffer
from deepep_moe.testing import run_ranks

CLUSTER = ROOT / "examples" / "cluster"
COMMON = ("--device", "cpu", "--ranks-per-node", "2")


def environment(**changes: str) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    paths = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "MASTER_PORT": port}
    return os.environ | paths | changes


def block_of(text: str) -> list[str]:
    """The lines to paste, of which there must be one block."""
    blocks = re.findall(r"^---- paste from here ----\n(.*?)\n---- to here ----$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1, text
    return blocks[0].splitlines()


def run_script(*arguments: str, **changes: str) -> list[str]:
    command = [str(CLUSTER / "run.sh"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(NPROC="4", **changes), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return block_of(done.stdout)


# ---- as users start them ----


@pytest.mark.parametrize("backend", ["auto", pytest.param("collective", marks=pytest.mark.slow)])
def test_correctness(backend):
    lines = run_script("correctness", *COMMON, "--backend", backend)
    chosen = {"auto": "shm", "collective": "collective"}[backend]
    assert lines[:3] == ["### deepep_moe: correctness", "", f"2 x 2 ranks (virtual nodes) on cpu, backend {chosen}"]
    assert sum(line.endswith("| the same bits |") for line in lines) == 16 and lines[-1] == "all results have the reference's bits"


@pytest.mark.slow
def test_bandwidth():
    sizes = ("--num-tokens", "64", "--hidden", "256", "--iterations", "2", "--topk-groups", "1")
    lines = run_script("bandwidth", *COMMON, "--backend", "collective", *sizes)
    assert lines[3] == "64 tokens a rank, hidden 256, top-8 of 256 experts, 1.00 nodes per token"
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[9:12]]
    assert [name for name, *_ in cells] == ["dispatch fp8", "dispatch bf16", "combine bf16"] and all(float(us) > 0 for _, us, *_ in cells)
    assert float(cells[0][2]) <= float(cells[1][2]) == float(cells[2][2]) <= 64 * 512 / 1e6


SRUN = """#!/bin/sh
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
wait $first && wait $second
"""


@pytest.mark.slow
def test_slurm(tmp_path):
    """A fake srun starts both launchers here, and a fake scontrol names them. --ranks-per-node makes two nodes of this host."""
    for name, text in (("srun", SRUN), ("scontrol", '#!/bin/sh\n[ "$3" = "node[0-1]" ] && printf "127.0.0.1\\nnowhere\\n"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_SUBMIT_DIR": str(ROOT)}
    variables = environment(NPROC="2", PATH=f"{tmp_path}:{os.environ['PATH']}", **slurm)
    command = [str(CLUSTER / "slurm.sh"), "environment", *COMMON, "--backend", "collective"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = block_of(done.stdout)
    assert lines[2:4] == ["2 x 2 ranks (virtual nodes) on cpu, backend collective", "host 0: ranks 0 to 3"]
    assert any(line.startswith("| environment | ") and "GLOO_SOCKET_IFNAME=lo" in line for line in lines)
    assert f"| Python | {platform.python_version()} |" in lines


# ---- wrong results ----


def one_bit_off(rank: int, num_ranks: int) -> tuple[bool, str]:
    correctness, ranks = modules_of(CLUSTER, "correctness", "ranks")
    combine = Buffer.combine

    def wrong(self, *args, **kwargs):
        y = combine(self, *args, **kwargs)
        if rank == 1 and len(y):
            y.view(torch.uint8)[0, 0] ^= 1
        return y

    Buffer.combine = wrong
    options = argparse.Namespace(backend="auto", ranks_per_node=1, num_tokens=3)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        return correctness.run(ranks.Rank(options, torch.device("cpu"))), printed.getvalue()


def test_wrong_results_are_found():
    (right, text), (also, nothing) = run_ranks(one_bit_off, 2)
    lines = block_of(text)
    assert not right and not also and nothing == "" and lines[-1] == "SOME RESULTS DIFFER from the reference"
    assert "| uniform, bfloat16, layout rank | DIFFERS on rank 1: combined_x |" in lines
    assert "| one rank without tokens, float32, layout expert | the same bits |" in lines, "rank 1 has no tokens there"
