"""Programs that prepare a framework, and then run a script as if it had been started itself."""

import argparse
import os
import runpy
import sys

from deepep_moe.command import Parser
from deepep_moe.topology.binding import add_bind, bind_this_rank


def parser_of(module: str, description: str, epilog: str) -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    return Parser(f"python -m {module}", description=description, epilog=epilog, formatter_class=form, allow_abbrev=False)


def parse(parser: argparse.ArgumentParser, example: str) -> argparse.Namespace:
    """Return the options of the program, among them `script` and its `arguments`, and bind this rank where they ask for it."""
    add_bind(parser)
    parser.add_argument("script", help=f"the script to run, for example {example}")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script, passed on unchanged")
    options = parser.parse_args()
    if not os.path.isfile(options.script):
        parser.error(f"no such script: {options.script!r} (current folder: {os.getcwd()})")
    if options.bind:
        bind_this_rank()  # first, as memory that is there already stays where it is
    return options


def run(script: str, arguments: list[str]) -> None:
    """Run a script with what `python script.py arguments` gives it: its arguments, and its folder first on the path, where `-m` has put the
    current folder."""
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")
