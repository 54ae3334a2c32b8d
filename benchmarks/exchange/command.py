"""Benchmark of dispatch and combine on one host: `python benchmarks/run.py exchange`.

It starts its own ranks, one per GPU, or uses those that torchrun started. The backends `shm` and `collective` need no GPU. Results are
checked, then timed. The baseline is an all-to-all of every (token, expert) row, over NCCL or on the CPU over gloo, with and without its
permutes. The run also times the copy engines over the link, or memcpy. With `nvlink` it also times how much of an exchange hides behind
GEMMs (`python benchmarks/run.py overlap --help`).

"stream us" is what a call adds to a busy stream. "call us" includes the host's time until the first launch. Both are of the slowest rank.
"""

import argparse

import torch

from benchmarks.common.peers import add_peer
from benchmarks.common.ranks import add_sizes, resolve_sizes, run
from benchmarks.common.report import Record, number, show_head, show_table, sms_of, spread_of
from benchmarks.exchange.measure import measure

TOKENS = {"cuda": (128, 512, 2048, 4096, 8192, 32768), "cpu": (128, 512)}
QUICK_TOKENS = (128, 4096)
OVERLAP_TOKENS = {"cuda": (4096,), "cpu": (512,)}
SWEEP = (4, 8, 12, 16, 24, 32)
SWEPT_TOKENS = 4096
GEMM = (4096, 2048, 2048)
_GEMM_HELP = f"sizes of the GEMMs beside an exchange; default {' '.join(map(str, GEMM))}"
_NUM_SMS_HELP = f"SMs of every call, 0 for the copy engine; default the buffer's own choice, and the copy engine at {SWEPT_TOKENS} tokens"


def add_shape_arguments(parser: argparse.ArgumentParser, backends: tuple[str, ...], default_tokens: tuple[int, ...]) -> None:
    """Add the options that `exchange` and `overlap` share."""
    add_sizes(parser, backends, " ".join(map(str, default_tokens)), "30")
    for name, default in (("hidden", 7168), ("expert-alignment", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--gemm", type=int, nargs=3, default=GEMM, help=_GEMM_HELP, metavar=("ROWS", "COLUMNS", "DEPTH"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shape_arguments(parser, ("nvlink", "nvshmem", "collective", "shm"), TOKENS["cuda"])
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
    default_tokens = (OVERLAP_TOKENS if options.is_overlap else TOKENS)["cuda" if options.on_gpu else "cpu"]
    resolve_sizes(options, QUICK_TOKENS if options.quick else default_tokens, options.num_experts)
    options.iterations = options.iterations or (10 if options.quick else 30)
    if min(options.gemm) < 1:
        raise ValueError(f"--gemm {' '.join(map(str, options.gemm))} must be three sizes of at least 1")
    options.overlap_tokens = options.num_tokens if options.is_overlap else [_one_size(options)] if options.backend == "nvlink" else []
    options.num_tokens = [] if options.is_overlap else options.num_tokens
    options.num_sms_of = {num_tokens: _num_sms(options, num_tokens) for num_tokens in options.num_tokens}


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


_COLUMNS = {
    "operation": lambda r: r["name"], "EP": number("num_ranks", 0), "tokens": number("num_tokens", 0), "SMs": sms_of,
    "stream us": number("us_median"), "p10-p90": spread_of, "call us": number("call_us"), "MB": number("bytes_moved", 1, 1e-6),
    "GB/s": number("gbps"), "% link": number("percent_of_link", 0), "baseline us": number("rival_alone_us"),
    "permuted": number("rival_permuted_us"), "speed-up": number("ratio", 2, unit="x"),
}  # fmt: skip
_OVERLAP_COLUMNS = {
    "operation": lambda r: r["name"], "EP": number("num_ranks", 0), "tokens": number("num_tokens", 0), "SMs": sms_of,
    "GEMMs": number("num_gemms", 0), "both us": number("us_median"), "p10-p90": spread_of, "start": number("start_us"),
    "GEMMs us": number("gemms_us"), "hook": number("hook_us"), "exchange alone": number("exchange_us"),
    "GEMMs alone": number("alone_gemms_us"), "GEMM speed": number("gemm_speed", 2),
    "hidden": lambda r: "?" if r["exchange_hidden"] is None else f"{r['exchange_hidden']:.0%}",
}  # fmt: skip


def show(records: list[Record]) -> None:
    show_head(records)
    exchanges, overlaps = ([r for r in records if ("gemm" in r) == is_overlap] for is_overlap in (False, True))
    if exchanges:
        sizes = {(r["num_ranks"], r["num_tokens"]): r["workspace_bytes"] for r in exchanges if r["workspace_bytes"] is not None}
        print("workspace per rank: " + ", ".join(f"EP{n} {t} tokens {size / 2**20:.0f} MiB" for (n, t), size in sizes.items()))
        print("baseline: all-to-all of every (token, expert) row, in the rank layout of every (token, rank) row, its permutes left out and")
        print("counted; speed-up over the latter. MB: over the link, of the rank that sends most. SMs: - is the buffer's own choice.")
        show_table(_COLUMNS, exchanges)
    if overlaps:
        rows, columns, depth = overlaps[0]["gemm"]
        print(
            f"GEMMs of {rows} x {columns}, sums of {depth}, bf16, between start and hook of an exchange. us of the slowest rank, medians."
        )
        print("GEMM speed: beside the exchange, 1 is alone. hidden: part of the exchange that costs no time beside the GEMMs.")
        if any(r["exchange_hidden"] is None for r in overlaps):
            print("?: the GEMMs took longer alone than beside the exchange, as on a busy machine; what is hidden cannot be said.")
        show_table(_OVERLAP_COLUMNS, overlaps)


def main(options: argparse.Namespace) -> None:
    run(measure, resolve, show, options)
