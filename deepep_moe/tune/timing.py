"""Time a call that all ranks of a host make together, in microseconds: by CUDA events on a GPU, else by the host's clock."""

import functools
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

SLEEP_US = 1000.0  # the device sleeps while the host reaches the first launch of the call
_LEAD_S = 1e-3  # ranks agree on a start that is this far ahead

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
    """Times one call at a time, which all ranks start by their host's clock, also ranks that share a GPU. Every method is collective."""

    def __init__(self, device: torch.device):
        self.device, self.is_gpu = device, device.type == "cuda"
        if self.is_gpu:
            self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._cycles_per_us = cycles_per_us(torch.cuda.current_device())

    def once(self, call: Callable[[], object]) -> float:
        """Return what `call` adds to a busy stream of this rank; without a GPU its wall time."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)
        meet()
        if self.is_gpu:
            self.sleep(SLEEP_US)
        return self._timed(call)

    def sleep(self, us: float) -> None:
        """Keep the GPU's current stream busy for `us` microseconds, or longer while its clock is slow."""
        torch.cuda._sleep(int(us * self._cycles_per_us))

    def _timed(self, call: Callable[[], object]) -> float:
        if not self.is_gpu:
            begin = time.perf_counter()
            result = call()
            elapsed_us = (time.perf_counter() - begin) * 1e6
        else:
            self._start.record()
            result = call()
            self._end.record()
            self._end.synchronize()
            elapsed_us = self._start.elapsed_time(self._end) * 1e3
        del result  # memory goes back after the measurement
        return elapsed_us

    def synchronize(self) -> None:
        """Wait until all ranks and their devices have finished their work."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)
        dist.barrier()


def meet() -> None:
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
