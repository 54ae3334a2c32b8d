"""Convert the gate's choice to other forms."""

import torch
from torch import Tensor

from deepep_moe.ops.routing import is_token_in_rank


def to_dense(topk_idx: Tensor, topk_weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the dense pair that some frameworks take instead of indices and weights.

    Args:
        topk_idx: `[num_tokens, num_topk]` int64 or int32, -1 for lanes without an expert.
        topk_weights: `[num_tokens, num_topk]`, of any floating-point dtype.
        num_experts: columns of the result.

    Returns:
        `(probs, routing_map)`: `[num_tokens, num_experts]` weights, 0 where not chosen, in the weights' dtype and differentiable in
        them; and `[num_tokens, num_experts]` bool, True where chosen.
    """
    chosen = topk_idx >= 0
    columns = topk_idx.long().clamp(min=0)
    shape = (topk_idx.shape[0], num_experts)
    probs = topk_weights.new_zeros(shape).scatter_add(1, columns, topk_weights.masked_fill(~chosen, 0))
    # Added, not assigned: a lane without an expert must not clear column 0.
    routing_map = topk_idx.new_zeros(shape, dtype=torch.int32).scatter_add(1, columns, chosen.int()) > 0
    return probs, routing_map


def nodes_per_token(topk_idx: Tensor, num_experts: int, num_nodes: int) -> Tensor:
    """Return how many nodes each token goes to; node-limited routing bounds it by `topk_groups` (arXiv 2412.19437, section 2.1.2).

    With `num_groups` a multiple of `num_nodes`, groups do not straddle nodes, so a token touches at most `topk_groups` of them.

    Args:
        topk_idx: `[num_tokens, num_topk]` int64 or int32, -1 for lanes without an expert.
        num_experts: experts of the layer, in equal shares on the nodes, in order.
        num_nodes: divides `num_experts`.

    Returns:
        `[num_tokens]` int64; its mean is what the network sees.

    Raises:
        ValueError: `num_nodes` does not divide the experts.
    """
    if num_nodes < 1 or num_experts % num_nodes:
        raise ValueError(f"num_nodes is {num_nodes}; it must divide the {num_experts} experts")
    return is_token_in_rank(topk_idx, num_nodes, num_experts // num_nodes).sum(1)
