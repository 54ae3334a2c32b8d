"""The option `--bind` of programs whose ranks a launcher starts, or that start ranks themselves."""

import argparse
import sys

from deepep_moe.topology.binding import bind


def add_bind(parser: argparse._ActionsContainer) -> None:
    """Add the option `--bind` to `parser`."""
    parser.add_argument("--bind", action="store_true", help="bind each rank to cores, memory and NICs beside its GPU (docs/topology.md)")


def bind_this_rank() -> None:
    """Bind this process, the local rank that its launcher says it is, and print what was done as one line on stderr."""
    sys.stderr.write(f"{bind()}\n")  # at once: torchrun's ranks do not buffer, and print would write the end of the line on its own
    sys.stderr.flush()
