"""Benchmark of dispatch and combine on the GPUs of one host: `python benchmarks/run.py --backend nvlink`.

Starts its own ranks, one per GPU, or uses those that torchrun started. Results are checked, then timed. The same run times an all-to-all of
every (token, expert) row over NCCL, with and without the permutes that it needs, the rate of the copy engines over the link, and how much
of an exchange hides behind GEMMs (`python benchmarks/run.py overlap --help`).
"stream us" is what a call adds to a busy stream. "call us" includes the host's time until the first launch. Both are of the slowest rank.
"""

import argparse
import sys

import torch

from benchmarks.common.report import exit_with_failures
from benchmarks.exchange.measure import Report, measure
from benchmarks.exchange.peers import add_peer, check_peers
from benchmarks.exchange.report import records_of, show
from benchmarks.overlap import report as overlap_report
from deepep_moe import config
from deepep_moe.errors import EPError
from deepep_moe.tune.ranks import add_ranks_and_tokens, resolve_ranks, start
from deepep_moe.tune.records import write_json

TOKENS = {"cuda": (128, 512, 2048, 4096, 8192, 32768), "cpu": (128, 512)}
QUICK_TOKENS = (128, 4096)
OVERLAP_TOKENS = {"cuda": (4096,), "cpu": (512,)}
SWEEP = (4, 8, 12, 16, 24, 32)
SWEPT_TOKENS = 4096
GEMM = (4096, 2048, 2048)
_GEMM_HELP = f"sizes of the GEMMs beside an exchange; default {' '.join(map(str, GEMM))}"
_NUM_SMS_HELP = f"SMs of every call, 0 for the copy engine; default the buffer's own choice, and the copy engine at {SWEPT_TOKENS} tokens"


def add_shape_arguments(parser: argparse.ArgumentParser, backends: tuple[str, ...], default_tokens: str) -> None:
    """Add the options that the benchmarks of exchanges on GPUs share."""
    parser.add_argument("--backend", choices=backends, default="nvlink")
    add_ranks_and_tokens(parser, default_tokens)
    for name, default in (("hidden", 7168), ("num-experts", 256), ("num-topk", 8), ("expert-alignment", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--gemm", type=int, nargs=3, default=GEMM, help=_GEMM_HELP, metavar=("ROWS", "COLUMNS", "DEPTH"))
    parser.add_argument("--iterations", type=int, help="default 30")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shape_arguments(parser, ("nvlink", "nvshmem", "collective", "shm"), " ".join(map(str, TOKENS["cuda"])))
    parser.add_argument("--ranks-per-node", type=int, help="virtual nodes of so many ranks, for nvshmem and collective")
    parser.add_argument("--num-rail-sms", type=int, help="SMs that send to other nodes, with nvshmem; default the buffer's own choice")
    parser.add_argument("--num-sms", type=int, nargs="+", help=_NUM_SMS_HELP)
    parser.add_argument("--sweep", action="store_true", help=f"also {' '.join(map(str, SWEEP))} SMs at {SWEPT_TOKENS} tokens")
    parser.add_argument("--quick", action="store_true", help=f"{' and '.join(map(str, QUICK_TOKENS))} tokens, 10 iterations")
    add_peer(parser)
    parser.set_defaults(is_overlap=False)


def resolve(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the machine. Raises EPError for what cannot run, ValueError for values that do not fit."""
    options.on_gpu = options.backend in ("nvlink", "nvshmem") or (options.backend == "collective" and torch.cuda.device_count() > 0)
    resolve_ranks(options)
    options.num_tokens = sorted(set(options.num_tokens or _default_tokens(options)))
    options.iterations = options.iterations or (10 if options.quick else 30)
    for n in options.num_ranks:
        if n < 1 or options.num_experts % n:
            raise ValueError(f"--num-experts {options.num_experts} must be a multiple of --num-ranks {n}")
    if not 1 <= options.num_topk <= options.num_experts or min(options.num_tokens) < 1 or options.iterations < 1:
        raise ValueError(
            f"--num-topk {options.num_topk} must be 1 to --num-experts {options.num_experts}, --num-tokens and --iterations at least 1"
        )
    if min(options.gemm) < 1:
        raise ValueError(f"--gemm {' '.join(map(str, options.gemm))} must be three sizes of at least 1")
    if options.peer and not options.on_gpu:
        raise ValueError(f"--peer {options.peer[0]} needs GPUs; give --backend nvlink")
    options.overlap_tokens = options.num_tokens if options.is_overlap else [_one_size(options)] if options.backend == "nvlink" else []
    options.num_tokens = [] if options.is_overlap else options.num_tokens
    options.num_sms_of = {num_tokens: _num_sms(options, num_tokens) for num_tokens in options.num_tokens}


def _default_tokens(options: argparse.Namespace) -> tuple[int, ...]:
    if options.quick:
        return QUICK_TOKENS
    return (OVERLAP_TOKENS if options.is_overlap else TOKENS)["cuda" if options.on_gpu else "cpu"]


def _one_size(options: argparse.Namespace) -> int:
    """Return the number of tokens for measurements that are made at one size only."""
    return SWEPT_TOKENS if SWEPT_TOKENS in options.num_tokens else max(options.num_tokens)


def _num_sms(options: argparse.Namespace, num_tokens: int) -> list[int | None]:
    """Return the numbers of SMs to measure with. The sweep and the copy engine are measured at one size only."""
    chosen: list[int | None] = list(options.num_sms or [None])
    if num_tokens == _one_size(options):
        chosen += SWEEP if options.sweep else ()
        chosen += [0] if options.backend == "nvlink" and options.num_sms is None else []
    return list(dict.fromkeys(chosen))


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
    records, overlaps = records_of(reports, options), overlap_report.records_of(reports, options)
    write_json(options.json, records + overlaps)
    if records:
        show(records)
    if overlaps:
        overlap_report.show(overlaps)
    exit_with_failures(reports)
