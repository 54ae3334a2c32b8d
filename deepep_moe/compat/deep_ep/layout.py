"""Counts for DeepEP's callers, before a dispatch. The dispatch counts again in its own kernels."""

import torch
from torch import Tensor

from deepep_moe.ops.lanes import count_lanes


def dispatch_layout(topk_idx: Tensor, num_experts: int, num_ranks: int, num_nodes: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return the counts of `Buffer.get_dispatch_layout` for `topk_idx` [num_tokens, num_topk] int32 or int64, -1 = no expert.

    The host waits for nothing. An index out of range is found by the dispatch, not here. Raises ValueError for another shape or number
    of experts.
    """
    if topk_idx.dim() != 2:
        raise ValueError(f"topk_idx has shape {list(topk_idx.shape)}; it must be [num_tokens, num_topk]")
    if num_experts < 1 or num_experts % num_ranks:
        raise ValueError(f"num_experts is {num_experts}; it must be a multiple of the group's {num_ranks} ranks")
    topk_idx = topk_idx if topk_idx.dtype in (torch.int64, torch.int32) else topk_idx.long()
    per_rank, per_expert, in_rank = count_lanes(topk_idx, num_experts, num_ranks)
    per_node = None
    if num_nodes > 1:
        per_node = in_rank.unflatten(1, (num_nodes, -1)).any(2).sum(0, dtype=torch.int32)
    return per_rank, per_node, per_expert, in_rank


def lanes_of_ranks(is_token_in_rank: Tensor, num_experts: int) -> Tensor:
    """Return a topk_idx [num_tokens, num_ranks] int64 for tokens whose experts the caller keeps to himself: lane r names the first expert
    of rank r, or -1. Raises ValueError for another shape."""
    if is_token_in_rank.dim() != 2 or is_token_in_rank.dtype != torch.bool:
        wrong = f"shape {list(is_token_in_rank.shape)} and dtype {is_token_in_rank.dtype}"
        raise ValueError(f"is_token_in_rank has {wrong}; it must be [num_tokens, num_ranks] torch.bool")
    num_ranks = is_token_in_rank.shape[1]
    first = torch.arange(0, num_experts, num_experts // num_ranks, device=is_token_in_rank.device)
    return torch.where(is_token_in_rank, first, -1)
