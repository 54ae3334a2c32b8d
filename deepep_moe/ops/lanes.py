"""Convert dense routing (a map of chosen experts with values) to lanes of top-k and back, and count lanes: one kernel each on GPUs,
operators of PyTorch elsewhere."""

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.device import is_gpu, launch, readable
from deepep_moe.library import Context, is_watched, needs_gradients


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
    if is_watched((routing_map, values)) or not _has_kernels(routing_map):
        topk_idx = topk_from_map(routing_map.bool(), num_topk)
        return topk_idx, None if values is None else weights_at(values, topk_idx)
    num_tokens, routing_map = routing_map.shape[0], routing_map.bool()
    topk_idx = torch.empty(num_tokens, num_topk, dtype=torch.int64, device=routing_map.device)
    topk_values = None
    if values is not None:
        topk_values, values = torch.empty(num_tokens, num_topk, dtype=torch.float32, device=values.device), readable(values.float())
    launch(_C.gpu_lanes_of_map, readable(routing_map), values, topk_idx, topk_values, on=topk_idx)
    return topk_idx, topk_values


def dense_of_lanes(topk_idx: Tensor, topk_values: Tensor, num_experts: int) -> Tensor:
    """Return [num_tokens, num_experts] fp32: `topk_values` [num_tokens, num_topk] fp32 in the columns of their experts, 0 elsewhere.

    topk_idx: [num_tokens, num_topk] int64; -1 and any other invalid index = no expert. Without gradient.
    """
    is_differentiated = needs_gradients((topk_values,))  # a backward, once more
    if is_differentiated or is_watched((topk_idx, topk_values)) or not _has_kernels(topk_idx):
        values = topk_values.to_dense() if topk_values.is_sparse else topk_values
        dense = values.new_zeros(topk_idx.shape[0], num_experts + 1)
        columns = torch.where(topk_idx < num_experts, topk_idx, -1) + 1
        return dense.scatter_(1, columns, values)[:, 1:].contiguous()  # lanes without an expert write column 0, which goes
    dense = torch.empty(topk_idx.shape[0], num_experts, dtype=torch.float32, device=topk_idx.device)
    launch(_C.gpu_dense_of_lanes, readable(topk_idx), readable(topk_values), dense, on=dense)
    return dense


def count_lanes(topk_idx: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Count the tokens of each rank and of each expert, each token once, and return to which ranks each token goes.

    Args:
        topk_idx: [num_tokens, num_topk] int64 or int32; -1 and any other invalid index = no expert.
        num_experts: a multiple of `num_ranks`.

    Returns:
        num_tokens_per_rank [num_ranks] int32 and num_tokens_per_expert [num_experts] int32, of one memory, and is_token_in_rank
        [num_tokens, num_ranks] bool.
    """
    counts = torch.zeros(num_ranks + num_experts, dtype=torch.int32, device=topk_idx.device)
    is_token_in_rank = torch.empty(topk_idx.shape[0], num_ranks, dtype=torch.bool, device=topk_idx.device)
    if not is_watched((topk_idx,)) and _has_kernels(topk_idx):
        launch(_C.gpu_count_lanes, readable(topk_idx), counts, is_token_in_rank, on=counts)
    else:
        columns = torch.where(topk_idx < num_experts, topk_idx, -1).clamp(min=-1).long() + 1
        chosen = torch.zeros(topk_idx.shape[0], num_experts + 1, dtype=torch.bool, device=topk_idx.device)
        chosen = chosen.scatter_(1, columns, True)[:, 1:]  # lanes without an expert write column 0, which goes
        is_token_in_rank.copy_(chosen.unflatten(1, (num_ranks, -1)).any(2))
        counts[:num_ranks], counts[num_ranks:] = is_token_in_rank.sum(0), chosen.sum(0)
    return counts[:num_ranks], counts[num_ranks:], is_token_in_rank


class LanesOfMap(torch.autograd.Function):
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


def _has_kernels(tensor: Tensor) -> bool:
    return is_gpu(tensor.device) and hasattr(_C, "gpu_lanes_of_map")
