"""The work of one rank: check and then time every operation and its baselines."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.common.link import link_rows, tokens_from_to
from benchmarks.common.ranks import BenchRank, Report
from benchmarks.common.report import Record
from benchmarks.exchange.baselines import PlannedByExpert, verify_baseline, words
from benchmarks.low_latency import operations as low_latency_operations
from benchmarks.low_latency.batches import GRAPH_CALLS, Batches, Times
from benchmarks.low_latency.operations import LowLatencyOperation
from benchmarks.low_latency.peers import PEERS, SmallBatches
from deepep_moe import LowLatencyBuffer
from deepep_moe.tune.ranks import TIMEOUT_S
from deepep_moe.tune.workload import Inputs

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
        everyone, what, o = self.everyones_inputs(num_tokens), f"{num_tokens} tokens", self.options
        baselines = self._time_all_to_all(everyone)
        self._free()
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
        self._free()
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

    def _free(self) -> None:
        if self.timer.is_gpu:
            torch.cuda.empty_cache()

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
        """Return a record of the call as a graph, if there is one, of the eager call, and of each half that it has."""
        num_tokens = len(mine.x)
        iterations = self.options.iterations_of[num_tokens]
        num_bytes = link_rows(tokens_from_to(mine.topk_idx, self.shape))[o.op] * o.row_bytes
        eager = self.batches.times(o.call, iterations)
        halves = () if o.send is None else self.batches.halves(o.send, min(iterations, _MOST_HALVES))
        graph = self._graphs_of(o, iterations) if self.timer.is_gpu else None
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

    def _graphs_of(self, o: LowLatencyOperation, iterations: int) -> tuple[Times, float] | None:
        """Time graphs of a call. A call of another library that cannot be captured is timed eagerly, and that it cannot is reported."""
        time = partial(self._time_graphs, o, iterations)
        return time() if o.backend is None else self.agreed(f"{o.name} in a graph", time)

    def _time_graphs(self, o: LowLatencyOperation, iterations: int) -> tuple[Times, float]:
        """Time a graph of one call, whose last result is checked too, and return the mean of a call in a graph of many."""
        graph, result = self.batches.graph(o.call)
        times = self.batches.times(graph.replay, iterations)
        many, _ = self.batches.graph(o.call, GRAPH_CALLS)
        replays = self.batches.times(many.replay, _GRAPH_REPLAYS, _GRAPH_REPLAYS + 2, 2)
        o.check(result)  # last, as it may raise on one rank alone
        return times, statistics.median(replays.us) / GRAPH_CALLS

    # ---- what it is measured against ----

    def _time_all_to_all(self, everyone: list[Inputs]) -> dict[tuple[str, str], Baseline]:
        """Time the all-to-all of each operation and dtype, if its results are right."""
        inputs, times_of = everyone[self.rank], {}
        what, time = f"{len(inputs.x)} tokens", partial(self._time_baseline, len(inputs.x))
        baseline = PlannedByExpert(words(inputs.x), inputs, self.shape, self.group)
        expert_rows = self.agreed(f"all-to-all, {what}", partial(verify_baseline, baseline, everyone, self.shape, self.rank))
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
