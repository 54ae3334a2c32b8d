"""Benchmark of low-latency dispatch and combine: `python benchmarks/run.py low-latency`.

Starts its own ranks, one per GPU, or uses those that torchrun started; `--backend shm` needs no GPU. Results are checked to the bit, then
timed. On GPUs each call is timed eagerly and as a CUDA graph of its own, thousands in a row, with the host far ahead and an event between
each two calls. So are the half that sends, and the half that receives when the rows are there. On the CPU the host's clock times them. The
same run times an all-to-all of every (token, expert) row with its permutes, dispatch and combine of `Buffer`, and with `--peer` another
library. Times are of the rank with the largest median.
"""

import argparse
import sys

from benchmarks.common.report import exit_with_failures
from benchmarks.exchange.peers import add_peer, check_peers
from benchmarks.low_latency.measure import Report, measure
from benchmarks.low_latency.peers import PEERS
from benchmarks.low_latency.report import records_of, show
from deepep_moe import config
from deepep_moe.errors import EPError
from deepep_moe.tune.ranks import add_ranks_and_tokens, resolve_ranks, start
from deepep_moe.tune.records import write_json

TOKENS = {"cuda": (1, 8, 32, 128, 256, 512), "cpu": (1, 8, 32, 128)}
QUICK_TOKENS = (8, 128)
HIDDEN = {"cuda": 7168, "cpu": 1024}
MANY_ITERATIONS_TOKENS = 128
ITERATIONS = {"cuda": (10_000, 1000), "cpu": (200, 200)}
"""The iterations at `MANY_ITERATIONS_TOKENS` tokens, and elsewhere."""
_QUICK_SHARE = 10  # `--quick` makes one of so many iterations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=("nvlink", "shm"), default="nvlink")
    add_ranks_and_tokens(parser, f"{' '.join(map(str, TOKENS['cuda']))}, up to 128 with shm")
    parser.add_argument("--hidden", type=int, help=f"a multiple of 128; default {HIDDEN['cuda']}, with shm {HIDDEN['cpu']}")
    for name, default in (("num-experts", 256), ("num-topk", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    many, few = ITERATIONS["cuda"]
    helped = f"default {many} at {MANY_ITERATIONS_TOKENS} tokens, {few} elsewhere, {ITERATIONS['cpu'][0]} with shm"
    parser.add_argument("--iterations", type=int, help=helped)
    parser.add_argument("--quick", action="store_true", help=f"{' and '.join(map(str, QUICK_TOKENS))} tokens, a tenth of the iterations")
    add_peer(parser, tuple(PEERS))
    parser.set_defaults(expert_alignment=1)


def resolve(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the machine. Raises EPError for what cannot run, ValueError for values that do not fit."""
    options.on_gpu = options.backend == "nvlink"
    device = "cuda" if options.on_gpu else "cpu"
    resolve_ranks(options)
    options.hidden = HIDDEN[device] if options.hidden is None else options.hidden
    options.num_tokens = sorted(set(options.num_tokens or (QUICK_TOKENS if options.quick else TOKENS[device])))
    for n in options.num_ranks:
        if n < 1 or options.num_experts % n:
            raise ValueError(f"--num-experts {options.num_experts} must be a multiple of --num-ranks {n}")
    if options.hidden < 1 or options.hidden % 128:
        raise ValueError(f"--hidden {options.hidden} must be a multiple of 128: rows in fp8 have a scale for 128 columns")
    if not 1 <= options.num_topk <= min(options.num_experts, 32):
        raise ValueError(f"--num-topk {options.num_topk} must be 1 to 32, and at most --num-experts {options.num_experts}")
    if options.peer and not options.on_gpu:
        raise ValueError(f"--peer {options.peer[0]} needs GPUs; give --backend nvlink")
    if min(options.num_tokens) < 1 or (options.iterations is not None and options.iterations < 1):
        raise ValueError("--num-tokens and --iterations must be at least 1")
    options.iterations_of = {num_tokens: _iterations(options, num_tokens, device) for num_tokens in options.num_tokens}


def _iterations(options: argparse.Namespace, num_tokens: int, device: str) -> int:
    if options.iterations is not None:
        return options.iterations
    default = ITERATIONS[device][num_tokens != MANY_ITERATIONS_TOKENS]
    return default // _QUICK_SHARE if options.quick else default


def run(options: argparse.Namespace) -> list[Report]:
    """Return one report per number of ranks."""
    check_peers(options.peer)
    resolve(options)
    return start(measure, options)


def main(options: argparse.Namespace) -> None:
    try:
        reports = run(options)
    except (EPError, ValueError) as error:
        sys.exit(str(error))
    if config.launched_rank():
        return  # rank 0 reports
    records = records_of(reports, options)
    write_json(options.json, records)
    if records:
        show(reports, records)
    exit_with_failures(reports)
