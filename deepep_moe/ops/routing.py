"""Checks and counts of a routing, in plain PyTorch on any device."""

import torch
from torch import Tensor

from deepep_moe.arguments import check_tensor
from deepep_moe.errors import no_expert
from deepep_moe.library import register


def refuse_bad_routing(topk_idx: Tensor, num_experts: int) -> None:
    """Raise ValueError for an index outside [-1, num_experts) or an expert twice in a row of topk_idx [num_tokens, num_topk]."""
    outside = ((topk_idx < -1) | (topk_idx >= num_experts)).nonzero()
    if len(outside):
        token, lane = outside[0].tolist()
        index = int(topk_idx[token, lane])
        raise no_expert(f"topk_idx[{token}, {lane}] is {index}; it must be -1 (no expert) or 0 to {num_experts - 1}")
    ordered = topk_idx.sort(dim=1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).nonzero()
    if len(twice):
        token, expert = int(twice[0, 0]), int(ordered[twice[0, 0], twice[0, 1]])
        first, second = (topk_idx[token] == expert).nonzero().flatten().tolist()[:2]
        raise ValueError(f"topk_idx[{token}] names expert {expert} twice, in lanes {first} and {second}; a token may choose an expert once")


def refuse_bad_copies(copies: list[list[int]], num_experts: int) -> None:
    """Raise ValueError for an entry of copies [num_ranks, num_slots] that is neither -1 nor an expert of another rank, once for a rank."""
    num_local = num_experts // len(copies)
    for rank, row in enumerate(copies):
        for slot, expert in enumerate(row):
            if not -1 <= expert < num_experts or (expert >= 0 and (expert // num_local == rank or expert in row[:slot])):
                raise ValueError(f"copies[{rank}, {slot}] is {expert}; it must be -1 or an expert of another rank, once for each rank")


def is_token_in_rank(topk_idx: Tensor, num_ranks: int, num_local_experts: int) -> Tensor:
    """Return [num_tokens, num_ranks] bool: whether the token of topk_idx [num_tokens, num_topk] goes to the rank."""
    ranks = torch.where(topk_idx >= 0, topk_idx // num_local_experts, num_ranks).long()
    mask = torch.zeros(topk_idx.shape[0], num_ranks + 1, dtype=torch.bool, device=topk_idx.device)
    return mask.scatter_(1, ranks, True)[:, :-1].contiguous()


# ---- counts before sending, as an operator ----


def _layout(topk_idx: Tensor, num_topk: int, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields of `Layout`. Raises ValueError or TypeError for a bad routing."""
    num_tokens = len(topk_idx) if topk_idx.dim() > 0 else 0
    check_tensor("topk_idx", topk_idx, (num_tokens, num_topk), (torch.int64, torch.int32), any_strides=True)
    refuse_bad_routing(topk_idx, num_experts)
    in_rank = is_token_in_rank(topk_idx, num_ranks, num_experts // num_ranks)
    per_expert = topk_idx[topk_idx >= 0].bincount(minlength=num_experts).to(torch.int32)
    return in_rank.sum(0, dtype=torch.int32), per_expert, in_rank


def _fake_layout(topk_idx: Tensor, num_topk: int, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    counts = (topk_idx.new_empty(size, dtype=torch.int32) for size in (num_ranks, num_experts))
    return *counts, topk_idx.new_empty(topk_idx.shape[0], num_ranks, dtype=torch.bool)  # type: ignore[return-value]


register("layout(Tensor topk_idx, int num_topk, int num_experts, int num_ranks) -> (Tensor, Tensor, Tensor)", _layout, _fake_layout)
