"""The work of one rank: exchanges in two halves, with and without GEMMs between them."""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.common.verify import verify
from deepep_moe import Buffer
from deepep_moe.tune.operations import compare_bits
from deepep_moe.tune.records import spread
from deepep_moe.tune.timing import Mark, Timer, slowest
from deepep_moe.tune.workload import Inputs, Operation, Shape

OPS = ("dispatch", "combine")
NUM_SMS = {"nvlink": (0, None)}  # other backends have no SMs
_CHAIN = 1.5  # the GEMMs last so many times as long as the hook alone, so that rows arrive before they end
_MAX_GEMMS = 500
_MOST_HIDDEN = 1.1  # of an exchange: more than all of it, by noise
_NUM_OPERANDS = 4  # pairs of operands take turns, as experts do, so that a GEMM finds little in the cache


@dataclass
class Schedule:
    """Times of phases that follow each other on the stream, in microseconds of the slowest rank, [iterations][phases]."""

    phases: tuple[str, ...]
    ends: list[list[float]]
    """Times from the start of the first phase."""
    lengths: list[list[float]]

    @property
    def total(self) -> list[float]:
        return [ends[-1] for ends in self.ends]

    def length(self, phase: str) -> list[float]:
        return [lengths[self.phases.index(phase)] for lengths in self.lengths]


def figures_of(exchange: Schedule, gemms: Schedule, both: Schedule) -> dict[str, Any]:
    """Return a record's figures for an exchange alone, the GEMMs alone, and both, from medians.

    `gemm_speed` is the speed of the GEMMs beside the exchange, where 1 is their speed alone. `exchange_hidden` is the part of the exchange
    that costs no time beside the GEMMs, at most 1. It is None if both took less time than the GEMMs alone, by more than noise.
    """
    exchange_us, gemms_us, both_us = (statistics.median(schedule.total) for schedule in (exchange, gemms, both))
    part = (exchange_us + gemms_us - both_us) / exchange_us
    figures = {
        "gemm_speed": gemms_us / statistics.median(both.length("GEMMs")),
        "exchange_hidden": None if part > _MOST_HIDDEN else min(part, 1.0),
        "exchange_us": exchange_us,
    }
    for prefix, schedule in {"": both, "exchange_": exchange, "alone_": gemms}.items():
        for phase in schedule.phases:
            name = f"{prefix}{phase.lower()}_us"
            figures[name], figures[f"{name}_p10"], figures[f"{name}_p90"] = spread(schedule.length(phase))
    return figures


def _unmarked() -> None:
    pass


class BesideGemms:
    """Exchanges of one buffer, bf16 in the expert layout, and the GEMMs beside them. Every method is collective."""

    def __init__(self, timer: Timer, buffer: Buffer, shape: Shape, everyone: Sequence[Inputs], rank: int, options: argparse.Namespace):
        """`everyone` has the inputs of all ranks."""
        self.timer, self.buffer, self.shape, self.everyone, self.rank = timer, buffer, shape, everyone, rank
        self.iterations: int = options.iterations
        self.inputs = everyone[rank]
        rows, columns, depth = options.gemm
        random = partial(torch.randn, dtype=torch.bfloat16, device=timer.device)
        self.operands = [(random(rows, depth), random(depth, columns)) for _ in range(_NUM_OPERANDS)]
        self.product = random(rows, columns)
        self.num_gemms = 0  # set when an exchange was timed
        self.out = self._call("dispatch", None)

    def verify(self, op: str, num_sms: int | None) -> bool:
        """Check that results through the hook, after GEMMs, are right and equal the plain call's. Return True or raise EPError."""
        plain, split = self._call(op, num_sms), self._exchange(op, num_sms, _NUM_OPERANDS)
        verify(Operation(op, "bfloat16", "expert", 2 * self.shape.hidden, lambda: split), self.everyone, self.shape, self.rank)
        if op == "combine":
            compare_bits("combined_x through the hook", split, plain, "the plain call's")
            return True
        for name in ("recv_x", "recv_topk_weights", "num_recv_tokens_per_expert"):
            compare_bits(f"{name} through the hook", getattr(split, name), getattr(plain, name), "the plain call's")
        return True

    def measure(self, op: str, num_sms: int | None) -> tuple[Schedule, Schedule, Schedule]:
        """Return the times of the exchange alone, of the GEMMs alone, and of both."""
        exchange = self._schedule(("start", "hook"), partial(self._exchange, op, num_sms, 0))
        self.num_gemms = self.num_gemms or self._enough_gemms(exchange.length("hook"))
        gemms = self._schedule(("GEMMs",), partial(self._compute, self.num_gemms))
        both = self._schedule(("start", "GEMMs", "hook"), partial(self._exchange, op, num_sms, self.num_gemms))
        return exchange, gemms, both

    # ---- what is measured ----

    def _call(self, op: str, num_sms: int | None, **how: Any) -> Any:
        if op == "combine":
            out = self.out
            return self.buffer.combine(out.recv_x, out.handle, out.recv_topk_weights, num_sms=num_sms, **how)
        i, alignment = self.inputs, self.shape.expert_alignment
        return self.buffer.dispatch(i.x, i.topk_idx, i.topk_weights, expert_alignment=alignment, num_sms=num_sms, **how)

    def _exchange(self, op: str, num_sms: int | None, num_gemms: int, mark: Mark = _unmarked) -> Any:
        """Make an exchange in two halves with GEMMs between them, and mark the end of each."""
        result = self._call(op, num_sms, return_hook=True)
        result, hook = result if op == "combine" else (result, result.hook)
        mark()
        if num_gemms > 0:
            self._compute(num_gemms, mark)
        hook()
        mark()
        return result

    def _compute(self, num_gemms: int, mark: Mark = _unmarked) -> None:
        for i in range(num_gemms):
            torch.mm(*self.operands[i % _NUM_OPERANDS], out=self.product)
        mark()

    # ---- how ----

    def _schedule(self, phases: tuple[str, ...], call: Callable[[Mark], Any]) -> Schedule:
        ends = self.timer.marks(call, self.iterations)
        lengths = [[end - begin for begin, end in zip([0.0, *row], row, strict=False)] for row in ends]
        return Schedule(phases, slowest(ends), slowest(lengths))

    def _enough_gemms(self, hook: list[float]) -> int:
        """Return the number of GEMMs, which is the same on all ranks."""
        chain = self._schedule(("GEMMs",), partial(self._compute, _NUM_OPERANDS)).total
        wished = _CHAIN * statistics.median(hook) * _NUM_OPERANDS / statistics.median(chain)
        return min(max(round(wished), 1), _MAX_GEMMS)
