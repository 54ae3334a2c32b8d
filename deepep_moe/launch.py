"""Start ranks as torchrun does, with its options, and bind each to what is beside its GPU: `deepep-moe launch --bind ...`."""

import argparse
import sys
from pathlib import Path

from torch.distributed import run

from deepep_moe import config
from deepep_moe.command import Parser
from deepep_moe.topology import nccl
from deepep_moe.topology.binding import add_bind


def parser() -> argparse.ArgumentParser:
    """Return torchrun's parser with the options of this module."""
    cli = Parser("deepep-moe launch", description=__doc__, parents=[run.get_args_parser()], conflict_handler="resolve")
    group = cli.add_argument_group("deepep_moe")
    add_bind(group)
    group.add_argument("--nccl-settings", action="store_true", help="set what `deepep-moe topology nccl` advises and nobody set")
    return cli


def bound(options: argparse.Namespace) -> argparse.Namespace:
    """Return torchrun's `options` with the command wrapped into one that binds itself first."""
    command = [options.training_script, *options.training_script_args]
    if not options.no_python:
        python = config.variables(["PYTHON_EXEC"]).get("PYTHON_EXEC", sys.executable)
        command = [python, "-u", *(["-m"] if options.module else []), *command]
    changed = {"no_python": True, "module": False, "training_script": sys.executable}
    arguments = ["-m", "deepep_moe.topology.bound", *command]
    return argparse.Namespace(**vars(options) | changed | {"training_script_args": arguments})


def main(arguments: list[str]) -> None:
    """Start the ranks that `arguments`, in torchrun's words, ask for."""
    words = parser()
    options = words.parse_args(arguments)
    if not (options.module or options.no_python or options.run_path or Path(options.training_script).exists()):
        words.error(f"no such script: {options.training_script!r} (current folder: {Path.cwd()})")
    if options.bind:
        for name in ("run_path", "virtual_local_rank", "numa_binding"):  # numa_binding would bind the ranks too
            if getattr(options, name, None):
                words.error(f"--bind does not work with --{name.replace('_', '-')}; leave one of them out")
        options = bound(options)
    if options.nccl_settings:
        new = config.set_unless_given(nccl.missing(Path("/")))
        print(f"NCCL settings: {' '.join(f'{name}={value}' for name, value in new.items()) or 'all are set already'}", file=sys.stderr)
    try:
        run.run(options)
    except (AssertionError, FileNotFoundError, PermissionError, ValueError) as error:  # of an option or the script, not of a rank
        words.error(str(error) or f"--nnodes {options.nnodes} and --nproc-per-node {options.nproc_per_node} must be at least 1")
