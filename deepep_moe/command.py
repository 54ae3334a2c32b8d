"""The command `deepep-moe`, which `python -m deepep_moe` is too. Each subcommand is a module, imported when it runs."""

import argparse
import importlib
import sys
from typing import NoReturn

COMMANDS = {
    "doctor": ("deepep_moe.doctor.page", "say what this machine can run, and what to do where not"),
    "topology": ("deepep_moe.topology.command", "show NUMA nodes, GPUs and NICs, or settings of NCCL"),
    "tune": ("deepep_moe.tune.command", "find the fastest settings of dispatch and combine on this machine"),
    "launch": ("deepep_moe.launch", "start ranks as torchrun does, with --bind each beside its GPU"),
    "build": ("deepep_moe.build", "build the modules that a wheel leaves out"),
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: the value and its rule."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the subcommand that `arguments` name, by default those of the program, and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in COMMANDS:
        return importlib.import_module(COMMANDS[arguments[0]][0]).main(arguments[1:]) or 0
    from deepep_moe._C import __version__

    listed = "\n".join(f"  {name:<10}{what}" for name, (_, what) in COMMANDS.items())
    parser = Parser("deepep-moe", epilog=f"commands:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"deepep_moe {__version__}")
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="COMMAND", help="deepep-moe COMMAND --help shows its options")
    parser.parse_args(arguments)
    parser.print_help()
    return 0
