"""Times of calls that all ranks make together, by CUDA events on a GPU and by the clock on the CPU."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

WARMUP = 3
_SLEEP_US = 1000.0  # of the device, while the host reaches the first launch of the call
_LEAD_S = 1e-3  # from the agreement on a moment to that moment
_MAX_MARKS = 4  # in one call

Mark = Callable[[], None]
_Times = TypeVar("_Times", list[float], list[list[float]])


class Timer:
    """Measures one call at a time, each turn begun by all ranks within a few microseconds.

    `stream`: the device is busy until the host has long entered the call, so the time is what the call adds to the stream: from the point
    where the stream reaches it to the point where its result may be used there. `call`: the device is idle when the call is made, so the
    host's way to the first launch counts. On the CPU both are the wall time of the call. Times are microseconds; collective.
    """

    def __init__(self, device: torch.device, group: "dist.ProcessGroup | None" = None):
        """`group`: of NCCL, for a GPU. The default group must move CPU tensors, and its ranks must be processes of one host."""
        self.device, self.group = device, group
        self.is_gpu = device.type == "cuda"
        if self.is_gpu:
            self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._marked = [torch.cuda.Event(enable_timing=True) for _ in range(_MAX_MARKS)]
            self._token = torch.zeros(1, device=device)
            dist.all_reduce(self._token, group=group)
            self._cycles_per_us = self._clock()

    def stream(self, call: Callable[[], Any], iterations: int) -> list[float]:
        """Of the slowest rank in every iteration."""
        return slowest(self.own_stream(call, iterations))

    def call(self, call: Callable[[], Any], iterations: int) -> list[float]:
        """Of the slowest rank in every iteration."""
        return slowest([self._call_once(call) for _ in range(WARMUP + iterations)][WARMUP:])

    def own_stream(self, call: Callable[[], Any], iterations: int) -> list[float]:
        """As `stream`, of this rank alone."""
        once = self._stream_once if self.is_gpu else self._call_once
        return [once(call) for _ in range(WARMUP + iterations)][WARMUP:]

    def marks(self, call: Callable[[Mark], Any], iterations: int) -> list[list[float]]:
        """As `own_stream`, of `call(mark)`: from its begin to each of its calls of `mark`, equally many every time, by iteration."""
        once = self._marks_on_stream if self.is_gpu else self._marks_by_clock
        return [once(call) for _ in range(WARMUP + iterations)][WARMUP:]

    def synchronize(self) -> None:
        """All ranks and their devices are through with everything."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)
        dist.barrier()

    def sleep(self, us: float) -> None:
        """Keep the GPU's current stream busy for `us` microseconds, longer where its clock is slow."""
        torch.cuda._sleep(int(us * self._cycles_per_us))

    def _line_up(self) -> None:
        self.sleep(_SLEEP_US)
        dist.all_reduce(self._token, group=self.group)  # behind the sleep: GPUs leave it together, however late their hosts were

    def _stream_once(self, call: Callable[[], Any]) -> float:
        self._line_up()
        self._start.record()
        result = call()
        self._end.record()
        self._end.synchronize()
        del result  # memory goes back after the measurement
        return self._start.elapsed_time(self._end) * 1e3

    def _marks_on_stream(self, call: Callable[[Mark], Any]) -> list[float]:
        unused, used = iter(self._marked), []

        def mark() -> None:
            used.append(next(unused))
            used[-1].record()

        self._line_up()
        self._start.record()
        result = call(mark)
        used[-1].synchronize()
        del result  # memory goes back after the measurement
        return [self._start.elapsed_time(event) * 1e3 for event in used]

    def _marks_by_clock(self, call: Callable[[Mark], Any]) -> list[float]:
        _meet()
        moments = [time.perf_counter()]
        result = call(lambda: moments.append(time.perf_counter()))
        del result
        return [(moment - moments[0]) * 1e6 for moment in moments[1:]]

    def _call_once(self, call: Callable[[], Any]) -> float:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)
        _meet()
        if not self.is_gpu:
            begin = time.perf_counter()
            result = call()
            elapsed = (time.perf_counter() - begin) * 1e6
        else:
            self._start.record()
            result = call()
            self._end.record()
            self._end.synchronize()
            elapsed = self._start.elapsed_time(self._end) * 1e3
        del result
        return elapsed

    def _clock(self) -> float:
        """Cycles that this GPU counts in a microsecond at its highest clock."""
        probe, shortest_ms = 2_000_000, float("inf")
        for _ in range(20):
            self._start.record()
            torch.cuda._sleep(probe)
            self._end.record()
            self._end.synchronize()
            shortest_ms = min(shortest_ms, self._start.elapsed_time(self._end))
        return probe / (shortest_ms * 1e3)


def _meet() -> None:
    """Returns on every rank at the same moment of the host's monotonic clock, which its processes share."""
    moment = torch.tensor([time.monotonic() + _LEAD_S], dtype=torch.float64)
    dist.all_reduce(moment, op=dist.ReduceOp.MAX)
    agreed = moment.item()
    while time.monotonic() < agreed:
        pass


def slowest(times: _Times) -> _Times:
    """An exchange is over when its last rank is done: the maximum over ranks of every time."""
    table = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return table.tolist()
