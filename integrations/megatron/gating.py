"""Let the gate of this library do Megatron-Core's top-k routing, and hand its choice to the dispatcher.

`TopKRouter.routing` calls `topk_routing_with_score_function`, which returns the dense pair (probs, routing_map). A flex dispatcher then
searches it for the experts. `serve_routers` puts one call of the gate in that place, for routers of layers that dispatch through
deepep_moe. The gate returns the pair too, as others read it, and its top-k lists and counts are attached to the pair.
Auxiliary losses call `compute_routing_scores_for_aux_loss` for scores of all experts and a choice by them. A second call of the gate
computes those.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepep_moe.integrations.common.patches import Patches, Stock
from deepep_moe.integrations.common.warn_once import warn_once
from deepep_moe.integrations.megatron.config_switches import is_ours
from deepep_moe.integrations.megatron.options import Config
from deepep_moe.library import Context, Function
from deepep_moe.ops.gate import FullGateOutput, gate_full, why_not
from deepep_moe.ops.lanes import weights_at

_CHOICE = "_deepep_moe_choice"  # attribute of a routing_map
_MAP = "_deepep_moe_routing_map"  # attribute of its probs: a weak reference to it


class Choice(NamedTuple):
    """The gate's choice as top-k lists, attached to the dense pair that was made of it."""

    probs: torch.Tensor
    versions: tuple[int, int]  # versions of probs and routing_map; a tensor changed in place no longer has the gate's choice
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    num_tokens_per_expert: torch.Tensor

    def weights_for(self, probs: torch.Tensor) -> torch.Tensor:
        """Return the weights of the choice, [num_tokens, num_topk] fp32.

        They are the gate's own if `probs` is what it returned. Otherwise they are read from `probs`, with all that was done to it since,
        such as attaching a loss.
        """
        is_own = probs is self.probs and probs._version == self.versions[0] and probs.requires_grad == self.topk_weights.requires_grad
        is_watched = bool(probs._backward_hooks) or probs.retains_grad
        return self.topk_weights if is_own and not is_watched else weights_at(probs, self.topk_idx)


def choice_for(routing_map: torch.Tensor) -> Choice | None:
    """Return the gate's choice that `routing_map` stands for, or None if something else has made or changed the map."""
    choice: Choice | None = getattr(routing_map, _CHOICE, None)
    return choice if choice is not None and choice.versions[1] == routing_map._version else None


def _attach_choice(routing_map: torch.Tensor, probs: torch.Tensor, *lists: torch.Tensor) -> None:
    """Attach what the gate chose. `lists` are the last fields of `Choice`."""
    setattr(routing_map, _CHOICE, Choice(probs, (probs._version, routing_map._version), *lists))
    setattr(probs, _MAP, weakref.ref(routing_map))


def serve_routers(patches: Patches) -> None:
    """Let the gate choose, and compute scores for auxiliary losses, for routers of layers with our dispatcher.

    Megatron-Core's own routing runs where the gate cannot, and one log line says why. The gate takes only fp32 logits, because
    Megatron-Core rounds scores to the dtype of the logits before it chooses. It does not run while a router replays or records, with fused
    routing of TransformerEngine, with arguments that came after 0.19, or where somebody else has replaced Megatron-Core's functions.
    """
    from megatron.core.transformer.moe import router

    served: list[object] = [None]  # the configs of the routers that run, None where the gate does not serve
    _serve_losses(patches)

    def replacement(name: str, ours: Callable[[dict[str, object], bool], object], known: set[str]) -> Callable[..., object]:
        original = getattr(router, name)
        parameters = inspect.signature(original)
        names = tuple(parameters.parameters)

        def named(args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, Any]:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            if len(arguments) == len(args) + len(kwargs) and parameters.parameters.keys() >= arguments.keys():
                return arguments
            return parameters.bind(*args, **kwargs).arguments  # it says what is wrong

        def choose(*args: object, **kwargs: object) -> object:
            if served[-1] is None:
                return original(*args, **kwargs)
            reason = _replaced(name, original)
            arguments = {} if reason else named(args, kwargs)
            reason = reason or _refusal(arguments, known)
            if reason is None:
                return ours(arguments, not has_loss_scaler(served[-1]))
            warn_once(f"Megatron-Core's own routing is used, without the gate of deepep_moe: {reason}", stage_group())
            return original(*args, **kwargs)

        return choose

    @patches.around(router.TopKRouter, "routing")
    def route(stock: Stock, module: router.TopKRouter, /, *args: object, **kwargs: object) -> object:
        served.append(module.config if is_ours(module.config) else None)
        try:
            return stock(module, *args, **kwargs)
        finally:
            served.pop()

    for name, (ours, known) in _REPLACEMENTS.items():
        if not hasattr(router, name):  # 0.13
            warn_once(f"Megatron-Core's own routing is used, without the gate of deepep_moe: this version has no {name}")
        else:
            patches.set(router, name, replacement(name, ours, known))
    _serve_counts(patches, router)


def _serve_counts(patches: Patches, router: Any) -> None:
    """Let routers with an expert bias add the gate's counts. Megatron-Core counts the routing map in a compiled region of its own, which
    takes the host several times as long as the gate."""
    stock = getattr(router.TopKRouter, "_apply_expert_bias", None)
    if stock is None or stock.__module__ != router.__name__:  # before 0.16, or somebody else's
        return

    @patches.around(router.TopKRouter, "_apply_expert_bias")
    def count(stock: Stock, module: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        choice = None if padding_mask is not None else choice_for(routing_map)
        if choice is None:
            stock(module, routing_map, padding_mask=padding_mask)
        elif module.enable_expert_bias and torch.is_grad_enabled():
            module.local_tokens_per_expert.add_(choice.num_tokens_per_expert)


def has_loss_scaler(config: Config) -> bool:
    """Return whether Megatron-Core scales the loss of a model with this config. It does for fp16, and skips steps that overflow, with a
    dynamic and with a constant scale alike."""
    return bool(getattr(config, "fp16", False))


def stage_group() -> "dist.ProcessGroup | None":
    """Return the group of this pipeline stage, or None if Megatron-Core has not made its groups."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None
    group: dist.ProcessGroup = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return group


def _replaced(name: str, original: object) -> str | None:
    """Return the reason why `original`, or a function that it calls, is not Megatron-Core's own, or None.

    A wrapper may have the name of the function that it wraps, but its globals are those of its own module.
    """
    from megatron.core.transformer.moe import moe_utils

    for function, its_name in ((original, name), (moe_utils.group_limited_topk, "group_limited_topk")):
        if getattr(function, "__globals__", {}).get("__name__") != moe_utils.__name__:
            return f"somebody has replaced its {its_name}"
    return None


def _refusal(arguments: dict[str, Any], known: set[str]) -> str | None:
    """Return the reason why the gate cannot serve a call of Megatron-Core's function with these arguments, or None if it can. `known` names
    the arguments that it can honour."""
    logits, score_function = arguments["logits"], arguments.get("score_function", "softmax")
    replay = arguments.get("router_replay")
    if logits.dtype != torch.float32:
        return f"it rounds scores to {logits.dtype} before it chooses; moe_router_dtype='fp32' keeps them, and the gate serves it"
    if arguments.get("fused"):
        return "moe_router_fusion asks for TransformerEngine's routing"
    if replay is not None and replay.router_replay_action is not None:
        return f"a router replay is active ({replay.router_replay_action})"
    if arguments.get("expert_bias") is not None and score_function == "softmax":
        return "an expert bias has no effect on Megatron-Core's softmax routing"
    reason = _why_not(logits.device, logits.dtype, logits.shape[-1], arguments["topk"], score_function=score_function, **_groups(arguments))
    if reason is not None:
        return f"the gate refuses: {reason}"
    others = sorted(name for name in arguments.keys() - known if arguments[name] is not None and arguments[name] is not False)
    return f"the gate does not know {', '.join(others)}" if others else None


_why_not = functools.lru_cache(maxsize=64)(why_not)


def _groups(arguments: dict[str, Any]) -> dict[str, int]:
    """Return the gate's arguments for groups of experts."""
    if not arguments.get("group_topk"):
        return {}
    group_topk = arguments["group_topk"]
    return {"num_groups": arguments["num_groups"], "topk_groups": group_topk, "group_score_topk": arguments["topk"] // group_topk}


def _route(arguments: dict[str, Any], check_finite: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pair of topk_routing_with_score_function."""
    topk, score_function = arguments["topk"], arguments.get("score_function", "softmax")
    if score_function == "softmax" and not arguments.get("use_pre_softmax"):
        score_function = "softmax_topk"
    out = _gate(
        arguments["logits"], topk, score_function=score_function, expert_bias=arguments.get("expert_bias"),
        normalize=score_function in ("sigmoid", "sqrtsoftplus") and topk > 1, routed_scaling_factor=arguments.get("scaling_factor") or 1.0,
        check_finite=check_finite, **_groups(arguments),
    )  # fmt: skip
    assert out.probs is not None and out.routing_map is not None  # they were asked for
    if not out.probs.is_inference():  # tensors of the inference mode have no versions that tell whether they were changed
        _attach_choice(out.routing_map, out.probs, out.topk_idx, out.topk_weights, out.num_tokens_per_expert)
    return out.probs, out.routing_map


def _score(arguments: dict[str, Any], check_finite: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pair of compute_routing_scores_for_aux_loss: the experts chosen by scores alone, and each expert's share of the scores."""
    out = _gate(
        arguments["logits"], arguments["topk"], shares=True, score_function=arguments["score_function"], mask=arguments.get("padding_mask"),
        check_finite=check_finite,
    )  # fmt: skip
    assert out.routing_map is not None and out.shares is not None  # they were asked for
    return out.routing_map, out.shares


def _gate(logits: torch.Tensor, topk: int, **options: Any) -> FullGateOutput:
    try:
        return gate_full(logits, topk, dense=True, **options)
    except ValueError as error:
        if not options["check_finite"]:
            raise
        raise ValueError(f"{error}. Megatron-Core's own routing, which enable(gate=False) leaves in place, takes such logits") from error


# ---- auxiliary losses ----


class _AttachLoss(Function):
    """Does to probs and to the gate's weights what Megatron-Core's `MoEAuxLossAutoScaler` does to probs.

    The dispatch uses one of both. So it need not read the weights from the probs again, and the loss gets its gradient once.
    """

    @staticmethod
    def forward(ctx: Context, probs: torch.Tensor, topk_weights: torch.Tensor, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(loss)
        return probs, topk_weights

    @staticmethod
    def backward(ctx: Context, grad_probs: object, grad_weights: object) -> tuple[object, object, torch.Tensor]:
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        return grad_probs, grad_weights, MoEAuxLossAutoScaler.backward(ctx, grad_probs)[1]


def _serve_losses(patches: Patches) -> None:
    """Let the gate's choice stay with probs to which Megatron-Core attaches a loss."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    @patches.around(MoEAuxLossAutoScaler, "apply")
    def attach(stock: Stock, output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        routing_map: torch.Tensor | None = getattr(output, _MAP, lambda: None)()
        choice = None if routing_map is None else choice_for(routing_map)
        if routing_map is None or choice is None or choice.weights_for(output) is not choice.topk_weights:
            probs: torch.Tensor = stock(output, loss)
            return probs
        probs, topk_weights = _AttachLoss.apply(output, choice.topk_weights, loss)
        _attach_choice(routing_map, probs, choice.topk_idx, topk_weights, choice.num_tokens_per_expert)
        return probs


_REPLACEMENTS: dict[str, tuple[Callable[[dict[str, Any], bool], Any], set[str]]] = {
    "topk_routing_with_score_function": (
        _route,
        {
            "logits", "topk", "use_pre_softmax", "num_groups", "group_topk", "scaling_factor", "score_function", "expert_bias", "fused",
            "router_replay",
        },
    ),
    "compute_routing_scores_for_aux_loss": (_score, {"logits", "topk", "score_function", "fused", "padding_mask"}),
}  # fmt: skip
"""Functions of Megatron-Core's router, by name: our function, which takes their arguments and `check_finite`, and the arguments that it
knows."""
