"""Run a script that imports DeepEP on deepep_moe: `python -m deepep_moe.compat.run script.py ARGUMENTS`.

`-m MODULE ARGUMENTS` runs a module. Processes that the script starts begin without it; launchers such as torchrun take this module as what
they run: `torchrun --nproc-per-node 8 -m deepep_moe.compat.run script.py`.
"""

import os
import runpy
import sys

from deepep_moe.compat.deep_ep import install

_USAGE = "usage: python -m deepep_moe.compat.run SCRIPT [ARGUMENTS], or -m MODULE [ARGUMENTS]"


def main(arguments: list[str]) -> None:
    """Install `deep_ep`, and run a script or a module with its arguments as Python does. Raises SystemExit without one."""
    is_module, rest = arguments[:1] == ["-m"], arguments[1:] if arguments[:1] == ["-m"] else arguments
    if rest[:1] in (["-h"], ["--help"]):
        return print(_USAGE)
    if not rest or rest[0].startswith("-"):
        raise SystemExit(_USAGE)
    if not is_module and not os.path.exists(rest[0]):
        raise SystemExit(f"python -m deepep_moe.compat.run: no such script: {rest[0]!r} (current folder: {os.getcwd()})")
    install()
    if is_module:
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = rest
    sys.path[0] = os.path.dirname(os.path.realpath(rest[0]))
    runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
