"""Time a call of one process, or of all ranks together, in microseconds: by the host's clock, or by CUDA events on a GPU."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe.tune.timing import SLEEP_US, cycles_per_us, meet, slowest
from deepep_moe.tune.timing import Timer as TunersTimer

WARMUP = 3  # calls that are made first and not counted
_QUEUED = 20  # calls that wait on the device for their turn


def wall_us(call: Callable[[], Any], repeats: int, before: Callable[[], Any] = lambda: None) -> list[float]:
    """Time `repeats` calls by the host's clock. `before` runs before each call and is not timed."""
    times = []
    for _ in range(WARMUP + repeats):
        before()
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return times[WARMUP:]


def kernel_us(call: Callable[[], Any], repeats: int) -> list[float]:
    """Time a call on the device, `repeats` times.

    Each time is the mean of 20 calls. The host queues them while the device sleeps, so the host's time does not count and launches follow
    each other as closely as they can.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    host_us = min(wall_us(lambda: [call() for _ in range(_QUEUED)], 3, before=torch.cuda.synchronize))
    cycles = int((2 * host_us + SLEEP_US) * cycles_per_us(torch.cuda.current_device()))
    times = []
    for _ in range(repeats):
        torch.cuda._sleep(cycles)
        start.record()
        for _ in range(_QUEUED):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / _QUEUED)
    return times


class Timer(TunersTimer):
    """Times one call at a time. All ranks start each call within a few microseconds of each other; every method is collective.

    `stream` keeps the device busy until the host has long entered the call. The time is what the call adds to the stream: from the point
    where the stream reaches the call to the point where its result may be used there. `call` starts from an idle device, so the host's
    time until the first launch counts. On the CPU both are the wall time of the call.
    """

    def __init__(self, device: torch.device, group: "dist.ProcessGroup | None" = None):
        """Take an NCCL `group` for a GPU, by default the default group. `call` and `slowest` move CPU tensors over the default group, whose
        ranks must be processes of one host."""
        super().__init__(device)
        self.group = group
        if self.is_gpu:
            self._token = torch.zeros(1, device=device)
            dist.all_reduce(self._token, group=group)

    def stream(self, call: Callable[[], Any], iterations: int) -> list[float]:
        """Return the time of the slowest rank in every iteration."""
        return slowest([self.once(call) for _ in range(WARMUP + iterations)][WARMUP:])

    def call(self, call: Callable[[], Any], iterations: int) -> list[float]:
        """Return the time of the slowest rank in every iteration."""
        return slowest([self._from_idle(call) for _ in range(WARMUP + iterations)][WARMUP:])

    def once(self, call: Callable[[], Any]) -> float:
        """Return one time of `stream` of this rank alone."""
        if not self.is_gpu:
            return self._from_idle(call)
        self.sleep(SLEEP_US)
        # After the sleep, so that GPUs leave it together, however late their hosts were.
        dist.all_reduce(self._token, group=self.group)
        return self._timed(call)

    def _from_idle(self, call: Callable[[], Any]) -> float:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)
        meet()
        return self._timed(call)
