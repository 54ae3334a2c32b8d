"""The work of one rank: check and then time every operation and its baselines."""

import argparse
import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.common.verify import verify
from benchmarks.exchange.baselines import PlannedByExpert, verify_baseline, words
from benchmarks.exchange.link_rate import link_gbps
from benchmarks.exchange.peers import foreign
from benchmarks.low_latency import operations as low_latency_operations
from benchmarks.low_latency.batches import GRAPH_CALLS, Batches, Times
from benchmarks.low_latency.operations import LowLatencyOperation
from benchmarks.low_latency.peers import PEERS, SmallBatches
from deepep_moe import LowLatencyBuffer
from deepep_moe.tune.operations import operations
from deepep_moe.tune.ranks import TIMEOUT_S, Rank
from deepep_moe.tune.workload import Inputs, gather_counts, link_rows, tokens_per_rank

_LINK_ITERATIONS = 10
_MOST_HALVES = 1000  # most calls in halves, which pause in between
_OTHER_ITERATIONS = 200  # most calls of the all-to-all
_OTHER_BATCH, _OTHER_DROP = 25, 5  # with more of its many launches the device's queue would be full
_BUFFER_ITERATIONS = 30
_GRAPH_REPLAYS = 30


@dataclass(frozen=True)
class Baseline:
    """Times of the all-to-all of every (token, expert) row, with its permutes."""

    eager: Times
    graph: Times | None


@dataclass(frozen=True)
class Measurement:
    op: str
    name: str
    dtype: str
    wire: str
    num_tokens: int
    link_bytes: int
    """Bytes of rows and scales over the link, of the rank that sends most."""
    workspace_bytes: int | None
    eager: Times
    graph: Times | None
    """None on the CPU."""
    graph_of_20_us: float | None
    """Mean time of a call in a graph of 20 calls, which has no events in it."""
    send: Times | None
    receive: Times | None
    """Both None where the call has no halves."""
    baseline: Baseline | None
    buffer_us: list[float] | None
    """Times of each call of the same operation of `Buffer`, in the expert layout, of the slowest rank."""
    layout: str = "expert"
    backend: str | None = None
    """The name of another library, and its version. None stands for the buffer's backend."""
    version: str | None = None


@dataclass
class Report:
    num_ranks: int
    hardware: str
    transport: str
    """The library that moves the rows of the baseline."""
    link_gbps: float | None
    num_sms: int | None
    """All SMs of the GPU, as a call occupies them. None on the CPU."""
    event_us: float | None
    measurements: list[Measurement] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Operations that raised or had wrong results, and so are not timed."""


class LowLatencyRank(Rank):
    """One rank of one run. Every method is collective."""

    def measure_all(self) -> Report:
        gc.collect()
        gc.freeze()  # collections stay short
        self.batches = Batches(self.timer)
        rate, num_sms = link_gbps(self.timer, _LINK_ITERATIONS), None
        if self.timer.is_gpu:
            num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        transport = "NCCL" if self.timer.is_gpu else "gloo"
        report = Report(self.shape.num_ranks, self.hardware(), transport, rate, num_sms, self.batches.event_us(), failures=self.failures)
        peers = self._make_peers()
        for num_tokens in self.options.num_tokens:
            report.measurements += self._measure_size(num_tokens, peers)
        self.timer.synchronize()
        for peer in peers:
            self.agreed(f"the end of {peer.name}", partial(foreign, peer.destroy))
        return report

    def _measure_size(self, num_tokens: int, peers: list[SmallBatches]) -> list[Measurement]:
        """Time every operation that is right, at one size."""
        everyone, what = self.everyones_inputs(num_tokens), f"{num_tokens} tokens"
        baselines = self._time_all_to_all(everyone)
        buffers = self._time_buffer(everyone)
        self._free()
        o = self.options
        buffer = LowLatencyBuffer(None, num_tokens, o.hidden, o.num_experts, o.num_topk, backend=o.backend, timeout_s=TIMEOUT_S)
        self.say(f"{what}, workspace {buffer.workspace_bytes / 2**20:.1f} MiB per rank")
        found = []
        make = partial(low_latency_operations.operations, buffer, self.shape, everyone, self.rank)
        for operation in self.agreed(f"every operation, {what}", make) or []:
            name = f"{operation.name}, {what}"
            if self.agreed(name, partial(self._checked, buffer, partial(low_latency_operations.verify, operation))):
                baseline, other = baselines.get((operation.op, operation.dtype)), buffers.get((operation.op, operation.dtype))
                time = partial(self._time_call, operation, everyone[self.rank], buffer.workspace_bytes, baseline, other)
                found.append(self.agreed(name, partial(self._checked, buffer, time)))
        self.timer.synchronize()
        buffer.destroy()
        for peer in peers:
            found += self._time_peer(peer, everyone, baselines)
        self._free()
        return [measurement for measurement in found if measurement is not None]

    # ---- other libraries ----

    def _make_peers(self) -> list[SmallBatches]:
        """Construct the peers that can be, each once for all sizes."""
        group, most, made = self.group_of_peers(), max(self.options.num_tokens), []
        for name in dict.fromkeys(self.options.peer):
            made.append(self.agreed(name, partial(foreign, partial(PEERS[name], self.shape, group, most))))
        return [peer for peer in made if peer is not None]

    def _time_peer(
        self, peer: SmallBatches, everyone: list[Inputs], baselines: dict[tuple[str, str], Baseline]
    ) -> list[Measurement | None]:
        """Time every operation of another library that is right, at one size."""
        what, found = f"{len(everyone[0].x)} tokens", []
        self.say(f"{what}, {peer.name} {peer.version}")
        make = partial(foreign, partial(peer.operations, everyone, self.rank))
        for o in self.agreed(f"{peer.name}, {what}", make) or []:
            name = f"{o.name}, {what}"
            if self.agreed(name, partial(foreign, partial(low_latency_operations.verify, o))):
                baseline = baselines.get((o.op, o.dtype)) if o.layout == "expert" else None
                time = partial(self._time_call, o, everyone[self.rank], peer.workspace_bytes, baseline, None, peer.version)
                found.append(self.agreed(name, partial(foreign, time)))
        self.timer.synchronize()
        return found

    def _free(self) -> None:
        if self.timer.is_gpu:
            torch.cuda.empty_cache()

    def _checked(self, buffer: LowLatencyBuffer, attempt: Callable[[], Any]) -> Any:
        """Return what `attempt` returns. Raises what it raises, and on a GPU what its kernels reported."""
        result = attempt()
        if self.timer.is_gpu:
            torch.cuda.synchronize(self.device)
        buffer.check()
        return result

    def _time_call(
        self,
        o: LowLatencyOperation,
        mine: Inputs,
        workspace_bytes: int | None,
        baseline: Baseline | None,
        buffer_us: list[float] | None,
        version: str | None = None,
    ) -> Measurement:
        num_tokens = len(mine.x)
        iterations = self.options.iterations_of[num_tokens]
        rows = link_rows(gather_counts(tokens_per_rank(mine.topk_idx, self.shape)))[o.op]
        eager = self.batches.times(o.call, iterations)
        send, receive = (None, None) if o.send is None else self.batches.halves(o.send, min(iterations, _MOST_HALVES))
        graph, of_20_us = self._graphs_of(o, iterations) if self.timer.is_gpu else (None, None)
        what = (o.op, o.name, o.dtype, o.wire, num_tokens, rows * o.row_bytes, workspace_bytes)
        return Measurement(*what, eager, graph, of_20_us, send, receive, baseline, buffer_us, o.layout, o.backend, version)

    def _graphs_of(self, o: LowLatencyOperation, iterations: int) -> tuple[Times | None, float | None]:
        """Time graphs of a call. A call of another library that cannot be captured is timed eagerly, and that it cannot is reported."""
        time = partial(self._time_graphs, o, iterations)
        if o.backend is None:
            return time()
        return self.agreed(f"{o.name} in a graph", partial(foreign, time)) or (None, None)

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
        """Time the all-to-all of each operation and dtype, where it is right."""
        inputs, made = everyone[self.rank], {}
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
            made[key] = self.agreed(f"all-to-all {' '.join(key)}, {what}", partial(time, call))
        return {key: times for key, times in made.items() if times is not None}

    def _time_baseline(self, num_tokens: int, call: Callable[[], Any]) -> Baseline:
        iterations = min(self.options.iterations_of[num_tokens], _OTHER_ITERATIONS)
        eager = self.batches.times(call, iterations, _OTHER_BATCH, _OTHER_DROP)
        captured = self.agreed("all-to-all in a graph", partial(self.batches.graph, call)) if self.timer.is_gpu else None
        return Baseline(eager, None if captured is None else self.batches.times(captured[0].replay, iterations, _OTHER_BATCH, _OTHER_DROP))

    def _time_buffer(self, everyone: list[Inputs]) -> dict[tuple[str, str], list[float]]:
        """Time each operation and dtype of `Buffer` that is right, not in graphs, as its dispatch waits on the host for counts."""
        what, made = f"Buffer, {len(everyone[0].x)} tokens", {}
        buffer = self.new_buffer(len(everyone[0].x))
        for o in self.agreed(what, partial(operations, buffer, self.shape, everyone[self.rank], None)) or []:
            is_same = o.layout == "expert" and o.op in ("dispatch", "combine")
            if is_same and self.agreed(f"{what}, {o.name}", partial(verify, o, everyone, self.shape, self.rank)):
                made[o.op, o.dtype] = self.timer.stream(o.call, _BUFFER_ITERATIONS)
        self.timer.synchronize()
        buffer.destroy()
        return made


@torch.no_grad()
def measure(rank: int, num_ranks: int, options: argparse.Namespace, device_idx: int | None = None) -> Report:
    """Run one rank, in a process whose default group moves CPU tensors. `device_idx` is its GPU, by default the rank."""
    return LowLatencyRank(rank, num_ranks, rank if device_idx is None else device_idx, options).measure_all()
