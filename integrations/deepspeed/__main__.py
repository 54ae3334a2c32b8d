"""Run a script whose ds_config may name deepep_moe: `python -m deepep_moe.integrations.deepspeed [options] script.py [arguments]`."""

import argparse
import os
import runpy
import sys

from deepep_moe.integrations.deepspeed import enable
from deepep_moe.topology.option import add_bind, bind_this_rank

_DESCRIPTION = """Let deepspeed.initialize honour the section "deepep_moe" of ds_config, then run a script as if it had been started itself.

Add to the ds_config that the script uses:
  "deepep_moe": {"enabled": true}
"""
_EPILOG = """examples:
  torchrun --nproc-per-node 8 -m deepep_moe.integrations.deepspeed train.py --deepspeed_config ds_config.json ...
  deepspeed --module deepep_moe.integrations.deepspeed train.py --deepspeed_config ds_config.json ...
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deepep_moe.integrations.deepspeed",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--local_rank", metavar="N", help="DeepSpeed's launcher gives it to the program that it starts; the script gets it as it came"
    )
    add_bind(parser)
    parser.add_argument("script", help="the script to run, for example train.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script, passed on unchanged")
    return parser


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    if not os.path.isfile(options.script):
        parser.error(f"no such script: {options.script!r} (current folder: {os.getcwd()})")
    if options.bind:
        bind_this_rank()  # first, as memory that is there already stays where it is
    enable()
    # The script finds what `python script.py arguments` gives it: its arguments, and its folder first on the path. `-m` had put the
    # current folder there.
    local_rank = [] if options.local_rank is None else [f"--local_rank={options.local_rank}"]
    sys.argv = [options.script, *local_rank, *options.arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.abspath(options.script))
    runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
