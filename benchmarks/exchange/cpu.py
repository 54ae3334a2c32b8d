"""Benchmark of dispatch and combine on the CPU.

One run times, on the same routing, the backend that was asked for, `collective` over gloo, an all-to-all of every (token, expert) row, and
memcpy with all ranks copying at once, whose rate bounds the others. They take turns, so that a noisy machine is noisy for all. Results are
verified before they are timed.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.report import number, show_table, spread_of
from benchmarks.exchange.baselines import AllToAllRows
from deepep_moe import Buffer, config
from deepep_moe.errors import EPError
from deepep_moe.testing import run_ranks
from deepep_moe.tune.records import DTYPES, record, write_json
from deepep_moe.tune.timing import slowest

Pair = tuple[Callable[[], Any], Callable[[], Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=("shm", "collective"), default="shm")
    for name, default in [("num-ranks", 2), ("num-tokens", 4096), ("hidden", 2048), ("num-topk", 8), ("num-experts", 64), ("repeats", 15)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--layout", choices=("expert", "rank"), default="expert")


def _inputs(options: argparse.Namespace, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(options.num_tokens, options.hidden, generator=generator).to(DTYPES[options.dtype])
    topk_idx = torch.rand(options.num_tokens, options.num_experts, generator=generator).topk(options.num_topk).indices
    return x, topk_idx, torch.rand(options.num_tokens, options.num_topk, generator=generator)


def _buffer_pair(backend: str, options: argparse.Namespace, inputs: tuple[torch.Tensor, ...]) -> tuple[Buffer, Pair]:
    buffer = Buffer(None, options.num_tokens, options.hidden, options.num_experts, options.num_topk, backend=backend)
    state: dict[str, Any] = {}

    def dispatch() -> torch.Tensor:
        state["out"] = buffer.dispatch(*inputs, layout=options.layout)
        return state["out"].recv_x

    def combine() -> torch.Tensor:
        out = state["out"]
        return buffer.combine(out.recv_x, out.handle, out.recv_topk_weights if options.layout == "expert" else None)

    return buffer, (dispatch, combine)


def _baseline_pair(options: argparse.Namespace, inputs: tuple[torch.Tensor, ...]) -> Pair:
    baseline, state = AllToAllRows(options.num_experts, options.layout), {}

    def dispatch() -> torch.Tensor:
        state["rows"] = baseline.dispatch(*inputs)
        return state["rows"]

    return dispatch, lambda: baseline.combine(state["rows"], options.num_tokens)


def _verify(pairs: dict[str, Pair], options: argparse.Namespace, inputs: tuple[torch.Tensor, ...]) -> int:
    """Make one exchange of each pair. All must dispatch the same rows and combine to what the definition says, or this raises EPError.

    Returns the bytes that a rank must at least read and write in a dispatch or a combine: each token once and each row once.
    """
    x, topk_idx, topk_weights = inputs
    ranks = topk_idx.sort(1).values // (options.num_experts // options.num_ranks)
    num_copies = torch.full((len(x), 1), options.num_topk)
    if options.layout == "rank":
        num_copies = 1 + (ranks[:, 1:] != ranks[:, :-1]).sum(1, keepdim=True)
    factors = dict.fromkeys(pairs, num_copies)
    if options.layout == "expert":
        factors |= dict.fromkeys(("ours", "collective"), topk_weights.sum(1, keepdim=True))  # the all-to-all applies no weights
    rows: dict[str, torch.Tensor] = {}
    for name, (dispatch, combine) in pairs.items():
        rows[name] = dispatch()
        if not torch.equal(rows[name], rows["ours"]):
            raise EPError(f"{name} dispatched other rows than ours")
        combined, expected = combine().float(), x.float() * factors[name]
        tolerance = options.num_topk * torch.finfo(x.dtype).eps  # relative to the largest entry, as sums of rounded rows
        if not torch.allclose(combined, expected, rtol=0, atol=tolerance * float(expected.abs().max())):
            raise EPError(f"{name} combined to other sums than those of its rows")
    return x.nbytes + rows["ours"].nbytes


def measure(rank: int, num_ranks: int, options: argparse.Namespace) -> tuple[dict[str, list[float]], int]:
    """Return the times of one rank in microseconds, by step, and the bytes that it touches."""
    torch.set_num_threads(config.num_threads(num_ranks))  # baselines and memcpy use as many threads as we do
    inputs = _inputs(options, rank)
    buffer, ours = _buffer_pair(options.backend, options, inputs)
    other, collective = _buffer_pair("collective", options, inputs)
    pairs = {"ours": ours, "collective": collective, "all-to-all": _baseline_pair(options, inputs)}
    bytes_touched = _verify(pairs, options, inputs)
    source, target = torch.ones(bytes_touched // 2, dtype=torch.uint8), torch.empty(bytes_touched // 2, dtype=torch.uint8)
    steps: dict[str, Callable[[], Any]] = {f"{name} {op}": call for name, pair in pairs.items() for op, call in zip(OPS, pair, strict=True)}
    steps["memcpy"] = lambda: target.copy_(source)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.repeats + 2):
        for name, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            if turn >= 2:
                times[name].append((time.perf_counter() - begin) * 1e6)
    buffer.destroy()
    other.destroy()
    return dict(zip(times, slowest(list(times.values())), strict=True)), bytes_touched


OPS = ("dispatch", "combine")


def _add(first: list[float], second: list[float]) -> list[float]:
    return [a + b for a, b in zip(first, second, strict=True)]


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return all records of one shape."""
    times, bytes_touched = run_ranks(measure, options.num_ranks, options, timeout_s=1800, bind=options.bind)[0]
    for name in ("ours", "collective", "all-to-all"):
        times[f"{name} dispatch+combine"] = _add(*(times[f"{name} {op}"] for op in OPS))
    memcpy_us = statistics.median(times["memcpy"])
    settings = vars(options) | {"dtype": str(DTYPES[options.dtype]).removeprefix("torch.")}
    records = []
    for op, passes in (("dispatch", 1), ("combine", 1), ("dispatch+combine", 2)):
        ours = times[f"ours {op}"]
        bound: dict[str, Any] = {
            "num_threads": config.num_threads(options.num_ranks),
            "memcpy_us": passes * memcpy_us,
            "percent_of_memcpy": 100 * passes * memcpy_us / statistics.median(ours),
        }
        for name, baseline in (("collective", "collective (gloo)"), ("all-to-all", AllToAllRows.name)):
            records.append(
                record(op, settings, ours, passes * bytes_touched, baseline=baseline, baseline_times=times[f"{name} {op}"], **bound)
            )
    return records


_COLUMNS = {
    "operation": lambda r: r["op"], "us median": number("us_median", 0), "p10-p90": spread_of, "MB touched": number("bytes_moved", 1, 1e-6),
    "GB/s": number("gbps"), "% of memcpy": number("percent_of_memcpy", 0), "speed-up": number("ratio", 1, unit="x"),
    "baseline us": number("rival_us", 0), "baseline": lambda r: r["rival"],
}  # fmt: skip


def show(records: list[dict[str, Any]]) -> None:
    first = records[0]
    print(
        f"{first['hardware']}: {first['num_ranks']} ranks, {first['num_tokens']} tokens x {first['hidden']} {first['dtype']}, "
        f"top-{first['num_topk']} of {first['num_experts']} experts, layout {first['layout']}, backend {first['backend']}"
    )
    show_table(_COLUMNS, records)


def main(options: argparse.Namespace) -> None:
    least = min(options.num_ranks, options.num_tokens, options.num_topk, options.repeats)
    if least < 1 or options.num_experts % options.num_ranks or options.num_topk > options.num_experts:
        sys.exit(
            f"--num-ranks {options.num_ranks}, --num-tokens {options.num_tokens}, --num-topk {options.num_topk} and --repeats "
            f"{options.repeats} must be at least 1, --num-experts {options.num_experts} a multiple of the ranks, with top-k experts or more"
        )
    records = run(options)
    show(records)
    write_json(options.json, records)
