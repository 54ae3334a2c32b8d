"""Two runs side by side: a page made of the pages that --report or an example has written."""

import argparse
import sys
from pathlib import Path

from deepep_moe.bench.page.page import read, write_comparison
from deepep_moe.errors import EPError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, help="page of a run")
    parser.add_argument("second", type=Path, help="page of another")
    parser.add_argument("--out", type=Path, default=Path("comparison.html"), help="page to write (default: %(default)s)")


def main(options: argparse.Namespace) -> None:
    try:
        write_comparison(read(options.first), read(options.second), options.out)
    except EPError as error:
        sys.exit(str(error))
