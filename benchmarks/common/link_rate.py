"""The rate of the copy engine over the link, which dispatch and combine are compared with."""

import statistics
from functools import partial

import torch
import torch.distributed as dist

from deepep_moe import Buffer
from deepep_moe.tune.timing import Timer, slowest

_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}


def link_gbps(timer: Timer, iterations: int) -> float | None:
    """Return the GB/s of one direction while every GPU copies a large block to the next one, of the slowest GPU.

    On the CPU it is the rate of memcpy while all ranks copy. A single rank gets None.
    """
    num_ranks, num_bytes = dist.get_world_size(), _BYTES[timer.device.type]
    if num_ranks == 1:
        return None
    if timer.is_gpu:
        hidden = 8192  # a slot of the workspace holds this many fp32 columns
        buffer = Buffer(None, num_bytes // hidden // 4, hidden, num_ranks, 1, backend="nvlink")
        copy = partial(buffer.calls.backend.copy_to, (dist.get_rank() + 1) % num_ranks, num_bytes)  # type: ignore[attr-defined]
    else:
        source, target = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
        copy = partial(target.copy_, source)
    times = timer.own_stream(copy, iterations)
    (median,) = slowest([statistics.median(times)])
    timer.synchronize()
    if timer.is_gpu:
        buffer.destroy()
    return num_bytes / median / 1e3
