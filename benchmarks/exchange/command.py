"""Benchmark of dispatch and combine on one host: `python benchmarks/run.py exchange`.

It starts its own ranks, one per GPU, or uses those that torchrun started. The backends `shm` and `collective` need no GPU. Results are
checked, then timed. The baseline is an all-to-all of every (token, expert) row, over NCCL or on the CPU over gloo, with and without its
permutes. The run also times the copy engines over the link, or memcpy.

"stream us" is what a call adds to a busy stream. "call us" includes the host's time until the first launch. Both are of the slowest rank.
"""

import argparse
import statistics
from functools import partial

import torch

from benchmarks.common.link import link_rows, tokens_from_to
from benchmarks.common.peers import add_peer
from benchmarks.common.ranks import BenchRank, Report, add_sizes, resolve_sizes, run
from benchmarks.common.records import spread
from benchmarks.common.report import Record, number, show_head, show_table, spread_of
from benchmarks.common.verify import verify
from benchmarks.common.workload import Inputs, Operation, make_inputs, operations
from benchmarks.exchange.baselines import PLANNED, verify_baseline, words
from benchmarks.exchange.deep_ep import KINDS

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
    add_peer(parser, KINDS)


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


# ---- the work of one rank ----

Baselines = dict[tuple[str, str, str], tuple[list[float], list[float]]]
"""Times of an all-to-all by operation, dtype and layout: of its rows alone, and with the permutes that a layer needs."""


class ExchangeRank(BenchRank):
    """One rank of one run. Every method is collective."""

    def run(self) -> Report:
        self.say("no link" if self.link_gbps is None else f"link {self.link_gbps:.0f} GB/s")
        for num_tokens in self.options.num_tokens:
            self.report.records += self._measure(num_tokens)
        self.timer.synchronize()
        return self.report

    def _measure(self, num_tokens: int) -> list[Record]:
        """Time every operation that is right, at one size."""
        inputs = make_inputs(self.shape, num_tokens, self.rank, self.device)
        baselines = self._time_baselines(inputs)
        torch.cuda.empty_cache()  # the baselines' rows take more memory than ours; nothing on CPUs
        rows = link_rows(tokens_from_to(inputs.topk_idx, self.shape))
        buffer = self.new_buffer(num_tokens)
        self.say(f"{num_tokens} tokens, workspace {buffer.workspace_bytes / 2**20:.1f} MiB per rank")
        records = []
        for num_sms in self.options.num_sms_of[num_tokens]:
            where = f"{num_tokens} tokens, num_sms {num_sms}"
            for o in self.agreed(f"every operation, {where}", partial(operations, buffer, self.shape, inputs, num_sms)) or []:
                if self.agreed(f"{o.name}, {where}", partial(verify, o, buffer, inputs, self.shape, self.rank)):
                    records.append(self._time(o, num_tokens, rows, baselines, buffer.workspace_bytes))
        self.timer.synchronize()
        buffer.destroy()
        for name in dict.fromkeys(self.options.peer):
            records += self._measure_peer(name, inputs, rows, baselines)
        return records

    def _measure_peer(self, name: str, inputs: Inputs, rows: dict[str, int], baselines: Baselines) -> list[Record]:
        """Time every operation of another library that is right, at one size. What it raises is reported; where it raises on some ranks
        only, the others may wait for these until its own deadline."""
        num_tokens, records = len(inputs.x), []
        what = f"{name}, {num_tokens} tokens"
        torch.cuda.empty_cache()
        peer = self.agreed(what, partial(KINDS[name], name, self.shape, self.peers, num_tokens))
        if peer is None:
            return []
        self.say(f"{what}, version {peer.version}")
        for layout in peer.layouts:
            listed = self.agreed(what, partial(peer.operations, inputs, layout))
            if listed is None:
                break
            for o in listed:
                time = partial(self._time, o, num_tokens, rows, baselines, None, peer.version)
                records.append(self.agreed(f"{o.name}, {num_tokens} tokens", time))
        self.timer.synchronize()
        self.agreed(f"the end of {what}", peer.destroy)
        return [entry for entry in records if entry is not None]

    def _time(
        self, o: Operation, num_tokens: int, rows: dict[str, int], baselines: Baselines, workspace_bytes: int | None,
        version: str | None = None,
    ) -> Record:  # fmt: skip
        iterations = self.options.iterations
        stream_us = self.timer.stream(o.call, iterations)
        call_us = self.timer.call(o.call, iterations) if self.timer.is_gpu else stream_us
        (median, p10, p90), (alone_us, permuted_us) = spread(call_us), baselines[o.op, o.dtype, o.layout]
        return self.record(
            o.op, num_tokens, o.dtype, o.layout, stream_us, rows[o.op] * o.row_bytes, backend=o.backend, version=version,
            baseline=f"{PLANNED[o.layout].name} ({self.transport}) with permutes", baseline_times=permuted_us, name=o.name,
            num_sms=o.num_sms, expert_alignment=self.options.expert_alignment if o.layout == "expert" else 1, call_us=median,
            call_us_p10=p10, call_us_p90=p90, rival_alone_us=statistics.median(alone_us),
            rival_permuted_us=statistics.median(permuted_us), workspace_bytes=workspace_bytes,
            ranks_per_node=self.options.ranks_per_node or self.shape.num_ranks, num_rail_sms=self.options.num_rail_sms,
        )  # fmt: skip

    def _time_baselines(self, inputs: Inputs) -> Baselines:
        """Time the baseline of each operation, dtype and layout."""
        iterations, stream, times = self.options.iterations, self.timer.stream, {}
        for layout, planned in PLANNED.items():
            for dtype, rows in (("float8_e4m3fn", words(inputs.x_fp8, inputs.x_scales)), ("bfloat16", words(inputs.x))):
                baseline = planned(rows, inputs, self.shape, self.group)
                alone = stream(baseline.exchange, iterations)
                times["dispatch", dtype, layout] = alone, stream(baseline.dispatch, iterations)
            arrived = verify_baseline(baseline, inputs, self.shape)
            times["cached dispatch", dtype, layout] = alone, stream(baseline.cached_dispatch, iterations)
            back = stream(baseline.exchange_back, iterations)
            times["combine", dtype, layout] = back, stream(partial(baseline.combine, arrived), iterations)
        return times


# ---- report ----

_COLUMNS = {
    "operation": lambda r: r["name"], "EP": number("num_ranks", 0), "tokens": number("num_tokens", 0),
    "SMs": lambda r: str({None: "-", 0: "copy"}.get(r["num_sms"], r["num_sms"])), "stream us": number("us_median"), "p10-p90": spread_of,
    "call us": number("call_us"), "MB": number("bytes_moved", 1, 1e-6), "GB/s": number("gbps"), "% link": number("percent_of_link", 0),
    "baseline us": number("rival_alone_us"), "permuted": number("rival_permuted_us"), "speed-up": number("ratio", 2, unit="x"),
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
