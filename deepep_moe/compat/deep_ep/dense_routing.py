"""Routing as HybridEP's callers give it: a map of chosen experts with dense probabilities, and a bound on the rows of a rank."""

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe.ops.lanes import lanes_of_map


def first_lanes(routing_map: Tensor, num_topk: int) -> tuple[Tensor, Tensor]:
    """Return topk_idx [num_tokens, num_topk] int64 of `routing_map` [num_tokens, num_experts] bool, a token's first `num_topk` experts,
    ascending, then -1; and [] bool: has any token more?"""
    topk_idx, _ = lanes_of_map(routing_map, None, num_topk)
    is_lost = topk_idx[:, 0] == routing_map.shape[1]  # so it says instead of its first expert
    topk_idx[:, 0] = torch.where(is_lost, routing_map.view(torch.uint8).argmax(1), topk_idx[:, 0])
    return topk_idx, is_lost.any()


def keep_within(
    topk_idx: Tensor, num_experts: int, num_rows: int, alignment: int, group: dist.ProcessGroup, has_lost: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Drop the lanes whose rows lie behind the first `num_rows` of their expert's rank. Collective; the host waits for no GPU.

    A rank's rows are grouped by expert, in an expert by (source rank, token), and each group is padded to a multiple of `alignment`. Each
    rank has a bound of its own. All ranks sum up a matrix of counts, from which each of them knows where its own rows lie.

    Args:
        topk_idx: [num_tokens, num_topk] int64, -1 = no expert.
        has_lost: [] bool: has this rank dropped lanes before? It counts for all ranks.

    Returns topk_idx with -1 for the dropped lanes, and [] bool: True if any rank of the group has dropped a lane.
    """
    rank = dist.get_rank(group)
    columns = topk_idx + 1
    ones = torch.ones_like(topk_idx)
    chosen = topk_idx.new_zeros(topk_idx.shape[0], num_experts + 1).scatter_(1, columns, ones)
    chosen[:, 0] = 0
    place = chosen.cumsum(0)
    table = _empty_table(num_experts, group, topk_idx.device)
    num_ranks = len(table)
    table[rank, 1:-1] = chosen.sum(0)[1:]
    table[rank, 0] = num_rows // alignment * alignment
    if has_lost is not None:
        table[rank, -1] = has_lost
    dist.all_reduce(table, group=group)
    bounds, counts = table[:, :1], table[:, 1:-1].reshape(num_ranks, num_ranks, -1)  # [source, destination, local expert]
    totals = counts.sum(0)
    ends = ((totals + alignment - 1) // alignment * alignment).cumsum(1)
    starts = torch.cat([torch.zeros_like(bounds), ends[:, :-1]], 1)
    room = (bounds - starts).clamp(min=0)
    kept = (room - counts[:rank].sum(0)).clamp(min=0).flatten()  # rows of this rank's that each expert has room for
    kept = torch.cat([kept.new_full((1,), topk_idx.shape[0]), kept])
    is_dropped = place.gather(1, columns) > kept[columns]
    return topk_idx.masked_fill(is_dropped, -1), (totals > room).any() | table[:, -1].any()


def keep_nothing(num_experts: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Take part in the `keep_within` of the peers, for a rank that refuses the dispatch behind it."""
    dist.all_reduce(_empty_table(num_experts, group, device), group=group)


def _empty_table(num_experts: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Return [num_ranks, num_experts + 2] int64, a row for each rank: the rows it has room for, its tokens for each expert, has it lost
    lanes?"""
    return torch.zeros(dist.get_world_size(group), num_experts + 2, dtype=torch.int64, device=device)


def experts_only(topk_idx: Tensor, num_experts: int) -> Tensor:
    """Return `topk_idx` int64 with -1 for every index that is no expert. HybridEP ignores such indices, and callers mark padding so."""
    topk_idx = topk_idx.long()
    return topk_idx.clamp(min=-1).masked_fill_(topk_idx >= num_experts, -1)
