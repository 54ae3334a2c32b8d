"""Baselines of the gate, with sigmoid scores and a bias as in DeepSeek-V3. Each returns weights or the dense pair."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepep_moe import ops
from deepep_moe.errors import BackendUnavailableError

SCALING = 2.5


class Shape(NamedTuple):
    """The sizes of one measurement, with the names of `deepep_moe.ops.gate`."""

    num_tokens: int
    num_experts: int
    num_topk: int
    num_groups: int
    topk_groups: int


Gate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits, expert_bias) -> (differentiable weights, indices or map): `[num_tokens, num_topk]`, or `[num_tokens, num_experts]` if dense."""


def ours(shape: Shape, dense: bool) -> Gate:
    options: dict[str, Any] = {
        "num_groups": shape.num_groups, "topk_groups": shape.topk_groups, "routed_scaling_factor": SCALING,
    }  # fmt: skip

    def gate(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        if not dense:
            output = ops.gate(logits, shape.num_topk, expert_bias=bias, **options)
            return output.topk_weights, output.topk_idx
        full = ops.gate_full(logits, shape.num_topk, dense=True, expert_bias=bias, **options)
        return full.probs, full.routing_map  # type: ignore[return-value]

    return gate


def operators(shape: Shape, dense: bool) -> Gate:
    """Return what training frameworks do with PyTorch operators in fp32. Experts are counted too, as `ops.gate` does."""
    group_size = shape.num_experts // shape.num_groups

    def gate(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.float().sigmoid()
        selection = scores + bias
        if shape.topk_groups < shape.num_groups:
            group_scores = selection.view(len(logits), shape.num_groups, -1).topk(2, dim=2).values.sum(dim=2)
            chosen = group_scores.topk(shape.topk_groups, dim=1, sorted=False).indices
            excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, chosen, False)
            selection = selection.masked_fill(excluded.repeat_interleave(group_size, dim=1), -torch.inf)
        topk_idx = selection.topk(shape.num_topk, dim=1).indices
        topk_weights = scores.gather(1, topk_idx)
        topk_weights = topk_weights / (topk_weights.sum(dim=1, keepdim=True) + 1e-20) * SCALING
        torch.bincount(topk_idx.view(-1), minlength=shape.num_experts)
        if not dense:
            return topk_weights, topk_idx
        probs = torch.zeros_like(logits, dtype=topk_weights.dtype).scatter(1, topk_idx, topk_weights)
        return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, topk_idx, True)

    return gate


def compiled(shape: Shape, dense: bool) -> Gate:
    torch.compiler.reset()  # code of earlier shapes counts towards a limit, above which nothing is compiled
    return torch.compile(operators(shape, dense), dynamic=False)


def _foreign(module: str, function: str, shape: Shape, dense: bool) -> Gate:
    """Return a router of another library. Both libraries take the same arguments and return the dense pair; lanes are picked from it.

    Raises BackendUnavailableError where the library cannot be imported.
    """
    try:
        route = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, OSError) as error:  # OSError: a library that the package links is missing
        raise BackendUnavailableError(f"{type(error).__name__}: {error}") from error
    groups = (shape.num_groups, shape.topk_groups) if shape.topk_groups < shape.num_groups else (None, None)

    def gate(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        probs, routing_map = route(
            logits, topk=shape.num_topk, use_pre_softmax=False, num_groups=groups[0], group_topk=groups[1], scaling_factor=SCALING,
            score_function="sigmoid", expert_bias=bias,
        )  # fmt: skip
        return (probs, routing_map) if dense else probs.topk(shape.num_topk, dim=1)

    return gate


megatron = partial(_foreign, "megatron.core.transformer.moe.moe_utils", "topk_routing_with_score_function")
"""Megatron-Core's router in PyTorch operators."""
transformer_engine = partial(_foreign, "transformer_engine.pytorch.router", "fused_topk_with_score_function")
"""Transformer Engine's fused router."""
BASELINES: dict[str, Callable[[Shape, bool], Gate]] = {
    "torch operators": operators,
    "torch.compile": compiled,
    "Megatron-Core": megatron,
    "Transformer Engine": transformer_engine,
}
ON_CPU = {"torch operators": operators}
