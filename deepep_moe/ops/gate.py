"""The gate: group-limited top-k over expert scores (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepep_moe import _C, config

SCORE_FUNCTIONS = ("sigmoid", "softmax", "softmax_topk")
_DTYPES = {torch.float32: _C.DType.float32, torch.bfloat16: _C.DType.bfloat16, torch.float16: _C.DType.float16}


class GateOutput(NamedTuple):
    """Where tokens go.

    topk_idx: `[num_tokens, num_topk]` expert of each lane, by descending selection score; -1 in rows of masked tokens.
    topk_weights: `[num_tokens, num_topk]` fp32, differentiable; 0 in rows of masked tokens.
    num_tokens_per_expert: `[num_experts]` int32, lanes that chose the expert.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    num_tokens_per_expert: Tensor


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
) -> GateOutput:
    """Chooses `num_topk` experts for each token, in one pass and with ties going to the lower expert index.

    Scores are computed in double precision and rounded once to fp32, whatever the dtype of the logits. The choice is by score plus
    `expert_bias`; weights come from the scores alone. With `topk_groups < num_groups` a token first chooses that many groups of
    consecutive experts, by the sum of each group's `group_score_topk` best biased scores, and then only experts in them.
    `deepep_moe.reference.gate` is the exact definition.

    Args:
        logits: `[num_tokens, num_experts]` float32, bfloat16 or float16 on the CPU. The gradient has the same dtype.
        num_topk: experts per token, at most 32.
        num_groups: groups of experts; divides `num_experts`. 1: no limit.
        topk_groups: groups a token may choose from; together they hold at least `num_topk` experts.
        group_score_topk: experts that make a group's score. DeepSeek-V3: 2. Megatron-Core: `num_topk // topk_groups`.
        score_function: "sigmoid" (DeepSeek-V3); "softmax" over all experts; or "softmax_topk": the choice is by logits and the
            weights are the softmax over the chosen ones (Mixtral; Megatron-Core's default).
        expert_bias: `[num_experts]` fp32, moves the choice only (arXiv 2408.15664).
        normalize: divide the weights by their sum + 1e-20. Without effect for "softmax_topk", whose weights have sum 1.
        routed_scaling_factor: multiplies the weights.
        mask: `[num_tokens]` bool, True for tokens to leave out, such as padding. Their logits are not read; their gradient is 0.
        index_dtype: int64 or int32, of `topk_idx`.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape or number is out of bounds, a tensor is not on the CPU, or a logit or bias is NaN or infinite.
    """
    _check_tensors(logits, expert_bias, mask, index_dtype)
    check_options(
        logits.shape[1],
        num_topk,
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_score_topk=group_score_topk,
        score_function=score_function,
        routed_scaling_factor=routed_scaling_factor,
    )
    groups = (num_groups, topk_groups, group_score_topk)
    weights = (score_function, normalize, float(routed_scaling_factor))
    return GateOutput(*torch.ops.deepep_moe.gate(logits, expert_bias, mask, num_topk, *groups, *weights, index_dtype))


def check_options(
    num_experts: int,
    num_topk: int,
    *,
    num_groups: int,
    topk_groups: int,
    group_score_topk: int,
    score_function: str,
    routed_scaling_factor: float,
) -> None:
    """Raises ValueError for settings that `gate` cannot serve; the arguments are those of `gate`."""
    if not 1 <= num_topk <= min(_C.MAX_TOPK, num_experts):
        raise ValueError(f"num_topk must be 1 to {min(_C.MAX_TOPK, num_experts)} for {num_experts} experts, got {num_topk}")
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups must divide the {num_experts} experts, got {num_groups}")
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"topk_groups must be 1 to num_groups, got {topk_groups} of {num_groups} groups")
    group_size = num_experts // num_groups
    if topk_groups * group_size < num_topk:
        raise ValueError(
            f"topk_groups must leave at least num_topk experts: {topk_groups} groups of {group_size} experts are fewer than {num_topk}"
        )
    if topk_groups < num_groups and not 1 <= group_score_topk <= group_size:
        raise ValueError(f"group_score_topk must be 1 to the {group_size} experts of a group, got {group_score_topk}")
    check_score_function(score_function)
    if not math.isfinite(routed_scaling_factor):
        raise ValueError(f"routed_scaling_factor must be finite, got {routed_scaling_factor}")


def check_score_function(score_function: str) -> None:
    """Raises ValueError for an unknown name."""
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(f"score_function must be one of {', '.join(SCORE_FUNCTIONS)}, got {score_function!r}")


def _check_tensors(logits: Tensor, expert_bias: Tensor | None, mask: Tensor | None, index_dtype: torch.dtype) -> None:
    if logits.dim() != 2:
        raise ValueError(f"logits must be [num_tokens, num_experts], got shape {list(logits.shape)}")
    if logits.dtype not in _DTYPES:
        raise TypeError(f"logits must be float32, bfloat16 or float16, got {logits.dtype}; convert them with logits.float()")
    if index_dtype not in (torch.int64, torch.int32):
        raise TypeError(f"index_dtype must be torch.int64 or torch.int32, got {index_dtype}")
    num_tokens, num_experts = logits.shape
    _check_tensor("logits", logits, logits.dtype, [num_tokens, num_experts])
    if expert_bias is not None:
        _check_tensor("expert_bias", expert_bias, torch.float32, [num_experts])
    if mask is not None:
        _check_tensor("mask", mask, torch.bool, [num_tokens])


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: list[int]) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if list(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape} to match logits, got {list(tensor.shape)}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, got {tensor.device}: the gate kernel of this version runs there; move it with .cpu()")


def to_dense(topk_idx: Tensor, topk_weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The dense pair that some frameworks take instead of indices and weights.

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
    routing_map = topk_idx.new_zeros(shape, dtype=torch.int8).scatter_add(1, columns, chosen.to(torch.int8)) > 0
    return probs, routing_map


# The torch operators. `gate` above checks the arguments; autograd and torch.compile see these.

_LIBRARY = torch.library.Library("deepep_moe", "FRAGMENT")
_LIBRARY.define(
    "gate(Tensor logits, Tensor? expert_bias, Tensor? mask, int num_topk, int num_groups, int topk_groups, int group_score_topk, "
    "str score_function, bool normalize, float routed_scaling_factor, ScalarType index_dtype) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "gate_backward(Tensor grad_topk_weights, Tensor logits, Tensor topk_idx, str score_function, bool normalize, "
    "float routed_scaling_factor) -> Tensor"
)


def _options(logits: Tensor, topk_idx: Tensor, groups: Sequence[int], weights: Sequence[Any]) -> _C.GateOptions:
    return _C.GateOptions(
        num_tokens=logits.shape[0],
        num_experts=logits.shape[1],
        num_topk=topk_idx.shape[1],
        num_groups=groups[0],
        topk_groups=groups[1],
        group_score_topk=groups[2],
        score_function=weights[0],
        normalize=weights[1],
        routed_scaling_factor=weights[2],
        dtype=_DTYPES[logits.dtype],
        index64=topk_idx.dtype == torch.int64,
        num_threads=config.num_threads(),
    )


def _ptr(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _empty_outputs(logits: Tensor, num_topk: int, index_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    return (
        logits.new_empty(num_tokens, num_topk, dtype=index_dtype),
        logits.new_empty(num_tokens, num_topk, dtype=torch.float32),
        logits.new_empty(num_experts, dtype=torch.int32),
    )


def _gate_cpu(logits, expert_bias, mask, num_topk, *settings):
    *numbers, index_dtype = settings
    logits = logits.contiguous()
    expert_bias = None if expert_bias is None else expert_bias.contiguous()
    mask = None if mask is None else mask.contiguous()
    topk_idx, topk_weights, num_tokens_per_expert = _empty_outputs(logits, num_topk, index_dtype)
    _C.gate_forward(
        _options(logits, topk_idx, numbers[:3], numbers[3:]),
        logits_ptr=logits.data_ptr(),
        expert_bias_ptr=_ptr(expert_bias),
        mask_ptr=_ptr(mask),
        topk_idx_ptr=topk_idx.data_ptr(),
        topk_weights_ptr=topk_weights.data_ptr(),
        num_tokens_per_expert_ptr=num_tokens_per_expert.data_ptr(),
    )
    return topk_idx, topk_weights, num_tokens_per_expert


def _gate_fake(logits, expert_bias, mask, num_topk, *settings):
    return _empty_outputs(logits, num_topk, settings[-1])


def _gate_setup_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output[0])
    ctx.weights = inputs[7:10]


def _gate_autograd(ctx, grad_topk_idx, grad_topk_weights, grad_num_tokens_per_expert):
    logits, topk_idx = ctx.saved_tensors
    return torch.ops.deepep_moe.gate_backward(grad_topk_weights, logits, topk_idx, *ctx.weights), *[None] * 10


def _gate_backward_cpu(grad_topk_weights, logits, topk_idx, *weights):
    grad_topk_weights, logits, topk_idx = grad_topk_weights.contiguous(), logits.contiguous(), topk_idx.contiguous()
    grad_logits = torch.empty_like(logits)
    _C.gate_backward(
        _options(logits, topk_idx, (1, 1, 1), weights),
        logits_ptr=logits.data_ptr(),
        topk_idx_ptr=topk_idx.data_ptr(),
        grad_topk_weights_ptr=grad_topk_weights.data_ptr(),
        grad_logits_ptr=grad_logits.data_ptr(),
    )
    return grad_logits


def _gate_backward_fake(grad_topk_weights, logits, topk_idx, *weights):
    return logits.new_empty(logits.shape)


_LIBRARY.impl("gate", _gate_cpu, "CPU")
_LIBRARY.impl("gate_backward", _gate_backward_cpu, "CPU")
torch.library.register_fake("deepep_moe::gate", _gate_fake, lib=_LIBRARY)
torch.library.register_fake("deepep_moe::gate_backward", _gate_backward_fake, lib=_LIBRARY)
torch.library.register_autograd("deepep_moe::gate", _gate_autograd, setup_context=_gate_setup_context, lib=_LIBRARY)
