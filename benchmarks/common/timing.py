"""Time a call of one process, in microseconds: by the host's clock, or by CUDA events on a GPU."""

import time
from collections.abc import Callable
from typing import Any

import torch

from deepep_moe.tune.timing import SLEEP_US, WARMUP, cycles_per_us

_QUEUED = 20  # calls that wait on the device for their turn


def _nothing() -> None:
    pass


def wall_us(call: Callable[[], Any], repeats: int, before: Callable[[], Any] = _nothing) -> list[float]:
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
