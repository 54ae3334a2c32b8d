"""The command `deepep-moe`: what it shows, and what it refuses in one line."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import deepep_moe
from deepep_moe.command import COMMANDS, main

ROOT = Path(__file__).parents[2]


def test_command_and_module_are_one():
    (name, entry) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].popitem()
    module, function = entry.split(":")
    assert name == "deepep-moe" and getattr(importlib.import_module(module), function) is main
    done = subprocess.run([sys.executable, "-m", "deepep_moe", "--version"], capture_output=True, text=True)
    assert done.stdout == f"deepep_moe {deepep_moe.__version__}\n"


def test_help_without_a_subcommand(capsys):
    assert main([]) == 0
    output = capsys.readouterr().out
    assert output.startswith("usage: deepep-moe ") and all(f"  {name} " in output for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tset", "deepep-moe: argument COMMAND: invalid choice: 'tset' (choose from "),
        ("doctor --tset", "deepep-moe doctor: unrecognized arguments: --tset"),
        ("topology ncl", "deepep-moe topology: argument nccl: invalid choice: 'ncl' (choose from "),
        ("tune --time-limit nan", "deepep-moe tune: --time-limit nan must be above 0 and below 1e9"),
        ("tune --hidden 24", "deepep-moe tune: --hidden 24 must be a multiple of 16, "),
        ("tune --num-topk 9 --num-experts 8", "deepep-moe tune: --num-topk 9 must be at most 32 and at most --num-experts 8"),
        ("launch x.py", "deepep-moe launch: no such script: 'x.py' (current folder: "),
        ("launch --nproc-per-node 0 -m x", "deepep-moe launch: --nnodes 1:1 and --nproc-per-node 0 must be at least 1"),
        ("build _triton", "deepep-moe build: no module _triton; choose from _torch, _nvshmem"),
    ],
)
def test_wrong_values_are_named_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    output = capsys.readouterr()
    assert end.value.code == 2 and not output.out and output.err.startswith(message) and output.err.count("\n") == 1, output
