"""The gate: group-limited top-k over expert scores (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.arguments import as_float, as_int, check_bool, check_is_tensor, check_memory, check_tensor
from deepep_moe.device import FLOATS, is_gpu, native_for
from deepep_moe.library import call
from deepep_moe.ops import gate_operators

# Options that are checked, in the operators' order.
OPTIONS = ("num_groups", "topk_groups", "group_score_topk", "score_function", "normalize", "routed_scaling_factor")


class GateOutput(NamedTuple):
    """The experts that tokens go to.

    topk_idx: `[num_tokens, num_topk]` expert of each lane, by descending selection score. Rows of masked tokens have -1.
    topk_weights: `[num_tokens, num_topk]` fp32, differentiable. Rows of masked tokens have 0.
    num_tokens_per_expert: `[num_experts]` int32, lanes that chose the expert.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    num_tokens_per_expert: Tensor


class FullGateOutput(NamedTuple):
    """The experts that tokens go to, in the forms that were asked for; None for the others.

    topk_idx, topk_weights, num_tokens_per_expert: as in `GateOutput`.
    probs: `[num_tokens, num_experts]` fp32 weights, differentiable. Those of experts that were not chosen are 0.
    routing_map: `[num_tokens, num_experts]` bool. Chosen experts are True.
    num_tokens_per_rank: `[num_ranks]` int32, tokens that go to the rank.
    is_token_in_rank: `[num_tokens, num_ranks]` bool.
    shares: `[num_tokens, num_experts]` fp32, each expert's part of the token's scores, differentiable. Rows of masked tokens have 0.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    num_tokens_per_expert: Tensor
    probs: Tensor | None
    routing_map: Tensor | None
    num_tokens_per_rank: Tensor | None
    is_token_in_rank: Tensor | None
    shares: Tensor | None


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
    check_finite: bool = True,
) -> GateOutput:
    """Chooses `num_topk` experts for each token, in one pass and with ties going to the lower expert index.

    Scores are computed in double precision and rounded once to fp32, whatever the dtype of the logits. The choice is by score plus
    `expert_bias`; weights come from the scores alone. With `topk_groups < num_groups` a token first chooses that many groups of
    consecutive experts, by the sum of each group's `group_score_topk` best biased scores, and then only experts in them.
    `deepep_moe.reference.gate` is the exact definition.

    On a GPU the call is one launch and waits for nothing. So a logit or bias that is not finite is found there, and the token chooses no
    expert (-1). The next gate, backward of one or `check_gate` on that GPU raises, whichever layer it is of.

    Args:
        logits: `[num_tokens, num_experts]` float32, bfloat16 or float16, on the CPU or a GPU; there at most 1024 experts. The gradient
            has the same dtype.
        num_topk: experts per token, at most 32.
        num_groups: groups of experts; divides `num_experts`. With 1 there is no limit.
        topk_groups: groups a token may choose from; together they hold at least `num_topk` experts.
        group_score_topk: experts that make a group's score. DeepSeek-V3: 2. Megatron-Core: `num_topk // topk_groups`.
        score_function: "sigmoid" (DeepSeek-V3); "sqrtsoftplus", the root of log(1 + exp(x)); "softmax" over all experts; "softmax_topk".
            The last chooses by logits, and the weights are the softmax over the chosen ones (Mixtral; Megatron-Core's default).

        expert_bias: `[num_experts]` fp32. It moves the choice only (arXiv 2408.15664).
        normalize: divide the weights by their sum + 1e-20. Without effect for "softmax_topk", whose weights have sum 1.
        routed_scaling_factor: multiplies the weights.
        mask: `[num_tokens]` bool, True for tokens to leave out, such as padding. Their logits are not read; their gradient is 0.
        index_dtype: int64 or int32, of `topk_idx`.
        check_finite: False lets NaN and infinite logits through, for a loss scaler, which skips such a step. They go through the
            arithmetic above as other numbers do, and NaN is greater than all. So each token chooses `num_topk` different experts, and its
            weights are NaN where PyTorch's functions make them so.

    Raises:
        TypeError: a tensor has another dtype, or an option another type.
        ValueError: a shape or number is out of bounds, tensors are on different devices, or a logit (with `check_finite`)
            or a bias is NaN or infinite.
    """
    native = native_for(logits)
    if native is not None:
        output: GateOutput | None = native.gate(
            logits, num_topk, num_groups, topk_groups, group_score_topk, score_function, expert_bias, normalize, routed_scaling_factor,
            mask, index_dtype, check_finite, False, 0, False,
        )  # fmt: skip
        if output is not None:
            return output
    arguments = _checked(
        logits, num_topk, num_groups=num_groups, topk_groups=topk_groups, group_score_topk=group_score_topk,
        score_function=score_function, expert_bias=expert_bias, normalize=normalize, routed_scaling_factor=routed_scaling_factor,
        mask=mask, index_dtype=index_dtype, check_finite=check_finite,
    )  # fmt: skip
    return GateOutput(*call("gate", (logits, expert_bias, mask), *arguments, False, 0, False)[:3])


def gate_full(
    logits: Tensor, num_topk: int, *, dense: bool = False, num_ranks: int = 0, shares: bool = False, **options: Any
) -> FullGateOutput:
    """Compute `gate`, and in the same pass (on a GPU: the same launch) what else a router or a dispatch needs to know.

    Args:
        logits, num_topk: as in `gate`.
        dense: also the pair `(probs, routing_map)`, as `to_dense` makes it.
        num_ranks: also `num_tokens_per_rank` and `is_token_in_rank` of the experts in equal shares on so many ranks. It divides
            `num_experts`; 0: not wanted.
        shares: also `shares`, of which auxiliary losses are made: scores divided by the sum of the token's scores + 1e-20. For both softmax
            functions they are the softmax over all experts. They are computed in double from the scores in fp32 and rounded once.
            `expert_bias`, groups, `normalize` and `routed_scaling_factor` have no effect on them. `deepep_moe.reference.gate_shares` is the
            exact definition.
        options: the other arguments of `gate`.

    Raises:
        TypeError, ValueError: as `gate`; `num_ranks` does not divide the experts.
    """
    defaults: dict[str, Any] = gate.__kwdefaults__  # type: ignore[assignment]
    if unknown := [name for name in options if name not in defaults]:
        raise TypeError(f"gate_full has no argument {', '.join(sorted(unknown))}; it takes dense, num_ranks, shares, {', '.join(defaults)}")
    options = defaults | options
    native = native_for(logits)
    output: FullGateOutput | None = (
        None if native is None else native.gate(logits, num_topk, *options.values(), dense, num_ranks, shares, True)
    )
    if output is not None:
        return output
    arguments = _checked(logits, num_topk, **options)
    num_experts, num_ranks = logits.shape[1], as_int("num_ranks", num_ranks)
    check_bool("dense", dense)
    check_bool("shares", shares)
    if num_ranks < 0 or (num_ranks > 0 and num_experts % num_ranks):
        raise ValueError(f"num_ranks is {num_ranks}; it must divide the {num_experts} experts")
    tensors = (logits, options["expert_bias"], options["mask"])
    topk_idx, topk_weights, counts, probs, routing_map, in_rank, all_shares = call("gate", tensors, *arguments, dense, num_ranks, shares)
    return FullGateOutput(
        topk_idx, topk_weights, counts[:num_experts], probs if dense else None, routing_map if dense else None,
        counts[num_experts:] if num_ranks else None, in_rank if num_ranks else None, all_shares if shares else None,
    )  # fmt: skip


def check_gate(device: torch.device | int | None = None) -> None:
    """Wait for the GPU `device`, by default the current one, and look at what gates have found there since the last look.

    Raises:
        ValueError: a logit or bias was not finite. The CPU's gate raises it at once.
    """
    if torch.cuda.is_available() and hasattr(_C, "gpu_gate_check"):
        torch.cuda.synchronize(device)
        index = device if device is None or isinstance(device, int) else torch.device(device).index
        _C.gpu_gate_check(torch.cuda.current_device() if index is None else index)


def _checked(
    logits: Tensor, num_topk: int, *, expert_bias: Any, mask: Any, index_dtype: Any, check_finite: Any, **options: Any
) -> tuple[Any, ...]:
    """Return the arguments of the operator `gate` between its tensors and `dense`."""
    _check_tensors(logits, expert_bias, mask, index_dtype)
    check_bool("check_finite", check_finite)
    return *check_options(logits.shape[1], num_topk, **options), check_finite, index_dtype


def why_not(device: torch.device, dtype: torch.dtype, num_experts: int, num_topk: int, **options: Any) -> str | None:
    """Return the reason that `gate` refuses logits [any, num_experts] of this dtype on `device` with these of its options, or None."""
    defaults: dict[str, Any] = gate.__kwdefaults__  # type: ignore[assignment]
    try:
        _check_kind(device, dtype, num_experts)
        check_options(num_experts, num_topk, **{name: options.get(name, defaults[name]) for name in OPTIONS})
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def check_options(
    num_experts: int,
    num_topk: int,
    *,
    num_groups: int,
    topk_groups: int,
    group_score_topk: int,
    score_function: str,
    normalize: bool,
    routed_scaling_factor: float,
) -> tuple[int, int, int, int, str, bool, float]:
    """Return `num_topk` and `OPTIONS` as plain values; the arguments are those of `gate`. Raises TypeError, or ValueError for settings that
    `gate` cannot serve."""
    num_topk, num_groups = as_int("num_topk", num_topk), as_int("num_groups", num_groups)
    topk_groups, group_score_topk = as_int("topk_groups", topk_groups), as_int("group_score_topk", group_score_topk)
    check_bool("normalize", normalize)
    routed_scaling_factor = as_float("routed_scaling_factor", routed_scaling_factor)
    if not 1 <= num_topk <= min(_C.MAX_TOPK, num_experts):
        raise ValueError(f"num_topk is {num_topk}; it must be 1 to {min(_C.MAX_TOPK, num_experts)} for {num_experts} experts")
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups is {num_groups}; it must divide the {num_experts} experts")
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"topk_groups is {topk_groups}; it must be 1 to num_groups, {num_groups}")
    group_size = num_experts // num_groups
    if topk_groups * group_size < num_topk:
        raise ValueError(f"topk_groups is {topk_groups}; its groups of {group_size} experts must hold at least num_topk, {num_topk}")
    if topk_groups < num_groups and not 1 <= group_score_topk <= group_size:
        raise ValueError(f"group_score_topk is {group_score_topk}; it must be 1 to the {group_size} experts of a group")
    gate_operators.check_score_function(score_function)
    if not math.isfinite(routed_scaling_factor):
        raise ValueError(f"routed_scaling_factor is {routed_scaling_factor}; it must be finite")
    return num_topk, num_groups, topk_groups, group_score_topk, score_function, normalize, routed_scaling_factor


def _check_tensors(logits: Tensor, expert_bias: Tensor | None, mask: Tensor | None, index_dtype: torch.dtype) -> None:
    check_is_tensor("logits", logits)
    if logits.dim() != 2:
        raise ValueError(f"logits has shape {list(logits.shape)}; it must be [num_tokens, num_experts]")
    _check_kind(logits.device, logits.dtype, logits.shape[1])
    if index_dtype not in (torch.int64, torch.int32):
        raise TypeError(f"index_dtype is {index_dtype}; it must be torch.int64 or torch.int32")
    num_tokens, num_experts = logits.shape
    expected = ("logits", logits, (num_tokens, num_experts), logits.dtype), ("mask", mask, (num_tokens,), torch.bool)
    for name, tensor, shape, dtype in (*expected, ("expert_bias", expert_bias, (num_experts,), torch.float32)):
        if tensor is not None:
            check_tensor(name, tensor, shape, (dtype,), logits.device, any_strides=True, like="logits")
            check_memory(name, tensor)


def _check_kind(device: torch.device, dtype: torch.dtype, num_experts: int) -> None:
    if dtype not in FLOATS:
        raise TypeError(f"logits has dtype {dtype}; it must be float32, bfloat16 or float16: pass logits.float()")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"logits is on {device}; it must be on the CPU or a CUDA device")
    if not is_gpu(device):
        return
    if not hasattr(_C, "MAX_GPU_GATE_EXPERTS"):
        raise ValueError(f"logits are on {device} and this build has no CUDA kernels: build deepep_moe where nvcc is found")
    if num_experts > _C.MAX_GPU_GATE_EXPERTS:
        raise ValueError(f"logits has {num_experts} experts; on a GPU it must have at most {_C.MAX_GPU_GATE_EXPERTS}: pass logits.cpu()")
