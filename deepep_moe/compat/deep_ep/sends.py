"""The dispatches of DeepEP's `Buffer` with new routing, or with ranks alone, and counts for callers before them."""

from operator import methodcaller

import torch
from torch import Tensor

from deepep_moe import config
from deepep_moe.arguments import as_int
from deepep_moe.compat.deep_ep.arguments import checked_routing, detached
from deepep_moe.compat.deep_ep.core import GrowingBuffers
from deepep_moe.compat.deep_ep.handle import Handle
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.handle import DispatchOutput
from deepep_moe.group.rendezvous import gather_objects
from deepep_moe.ops.lanes import count_lanes

_Told = tuple[Tensor | None, Tensor | None, list[int], Handle]


def send(
    buffers: GrowingBuffers, x: Tensor, x_scales: Tensor | None, is_token_in_rank: Tensor | None, num_tokens_per_expert: Tensor | None,
    topk_idx: Tensor | None, topk_weights: Tensor | None, expert_alignment: int, num_worst_tokens: int, num_sms: int | None,
) -> tuple[DispatchOutput, _Told]:  # fmt: skip
    """Dispatch with new routing, as DeepEP's arguments say it. Return the output, and (recv_topk_idx, recv_topk_weights, tokens of each
    local expert, the handle)."""
    try:
        counts, lanes = _checked(num_tokens_per_expert, topk_idx, is_token_in_rank)
        alignment = as_int("expert_alignment", expert_alignment)
        bound = as_int("num_worst_tokens", num_worst_tokens) or None
    except (TypeError, ValueError) as error:
        raise buffers.refuse(error) from None
    weights = None if topk_idx is None or topk_weights is None else detached(topk_weights)
    dispatch = methodcaller(
        "dispatch", x, lanes, weights, x_scales=x_scales, layout="rank", expert_alignment=alignment, num_recv_rows=bound, num_sms=num_sms
    )
    least = 0 if bound is None else -(-bound // buffers.num_ranks)  # the caller's bound is for every rank with as many tokens
    buffer, out = buffers.dispatch(x, counts.shape[0], lanes.shape[1], dispatch, least)
    handle = Handle(buffer, out.handle)
    if topk_idx is None:
        return out, (None, None, [] if bound else _counts_of_all(buffers, buffer, counts, alignment), handle)
    return out, (out.recv_topk_idx, out.recv_topk_weights, [] if bound else out.handle.num_rows_per_expert_list, handle)


def _checked(counts: Tensor | None, topk_idx: Tensor | None, is_token_in_rank: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return num_tokens_per_expert, whose length is the number of experts, and topk_idx. Raises TypeError or ValueError if something is
    missing or wrong."""
    if counts is None:
        raise ValueError("num_tokens_per_expert is missing; give what get_dispatch_layout returned, or the handle of an earlier dispatch")
    if not isinstance(counts, Tensor) or counts.dim() != 1:
        raise ValueError(f"num_tokens_per_expert is {counts!r:.80}; it must be a tensor [num_experts]")
    if topk_idx is not None:
        return counts, checked_routing(topk_idx)
    if is_token_in_rank is None:
        raise ValueError("topk_idx and is_token_in_rank are missing; give one of them, or the handle of an earlier dispatch")
    return counts, lanes_of_ranks(is_token_in_rank, counts.shape[0])


def _counts_of_all(buffers: GrowingBuffers, buffer: Buffer, num_tokens_per_expert: Tensor, alignment: int) -> list[int]:
    """Return how many tokens each local expert receives. Without topk_idx the rows received do not show it, so ranks exchange their own
    counts. Collective."""
    mine = num_tokens_per_expert.tolist()
    table = gather_objects(mine, buffers.group, buffers.num_ranks, "counts of a DeepEP dispatch without topk_idx", config.timeout_s(), list)
    first = buffer.rank * buffer.num_local_experts
    counts = torch.tensor(table).sum(0)[first : first + buffer.num_local_experts].tolist()
    return [-(-count // alignment) * alignment for count in counts]


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
