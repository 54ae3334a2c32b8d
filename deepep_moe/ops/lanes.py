"""Dense routing, as a map of chosen experts with a number for each, in lanes of top-k and back: one kernel each, without gradient."""

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from deepep_moe import _C

_log = logging.getLogger(__name__)


def lanes_of_map(routing_map: Tensor, values: Tensor | None, num_topk: int) -> tuple[Tensor, Tensor | None]:
    """Return the chosen experts of each token and their values.

    A token with more than `num_topk` experts gets `num_experts` in lane 0, which is no expert: a dispatch refuses it and tells the peers,
    who would wait for a rank that raised here. On a GPU the host does not wait.

    Args:
        routing_map: [num_tokens, num_experts] bool.
        values: [num_tokens, num_experts] of a floating-point dtype, such as probs, or None.

    Returns:
        topk_idx [num_tokens, num_topk] int64, a token's experts ascending, then -1; and their values [num_tokens, num_topk] fp32, 0 in
        lanes without an expert, or None.
    """
    if routing_map.is_cuda:
        kernels = triton_kernels()
        if kernels is None:
            topk_idx = topk_from_map(routing_map, num_topk)
            return topk_idx, None if values is None else weights_at(values, topk_idx)
        topk_idx, topk_values = kernels.gather(routing_map, routing_map if values is None else values, num_topk)
        return topk_idx, None if values is None else topk_values
    num_tokens = routing_map.shape[0]
    topk_idx = torch.empty(num_tokens, num_topk, dtype=torch.int64)
    if values is None:
        _C.lanes_of_map(routing_map.contiguous(), None, topk_idx, None)
        return topk_idx, None
    topk_values = torch.empty(num_tokens, num_topk, dtype=torch.float32)
    _C.lanes_of_map(routing_map.contiguous(), values.float().contiguous(), topk_idx, topk_values)
    return topk_idx, topk_values


def dense_of_lanes(topk_idx: Tensor, topk_values: Tensor, num_experts: int) -> Tensor:
    """Return [num_tokens, num_experts] fp32: `topk_values` [num_tokens, num_topk] fp32 in the columns of their experts, 0 elsewhere.

    topk_idx: [num_tokens, num_topk] int64, -1 = no expert.
    """
    if topk_idx.is_cuda:
        kernels = triton_kernels()
        if kernels is not None:
            return kernels.scatter(topk_idx, topk_values, num_experts, torch.float32)
        dense = topk_values.new_zeros(topk_idx.shape[0], num_experts + 1)
        return dense.scatter_(1, topk_idx + 1, topk_values)[:, 1:].contiguous()  # lanes without an expert write column 0, which goes
    dense = torch.empty(topk_idx.shape[0], num_experts, dtype=torch.float32)
    _C.dense_of_lanes(topk_idx.contiguous(), topk_values.contiguous(), dense)
    return dense


def topk_from_map(routing_map: Tensor, num_topk: int) -> Tensor:
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


def weights_at(probs: Tensor, topk_idx: Tensor) -> Tensor:
    """Return the probs of the chosen experts: probs [num_tokens, num_experts], topk_idx -> [num_tokens, num_topk] fp32, 0 at -1.
    Differentiable."""
    return probs.gather(1, topk_idx.clamp(0, probs.shape[1] - 1)).float().masked_fill(topk_idx < 0, 0.0)


@functools.cache
def triton_kernels() -> Any:
    """Return the module of Triton kernels, or None where Triton is not installed, which one log line says."""
    try:
        from deepep_moe.ops import routing_kernels
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        _log.info("Triton is not installed: PyTorch's operators convert dense routing to top-k lists, in a dozen launches instead of one")
        return None
    return routing_kernels
