"""The gradient of the gate in PyTorch operations, which may be differentiated once more."""

import torch
from torch import Tensor

EPSILON = 1e-20  # kWeightEpsilon of csrc/common/gate.h
_LEAST = -708.0  # below it no score changes any more once it is rounded to fp32, and the slope of the root is finite


def grad_logits(
    grad_topk_weights: Tensor | None, grad_probs: Tensor | None, grad_shares: Tensor | None, logits: Tensor, topk_idx: Tensor,
    score_function: str, normalize: bool, routed_scaling_factor: float,
) -> Tensor:  # fmt: skip
    """Return the gradient of the logits, in their dtype: `[num_tokens, num_experts]`, 0 in rows of tokens that chose no expert.

    It is computed in double precision. The parts through the weights and through the shares are rounded to fp32 and then added.
    """
    is_chosen, idx = topk_idx >= 0, topk_idx.long().clamp(min=0)
    has_expert = is_chosen.any(1, keepdim=True)
    wide = logits.double().where(has_expert, 0.0)
    total = torch.zeros_like(wide, dtype=torch.float32)
    if grad_topk_weights is not None or grad_probs is not None:
        grads = grad_topk_weights
        if grad_probs is not None:
            lanes = grad_probs.gather(1, idx)
            grads = lanes if grads is None else grads + lanes
        assert grads is not None
        grads = grads.double().where(is_chosen, 0.0) * routed_scaling_factor
        total = total + _through_weights(grads, wide, idx, is_chosen, score_function, normalize).float()
    if grad_shares is not None:
        total = total + _through_shares(grad_shares.double(), wide, score_function).float()
    return total.where(has_expert, 0.0).to(logits.dtype)


def _through_weights(grads: Tensor, wide: Tensor, idx: Tensor, is_chosen: Tensor, score_function: str, normalize: bool) -> Tensor:
    """Return the gradient of the logits from `grads` [num_tokens, num_topk] of the weights before the scaling factor."""
    lanes, nowhere = wide.gather(1, idx), torch.zeros_like(wide)
    if score_function == "softmax_topk":
        weights = lanes.masked_fill(~is_chosen, -torch.inf).where(is_chosen.any(1, keepdim=True), 0.0).softmax(1)
        grads = weights * (grads - (grads * weights).sum(1, keepdim=True))
        return nowhere.scatter_add(1, idx, grads.where(is_chosen, 0.0))
    if score_function == "softmax":
        all_scores, slopes = wide.softmax(1), None
        scores = all_scores.gather(1, idx)
    else:
        scores, slopes = _scores_and_slopes(lanes, score_function)
    if normalize:
        rounded = scores.float().double().where(is_chosen, 0.0)  # as in the forward
        divisor = rounded.sum(1, keepdim=True) + EPSILON
        grads = (grads - (grads * rounded).sum(1, keepdim=True) / divisor) / divisor
    if slopes is not None:
        return nowhere.scatter_add(1, idx, (grads * slopes).where(is_chosen, 0.0))
    grads = grads.where(is_chosen, 0.0)
    return all_scores * (nowhere.scatter_add(1, idx, grads) - (grads * scores).sum(1, keepdim=True))


def _through_shares(grads: Tensor, wide: Tensor, score_function: str) -> Tensor:
    """Return the gradient of the logits from `grads` [num_tokens, num_experts] of the shares."""
    if score_function in ("softmax", "softmax_topk"):
        shares = wide.softmax(1)
        return shares * (grads - (grads * shares).sum(1, keepdim=True))
    scores, slopes = _scores_and_slopes(wide, score_function)
    divisor = scores.sum(1, keepdim=True) + EPSILON
    return (grads - (grads * scores).sum(1, keepdim=True) / divisor) * slopes / divisor


def _scores_and_slopes(wide: Tensor, score_function: str) -> tuple[Tensor, Tensor]:
    """Return the scores of logits and their derivatives, where an expert's score depends on its own logit alone."""
    if score_function == "sigmoid":
        scores = wide.sigmoid()
        return scores, scores * (1.0 - scores)
    bounded = wide.clamp(min=_LEAST)
    scores = torch.logaddexp(bounded, torch.zeros_like(bounded)).sqrt()
    return scores, bounded.sigmoid() / (2.0 * scores)
