"""What a routing says, in plain PyTorch on any device."""

import torch
from torch import Tensor


def refuse_bad_routing(topk_idx: Tensor, num_experts: int) -> None:
    """Raise ValueError for an index outside [-1, num_experts) or an expert twice in a row of topk_idx [num_tokens, num_topk]."""
    outside = ((topk_idx < -1) | (topk_idx >= num_experts)).nonzero()
    if len(outside):
        token, lane = outside[0].tolist()
        raise ValueError(f"topk_idx[{token}, {lane}] is {int(topk_idx[token, lane])}; it must be -1 (no expert) or 0 to {num_experts - 1}")
    ordered = topk_idx.sort(dim=1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).nonzero()
    if len(twice):
        token, expert = int(twice[0, 0]), int(ordered[twice[0, 0], twice[0, 1]])
        first, second = (topk_idx[token] == expert).nonzero().flatten().tolist()[:2]
        raise ValueError(f"topk_idx[{token}] names expert {expert} twice, in lanes {first} and {second}; a token may choose an expert once")


def is_token_in_rank(topk_idx: Tensor, num_ranks: int, num_local_experts: int) -> Tensor:
    """[num_tokens, num_ranks] bool: does the token of topk_idx [num_tokens, num_topk] go to the rank?"""
    ranks = torch.where(topk_idx >= 0, topk_idx // num_local_experts, num_ranks).long()
    mask = torch.zeros(topk_idx.shape[0], num_ranks + 1, dtype=torch.bool, device=topk_idx.device)
    return mask.scatter_(1, ranks, True)[:, :-1].contiguous()


def num_tokens_per_expert(topk_idx: Tensor, num_experts: int) -> Tensor:
    """[num_experts] int64."""
    return topk_idx[topk_idx >= 0].bincount(minlength=num_experts)
