"""The gate as PyTorch operators, with gradients and fake implementations; `deepep_moe.ops.gate` checks what comes here."""

from typing import Any

import torch
from torch import Tensor

from deepep_moe import _C, reference, torch_module
from deepep_moe.device import device_index, is_gpu, readable
from deepep_moe.library import Context, call, register
from deepep_moe.ops.lanes import to_dense
from deepep_moe.ops.routing import is_token_in_rank

EPSILON = 1e-20  # kWeightEpsilon of csrc/common/gate.h
_LEAST = -708.0  # below it no score changes any more once it is rounded to fp32, and the slope of the root is finite
SCORE_FUNCTIONS = ("sigmoid", "sqrtsoftplus", "softmax", "softmax_topk")
_SETTINGS = (
    "int num_topk, int num_groups, int topk_groups, int group_score_topk, str score_function, bool normalize, "
    "float routed_scaling_factor, bool check_finite, ScalarType index_dtype, bool dense, int num_ranks, bool shares"
)
_NAMES = [setting.split()[1] for setting in _SETTINGS.split(", ")]


def _readable(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else readable(tensor) for tensor in tensors)


def check_score_function(score_function: str) -> None:
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(f"score_function is {score_function!r}; it must be one of {list(SCORE_FUNCTIONS)}")


# ---- forward ----


def _gate(logits: Tensor, expert_bias: Tensor | None, mask: Tensor | None, *settings: Any) -> tuple[Tensor, ...]:
    """Counts of experts, and of ranks after them, are one tensor: what an operator returns must not be views of the same memory."""
    logits, expert_bias, mask = _readable(logits, expert_bias, mask)  # type: ignore[assignment]
    options = dict(zip(_NAMES, settings, strict=True))
    if is_gpu(logits.device):
        g = _call_native("gate", logits, expert_bias=expert_bias, mask=mask, **options, is_checked=True)
        outputs: tuple[Any, ...] = g.topk_idx, g.topk_weights, g.counts, g.probs, g.routing_map, g.is_token_in_rank, g.shares
    else:
        outputs = _gate_cpu(logits, expert_bias, mask, **options)
    unwanted = _unwanted(logits)
    return *outputs[:3], *(other if tensor is None else tensor for tensor, other in zip(outputs[3:], unwanted, strict=True))


def _unwanted(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what stands for probs, routing_map, is_token_in_rank and shares that were not asked for."""
    no_numbers, in_no_rank = logits.new_empty(0, logits.shape[1], dtype=torch.float32), logits.new_empty(len(logits), 0, dtype=torch.bool)
    return no_numbers, no_numbers.new_empty(no_numbers.shape, dtype=torch.bool), in_no_rank, torch.empty_like(no_numbers)


def _gate_cpu(
    logits: Tensor, expert_bias: Tensor | None, mask: Tensor | None, *, check_finite: bool, dense: bool, num_ranks: int, shares: bool,
    **options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Run the definition of the gate, after a look for numbers that are not finite."""
    _check_bias(expert_bias)
    if check_finite:
        _check_logits(logits, mask)
    topk_idx, topk_weights, counts = reference.gate(logits, expert_bias=expert_bias, mask=mask, **options)
    topk_idx, topk_weights = topk_idx.contiguous(), topk_weights.contiguous()
    probs, routing_map = to_dense(topk_idx, topk_weights, logits.shape[1]) if dense else (None, None)
    in_rank = is_token_in_rank(topk_idx, num_ranks, logits.shape[1] // num_ranks) if num_ranks else None
    if in_rank is not None:
        counts = torch.cat((counts, in_rank.sum(0, dtype=torch.int32)))
    all_shares = reference.gate_shares(logits, score_function=options["score_function"], mask=mask) if shares else None
    return topk_idx, topk_weights, counts, probs, routing_map, in_rank, all_shares


def _check_bias(expert_bias: Tensor | None) -> None:
    if expert_bias is None or (is_finite := expert_bias.isfinite()).all():
        return
    expert = int(is_finite.logical_not().nonzero()[0])
    raise ValueError(f"expert_bias has {expert_bias[expert].item()} for expert {expert}; it must be finite")


def _check_logits(logits: Tensor, mask: Tensor | None) -> None:
    is_bad = logits.isfinite().logical_not_()
    if mask is not None:
        is_bad.masked_fill_(mask[:, None], False)
    if is_bad.any():
        token, expert = is_bad.nonzero()[0].tolist()
        raise ValueError(
            f"logits has {logits[token, expert].item()} for token {token}, expert {expert}; it must be finite: look for an overflow "
            "before the router, or mask the token"
        )


def _call_native(name: str, logits: Tensor, **arguments: object) -> Any:
    """Call a function of `_torch`. Raises ValueError for what an earlier launch has found not to be finite."""
    make = getattr(torch_module.needed(), name)
    for _ in range(2):  # another thread may have raised what the first call has found
        if (output := make(logits=logits, **arguments)) is not None:
            return output
        _C.gpu_gate_check(device_index(logits.device))
    raise RuntimeError("the GPU's gate cannot be launched")


def _gate_fake(logits: Tensor, expert_bias: Tensor | None, mask: Tensor | None, num_topk: int, *settings: Any) -> tuple[Tensor, ...]:
    *_, index_dtype, dense, num_ranks, has_shares = settings
    (num_tokens, num_experts), (probs, routing_map, _, shares) = logits.shape, _unwanted(logits)
    of_lanes = (logits.new_empty(num_tokens, num_topk, dtype=dtype) for dtype in (index_dtype, torch.float32))
    of_map = (each.new_empty(logits.shape) if dense else each for each in (probs, routing_map))
    counts = logits.new_empty(num_experts + num_ranks, dtype=torch.int32)
    in_rank = logits.new_empty(num_tokens, num_ranks, dtype=torch.bool)
    return *of_lanes, counts, *of_map, in_rank, shares.new_empty(logits.shape) if has_shares else shares


# ---- backward ----


def _save(ctx: Context, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], output[0])
    ctx.weights, ctx.num_inputs = inputs[7:10], len(inputs)


def _backward(
    ctx: Context, _idx: object, grad_topk_weights: Tensor | None, _counts: object, grad_probs: Tensor | None, _map: object,
    _in_rank: object, grad_shares: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    of_logits, grads = None, (grad_topk_weights, grad_probs, grad_shares)
    if any(grad is not None for grad in grads):
        of_logits = gradient_of_logits(*grads, *ctx.saved_tensors, *ctx.weights)
    return of_logits, *[None] * (ctx.num_inputs - 1)


def gradient_of_logits(
    grad_topk_weights: Tensor | None, grad_probs: Tensor | None, grad_shares: Tensor | None, logits: Tensor, topk_idx: Tensor, *weights: Any
) -> Tensor:
    """Return the gradient, which can be differentiated again where that is wanted."""
    arguments = (grad_topk_weights, grad_probs, grad_shares, logits, topk_idx)
    is_to_be_differentiated = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return grad_logits(*arguments, *weights) if is_to_be_differentiated else call("gate_backward", arguments, *weights)


def _gate_backward(
    grad_topk_weights: Tensor | None, grad_probs: Tensor | None, grad_shares: Tensor | None, logits: Tensor, topk_idx: Tensor, *weights: Any
) -> Tensor:
    check_score_function(weights[0])
    grad_topk_weights, grad_probs, grad_shares = _readable(grad_topk_weights, grad_probs, grad_shares)
    logits, topk_idx = _readable(logits, topk_idx)  # type: ignore[assignment]
    if not is_gpu(logits.device):
        return grad_logits(grad_topk_weights, grad_probs, grad_shares, logits, topk_idx, *weights)
    grads = {"grad_topk_weights": grad_topk_weights, "grad_probs": grad_probs, "grad_shares": grad_shares}
    options = dict(zip(("score_function", "normalize", "routed_scaling_factor"), weights, strict=True))
    grad: Tensor = _call_native("run_gate_backward", logits, topk_idx=topk_idx, **grads, **options)
    return grad


def _gate_backward_fake(
    grad_topk_weights: Tensor | None, grad_probs: Tensor | None, grad_shares: Tensor | None, logits: Tensor, topk_idx: Tensor, *weights: Any
) -> Tensor:
    return logits.new_empty(logits.shape)


# ---- the gradient in PyTorch operations, which may be differentiated once more ----


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


_SCHEMA = f"gate(Tensor logits, Tensor? expert_bias, Tensor? mask, {_SETTINGS}) -> ({', '.join(['Tensor'] * 7)})"
register(_SCHEMA, _gate, _gate_fake, _save, _backward)
_SCHEMA_OF_BACKWARD = (
    "gate_backward(Tensor? grad_topk_weights, Tensor? grad_probs, Tensor? grad_shares, Tensor logits, Tensor topk_idx, "
    "str score_function, bool normalize, float routed_scaling_factor) -> Tensor"
)
register(_SCHEMA_OF_BACKWARD, _gate_backward, _gate_backward_fake)
