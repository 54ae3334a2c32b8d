"""Time calls that are too short to be lined up one by one: batches of calls behind a busy device, and CUDA graphs."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.timing import WARMUP, Timer
from deepep_moe.tune.timing import meet

BATCH = 200
"""Calls of a batch. They keep their ranks in step themselves."""
GRAPH_CALLS = 20
"""Calls in the graph whose mean includes no events."""
_DROP = 10  # the first calls of a batch, until ranks are in step
_GAP_US = 60.0  # the time between halves, in which the rows arrive
_FIRST_SLEEP_US, _LONGEST_SLEEP_US = 1e3, 1e5

Mark = Callable[[], None]


@dataclass(frozen=True)
class Times:
    """Microseconds of each call, of the rank with the largest median."""

    us: list[float]
    host_us: float | None = None
    """Mean time of the host for a call; None on the CPU, where it equals `us`."""
    is_ahead: bool = True
    """True if the host had queued each batch before the device began it."""


class Batches:
    """Times calls that keep ranks in step: every rank makes the same calls, and each call waits for the peers' part. Collective.

    On a GPU the device sleeps until the host has queued a batch, which has an event between each two calls. The time between two events
    is that of a call and of one event. On the CPU it is the wall time of each call, which all ranks start at the same moment.
    """

    def __init__(self, timer: Timer):
        self.timer = timer
        self._events: list[torch.cuda.Event] = []
        if timer.is_gpu:
            self._stream = torch.cuda.Stream(timer.device)

    def times(self, call: Callable[[], Any], iterations: int, batch: int = BATCH, drop: int = _DROP) -> Times:
        def marked(mark: Mark) -> None:
            call()
            mark()

        rows, host_us, is_ahead = self._rows(marked, iterations, batch, drop)
        return of_slowest_rank([row[0] for row in rows], host_us, is_ahead)

    def halves(self, send: Callable[[], tuple[Any, Callable[[], None]]], iterations: int) -> tuple[Times, Times]:
        """Time the half that sends, and the half that receives, which starts when the rows are there."""
        pause = partial(self.timer.sleep, _GAP_US) if self.timer.is_gpu else partial(time.sleep, _GAP_US / 1e6)

        def marked(mark: Mark) -> None:
            result, hook = send()
            mark()
            pause()
            mark()
            hook()
            mark()
            del result

        rows, host_us, is_ahead = self._rows(marked, iterations, BATCH // 2, _DROP)
        sent, _, received = zip(*rows, strict=True)
        return of_slowest_rank(list(sent), host_us, is_ahead), of_slowest_rank(list(received), host_us, is_ahead)

    def event_us(self) -> float | None:
        """Return the time from one event to the next with nothing between, which is part of every time on a GPU."""
        return statistics.median(self.times(lambda: None, BATCH).us) if self.timer.is_gpu else None

    def graph(self, call: Callable[[], Any], num_calls: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Return a graph of `num_calls` calls, and the result of the last call."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.timer.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = call()  # a first call on a stream allocates what a capture must not
            self._stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")  # NCCL's watchdog thread keeps querying events
            try:
                for _ in range(num_calls):
                    del result
                    result = call()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph, result

    def _rows(self, marked: Callable[[Mark], None], iterations: int, batch: int, drop: int) -> tuple[list[list[float]], float | None, bool]:
        """Return the times from mark to mark, a row for each call, the host's mean time of a call, and whether the host was ahead."""
        if not self.timer.is_gpu:
            return [_by_clock(marked) for _ in range(WARMUP + iterations)][WARMUP:], None, True
        rows: list[list[float]] = []
        sleep_us, all_ahead, hosts = _FIRST_SLEEP_US, True, []
        while len(rows) < iterations:
            of_batch, host_us, was_ahead = self._batch(marked, min(batch, iterations - len(rows) + drop), sleep_us)
            state = torch.tensor([host_us, not was_ahead], dtype=torch.float64)
            dist.all_reduce(state, op=dist.ReduceOp.MAX)
            if state[1] and sleep_us < _LONGEST_SLEEP_US:  # the batch is not counted, but repeated
                sleep_us = min(max(2 * sleep_us, 1.5 * float(state[0])), _LONGEST_SLEEP_US)
                continue
            all_ahead = all_ahead and not state[1]
            rows += of_batch[drop:]
            hosts.append(host_us / len(of_batch))
        return rows, statistics.median(hosts), all_ahead

    def _batch(self, marked: Callable[[Mark], None], count: int, sleep_us: float) -> tuple[list[list[float]], float, bool]:
        used = 0

        def mark() -> None:
            nonlocal used
            if used == len(self._events):
                self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[used].record()
            used += 1

        self.timer.synchronize()
        self.timer.sleep(sleep_us)
        mark()
        begin = time.perf_counter()
        for _ in range(count):
            marked(mark)
        host_us = (time.perf_counter() - begin) * 1e6
        was_ahead = not self._events[0].query()
        events = self._events[:used]
        events[-1].synchronize()
        lengths = [a.elapsed_time(b) * 1e3 for a, b in pairwise(events)]
        marks = len(lengths) // count
        return [lengths[i : i + marks] for i in range(0, len(lengths), marks)], host_us, was_ahead


def _by_clock(marked: Callable[[Mark], None]) -> list[float]:
    """Return the times from mark to mark of a call that all ranks start at the same moment."""
    meet()
    moments = [time.perf_counter()]
    marked(lambda: moments.append(time.perf_counter()))
    return [(after - before) * 1e6 for before, after in pairwise(moments)]


def of_slowest_rank(us: list[float], host_us: float | None = None, is_ahead: bool = True) -> Times:
    """Return the times of the rank with the largest median. A maximum for each call would count every late event of any rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, Times(us, host_us, is_ahead))
    return max(everyone, key=lambda times: statistics.median(times.us))
