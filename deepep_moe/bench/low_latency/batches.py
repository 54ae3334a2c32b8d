"""Times of calls too short to be lined up one by one: rows of calls behind a busy device, and CUDA graphs."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe.bench.common.timing import Mark, Timer

BATCH = 200
"""Calls in a row that keep their ranks in step themselves."""
GRAPH_CALLS = 20
"""Of the graph whose mean has no events in it."""
_DROP = 10  # calls at the begin of a batch, in which ranks find into step
_GAP_US = 60.0  # between halves, in which the rows arrive
_FIRST_SLEEP_US, _LONGEST_SLEEP_US = 1e3, 1e5


@dataclass(frozen=True)
class Times:
    """Microseconds of the rank with the largest median, by call."""

    us: list[float]
    host_us: float | None = None
    """Mean that the host needs for a call; None on the CPU, where it is the same."""
    is_ahead: bool = True
    """The host had queued each batch before the device began it."""


class Batches:
    """Measures calls that keep ranks in step: every rank makes the same ones, each waits for the peers' part. Collective.

    On a GPU in batches, behind a sleep that lasts until the host has queued the batch, with an event between each two calls: the time from
    one to the next is that of the call and of one event. On the CPU the wall time of each call, begun by all ranks at the same moment.
    """

    def __init__(self, timer: Timer):
        self.timer = timer
        self._events: list[torch.cuda.Event] = []
        if timer.is_gpu:
            self._stream = torch.cuda.Stream(timer.device)

    def times(self, call: Callable[[], Any], iterations: int, batch: int = BATCH, drop: int = _DROP) -> Times:
        if not self.timer.is_gpu:
            return of_slowest_rank(self.timer.own_stream(call, iterations))

        def marked(mark: Mark) -> None:
            call()
            mark()

        rows, host_us, is_ahead = self._rows(marked, iterations, batch, drop)
        return of_slowest_rank([row[0] for row in rows], host_us, is_ahead)

    def halves(self, send: Callable[[], tuple[Any, Callable[[], None]]], iterations: int) -> tuple[Times, Times]:
        """Of the half that sends, and of the half that receives, begun when the rows are there."""

        def marked(mark: Mark) -> None:
            result, hook = send()
            mark()
            self._pause()
            mark()
            hook()
            mark()
            del result

        if self.timer.is_gpu:
            rows, host_us, is_ahead = self._rows(marked, iterations, BATCH // 2, _DROP)
        else:
            ends = self.timer.marks(marked, iterations)
            rows, host_us, is_ahead = [[row[0], row[1] - row[0], row[2] - row[1]] for row in ends], None, True
        sent, _, received = zip(*rows, strict=True)
        return of_slowest_rank(list(sent), host_us, is_ahead), of_slowest_rank(list(received), host_us, is_ahead)

    def event_us(self) -> float | None:
        """From one event to the next with nothing between; part of every time on a GPU."""
        return statistics.median(self.times(lambda: None, BATCH).us) if self.timer.is_gpu else None

    def graph(self, call: Callable[[], Any], num_calls: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
        """A graph of `num_calls` calls, and the result of the last one."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.timer.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = call()  # what a first call on a stream allocates would not be allowed in a capture
            self._stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")  # NCCL's watchdog goes on asking for its events
            try:
                for _ in range(num_calls):
                    del result
                    result = call()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph, result

    def _pause(self) -> None:
        if self.timer.is_gpu:
            self.timer.sleep(_GAP_US)
        else:
            end = time.perf_counter() + _GAP_US / 1e6
            while time.perf_counter() < end:
                pass

    def _rows(self, marked: Callable[[Mark], None], iterations: int, batch: int, drop: int) -> tuple[list[list[float]], float, bool]:
        """Times from mark to mark, a row for each call; the host's mean time of a call; was it ahead of the device?"""
        rows: list[list[float]] = []
        sleep_us, all_ahead, hosts = _FIRST_SLEEP_US, True, []
        while len(rows) < iterations:
            found, host_us, was_ahead = self._batch(marked, min(batch, iterations - len(rows) + drop), sleep_us)
            state = torch.tensor([host_us, not was_ahead], dtype=torch.float64)
            dist.all_reduce(state, op=dist.ReduceOp.MAX)
            if state[1] and sleep_us < _LONGEST_SLEEP_US:  # not counted, made again
                sleep_us = min(max(2 * sleep_us, 1.5 * float(state[0])), _LONGEST_SLEEP_US)
                continue
            all_ahead = all_ahead and not state[1]
            rows += found[drop:]
            hosts.append(host_us / len(found))
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


def of_slowest_rank(us: list[float], host_us: float | None = None, is_ahead: bool = True) -> Times:
    """The times of the rank whose median is the largest; the maximum of each call would count every late event of any rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, Times(us, host_us, is_ahead))
    return max(everyone, key=lambda times: statistics.median(times.us))
