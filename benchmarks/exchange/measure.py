"""The work of one rank: check and then time every operation, its baselines, and exchanges beside GEMMs."""

import argparse
import gc
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks.common.verify import verify
from benchmarks.exchange.baselines import PLANNED, verify_baseline, words
from benchmarks.exchange.link_rate import link_gbps
from benchmarks.exchange.peers import foreign, make_peer
from benchmarks.overlap.measure import NUM_SMS, OPS, BesideGemms, Overlap
from deepep_moe.tune.operations import operations
from deepep_moe.tune.ranks import Rank
from deepep_moe.tune.workload import Inputs, Operation, gather_counts, link_rows, tokens_per_rank


@dataclass
class Baseline:
    """Times of an all-to-all: of its rows alone, and with the permutes that a layer needs."""

    alone_us: list[float]
    permuted_us: list[float]


@dataclass
class Measurement:
    """Times in microseconds of the slowest rank, by iteration."""

    op: str
    dtype: str
    layout: str
    name: str
    num_tokens: int
    num_sms: int | None
    backend: str
    stream_us: list[float]
    call_us: list[float]
    link_bytes: int
    """Bytes over the link of the rank that sends most."""
    workspace_bytes: int | None
    baseline: Baseline
    version: str | None = None
    """The version of another library, whose name `backend` is."""


@dataclass
class Report:
    num_ranks: int
    hardware: str
    transport: str
    """The library that moves the rows of the baselines."""
    link_gbps: float | None
    measurements: list[Measurement] = field(default_factory=list)
    overlaps: list[Overlap] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Operations that raised or had wrong results, and so are not timed."""


class ExchangeRank(Rank):
    """One rank of one run. Every method is collective."""

    def run(self) -> Report:
        gc.collect()
        gc.freeze()  # collections stay short
        rate = link_gbps(self.timer, self.options.iterations)
        self.say("no link" if rate is None else f"link {rate:.0f} GB/s")
        report = Report(self.shape.num_ranks, self.hardware(), "NCCL" if self.options.on_gpu else "gloo", rate, failures=self.failures)
        for num_tokens in self.options.num_tokens:
            report.measurements += self._measure(num_tokens)
        for num_tokens in self.options.overlap_tokens:
            report.overlaps += self._overlap(num_tokens)
        self.timer.synchronize()
        return report

    def _measure(self, num_tokens: int) -> list[Measurement]:
        """Time every operation that is right, at one size."""
        everyone = self.everyones_inputs(num_tokens)
        inputs = everyone[self.rank]
        baselines = self._time_baselines(everyone)
        if self.timer.is_gpu:
            torch.cuda.empty_cache()  # the baselines' rows take more memory than ours
        rows = link_rows(gather_counts(tokens_per_rank(inputs.topk_idx, self.shape)))
        buffer = self.new_buffer(num_tokens)
        self.say(f"{num_tokens} tokens, workspace {buffer.workspace_bytes / 2**20:.1f} MiB per rank")
        measurements = []
        for num_sms in self.options.num_sms_of[num_tokens]:
            where = f"{num_tokens} tokens, num_sms {num_sms}"
            for o in self.agreed(f"every operation, {where}", partial(operations, buffer, self.shape, inputs, num_sms)) or []:
                if self.agreed(f"{o.name}, {where}", partial(verify, o, everyone, self.shape, self.rank)):
                    measurements.append(self._time(o, num_tokens, rows, baselines, buffer.workspace_bytes))
        self.timer.synchronize()
        buffer.destroy()
        for name in dict.fromkeys(self.options.peer):
            measurements += self._measure_peer(name, inputs, rows, baselines)
        return measurements

    def _measure_peer(
        self, name: str, inputs: Inputs, rows: dict[str, int], baselines: dict[tuple[str, str, str], Baseline]
    ) -> list[Measurement]:
        """Time every operation of another library that is right, at one size. What it raises is reported; where it raises on some ranks
        only, the others may wait for these until its own deadline."""
        num_tokens, found = len(inputs.x), []
        what = f"{name}, {num_tokens} tokens"
        if self.timer.is_gpu:
            torch.cuda.empty_cache()
        peer = self.agreed(what, partial(make_peer, name, self.shape, self.group_of_peers(), num_tokens))
        if peer is None:
            return []
        self.say(f"{what}, version {peer.version}")
        for o in self.agreed(what, partial(foreign, partial(peer.operations, inputs))) or []:
            time = partial(self._time, o, num_tokens, rows, baselines, None, peer.version)
            found.append(self.agreed(f"{o.name}, {num_tokens} tokens", partial(foreign, time)))
        self.timer.synchronize()
        self.agreed(f"the end of {what}", partial(foreign, peer.destroy))
        return [measurement for measurement in found if measurement is not None]

    def _overlap(self, num_tokens: int) -> list[Overlap]:
        """Time every exchange that is right, with GEMMs between its halves."""
        if self.timer.is_gpu:
            torch.cuda.empty_cache()
        everyone, buffer, found = self.everyones_inputs(num_tokens), self.new_buffer(num_tokens), []
        make = partial(BesideGemms, self.timer, buffer, self.shape, everyone, self.rank, self.options)
        beside = self.agreed(f"an exchange beside GEMMs, {num_tokens} tokens", make)
        for op in OPS if beside is not None else ():
            for num_sms in NUM_SMS.get(self.options.backend, (None,)):
                what = f"{op} beside GEMMs, {num_tokens} tokens, num_sms {num_sms}"
                if self.agreed(what, partial(beside.verify, op, num_sms)):
                    self.say(what)
                    found.append(self.agreed(what, partial(beside.measure, op, num_sms)))
        self.timer.synchronize()
        buffer.destroy()
        return [overlap for overlap in found if overlap is not None]

    def _time(
        self,
        o: Operation,
        num_tokens: int,
        rows: dict[str, int],
        baselines: dict[tuple[str, str, str], Baseline],
        workspace_bytes: int | None,
        version: str | None = None,
    ) -> Measurement:
        iterations = self.options.iterations
        stream_us = self.timer.stream(o.call, iterations)
        call_us = self.timer.call(o.call, iterations) if self.timer.is_gpu else stream_us
        backend = o.backend or self.options.backend
        link_bytes, baseline = rows[o.op] * o.row_bytes, baselines[o.op, o.dtype, o.layout]
        what = (o.op, o.dtype, o.layout, o.name, num_tokens, o.num_sms, backend)
        return Measurement(*what, stream_us, call_us, link_bytes, workspace_bytes, baseline, version)

    def _time_baselines(self, everyone: list[Inputs]) -> dict[tuple[str, str, str], Baseline]:
        """Time the baseline of each operation, dtype and layout."""
        iterations, inputs, stream, found = self.options.iterations, everyone[self.rank], self.timer.stream, {}
        for layout, planned in PLANNED.items():
            for dtype, rows in (("float8_e4m3fn", words(inputs.x_fp8, inputs.x_scales)), ("bfloat16", words(inputs.x))):
                baseline = planned(rows, inputs, self.shape, self.group)
                alone = stream(baseline.exchange, iterations)
                found["dispatch", dtype, layout] = Baseline(alone, stream(baseline.dispatch, iterations))
            arrived = verify_baseline(baseline, everyone, self.shape, self.rank)
            found["cached dispatch", dtype, layout] = Baseline(alone, stream(baseline.cached_dispatch, iterations))
            back = stream(baseline.exchange_back, iterations)
            found["combine", dtype, layout] = Baseline(back, stream(partial(baseline.combine, arrived), iterations))
        return found


def measure(rank: int, num_ranks: int, options: argparse.Namespace, device_idx: int | None = None) -> Report:
    """Run one rank, in a process whose default group moves CPU tensors. `device_idx` is its GPU, by default the rank."""
    return ExchangeRank(rank, num_ranks, rank if device_idx is None else device_idx, options).run()
