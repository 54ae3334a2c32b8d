"""Run a command as a bound rank: `python -m deepep_moe.topology.bound COMMAND ...`. `deepep-moe launch --bind` starts ranks so.

The command replaces this process, so it has the affinity, the memory policy and the variables from its first instruction on.
"""

import os
import sys

from deepep_moe.topology.binding import bind_this_rank


def main(command: list[str]) -> None:
    """Bind this process, say so on stderr, and become `command`. Ends the program with the reason where that does not exist."""
    if not command:
        sys.exit("usage: python -m deepep_moe.topology.bound COMMAND ...")
    bind_this_rank()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}; give a program that is there")


if __name__ == "__main__":
    main(sys.argv[1:])
