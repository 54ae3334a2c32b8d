"""Experts that are split over tensor-parallel ranks: choices of experts as choices of their shards."""

import torch


def repeat_for_tp(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_local_experts: int, tp_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Address every tensor-parallel shard of each chosen expert as an expert of its own.

    Rank `e * tp_size + t` of the group of all shards holds shard `t` of the experts of expert-parallel rank `e`. So the expert
    `e * num_local_experts + i` becomes experts `(e * tp_size + t) * num_local_experts + i` for all `t`. Combine then adds up the
    shards' partial outputs.

    topk_idx, topk_weights [num_tokens, num_topk] -> both [num_tokens, num_topk * tp_size].
    """
    if tp_size == 1:
        return topk_idx, topk_weights
    first = topk_idx + topk_idx.div(num_local_experts, rounding_mode="floor") * num_local_experts * (tp_size - 1)
    shards = torch.arange(tp_size, device=topk_idx.device) * num_local_experts
    repeated = torch.where(topk_idx.unsqueeze(2) < 0, -1, first.unsqueeze(2) + shards)
    weights = topk_weights.unsqueeze(2).expand(-1, -1, tp_size)
    return repeated.flatten(1), weights.flatten(1)


def choice_of_shards(topk_idx: torch.Tensor, num_local_experts: int, tp_size: int) -> torch.Tensor:
    """Return the chosen experts of which `repeat_for_tp` has made topk_idx: [num_tokens, num_topk * tp_size] -> [num_tokens, num_topk]."""
    first = topk_idx[:, ::tp_size].to(torch.int64)
    if tp_size == 1:
        return first
    choice = first.div(num_local_experts * tp_size, rounding_mode="floor") * num_local_experts + first % num_local_experts
    return torch.where(first < 0, -1, choice)
