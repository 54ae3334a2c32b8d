"""Benchmark of low-latency dispatch and combine: `python benchmarks/run.py low-latency`.

It starts its own ranks, one per GPU, or uses those that torchrun started; `--backend shm` needs no GPU. Results are checked to the bit,
then timed. On GPUs each call runs eagerly and as a CUDA graph of its own, thousands in a row, with the host far ahead and an event after
each call. Both halves are timed alone too, the receiving one when the rows are there. On the CPU the host's clock times them. Baselines are
an all-to-all of every (token, expert) row with its permutes, and with `--peer` another library. Times are of the rank with the
largest median.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.common.link import link_rows, tokens_from_to
from benchmarks.common.peers import add_peer
from benchmarks.common.ranks import BenchRank, Report, add_sizes, resolve_sizes, run
from benchmarks.common.report import Record, number, show_head, show_table, spread_of
from benchmarks.common.workload import Inputs, make_inputs
from benchmarks.exchange.baselines import PlannedByExpert, verify_baseline, words
from benchmarks.low_latency import operations as low_latency_operations
from benchmarks.low_latency.batches import GRAPH_CALLS, Batches, Times
from benchmarks.low_latency.operations import LowLatencyOperation
from benchmarks.low_latency.peers import PEERS, SmallBatches
from deepep_moe import LowLatencyBuffer
from deepep_moe.tune.ranks import TIMEOUT_S

TOKENS = {"cuda": (1, 8, 32, 128, 256, 512), "cpu": (1, 8, 32, 128)}
HIDDEN = {"cuda": 7168, "cpu": 1024}
MANY_ITERATIONS_TOKENS = 128
ITERATIONS = {"cuda": (10_000, 1000), "cpu": (200, 200)}
"""The iterations at `MANY_ITERATIONS_TOKENS` tokens, and elsewhere."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, ("nvlink", "shm"), f"{' '.join(map(str, TOKENS['cuda']))}, up to 128 with shm", iterations=None)
    parser.add_argument("--hidden", type=int, help=f"a multiple of 128; default {HIDDEN['cuda']}, with shm {HIDDEN['cpu']}")
    add_peer(parser, PEERS)
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


# ---- the work of one rank ----

_MOST_HALVES = 1000  # most calls in halves, which pause in between
_OTHER_ITERATIONS = 200  # most calls of the all-to-all
_OTHER_BATCH, _OTHER_DROP = 25, 5  # with more of its many launches the device's queue would be full
_GRAPH_REPLAYS = 30


Baseline = tuple[Times, Times | None]
"""Times of the all-to-all of every (token, expert) row, with its permutes: eager, and from a graph."""


class LowLatencyRank(BenchRank):
    """One rank of one run. Every method is collective."""

    link_iterations = 10

    def run(self) -> Report:
        self.batches = Batches(self.timer)
        self.num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count if self.timer.is_gpu else None
        self.event_us = self.batches.event_us()
        most, names = max(self.options.num_tokens), dict.fromkeys(self.options.peer)
        made = [self.agreed(name, partial(PEERS[name], self.shape, self.peers, most)) for name in names]
        peers = [peer for peer in made if peer is not None]
        for num_tokens in self.options.num_tokens:
            self.report.records += self._measure_size(num_tokens, peers)
        self.timer.synchronize()
        for peer in peers:
            self.agreed(f"the end of {peer.name}", peer.destroy)
        return self.report

    def _measure_size(self, num_tokens: int, peers: list[SmallBatches]) -> list[Record]:
        """Time every operation that is right, at one size: of ours, then of other libraries."""
        what, o = f"{num_tokens} tokens", self.options
        everyone = [make_inputs(self.shape, num_tokens, rank, self.device) for rank in range(self.shape.num_ranks)]
        baselines = self._time_all_to_all(everyone[self.rank])
        torch.cuda.empty_cache()  # nothing where there is no GPU
        buffer = LowLatencyBuffer(None, num_tokens, o.hidden, o.num_experts, o.num_topk, backend=o.backend, timeout_s=TIMEOUT_S)
        self.say(f"{what}, workspace {buffer.workspace_bytes / 2**20:.1f} MiB per rank")
        make = partial(low_latency_operations.operations, buffer, self.shape, everyone, self.rank)
        listed = self.agreed(f"every operation, {what}", make) or []
        records = self._time_calls(listed, everyone, baselines, buffer.workspace_bytes, buffer=buffer)
        buffer.destroy()
        for peer in peers:
            self.say(f"{what}, {peer.name} {peer.version}")
            listed = self.agreed(f"{peer.name}, {what}", partial(peer.operations, everyone, self.rank)) or []
            records += self._time_calls(listed, everyone, baselines, peer.workspace_bytes, peer.version)
        torch.cuda.empty_cache()
        return records

    def _time_calls(
        self, listed: list[LowLatencyOperation], everyone: list[Inputs], baselines: dict[tuple[str, str], Baseline],
        workspace_bytes: int | None, version: str | None = None, buffer: LowLatencyBuffer | None = None,
    ) -> list[Record]:  # fmt: skip
        """Time those of the operations that are right. `version` is that of another library, `buffer` is ours."""
        mine, records = everyone[self.rank], list[Record]()
        for o in listed:
            name, checked = f"{o.name}, {len(mine.x)} tokens", partial(self._checked, buffer)
            if self.agreed(name, partial(checked, partial(low_latency_operations.verify, o))):
                baseline = baselines.get((o.op, o.dtype)) if o.layout == "expert" else None
                time = partial(self._time_call, o, mine, workspace_bytes, baseline, version)
                records += self.agreed(name, partial(checked, time)) or []
        self.timer.synchronize()
        return records

    def _checked(self, buffer: LowLatencyBuffer | None, attempt: Callable[[], Any]) -> Any:
        """Return what `attempt` returns. Raises what it raises, and on a GPU what the kernels of `buffer` reported."""
        result = attempt()
        if buffer is not None:
            if self.timer.is_gpu:
                torch.cuda.synchronize(self.device)
            buffer.check()
        return result

    def _time_call(
        self, o: LowLatencyOperation, mine: Inputs, workspace_bytes: int | None, baseline: Baseline | None, version: str | None
    ) -> list[Record]:
        """Return a record of the call as a graph, of the eager call, and of each half that it has. It is reported that a call cannot be
        captured."""
        num_tokens = len(mine.x)
        iterations = self.options.iterations_of[num_tokens]
        num_bytes = link_rows(tokens_from_to(mine.topk_idx, self.shape))[o.op] * o.row_bytes
        eager = self.batches.times(o.call, iterations)
        halves = () if o.send is None else self.batches.halves(o.send, min(iterations, _MOST_HALVES))
        graph = self.agreed(f"{o.name} in a graph", partial(self._time_graphs, o, iterations)) if self.timer.is_gpu else None
        record = partial(self._record, o, num_tokens, num_bytes, workspace_bytes, version)
        eager_baseline, graph_baseline = baseline or (None, None)
        records = [record("both", eager, eager_baseline)]
        if graph is not None:
            of_graph = record("both", graph[0], graph_baseline or eager_baseline, graph=True)
            records.insert(0, of_graph | {"rival_graph": graph_baseline is not None, "us_graph_of_20": graph[1]})
        return records + [record(half, times) for half, times in zip(("send", "receive"), halves, strict=False)]

    def _record(
        self, o: LowLatencyOperation, num_tokens: int, link_bytes: int, workspace_bytes: int | None, version: str | None, half: str,
        times: Times, baseline: Times | None = None, *, graph: bool = False,
    ) -> Record:  # fmt: skip
        in_bf16 = ", in bf16" if (o.op, o.wire) == ("combine", "fp8") else ""  # the all-to-all has no combine in fp8
        sent_bytes = 0 if half == "receive" else link_bytes  # its rows have arrived before
        return self.record(
            o.op, num_tokens, o.dtype, o.layout, times.us, sent_bytes, backend=o.backend, version=version,
            baseline=None if baseline is None else f"all-to-all of rows ({self.transport}) with permutes{in_bf16}",
            baseline_times=[] if baseline is None else baseline.us, name=f"low-latency {o.name}", wire=o.wire, half=half, graph=graph,
            us_p99=sorted(times.us)[len(times.us) * 99 // 100], us_event=self.event_us, us_host=times.host_us,
            is_host_ahead=times.is_ahead, num_sms=None if o.backend else self.num_sms, workspace_bytes=workspace_bytes,
        )  # fmt: skip

    def _time_graphs(self, o: LowLatencyOperation, iterations: int) -> tuple[Times, float]:
        """Time a graph of one call, whose last result is checked too, and return the mean of a call in a graph of many."""
        graph, result = self.batches.graph(o.call)
        times = self.batches.times(graph.replay, iterations)
        many, _ = self.batches.graph(o.call, GRAPH_CALLS)
        replays = self.batches.times(many.replay, _GRAPH_REPLAYS, _GRAPH_REPLAYS + 2, 2)
        o.check(result)  # last, as it may raise on one rank alone
        return times, statistics.median(replays.us) / GRAPH_CALLS

    # ---- what it is measured against ----

    def _time_all_to_all(self, inputs: Inputs) -> dict[tuple[str, str], Baseline]:
        """Time the all-to-all of each operation and dtype, if its results are right."""
        what, time, times_of = f"{len(inputs.x)} tokens", partial(self._time_baseline, len(inputs.x)), {}
        baseline = PlannedByExpert(words(inputs.x), inputs, self.shape, self.group)
        expert_rows = self.agreed(f"all-to-all, {what}", partial(verify_baseline, baseline, inputs, self.shape))
        if expert_rows is None:
            return {}
        in_fp8 = PlannedByExpert(words(inputs.x_fp8, inputs.x_scales), inputs, self.shape, self.group)
        calls = {
            ("dispatch", "bfloat16"): baseline.dispatch,
            ("dispatch", "float8_e4m3fn"): in_fp8.dispatch,
            ("combine", "bfloat16"): partial(baseline.combine, expert_rows),
        }
        for key, call in calls.items():
            times_of[key] = self.agreed(f"all-to-all {' '.join(key)}, {what}", partial(time, call))
        return {key: times for key, times in times_of.items() if times is not None}

    def _time_baseline(self, num_tokens: int, call: Callable[[], Any]) -> Baseline:
        iterations = min(self.options.iterations_of[num_tokens], _OTHER_ITERATIONS)
        eager = self.batches.times(call, iterations, _OTHER_BATCH, _OTHER_DROP)
        captured = self.agreed("all-to-all in a graph", partial(self.batches.graph, call)) if self.timer.is_gpu else None
        return eager, None if captured is None else self.batches.times(captured[0].replay, iterations, _OTHER_BATCH, _OTHER_DROP)


# ---- report ----

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
