"""From Megatron-Core's dense routing to `topk_idx` and `topk_weights`."""

import torch


def topk_from_map(routing_map: torch.Tensor, num_topk: int) -> torch.Tensor:
    """Experts each token goes to, ascending, -1 behind them where a token has fewer than `num_topk`.

    routing_map [num_tokens, num_experts] bool -> topk_idx [num_tokens, num_topk] int64. Read from the map and not from the largest
    probs, because a chosen expert's prob can be exactly 0. The host does not wait for a GPU.

    Raises ValueError for a token with more than `num_topk` experts (on a GPU: a device-side assertion).
    """
    num_experts = routing_map.shape[1]
    excess = routing_map.sum(dim=1) > num_topk
    message = f"a token is routed to more than num_topk={num_topk} of {num_experts} experts; set moe_router_topk to the largest count"
    if excess.is_cuda:
        torch._assert_async(~excess.any(), message)
    elif bool(excess.any()):
        raise ValueError(message)
    # Distinct positive keys for the chosen experts, larger for lower ones, 0 for the rest: top-k has one answer, in ascending order.
    keys = routing_map * torch.arange(num_experts, 0, -1, device=routing_map.device)
    largest = keys.topk(min(num_topk, num_experts), dim=1).values
    topk_idx = torch.where(largest > 0, num_experts - largest, -1)
    return torch.nn.functional.pad(topk_idx, (0, num_topk - topk_idx.shape[1]), value=-1)


def weights_at(probs: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
    """Probs of the chosen experts: probs [num_tokens, num_experts], topk_idx -> [num_tokens, num_topk] fp32, 0 at -1; differentiable."""
    return probs.gather(1, topk_idx.clamp(min=0)).float().masked_fill(topk_idx < 0, 0.0)


def repeat_for_tp(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_local_experts: int, tp_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Address every tensor-parallel shard of each chosen expert as an expert of its own.

    Rank `e * tp_size + t` of the group of all shards holds shard `t` of the experts of expert-parallel rank `e`, so expert
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
