"""Convert Megatron-Core's dense routing to `topk_idx` and `topk_weights`."""

import functools
import logging
from typing import Any

import torch

_log = logging.getLogger(__name__)


def topk_from_dense(routing_map: torch.Tensor, probs: torch.Tensor, num_topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token and their probs, differentiable in `probs`. One kernel on a GPU with Triton; the host does not wait.

    routing_map [num_tokens, num_experts] bool, probs the same -> topk_idx [num_tokens, num_topk] int64, as `topk_from_map`;
    topk_weights fp32, as `weights_at`.
    """
    kernels = _kernels() if probs.is_cuda else None
    if kernels is not None:
        return kernels.TopkFromDense.apply(routing_map, probs, num_topk)
    topk_idx = topk_from_map(routing_map, num_topk)
    return topk_idx, weights_at(probs, topk_idx)


@functools.cache
def _kernels() -> Any:
    """Return the module of Triton kernels, or None where Triton is not installed, which one log line says."""
    try:
        from deepep_moe.integrations.megatron import routing_kernels
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        _log.info("Triton is not installed: PyTorch's operators convert dense routing to top-k lists, in a dozen launches instead of one")
        return None
    return routing_kernels


def topk_from_map(routing_map: torch.Tensor, num_topk: int) -> torch.Tensor:
    """Return the experts of each token in ascending order, followed by -1 where a token has fewer than `num_topk`.

    routing_map [num_tokens, num_experts] bool -> topk_idx [num_tokens, num_topk] int64. The experts are read from the map and not from
    the largest probs, because a chosen expert's prob can be exactly 0. A token with more than `num_topk` experts gets `num_experts` in
    lane 0, which is no expert. The dispatch refuses that and tells the peers, who would wait for a rank that raised here.
    """
    num_experts = routing_map.shape[1]
    # Chosen experts get distinct positive keys, larger for lower experts, and the rest get 0. So top-k has one answer, in ascending order.
    keys = routing_map * torch.arange(num_experts, 0, -1, device=routing_map.device)
    largest = keys.topk(min(num_topk, num_experts), dim=1).values
    topk_idx = torch.where(largest > 0, num_experts - largest, -1)
    topk_idx[:, :1].masked_fill_(routing_map.sum(dim=1, keepdim=True) > num_topk, num_experts)
    return torch.nn.functional.pad(topk_idx, (0, num_topk - topk_idx.shape[1]), value=-1)


def weights_at(probs: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
    """Return the probs of the chosen experts: probs [num_tokens, num_experts], topk_idx -> [num_tokens, num_topk] fp32, 0 at -1.
    Differentiable."""
    return probs.gather(1, topk_idx.clamp(0, probs.shape[1] - 1)).float().masked_fill(topk_idx < 0, 0.0)


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


def choice_of_shards(topk_idx: torch.Tensor, num_local_experts: int, tp_size: int) -> torch.Tensor:
    """Return the chosen experts of which `repeat_for_tp` has made topk_idx: [num_tokens, num_topk * tp_size] -> [num_tokens, num_topk]."""
    first = topk_idx[:, ::tp_size].to(torch.int64)
    if tp_size == 1:
        return first
    choice = first.div(num_local_experts * tp_size, rounding_mode="floor") * num_local_experts + first % num_local_experts
    return torch.where(first < 0, -1, choice)
