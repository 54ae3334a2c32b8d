"""Benchmark of low-latency dispatch and combine: `python benchmarks/run.py low-latency`.

It starts its own ranks, one per GPU, or uses those that torchrun started; `--backend shm` needs no GPU. Results are checked to the bit,
then timed. On GPUs each call runs eagerly and as a CUDA graph of its own, thousands in a row, with the host far ahead and an event after
each call. Both halves are timed alone too, the receiving one when the rows are there. On the CPU the host's clock times them. Baselines are
an all-to-all of every (token, expert) row with its permutes, and with `--peer` another library. Times are of the rank with the
largest median.
"""

import argparse

from benchmarks.common.peers import add_peer
from benchmarks.common.ranks import add_sizes, resolve_sizes, run
from benchmarks.common.report import Record, number, show_head, show_table, spread_of
from benchmarks.low_latency.measure import LowLatencyRank
from benchmarks.low_latency.peers import PEERS

TOKENS = {"cuda": (1, 8, 32, 128, 256, 512), "cpu": (1, 8, 32, 128)}
HIDDEN = {"cuda": 7168, "cpu": 1024}
MANY_ITERATIONS_TOKENS = 128
ITERATIONS = {"cuda": (10_000, 1000), "cpu": (200, 200)}
"""The iterations at `MANY_ITERATIONS_TOKENS` tokens, and elsewhere."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, ("nvlink", "shm"), f"{' '.join(map(str, TOKENS['cuda']))}, up to 128 with shm", iterations=None)
    parser.add_argument("--hidden", type=int, help=f"a multiple of 128; default {HIDDEN['cuda']}, with shm {HIDDEN['cpu']}")
    add_peer(parser, tuple(PEERS))
    parser.set_defaults(expert_alignment=1)


def resolve(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the machine. Raises EPError for what cannot run, ValueError for values that do not fit."""
    options.on_gpu = options.backend == "nvlink"
    device = "cuda" if options.on_gpu else "cpu"
    options.hidden = HIDDEN[device] if options.hidden is None else options.hidden
    resolve_sizes(options, TOKENS[device], 32)
    if options.hidden < 1 or options.hidden % 128:
        raise ValueError(f"--hidden {options.hidden} must be a multiple of 128: rows in fp8 have a scale for 128 columns")
    many, few = ITERATIONS[device]
    options.iterations_of = {n: options.iterations or (many if n == MANY_ITERATIONS_TOKENS else few) for n in options.num_tokens}


_COLUMNS = {
    "operation": lambda r: r["name"].removeprefix("low-latency ") + ("" if r["is_host_ahead"] else "*"),
    "EP": number("num_ranks", 0), "tokens": number("num_tokens", 0), "part": lambda r: "graph" if r["graph"] else r["half"],
    "us": number("us_median"), "p10-p90": spread_of, "p99": number("us_p99"), "of 20": number("us_graph_of_20"),
    "MB": number("bytes_moved", 3, 1e-6), "GB/s": number("gbps"), "% link": number("percent_of_link", 0),
    "baseline us": number("rival_us"), "speed-up": number("ratio", 2, unit="x"),
}  # fmt: skip


def show(records: list[Record]) -> None:
    show_head(records)
    for num_ranks, us in {r["num_ranks"]: r["us_event"] for r in records if r["us_event"] is not None}.items():
        print(f"EP{num_ranks}: {us:.2f} us from event to event, part of every time but `of 20`")
    print("graph: one call a CUDA graph; both: eager; send, receive: its halves, with the rows already there. of 20: mean of 20 calls in")
    print("one graph. MB: over the link, of the rank that sends most. baseline: all-to-all of all (token, expert) rows with its")
    print("permutes, in a graph where ours is. It has no combine in fp8: that is in bf16 there too.")
    if not all(r["is_host_ahead"] for r in records):
        print("*: the host was not always ahead of the device")
    show_table(_COLUMNS, records)


def main(options: argparse.Namespace) -> None:
    run(LowLatencyRank.measure, show, options)
