"""Megatron-Core's top-k routing by the gate of this library, and its choice on the way to the dispatcher.

`TopKRouter.routing` calls `topk_routing_with_score_function`, which makes the dense pair (probs, routing_map); a flex dispatcher then
looks for the experts in it. For routers of layers that dispatch through deepep_moe `serve_routers` puts one call of the gate in that
place. It makes the pair too, for what else reads it (counts for the expert bias), and ties its own lists to it. Auxiliary losses call
`compute_routing_scores_for_aux_loss` for scores of all experts and a choice by them; a second call of the gate makes those.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from deepep_moe._C import MAX_TOPK
from deepep_moe.integrations.megatron.patches import Patches
from deepep_moe.integrations.megatron.routing import weights_at
from deepep_moe.ops.gate import gate_full

_CHOICE = "_deepep_moe_choice"  # attribute of a routing_map
_log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """What the gate chose, beside the pair made of it."""

    probs: torch.Tensor
    versions: tuple[int, int]  # of probs and routing_map: one changed in place says something else
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    def weights_for(self, probs: torch.Tensor) -> torch.Tensor:
        """[num_tokens, num_topk] fp32: the gate's own where `probs` are what it returned, else taken from them, with what was done to
        them since, such as attaching a loss."""
        is_own = probs is self.probs and probs._version == self.versions[0] and probs.requires_grad == self.topk_weights.requires_grad
        return self.topk_weights if is_own else weights_at(probs, self.topk_idx)


def choice_for(routing_map: torch.Tensor) -> Choice | None:
    """The gate's choice that `routing_map` still stands for; None where there is none: the map was made or changed by something else."""
    choice: Choice | None = getattr(routing_map, _CHOICE, None)
    return choice if choice is not None and choice.versions[1] == routing_map._version else None


def serve_routers(patches: Patches, is_served: Callable[[Any], bool]) -> None:
    """Make the gate choose for routers whose config `is_served`, and score for their auxiliary losses, wherever it can; where not, one log
    line says why.

    Megatron-Core's routing is done as before for logits that are not fp32 (it rounds scores to their dtype before it chooses), while a
    router replays or records, for fused routing of TransformerEngine, and for arguments that came after 0.19.
    """
    from megatron.core.transformer.moe import router

    routing, served, said = router.TopKRouter.routing, [False], set[str]()

    def replacement(original: Callable[..., Any], ours: Callable[[dict[str, Any]], Any], known: set[str]) -> Callable[..., Any]:
        parameters = inspect.signature(original)

        def choose(*args: Any, **kwargs: Any) -> Any:
            given = parameters.bind(*args, **kwargs).arguments
            reason = _refusal(given, known) if served[-1] else None
            if reason is not None and reason not in said:
                said.add(reason)
                _log.info("Megatron-Core's own routing is used: %s", reason)
            return original(*args, **kwargs) if reason is not None or not served[-1] else ours(given)

        return choose

    def route(self: Any, *args: Any, **kwargs: Any) -> Any:
        served.append(is_served(self.config))
        try:
            return routing(self, *args, **kwargs)
        finally:
            served.pop()

    for name, (ours, known) in _REPLACEMENTS.items():
        original = getattr(router, name, None)
        if original is None:  # 0.13
            _log.info("this Megatron-Core has no %s: its own routing is used", name)
        else:
            patches.set(router, name, replacement(original, ours, known))
    patches.set(router.TopKRouter, "routing", route)


def _refusal(given: dict[str, Any], known: set[str]) -> str | None:
    """Why the gate cannot serve a call with these arguments of Megatron-Core's function, of which it knows some; None: it can."""
    logits, score_function = given["logits"], given.get("score_function", "softmax")
    replay = given.get("router_replay")
    if logits.dtype != torch.float32:
        return f"it rounds scores to {logits.dtype} before it chooses; moe_router_dtype='fp32' keeps them, and the gate serves it"
    if given.get("fused"):
        return "moe_router_fusion asks for TransformerEngine's routing"
    if replay is not None and replay.router_replay_action is not None:
        return f"a router replay is active ({replay.router_replay_action})"
    if score_function not in ("softmax", "sigmoid", "sqrtsoftplus"):
        return f"the gate has no score function {score_function!r}"
    if given.get("expert_bias") is not None and score_function == "softmax":
        return "an expert bias has no effect on Megatron-Core's softmax routing"
    if given["topk"] > MAX_TOPK:
        return f"the gate chooses {MAX_TOPK} experts at most, moe_router_topk is {given['topk']}"
    others = sorted(name for name, value in given.items() if name not in known and value is not None and value is not False)
    return f"the gate does not know {', '.join(others)}" if others else None


def _route(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair of topk_routing_with_score_function."""
    topk, score_function = given["topk"], given.get("score_function", "softmax")
    groups = {}
    if given.get("group_topk"):
        groups = {"num_groups": given["num_groups"], "topk_groups": given["group_topk"], "group_score_topk": topk // given["group_topk"]}
    if score_function == "softmax" and not given.get("use_pre_softmax"):
        score_function = "softmax_topk"
    out = gate_full(
        given["logits"], topk, dense=True, score_function=score_function, expert_bias=given.get("expert_bias"),
        normalize=score_function in ("sigmoid", "sqrtsoftplus") and topk > 1, routed_scaling_factor=given.get("scaling_factor") or 1.0,
        **groups,
    )  # fmt: skip
    assert out.probs is not None and out.routing_map is not None  # they were asked for
    setattr(out.routing_map, _CHOICE, Choice(out.probs, (out.probs._version, out.routing_map._version), out.topk_idx, out.topk_weights))
    return out.probs, out.routing_map


def _score(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair of compute_routing_scores_for_aux_loss: who would be chosen by scores alone, and each expert's share of the scores."""
    out = gate_full(
        given["logits"], given["topk"], dense=True, shares=True, score_function=given["score_function"], mask=given.get("padding_mask")
    )
    assert out.routing_map is not None and out.shares is not None  # they were asked for
    return out.routing_map, out.shares


_REPLACEMENTS: dict[str, tuple[Callable[[dict[str, Any]], Any], set[str]]] = {
    "topk_routing_with_score_function": (
        _route,
        {
            "logits", "topk", "use_pre_softmax", "num_groups", "group_topk", "scaling_factor", "score_function", "expert_bias", "fused",
            "router_replay",
        },
    ),
    "compute_routing_scores_for_aux_loss": (_score, {"logits", "topk", "score_function", "fused", "padding_mask"}),
}  # fmt: skip
"""Functions of Megatron-Core's router by name: ours instead, of their arguments, and which of those it knows."""
