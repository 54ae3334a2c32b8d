"""Convert dense routing (a map of chosen experts with values) to lanes of top-k and back, and count lanes: without gradient one kernel
each on GPUs, operators of PyTorch elsewhere."""

import torch
from torch import Tensor

from deepep_moe.device import native_for
from deepep_moe.library import Context, Function
from deepep_moe.ops.routing import is_token_in_rank


def lanes_of_map(routing_map: Tensor, values: Tensor | None, num_topk: int) -> tuple[Tensor, Tensor | None]:
    """Return the chosen experts of each token and their values, without gradient.

    Experts are read from the map, not from the largest values, because the value of a chosen expert can be 0. A token with more than
    `num_topk` experts gets `num_experts`, which is no expert, in lane 0. The dispatch then refuses it and tells the peers; they would wait
    if this rank raised here. The host does not wait for a GPU.

    Args:
        routing_map: [num_tokens, num_experts] bool, or numbers, of which 0 is False.
        values: [num_tokens, num_experts] of a floating-point dtype, such as probs, or None.

    Returns:
        topk_idx [num_tokens, num_topk] int64, a token's experts ascending, then -1; and their values [num_tokens, num_topk] fp32, 0 in
        lanes without an expert, or None.
    """
    native = native_for(routing_map)
    lanes: tuple[Tensor, Tensor | None] | None = None if native is None else native.lanes_of_map(routing_map, values, num_topk)
    if lanes is not None:
        return lanes
    topk_idx = topk_from_map(routing_map.bool(), num_topk)
    return topk_idx, None if values is None else weights_at(values, topk_idx)


def dense_of_lanes(topk_idx: Tensor, topk_values: Tensor, num_experts: int) -> Tensor:
    """Return [num_tokens, num_experts] fp32: `topk_values` [num_tokens, num_topk] fp32 in the columns of their experts, 0 elsewhere.

    topk_idx: [num_tokens, num_topk] int64; -1 and any other invalid index = no expert. Without gradient.
    """
    native = native_for(topk_idx)
    dense: Tensor | None = None if native is None else native.dense_of_lanes(topk_idx, topk_values, num_experts)
    if dense is not None:
        return dense
    values = topk_values.to_dense() if topk_values.is_sparse else topk_values
    dense = values.new_zeros(topk_idx.shape[0], num_experts + 1)
    columns = torch.where(topk_idx < num_experts, topk_idx, -1) + 1
    return dense.scatter_(1, columns, values)[:, 1:].contiguous()  # lanes without an expert write column 0, which is dropped


def count_lanes(topk_idx: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Count the tokens of each rank and of each expert, each token once, and return to which ranks each token goes.

    Args:
        topk_idx: [num_tokens, num_topk] int64 or int32; -1 and any other invalid index = no expert.
        num_experts: a multiple of `num_ranks`.

    Returns:
        num_tokens_per_rank [num_ranks] int32, num_tokens_per_expert [num_experts] int32, and is_token_in_rank [num_tokens, num_ranks]
        bool.
    """
    native = native_for(topk_idx)
    counted: tuple[Tensor, Tensor] | None = None if native is None else native.count_lanes(topk_idx, num_experts, num_ranks)
    if counted is not None:
        counts, is_token_in_rank = counted
        return counts[:num_ranks], counts[num_ranks:], is_token_in_rank
    columns = torch.where(topk_idx < num_experts, topk_idx, -1).clamp(min=-1).long() + 1
    chosen = torch.zeros(topk_idx.shape[0], num_experts + 1, dtype=torch.bool, device=topk_idx.device)
    chosen = chosen.scatter_(1, columns, True)[:, 1:]  # lanes without an expert write column 0, which is dropped
    is_token_in_rank = chosen.unflatten(1, (num_ranks, -1)).any(2)
    return is_token_in_rank.sum(0, dtype=torch.int32), chosen.sum(0, dtype=torch.int32), is_token_in_rank


class LanesOfMap(Function):
    """`lanes_of_map` with the gradient of `values`, in their dtype."""

    @staticmethod
    def forward(ctx: Context, routing_map: Tensor, values: Tensor, num_topk: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        topk_idx, topk_values = lanes_of_map(routing_map, values, num_topk)
        assert topk_values is not None  # there are values
        ctx.mark_non_differentiable(topk_idx)
        ctx.save_for_backward(topk_idx)
        ctx.num_experts, ctx.dtype = values.shape[1], values.dtype
        return topk_idx, topk_values

    @staticmethod
    def backward(ctx: Context, _: object, grad: Tensor | None) -> tuple[None, Tensor | None, None]:
        (topk_idx,) = ctx.saved_tensors
        return None, None if grad is None else dense_of_lanes(topk_idx, grad, ctx.num_experts).to(ctx.dtype), None


def topk_from_map(routing_map: Tensor, num_topk: int) -> Tensor:
    """Return topk_idx of `lanes_of_map` with PyTorch's operators."""
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
