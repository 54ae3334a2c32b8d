"""The rows that an exchange sends over the link, and the rate of the copy engine, which they are compared with."""

import statistics
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.timing import Timer
from benchmarks.common.workload import Shape
from deepep_moe import Buffer
from deepep_moe.ops.routing import is_token_in_rank

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
    median = statistics.median(timer.stream(copy, iterations))
    timer.synchronize()
    if timer.is_gpu:
        buffer.destroy()
    return num_bytes / median / 1e3


def gather_counts(counts: Tensor) -> Tensor:
    """Return `counts` of every rank, on a device of the default group and of one shape, as [num_ranks, ...]. Collective."""
    gathered = [torch.empty_like(counts) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, counts)
    return torch.stack(gathered)


def tokens_from_to(topk_idx: Tensor, shape: Shape) -> Tensor:
    """Return how many tokens go from each rank to each rank, [num_ranks, num_ranks] int64 on the CPU. Collective."""
    return gather_counts(is_token_in_rank(topk_idx, shape.num_ranks, shape.num_local_experts).sum(0).cpu())


def rows_to_others(goes: Tensor) -> int:
    """Return the rows that this rank sends over the link in a dispatch. goes: [num_tokens, num_ranks] bool, where its tokens go."""
    return int(goes.sum() - goes[:, dist.get_rank()].sum())


def link_rows(from_to: Tensor) -> dict[str, int]:
    """Return, by operation, the most rows that one rank sends over the link. `from_to` is what `tokens_from_to` returns.

    A token goes to a remote rank once, however many of its experts it chose. Combine sends the same rows back.
    """
    remote = from_to.clone().fill_diagonal_(0)
    out, back = int(remote.sum(1).max()), int(remote.sum(0).max())
    return {"dispatch": out, "cached dispatch": out, "combine": back}
