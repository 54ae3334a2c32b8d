"""Copies of hot experts, so that ranks have similar loads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepep_moe import _C, reference
from deepep_moe.arguments import as_int, check_is_tensor, check_plain, check_tensor
from deepep_moe.device import is_gpu, launch
from deepep_moe.installed import without_nvcc
from deepep_moe.library import call, refuse_transforms, register

_MOST = 2**31 - 1


@dataclass(frozen=True)
class CopyPlan:
    """A plan of the copies of experts, and the way of this rank's rows to them."""

    copies: Tensor
    """[num_ranks, num_slots] int32: the expert in each expert slot of each rank, or -1, as `ExpertSlots` takes it."""
    rows: Tensor
    """[num_ranks, num_slots] int32: rows that the copy takes, 0 where there is none."""
    topk_idx: Tensor
    """[num_tokens, num_topk]: this rank's topk_idx with physical experts, in its dtype. Those of a rank are its
    num_experts / num_ranks home experts, then its expert slots."""


def plan_copies(topk_idx: Tensor, counts: Tensor, rank: int, *, num_slots: int, cost: int, capacity: int | None = None) -> CopyPlan:
    """Plan copies of the experts with the most rows on ranks with few, and send this rank's rows to them. Without gradient.

    All ranks get the same `copies` and `rows` from the same arguments; `deepep_moe.reference.plan_copies` defines them, and
    `deepep_moe.reference.physical_topk_idx` defines `topk_idx`. On a GPU this is one kernel, for which the host does not wait.

    Args:
        topk_idx: [num_tokens, num_topk] int64 or int32, the experts of this rank's tokens, -1 = none. A bad index becomes one that a
            dispatch refuses.
        counts: [num_ranks, num_experts] int32, rows that each rank sends to each expert, on the device of topk_idx. Their sum is below
            2^31, and row `rank` counts topk_idx. At most 64 ranks; they divide the experts.
        rank: this rank.

        num_slots: copies that a rank may hold.
        cost: rows that a rank computes while one copy moves. A copy takes at least as many, unless it needs fewer to meet `capacity`.
        capacity: rows that a rank has room for, or None. The plan meets a capacity of the mean load or more if num_slots is num_experts /
            num_ranks or more. With fewer slots the caller must compare.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, device or number; on the CPU also negative counts. On a GPU, more ranks, experts and slots than fit
            into its shared memory.
    """
    refuse_transforms("plan_copies", {"topk_idx": topk_idx, "counts": counts})
    for name, tensor, dtypes in (("topk_idx", topk_idx, (torch.int64, torch.int32)), ("counts", counts, (torch.int32,))):
        check_is_tensor(name, tensor)
        check_plain(name, tensor)
        check_tensor(name, tensor, tensor.shape, dtypes, topk_idx.device, any_strides=True, like="topk_idx")
    if topk_idx.dim() != 2 or counts.dim() != 2:
        raise ValueError(
            f"topk_idx and counts have shapes {list(topk_idx.shape)} and {list(counts.shape)}; they must be [num_tokens, num_topk] and "
            "[num_ranks, num_experts]"
        )
    num_ranks, num_experts = counts.shape
    if is_gpu(topk_idx.device) and not hasattr(_C, "gpu_plan_copies"):
        raise ValueError(without_nvcc("plans of copies on GPUs"))
    if not 1 <= num_ranks <= _C.MAX_RANKS or num_experts < 1 or num_experts % num_ranks:
        raise ValueError(
            f"counts has shape {[num_ranks, num_experts]}; it must be [num_ranks, num_experts] of at most {_C.MAX_RANKS} ranks that divide "
            "the experts"
        )
    rank = as_int("rank", rank, least=0, most=num_ranks - 1)
    num_slots = as_int("num_slots", num_slots, least=0, most=num_experts)
    cost = as_int("cost", cost, least=0, most=_MOST)
    capacity = -1 if capacity is None else as_int("capacity", capacity, least=0, most=_MOST)
    return CopyPlan(*call("plan_copies", (topk_idx, counts), rank, num_slots, cost, capacity))


def _plan(topk_idx: Tensor, counts: Tensor, rank: int, num_slots: int, cost: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    topk_idx, counts = topk_idx.contiguous(), counts.contiguous()
    if is_gpu(topk_idx.device):
        copies, rows, physical = _empty_plan(topk_idx, counts, rank, num_slots, cost, capacity)
        launch(_C.gpu_plan_copies, topk_idx, counts, copies, rows, physical, rank, cost, capacity, on=topk_idx)
        return copies, rows, physical
    is_bad = (counts < 0) | (counts.flatten().cumsum(0).view_as(counts) > _MOST)
    if is_bad.any():
        source, expert = is_bad.nonzero()[0].tolist()
        raise ValueError(f"counts[{source}][{expert}] is {int(counts[source, expert])}; counts must be at least 0, with a sum below 2^31")
    copies, rows = reference.plan_copies(counts, num_slots, cost, capacity)
    return copies, rows, reference.physical_topk_idx(topk_idx, counts, copies, rows, rank)


def _empty_plan(topk_idx: Tensor, counts: Tensor, _rank: int, num_slots: int, *_: int) -> tuple[Tensor, Tensor, Tensor]:
    copies = counts.new_empty(counts.shape[0], num_slots)
    return copies, torch.empty_like(copies), torch.empty_like(topk_idx, memory_format=torch.contiguous_format)


_SCHEMA = "plan_copies(Tensor topk_idx, Tensor counts, int rank, int num_slots, int cost, int capacity) -> (Tensor, Tensor, Tensor)"
register(_SCHEMA, _plan, _empty_plan)
