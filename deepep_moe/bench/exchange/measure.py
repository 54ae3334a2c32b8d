"""Measure on one rank: check, then time, every operation, its baselines, and exchanges beside GEMMs."""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe import Buffer
from deepep_moe.bench.common.records import cpu_name
from deepep_moe.bench.common.timing import Timer
from deepep_moe.bench.common.verify import verify, verify_rival
from deepep_moe.bench.exchange.baselines import PLANNED, words
from deepep_moe.bench.exchange.deep_ep import DeepEP
from deepep_moe.bench.exchange.link_rate import link_gbps
from deepep_moe.bench.exchange.operations import (
    Inputs,
    Operation,
    Shape,
    gather_counts,
    link_rows,
    make_inputs,
    operations,
    tokens_per_rank,
)
from deepep_moe.bench.overlap.measure import NUM_SMS, OPS, BesideGemms, Overlap
from deepep_moe.errors import EPError

_TIMEOUT_S = 30.0  # of waits for a peer


@dataclass
class Rival:
    """Times of the rows alone, and with the permutes that a layer needs around them."""

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
    """Sent over the link by the rank that sends most."""
    workspace_bytes: int | None
    rival: Rival


@dataclass
class Report:
    num_ranks: int
    hardware: str
    transport: str
    """Of the rivals."""
    link_gbps: float | None
    measurements: list[Measurement] = field(default_factory=list)
    overlaps: list[Overlap] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Operations whose results were wrong, or that raised; they are not timed."""


class Rank:
    """One rank of one run. Every method is collective."""

    def __init__(self, rank: int, num_ranks: int, device_idx: int, options: argparse.Namespace):
        self.options, self.rank, self.started = options, rank, time.monotonic()
        self.shape = Shape(num_ranks, options.hidden, options.num_experts, options.num_topk, options.expert_alignment)
        self.device = torch.device("cuda", device_idx) if options.on_gpu else torch.device("cpu")
        self.group: dist.ProcessGroup | None = None
        if options.on_gpu:
            torch.cuda.set_device(self.device)
            self.group = dist.new_group(backend="nccl")
        self.timer = Timer(self.device, self.group)
        self.failures: list[str] = []
        self.peers = [DeepEP(self.shape, self.group) for _ in options.peer if self.group is not None]

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{time.monotonic() - self.started:6.1f} s] EP{self.shape.num_ranks}: {text}", file=sys.stderr, flush=True)

    def run(self) -> Report:
        gc.collect()
        gc.freeze()  # collections stay short
        rate = link_gbps(self.timer, self.options.iterations)
        self.say("no link" if rate is None else f"link {rate:.0f} GB/s")
        report = Report(self.shape.num_ranks, self._hardware(), "NCCL" if self.options.on_gpu else "gloo", rate, failures=self.failures)
        for num_tokens in self.options.num_tokens:
            report.measurements += self._measure(num_tokens)
        for num_tokens in self.options.overlap_tokens:
            report.overlaps += self._overlap(num_tokens)
        self.timer.synchronize()
        return report

    def _hardware(self) -> str:
        if not self.options.on_gpu:
            return cpu_name()
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return f"{self.shape.num_ranks} x {torch.cuda.get_device_name(self.device)}, CUDA {torch.version.cuda}, NCCL {nccl}; {cpu_name()}"

    def _buffer(self, num_tokens: int) -> Buffer:
        o = self.options
        group = self.group if o.backend == "collective" else None
        return Buffer(group, num_tokens, o.hidden, o.num_experts, o.num_topk, backend=o.backend, timeout_s=_TIMEOUT_S)

    def _agreed(self, what: str, attempt: Callable[[], Any]) -> Any:
        """What `attempt` returns, or None where it raised on any rank: then all ranks know, and leave it out."""
        result, reason = None, None
        try:
            result = attempt()
        except (EPError, ValueError, TypeError, RuntimeError) as error:
            reason = f"EP{self.shape.num_ranks}: {what}: rank {self.rank}: {type(error).__name__}: {error}"
        reasons: list[str | None] = [None] * self.shape.num_ranks
        dist.all_gather_object(reasons, reason)
        first = next((r for r in reasons if r is not None), None)
        if first is None:
            return result
        self.failures.append(first)
        self.say(f"not timed: {first}")
        return None

    def _inputs(self, num_tokens: int) -> list[Inputs]:
        """Of all ranks."""
        return [make_inputs(self.shape, num_tokens, rank, self.device) for rank in range(self.shape.num_ranks)]

    def _measure(self, num_tokens: int) -> list[Measurement]:
        """Every operation that is right, at one size."""
        everyone = self._inputs(num_tokens)
        inputs = everyone[self.rank]
        rivals = self._time_rivals(everyone)
        if self.timer.is_gpu:
            torch.cuda.empty_cache()  # of the rivals' rows, which outnumber ours
        rows = link_rows(gather_counts(tokens_per_rank(inputs.topk_idx, self.shape)))
        buffer = self._buffer(num_tokens)
        self.say(f"{num_tokens} tokens, workspace {buffer.workspace_bytes / 2**20:.1f} MiB per rank")
        measurements = []
        for num_sms in self.options.num_sms_of[num_tokens]:
            where = f"{num_tokens} tokens, num_sms {num_sms}"
            for o in self._agreed(f"every operation, {where}", partial(operations, buffer, self.shape, inputs, num_sms)) or []:
                if self._agreed(f"{o.name}, {where}", partial(verify, o, everyone, self.shape, self.rank)):
                    measurements.append(self._time(o, num_tokens, rows, rivals, buffer.workspace_bytes))
        for peer in self.peers:
            for o in self._agreed(f"{peer.name}, {num_tokens} tokens", partial(peer.operations, inputs)) or []:
                measurements.append(self._time(o, num_tokens, rows, rivals, None))
        self.timer.synchronize()
        buffer.destroy()
        return measurements

    def _overlap(self, num_tokens: int) -> list[Overlap]:
        """Every exchange that is right, with GEMMs between its halves."""
        if self.timer.is_gpu:
            torch.cuda.empty_cache()
        everyone, buffer, found = self._inputs(num_tokens), self._buffer(num_tokens), []
        make = partial(BesideGemms, self.timer, buffer, self.shape, everyone, self.rank, self.options)
        beside = self._agreed(f"an exchange beside GEMMs, {num_tokens} tokens", make)
        for op in OPS if beside is not None else ():
            for num_sms in NUM_SMS.get(self.options.backend, (None,)):
                what = f"{op} beside GEMMs, {num_tokens} tokens, num_sms {num_sms}"
                if self._agreed(what, partial(beside.verify, op, num_sms)):
                    self.say(what)
                    found.append(self._agreed(what, partial(beside.measure, op, num_sms)))
        self.timer.synchronize()
        buffer.destroy()
        return [overlap for overlap in found if overlap is not None]

    def _time(
        self, o: Operation, num_tokens: int, rows: dict[str, int], rivals: dict[tuple[str, str, str], Rival], workspace_bytes: int | None
    ) -> Measurement:
        iterations = self.options.iterations
        stream_us = self.timer.stream(o.call, iterations)
        call_us = self.timer.call(o.call, iterations) if self.timer.is_gpu else stream_us
        backend = o.backend or self.options.backend
        link_bytes, rival = rows[o.op] * o.row_bytes, rivals[o.op, o.dtype, o.layout]
        return Measurement(
            o.op, o.dtype, o.layout, o.name, num_tokens, o.num_sms, backend, stream_us, call_us, link_bytes, workspace_bytes, rival
        )

    def _time_rivals(self, everyone: list[Inputs]) -> dict[tuple[str, str, str], Rival]:
        """By operation, dtype and layout."""
        iterations, inputs, stream, found = self.options.iterations, everyone[self.rank], self.timer.stream, {}
        for layout, planned in PLANNED.items():
            for dtype, rows in (("float8_e4m3fn", words(inputs.x_fp8, inputs.x_scales)), ("bfloat16", words(inputs.x))):
                rival = planned(rows, inputs, self.shape, self.group)
                alone = stream(rival.exchange, iterations)
                found["dispatch", dtype, layout] = Rival(alone, stream(rival.dispatch, iterations))
            arrived = verify_rival(rival, everyone, self.shape, self.rank)
            found["cached dispatch", dtype, layout] = Rival(alone, stream(rival.cached_dispatch, iterations))
            back = stream(rival.exchange_back, iterations)
            found["combine", dtype, layout] = Rival(back, stream(partial(rival.combine, arrived), iterations))
        return found


def measure(rank: int, num_ranks: int, options: argparse.Namespace, device_idx: int | None = None) -> Report:
    """One run of one rank, in a process whose default group moves CPU tensors. `device_idx`: its GPU, by default the rank."""
    return Rank(rank, num_ranks, rank if device_idx is None else device_idx, options).run()
