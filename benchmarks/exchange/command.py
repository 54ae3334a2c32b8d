"""Benchmark of dispatch and combine on one host: `python benchmarks/run.py exchange`.

It starts its own ranks, one per GPU, or uses those that torchrun started. The backends `shm` and `collective` need no GPU. Results are
checked, then timed. The baseline is an all-to-all of every (token, expert) row, over NCCL or on the CPU over gloo, with and without its
permutes. The run also times the copy engines over the link, or memcpy.

"stream us" is what a call adds to a busy stream. "call us" includes the host's time until the first launch. Both are of the slowest rank.
"""

import argparse

import torch

from benchmarks.common.peers import add_peer
from benchmarks.common.ranks import add_sizes, resolve_sizes, run
from benchmarks.common.report import Record, number, show_head, show_table, sms_of, spread_of
from benchmarks.exchange.measure import ExchangeRank

TOKENS = {"cuda": (128, 512, 2048, 4096, 8192, 32768), "cpu": (128, 512)}
SWEEP = (4, 8, 12, 16, 24, 32)
SWEPT_TOKENS = 4096
_NUM_SMS_HELP = f"SMs of every call, 0 for the copy engine; default the buffer's own choice, and the copy engine at {SWEPT_TOKENS} tokens"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    backends = ("nvlink", "nvshmem", "collective", "shm")
    add_sizes(parser, backends, " ".join(map(str, TOKENS["cuda"])), hidden=7168, expert_alignment=128, iterations=30)
    parser.add_argument("--ranks-per-node", type=int, help="virtual nodes of so many ranks, for nvshmem and collective")
    parser.add_argument("--num-rail-sms", type=int, help="SMs that send to other nodes, with nvshmem; default the buffer's own choice")
    parser.add_argument("--num-sms", type=int, nargs="+", help=_NUM_SMS_HELP)
    parser.add_argument("--sweep", action="store_true", help=f"also {' '.join(map(str, SWEEP))} SMs at {SWEPT_TOKENS} tokens")
    add_peer(parser)


def resolve(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the machine. Raises EPError for what cannot run, ValueError for values that do not fit."""
    options.on_gpu = options.backend in ("nvlink", "nvshmem") or (options.backend == "collective" and torch.cuda.device_count() > 0)
    resolve_sizes(options, TOKENS["cuda" if options.on_gpu else "cpu"], options.num_experts)
    options.num_sms_of = {num_tokens: _num_sms(options, num_tokens) for num_tokens in options.num_tokens}


def _num_sms(options: argparse.Namespace, num_tokens: int) -> list[int | None]:
    """Return the numbers of SMs to measure with. The sweep and the copy engine are measured at one size only."""
    chosen: list[int | None] = list(options.num_sms or [None])
    if num_tokens == (SWEPT_TOKENS if SWEPT_TOKENS in options.num_tokens else max(options.num_tokens)):
        chosen += SWEEP if options.sweep else ()
        chosen += [0] if options.backend == "nvlink" and options.num_sms is None else []
    return list(dict.fromkeys(chosen))


_COLUMNS = {
    "operation": lambda r: r["name"], "EP": number("num_ranks", 0), "tokens": number("num_tokens", 0), "SMs": sms_of,
    "stream us": number("us_median"), "p10-p90": spread_of, "call us": number("call_us"), "MB": number("bytes_moved", 1, 1e-6),
    "GB/s": number("gbps"), "% link": number("percent_of_link", 0), "baseline us": number("rival_alone_us"),
    "permuted": number("rival_permuted_us"), "speed-up": number("ratio", 2, unit="x"),
}  # fmt: skip


def show(records: list[Record]) -> None:
    show_head(records)
    sizes = {(r["num_ranks"], r["num_tokens"]): r["workspace_bytes"] for r in records if r["workspace_bytes"] is not None}
    print("workspace per rank: " + ", ".join(f"EP{n} {t} tokens {size / 2**20:.0f} MiB" for (n, t), size in sizes.items()))
    print("baseline: all-to-all of every (token, expert) row, in the rank layout of every (token, rank) row, its permutes left out and")
    print("counted; speed-up over the latter. MB: over the link, of the rank that sends most. SMs: - is the buffer's own choice.")
    show_table(_COLUMNS, records)


def main(options: argparse.Namespace) -> None:
    run(ExchangeRank.measure, show, options)
