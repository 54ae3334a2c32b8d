"""Decide as DeepSpeed's gates do, without the work that only padded slots need.

A `TopKGate` numbers the slots of every expert by scans along the tokens of a matrix [num_tokens, num_experts]. On a GPU they take longer
than the rest of the gate, and packed rows need no slots. Here experts and weights come from the same random numbers, by the same floating
point operations in the same order, so decisions, weights, losses and gradients equal the gate's to the bit. Only the counting of tokens
differs.

That holds for gates whose source is known (0.19.4 to 0.19.8). Any other gate, and a gate that somebody watches, is called.
"""

import functools
import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.moe import sharded_moe
from deepspeed.moe.sharded_moe import TopKGate
from torch import Tensor
from torch.nn.modules import module as torch_module

from deepep_moe import _C
from deepep_moe.device import is_gpu, launch
from deepep_moe.integrations.deepspeed.native.watched import has_hooks
from deepep_moe.library import Context, Function

Decision = tuple[Tensor, Tensor, Tensor, Tensor]
"""The fields of `routing.Routing`."""
_FUNCTIONS = ("top1gating", "top2gating", "topkgating", "_capacity", "gumbel_rsample", "multiplicative_jitter", "einsum")
_ALL = 2**31  # the capacity of an expert that takes all tokens
_KNOWN = {"0.19.4 to 0.19.7": "7537ab1b18ba5551", "0.19.8": "4224238c65e13fc0"}


def decides_alike(gate: TopKGate, x: Tensor, used_token: Tensor | None) -> bool:
    """Return whether `decide(gate, x)` is what this gate would decide.

    It is not with masked tokens, where matrix products round the gate's weights, or with a default dtype other than fp32, in which the
    gate would compute its capacity.
    """
    return (
        used_token is None
        and torch.get_default_dtype() == torch.float32
        and type(gate) is TopKGate
        and not is_watched(gate)
        and not torch.is_autocast_enabled(x.device.type)
        and (gate.k != 2 or _multiplies_exactly())
        and knows_the_gate()
    )


def knows_the_gate() -> bool:
    """Return whether the installed `TopKGate` decides as the functions here do."""
    return is_known(TopKGate.forward, *(getattr(sharded_moe, name, None) for name in _FUNCTIONS))


def _multiplies_exactly() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # the precision was set for each backend separately
        return False


def is_watched(gate: TopKGate) -> bool:
    """Return whether a call of the gate does more than its class's forward, because of a hook, a timer or a forward of its own."""
    has_own = "forward" in gate.__dict__ or gate._compiled_call_impl is not None
    return has_hooks(gate) or torch_module._has_any_global_hook() or gate.wall_clock_breakdown or has_own


@functools.cache
def is_known(*functions: Callable[..., object] | None) -> bool:
    """Return whether these are the gate's forward and `_FUNCTIONS` of a version in `_KNOWN`, unpatched."""
    return digest(functions) in _KNOWN.values()


def digest(functions: tuple[Any, ...]) -> str:
    """Return a digest of the functions' source, or "" if there is no source or a function wraps another one.

    Scripted and compiled functions keep their source in the function that they were made of.
    """
    made_of: list[Any] = [getattr(function, "_torchdynamo_inline", None) for function in functions]
    if any(getattr(function, "__wrapped__", origin) is not origin for function, origin in zip(functions, made_of, strict=True)):
        return ""
    try:
        source = "".join(inspect.getsource(origin or function) for function, origin in zip(functions, made_of, strict=True))
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def decide(gate: TopKGate, x: Tensor) -> Decision:
    """Return what the gate decides for x [num_tokens > 0, hidden] without a group and with a least capacity of no more than num_tokens."""
    rows = x.float()
    if gate.noisy_gate_policy == "Jitter" and gate.training:
        rows = sharded_moe.multiplicative_jitter(rows, device=x.device)
    logits = torch.nn.functional.linear(rows, gate.wg.weight.float())
    capacity = None
    if gate.drop_tokens:
        factor = gate.capacity_factor if gate.training else gate.eval_capacity_factor
        capacity = capacity_of(*logits.shape, factor * gate.k, min(gate.min_capacity, len(x)))
    if gate.k == 1:
        return _decide_1(logits, capacity, noise=gate.noisy_gate_policy == "RSample" and gate.training, random=gate.use_rts)
    if gate.k == 2:
        return _decide_2(logits, capacity, noise=gate.top2_2nd_expert_sampling)
    return _decide_k(logits, gate.k, capacity)


@functools.lru_cache(maxsize=256)
def capacity_of(num_tokens: int, num_experts: int, factor: float, least: int) -> int:
    """Return the slots of an expert, computed in fp32 as the gate does, because rounding decides where the quotient is nearly whole."""
    return max(int(torch.ceil((num_tokens / num_experts) * torch.tensor(factor, device="cpu"))), least)


def _decide_1(logits: Tensor, capacity: int | None, *, noise: bool, random: bool) -> Decision:
    """Choose each token's best expert. An expert with too many tokens keeps those with the highest random numbers."""
    gates, scores = logits.softmax(1), logits.detach()
    if noise:
        scores = scores + sharded_moe.gumbel_rsample(logits.shape, device=logits.device)
    idx = (scores if noise else gates).argmax(1, keepdim=True)
    mask = torch.zeros_like(scores).scatter_(1, idx, 1.0)
    counts = mask.sum(0).long()
    l_aux = torch.sum(gates.mean(0) * mask.mean(0)) * gates.shape[1]
    order = _in_random_order(mask) if random else mask.long()  # without random numbers all are equal, and topk on integers decides
    kept = _best(order, int(counts.max()) if capacity is None else capacity, is_sorted=True).gather(1, idx)
    weights = gates.gather(1, idx) * kept
    return l_aux, counts, idx.masked_fill(~kept, -1).t(), weights.t()


def _in_random_order(mask: Tensor) -> Tensor:
    """Replace ones by random numbers, drawn as the gate draws them: in the dtype that was the default when it first drew."""
    drawn = sharded_moe.exp_selection_uniform_map
    if mask.device not in drawn:
        low, high = (torch.tensor(value, device=mask.device) for value in (0.0, 1.0))
        drawn[mask.device] = torch.distributions.Uniform(low, high).rsample
    numbers = drawn[mask.device](mask.shape)
    return mask.to(numbers.dtype) * numbers


def _decide_2(logits: Tensor, capacity: int | None, *, noise: bool) -> Decision:
    """Choose each token's best expert, and the best other expert by noisy logits. All first choices come before all second choices."""
    scores = logits.detach()
    if noise:
        scores = scores + sharded_moe.gumbel_rsample(logits.shape, device=logits.device)
    return Top2.apply(logits, scores, capacity, _choose_2) if has_kernels(logits) else _choose_2(logits, scores, capacity)


def _choose_2(logits: Tensor, scores: Tensor, capacity: int | None) -> Decision:
    gates = logits.softmax(1)
    first = gates.argmax(1, keepdim=True)
    second = scores.scatter(1, first, float("-inf")).argmax(1, keepdim=True)
    mask = torch.zeros_like(scores).scatter_(1, first, 1.0)
    l_aux = torch.mean(gates.mean(0) * mask.mean(0)) * gates.shape[1] * gates.shape[1]
    idx = torch.cat((first, second), 1)
    weights = gates.gather(1, idx)
    if capacity is None:
        counts = mask.scatter_add_(1, second, torch.ones_like(second, dtype=mask.dtype)).sum(0).long()
    else:
        lanes = idx.t().reshape(1, -1)
        chosen = torch.zeros(gates.shape[1], lanes.shape[1], dtype=torch.int32, device=idx.device).scatter_(0, lanes, 1)
        places = chosen.cumsum(1, dtype=torch.int32)  # along memory, from 1
        counts = places[:, -1].long()
        kept = (places.gather(0, lanes) <= capacity).view(2, -1).t()
        idx, weights = idx.masked_fill(~kept, -1), weights * kept
    total = weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
    return l_aux, counts, idx.t(), (weights / total).t()


def _decide_k(logits: Tensor, k: int, capacity: int | None) -> Decision:
    """Choose each token's k best experts. An expert with too many tokens keeps those with the largest gates."""
    gates = logits.softmax(1)
    best, idx = gates.topk(k, dim=1)
    mask = torch.zeros_like(gates, dtype=torch.bool).scatter_(1, idx, True)
    counts = mask.sum(0)
    num_experts = gates.shape[1]
    l_aux = torch.mean(gates.mean(0) * mask.float().mean(0)) * num_experts * num_experts / k
    if capacity is not None:
        mask &= _best(torch.zeros_like(gates).scatter_(1, idx, best.detach()), capacity, is_sorted=False)
    weights = gates * mask
    weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(gates.dtype).eps)
    return l_aux, counts, idx.masked_fill(~mask.gather(1, idx), -1).t(), weights.gather(1, idx).t()


def _best(scores: Tensor, num_tokens: int, *, is_sorted: bool) -> Tensor:
    """Return, as [num_tokens, num_experts] bool, whether a token is among the `num_tokens` with the highest scores of an expert.

    `is_sorted` must be what the gate asks topk for, as it may decide between equal scores.
    """
    best = scores.topk(min(num_tokens, len(scores)), dim=0, sorted=is_sorted).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(0, best, True)


# ---- top-2 gating in GPU kernels, as one autograd function ----


def has_kernels(logits: Tensor) -> bool:
    return is_gpu(logits.device) and hasattr(_C, "gpu_top2") and len(logits) > 0


class Top2(Function):
    """Computes `by_operations(logits, scores, capacity)`, which it calls for the second derivative only.

    It runs in GPU kernels, because the host limits the speed of a layer with few experts per token. Everything equals the operations to
    the bit.

    logits and scores are [num_tokens > 0, num_experts] fp32. scores have no gradient, and the second choices are the best of them.
    capacity is the most tokens of an expert, or None. Returns l_aux, counts [num_experts] int64, topk_idx [2, num_tokens] int32 with -1
    for dropped, and topk_weights [2, num_tokens] fp32.
    """

    @staticmethod
    def forward(ctx: Context, logits: Tensor, scores: Tensor, capacity: int | None, by_operations: Callable[..., Decision]) -> Decision:
        gates, scores = logits.softmax(1), scores.contiguous()
        num_tokens, num_experts = gates.shape
        chosen, topk_idx = (gates.new_empty(2, num_tokens, dtype=torch.int32) for _ in range(2))
        topk_weights, is_first = gates.new_empty(2, num_tokens), torch.empty_like(gates)
        counts = gates.new_empty(num_experts, dtype=torch.int64)
        most = _ALL if capacity is None else capacity
        launch(_C.gpu_top2, gates, scores, most, chosen, topk_idx, topk_weights, is_first, counts, on=gates)
        load = is_first.mean(0)
        l_aux = torch.mean(gates.mean(0) * load) * num_experts * num_experts
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(counts, topk_idx)
        ctx.save_for_backward(logits, scores, gates, chosen, topk_idx, load)
        ctx.again = capacity, by_operations
        return l_aux, counts, topk_idx, topk_weights

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        grad_l_aux, _, _, grad_weights = grads
        if grad_l_aux is None and grad_weights is None:
            return None, None, None, None
        logits, scores, gates, chosen, topk_idx, load = ctx.saved_tensors
        if torch.is_grad_enabled():
            capacity, by_operations = ctx.again
            l_aux, _, _, topk_weights = by_operations(logits, scores, capacity)
            wanted = [(out, grad) for out, grad in ((l_aux, grad_l_aux), (topk_weights, grad_weights)) if grad is not None]
            outputs, wanted_grads = zip(*wanted, strict=True)
            return *torch.autograd.grad(outputs, logits, wanted_grads, create_graph=True), None, None, None
        grad_weights = None if grad_weights is None else grad_weights.contiguous()
        grad_gates = torch.empty_like(gates)
        launch(_C.gpu_top2_backward, gates, chosen, topk_idx, grad_weights, grad_l_aux, load, grad_gates, on=gates)
        return torch.ops.aten._softmax_backward_data(grad_gates, gates, 1, torch.float32), None, None, None
