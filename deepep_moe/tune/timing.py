"""Time a call that all ranks make together, in microseconds: by the host's clock, or by CUDA events on a GPU."""

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

WARMUP = 3  # calls that are made first and not counted
SLEEP_US = 1000.0  # the device sleeps while the host reaches the first launch of the call
_LEAD_S = 1e-3  # ranks agree on a start that is this far ahead
_MAX_MARKS = 4  # in one call

Mark = Callable[[], None]
_Times = TypeVar("_Times", list[float], list[list[float]])


@functools.cache
def cycles_per_us(device_idx: int) -> float:
    """Measure how many cycles `torch.cuda._sleep` counts in a microsecond at the highest clock of the current device, `device_idx`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    probe, shortest_ms = 2_000_000, float("inf")
    torch.cuda.synchronize()
    for _ in range(20):
        start.record()
        torch.cuda._sleep(probe)
        end.record()
        end.synchronize()
        shortest_ms = min(shortest_ms, start.elapsed_time(end))
    return probe / (shortest_ms * 1e3)


class Timer:
    """Times one call at a time. All ranks start each call within a few microseconds of each other; every method is collective.

    `stream` keeps the device busy until the host has long entered the call. The time is what the call adds to the stream: from the point
    where the stream reaches the call to the point where its result may be used there. `call` starts from an idle device, so the host's
    time until the first launch counts. On the CPU both are the wall time of the call.
    """

    def __init__(self, device: torch.device, group: "dist.ProcessGroup | None" = None, *, meets_on_host: bool = False):
        """Take an NCCL `group` for a GPU, by default the default group. `call` and `slowest` move CPU tensors over the default group, whose
        ranks must be processes of one host.

        `meets_on_host`: ranks start by their hosts' clock instead of NCCL, which has no groups of ranks that share a GPU.
        """
        self.device, self.group, self.meets_on_host = device, group, meets_on_host
        self.is_gpu = device.type == "cuda"
        if self.is_gpu:
            self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._marked = [torch.cuda.Event(enable_timing=True) for _ in range(_MAX_MARKS)]
            self._token = torch.zeros(1, device=device)
            if not meets_on_host:
                dist.all_reduce(self._token, group=group)
            self._cycles_per_us = cycles_per_us(torch.cuda.current_device())

    def stream(self, call: Callable[[], Any], iterations: int) -> list[float]:
        """Return the time of the slowest rank in every iteration."""
        return slowest(self.own_stream(call, iterations))

    def call(self, call: Callable[[], Any], iterations: int) -> list[float]:
        """Return the time of the slowest rank in every iteration."""
        return slowest([self._call_once(call) for _ in range(WARMUP + iterations)][WARMUP:])

    def own_stream(self, call: Callable[[], Any], iterations: int) -> list[float]:
        """Return the times of `stream` of this rank alone."""
        once = self._stream_once if self.is_gpu else self._call_once
        return [once(call) for _ in range(WARMUP + iterations)][WARMUP:]

    def marks(self, call: Callable[[Mark], Any], iterations: int) -> list[list[float]]:
        """Return, for every iteration, what `marks_once` returns."""
        return [self.marks_once(call) for _ in range(WARMUP + iterations)][WARMUP:]

    def marks_once(self, call: Callable[[Mark], Any]) -> list[float]:
        """Return the times from the start of `call(mark)` to each of its calls of `mark`, on the stream of this rank."""
        return self._marks_on_stream(call) if self.is_gpu else self._marks_by_clock(call)

    def synchronize(self) -> None:
        """Wait until all ranks and their devices have finished their work."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)
        dist.barrier()

    def sleep(self, us: float) -> None:
        """Keep the GPU's current stream busy for `us` microseconds, or longer while its clock is slow."""
        torch.cuda._sleep(int(us * self._cycles_per_us))

    def _line_up(self) -> None:
        if self.meets_on_host:
            torch.cuda.synchronize(self.device)
            _meet()
        self.sleep(SLEEP_US)
        if not self.meets_on_host:
            # After the sleep, so that GPUs leave it together, however late their hosts were.
            dist.all_reduce(self._token, group=self.group)

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


def _meet() -> None:
    """Return on every rank at the same moment of the host's monotonic clock, which its processes share."""
    moment = torch.tensor([time.monotonic() + _LEAD_S], dtype=torch.float64)
    dist.all_reduce(moment, op=dist.ReduceOp.MAX)
    agreed = moment.item()
    while time.monotonic() < agreed:
        pass


def slowest(times: _Times) -> _Times:
    """Return the maximum over ranks of every time, as an exchange ends when its last rank is done."""
    table = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return table.tolist()
