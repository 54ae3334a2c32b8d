"""Find the settings of dispatch and combine that are fastest on this machine, and keep them in a profile that `Buffer` uses.

It starts its own ranks, one for each GPU, or uses those that torchrun started. Results never depend on a profile.
Exit code: 0 where a profile was written or nothing is faster, 1 after a failure, 2 for wrong arguments.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from deepep_moe import _C, config
from deepep_moe.command import Parser
from deepep_moe.errors import EPError
from deepep_moe.testing.launch import RankFailedError
from deepep_moe.topology.binding import add_bind, bind_this_rank
from deepep_moe.tune.ranks import add_ranks, resolve_ranks, start, tune
from deepep_moe.tuning import Files, write
from deepep_moe.tuning.profiles import parse

NOTHING_TO_TUNE = "there is no GPU, so there is nothing to tune; DEEPEP_MOE_NUM_THREADS sets the threads of backend 'shm' (docs/tuning.md)"


def parser() -> argparse.ArgumentParser:
    cli = Parser("deepep-moe tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_ranks(cli)
    sizes = {"num-tokens": 4096, "hidden": 7168, "num-experts": 256, "num-topk": 8}
    for name, default in sizes.items():
        cli.add_argument(f"--{name}", type=int, default=default, help=f"default {default}{', per rank' if name == 'num-tokens' else ''}")
    cli.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16", help="of dispatched rows; default bf16. Combined rows are bf16")
    cli.add_argument("--time-limit", type=float, default=150.0, help="seconds of the search, for all EP sizes together; default 150")
    cli.add_argument("--output", type=Path, help="file to add the profile to; default the one that Buffer finds by itself")
    add_bind(cli)
    cli.set_defaults(on_gpu=True, expert_alignment=128)
    return cli


def resolve(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the machine. Raises ValueError for values that do not fit."""
    num_gpus = torch.cuda.device_count()
    resolve_ranks(options)
    for name in ("num_tokens", "hidden", "num_topk", "num_experts", "time_limit"):
        if not 0 < getattr(options, name) < 1e9:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)} must be above 0 and below 1e9")
    if options.hidden % 16:
        raise ValueError(f"--hidden {options.hidden} must be a multiple of 16, as fp8 rows are multiples of 16 bytes")
    if options.num_topk > min(options.num_experts, _C.MAX_TOPK):
        raise ValueError(f"--num-topk {options.num_topk} must be at most {_C.MAX_TOPK} and at most --num-experts {options.num_experts}")
    for num_ranks in options.num_ranks:
        if num_ranks < 2 or options.num_experts % num_ranks:
            raise ValueError(f"--num-ranks {num_ranks} must be at least 2 and divide --num-experts {options.num_experts}")
    if max(options.num_ranks) > num_gpus > 0 and options.output is None:
        raise ValueError(
            f"{max(options.num_ranks)} ranks share {num_gpus} GPUs, so no link is measured, and other buffers must not find the profile by "
            "themselves; give --output FILE, and that file in DEEPEP_MOE_PROFILE where it is to be used"
        )


def target_of(options: argparse.Namespace) -> Path:
    """Return the file for the profile. Raises ValueError where there is none, where it holds something else, or where it cannot be
    written: that is better known before the run."""
    file: Path | None = options.output or Files.of_environment().user
    if file is None:
        raise ValueError("this user has no home for a profile; give --output FILE")
    try:
        if file.exists():
            parse(file.read_text(encoding="utf-8"))
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):  # as `write` needs it
            pass
    except (OSError, ValueError) as error:
        raise ValueError(f"a profile cannot be added to {file}: {error}; repair or delete it, or give --output FILE") from None
    return file


def main(arguments: list[str]) -> int:
    words = parser()
    options = words.parse_args(arguments)
    has_gpu = torch.cuda.device_count() > 0
    try:
        resolve(options)
        file = target_of(options) if has_gpu or options.output else Path()
    except ValueError as error:
        words.error(str(error))
    if not has_gpu:
        if not config.launched_rank():
            print(NOTHING_TO_TUNE)
        return 0
    if options.bind and options.launched:
        bind_this_rank()
    try:
        outcomes = start(tune, options)
        for num_ranks, outcome in zip(options.num_ranks, outcomes, strict=True):
            if not config.launched_rank():  # rank 0 reports
                print(f"EP{num_ranks}: {outcome.text}")
                if outcome.profile is not None:
                    write(outcome.profile, file)
                    print(f"EP{num_ranks}: wrote a profile for {outcome.profile.machine}, {outcome.profile.shape} to {file}")
    except (EPError, OSError, ValueError, RankFailedError) as error:  # ValueError: the file was damaged meanwhile
        print(error, file=sys.stderr)
        return 1
    return 0
