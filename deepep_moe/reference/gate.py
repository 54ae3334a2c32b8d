"""Definition of the gate: which experts each token goes to, and with which weights."""

import torch
from torch import Tensor


def gate(
    logits: Tensor,
    num_topk: int,
    *,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score_topk: int = 2,
    score_function: str = "sigmoid",
    expert_bias: Tensor | None = None,
    normalize: bool = True,
    routed_scaling_factor: float = 1.0,
    mask: Tensor | None = None,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `deepep_moe.ops.gate` step by step, for valid arguments only. Differentiable in `logits`. Logits that are not finite are let
    through, as with `check_finite=False`.

    Returns `(topk_idx, topk_weights, num_tokens_per_expert)` as there.
    """
    num_experts = logits.shape[1]
    if mask is not None:
        logits = logits.masked_fill(mask[:, None], 0)
    scores = _scores(logits, score_function)

    selection = scores.detach() if expert_bias is None else scores.detach() + expert_bias
    if topk_groups < num_groups:
        allowed = _experts_of_best_groups(selection, num_groups, topk_groups, group_score_topk)
        order = selection.gather(1, allowed).sort(dim=1, descending=True, stable=True).indices
        topk_idx = allowed.gather(1, order[:, :num_topk])
    else:
        topk_idx = selection.sort(dim=1, descending=True, stable=True).indices[:, :num_topk]

    topk_weights = _weights(scores.gather(1, topk_idx).double(), score_function, normalize) * routed_scaling_factor
    topk_weights = topk_weights.float()
    if mask is not None:
        topk_idx = topk_idx.masked_fill(mask[:, None], -1)
        topk_weights = topk_weights.masked_fill(mask[:, None], 0)
    num_tokens_per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
    return topk_idx.to(index_dtype), topk_weights, num_tokens_per_expert


def gate_shares(logits: Tensor, *, score_function: str = "sigmoid", mask: Tensor | None = None) -> Tensor:
    """Return the `shares` of `deepep_moe.ops.gate_full`: `[num_tokens, num_experts]` fp32, differentiable in `logits`."""
    if mask is not None:
        logits = logits.masked_fill(mask[:, None], 0)
    if score_function in ("softmax", "softmax_topk"):
        shares = logits.double().softmax(dim=1).float()
    else:
        scores = _scores(logits, score_function).double()
        shares = (scores / (scores.sum(dim=1, keepdim=True) + 1e-20)).float()
    return shares if mask is None else shares.masked_fill(mask[:, None], 0)


def _scores(logits: Tensor, score_function: str) -> Tensor:
    """Return [num_tokens, num_experts] fp32, computed in double and rounded once."""
    match score_function:
        case "sigmoid":
            return logits.double().sigmoid().float()
        case "sqrtsoftplus":
            return torch.logaddexp(logits.double(), logits.new_zeros((), dtype=torch.float64)).sqrt().float()
        case "softmax":
            return logits.double().softmax(dim=1).float()
        case _:  # softmax_topk: the softmax comes after the choice
            return logits.float()


def _experts_of_best_groups(selection: Tensor, num_groups: int, topk_groups: int, group_score_topk: int) -> Tensor:
    """Return the experts of each token's `topk_groups` best groups, by index: [num_tokens, topk_groups * group_size] int64."""
    num_tokens, num_experts = selection.shape
    group_size = num_experts // num_groups
    best = selection.view(num_tokens, num_groups, group_size).topk(group_score_topk, dim=2).values
    groups = _sum_in_order(best).sort(dim=1, descending=True, stable=True).indices[:, :topk_groups].sort(dim=1).values
    experts = groups[:, :, None] * group_size + torch.arange(group_size, device=selection.device)
    return experts.view(num_tokens, topk_groups * group_size)


def _weights(chosen: Tensor, score_function: str, normalize: bool) -> Tensor:
    """Weights in double, before the scaling factor, from the chosen scores [num_tokens, num_topk] in double."""
    if score_function == "softmax_topk":
        exponentials = (chosen - chosen.amax(dim=1, keepdim=True).detach()).exp()
        return exponentials / _sum_in_order(exponentials)[:, None]
    return chosen / (_sum_in_order(chosen)[:, None] + 1e-20) if normalize else chosen


def _sum_in_order(values: Tensor) -> Tensor:
    """Sum over the last dimension, first element first."""
    total = values[..., 0]
    for i in range(1, values.shape[-1]):
        total = total + values[..., i]
    return total
