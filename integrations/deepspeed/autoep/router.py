"""AutoEP's router with the gate of this library, and the bias that balances its experts."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from torch import Tensor

from deepep_moe.integrations.common.warn_once import is_first, warn_once
from deepep_moe.integrations.deepspeed.buffers import unswap
from deepep_moe.integrations.deepspeed.options import Options
from deepep_moe.ops.balance import update_expert_bias
from deepep_moe.ops.gate import gate, why_not

BIAS = "e_score_correction_bias"  # DeepSeek-V3's name for it, in AutoEP's routers and in checkpoints of its models
_STEP = "_take_model_step"  # both `step` and a pipeline engine's `train_batch` call this method of the engine
_GROUP_SCORE_TOPK = {"top2_sum": 2, "max": 1}


class GatedRouter(TokenChoiceTopKRouter):
    """A TokenChoiceTopKRouter that chooses by `deepep_moe.ops.gate` and counts its choices for the bias.

    `swap_router` gives this class to routers that were made as TokenChoiceTopKRouters, so parameters, hooks and state dict are the same
    objects.
    """

    deepep_moe_options: Options
    deepep_moe_speaks: bool
    """True on the first rank of the layer's groups."""
    deepep_moe_counts: Tensor | None = None
    """[num_experts] int64: tokens of this rank that chose each expert in training since the bias moved last. None: no forward yet."""

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Choose experts for x [num_tokens, hidden]. expert_bias, [num_experts] or None, adds to the router's `e_score_correction_bias`.

        Returns fp32 weights and int64 experts, both [num_tokens, top_k], and int32 [num_experts] tokens of each expert. Not collective.
        Raises ValueError for logits that are not finite: on the CPU at once, on a GPU as `deepep_moe.ops.gate` says. In fp16 they go
        through: DeepSpeed scales the loss and skips a step that overflows.
        """
        chosen = self._choose(x, expert_bias)
        if self.training and torch.is_grad_enabled() and has_moving_bias(self):
            counts = chosen[2].long()
            self.deepep_moe_counts = counts if self.deepep_moe_counts is None else self.deepep_moe_counts + counts
        return chosen

    def _choose(self, x: Tensor, expert_bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if not self.deepep_moe_options.gate:
            return super().forward(x, expert_bias)
        reason = why_own_choice(self, x.device, x.dtype)
        if reason is not None:
            if self.deepep_moe_speaks:
                warn_once(f"AutoEP's own router chooses, without the gate of deepep_moe: {reason}", on_all_ranks=True)
            return super().forward(x, expert_bias)
        biases = [bias.detach().float() for bias in (expert_bias, self.e_score_correction_bias) if bias is not None]
        bias = torch.stack(biases).sum(0) if biases else None
        logits = self.gate(x)
        check_finite = logits.dtype != torch.float16
        out = gate(logits, expert_bias=bias, normalize=bool(self.route_norm), check_finite=check_finite, **gate_options(self))
        return out.topk_weights, out.topk_idx, out.num_tokens_per_expert

    def take_counts(self) -> Tensor:
        """Return the counts since the last call and start anew. They are zeros on a rank without a forward."""
        counts, self.deepep_moe_counts = self.deepep_moe_counts, None
        return torch.zeros(self.num_experts, dtype=torch.int64, device=self.gate.weight.device) if counts is None else counts


def gate_options(router: TokenChoiceTopKRouter) -> dict[str, Any]:
    """Return a router's configuration as arguments of `gate`, without bias and normalization. Raises KeyError for unknown group scores."""
    options = {"num_topk": router.top_k, "score_function": router.score_func, "routed_scaling_factor": router.route_scale}
    if router.num_expert_groups is not None:
        score_topk = _GROUP_SCORE_TOPK[router.group_score_func]
        options |= {"num_groups": router.num_expert_groups, "topk_groups": router.num_limited_groups, "group_score_topk": score_topk}
    return options


def why_own_choice(router: TokenChoiceTopKRouter, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why the gate cannot choose for a router whose tokens are on `device`, in `dtype`, or None."""
    if router.score_func not in ("sigmoid", "softmax"):
        return f"the gate does not know AutoEP's score function {router.score_func!r}"
    if router.num_expert_groups is not None and (router.group_score_func not in _GROUP_SCORE_TOPK or router.num_limited_groups is None):
        return f"the gate does not know groups scored by {router.group_score_func!r}, limited to {router.num_limited_groups}"
    return why_not(device, dtype, router.num_experts, **gate_options(router))


def has_moving_bias(router: TokenChoiceTopKRouter) -> bool:
    """Return whether the router is swapped, with the option that moves its bias."""
    return isinstance(router, GatedRouter) and router.deepep_moe_options.expert_bias_update_rate is not None


def swap_router(router: TokenChoiceTopKRouter, options: Options, *groups: "dist.ProcessGroup | None") -> None:
    """Make the router of a layer of these groups a GatedRouter, or DeepSpeed's own router if the options ask for nothing that needs one.

    The caller has checked its bias.
    """
    if (reason := why_own_router(router)) is not None:
        warn_once(f"AutoEP's routers keep their own choice, without the gate of deepep_moe: {reason}", *groups)
        return
    if options.expert_bias_update_rate is not None:
        _prepare_bias(router)
    elif not options.gate:
        restore_router(router)
        return
    router.__class__ = GatedRouter
    assert isinstance(router, GatedRouter)
    router.deepep_moe_options = options
    router.deepep_moe_speaks = is_first(*groups)  # the groups themselves cannot be copied with the router


def restore_router(router: TokenChoiceTopKRouter) -> None:
    """Make a GatedRouter DeepSpeed's own router again. Its bias stays, as tokens are routed by it."""
    if type(router) is GatedRouter:
        unswap(router, TokenChoiceTopKRouter)


def why_own_router(router: TokenChoiceTopKRouter) -> str | None:
    """Return the reason why the router cannot be made a GatedRouter, or None."""
    if type(router) not in (TokenChoiceTopKRouter, GatedRouter):
        return f"deepep_moe knows deepspeed's TokenChoiceTopKRouter, and this is a {type(router).__name__}"
    if "forward" in router.__dict__ and type(router) is not GatedRouter:
        return "the router's forward was replaced; replace it after swapping"
    return None


def check_bias(router: TokenChoiceTopKRouter) -> None:
    """Raise ValueError if the optimizer moves the bias of `router`, or if nobody would count what the router chooses."""
    if (reason := why_own_router(router)) is not None:
        raise ValueError(f"expert_bias_update_rate needs routers that count their choices: {reason}")
    if isinstance(getattr(router, BIAS, None), torch.nn.Parameter):
        raise ValueError(
            f"expert_bias_update_rate moves a router's {BIAS}, but here it is a parameter, which the optimizer moves; "
            "make it a buffer, as transformers 5 does, or leave expert_bias_update_rate out"
        )


def _prepare_bias(router: TokenChoiceTopKRouter) -> None:
    """Give `router` an fp32 bias that training may move. It is zero if the router had none."""
    bias = getattr(router, BIAS, None)
    if bias is None:
        if hasattr(router, BIAS):
            delattr(router, BIAS)
        router.register_buffer(BIAS, torch.zeros(router.num_experts, dtype=torch.float32, device=router.gate.weight.device))
    elif bias.dtype != torch.float32:
        bias.data = bias.data.float()  # rounding to bf16 would lose steps of 0.001


# ---- balance without auxiliary loss, by a bias that moves with the optimizer (Wang et al. 2024, arXiv 2408.15664) ----


class StepWithBias:
    """Takes the place of an engine's optimizer step: makes the step, and then moves the biases of `routers`.

    A step that DeepSpeed skips, as after an overflow in fp16, moves none. Its counts are dropped: tokens that are not finite say nothing
    of the load.
    """

    def __init__(self, engine: Any, routers: Sequence[GatedRouter]):
        self.routers, self.own_step = routers, getattr(engine, _STEP)
        self._engine = engine

    def __call__(self, *args: object, **kwargs: object) -> Any:
        result = self.own_step(*args, **kwargs)
        routers = [router for router in self.routers if has_moving_bias(router)]
        if self._engine.was_step_applied():
            move_biases(routers, self._engine.seq_data_parallel_group)
        else:
            for router in routers:
                router.take_counts()
        return result


def move_biases(routers: Sequence[GatedRouter], group: dist.ProcessGroup) -> None:
    """Move each router's bias by the `expert_bias_update_rate` of all, against the load over the ranks of `group` since the last call.

    Collective, with one all-reduce for all routers that have the same number of experts. Raises TypeError for biases that are no longer
    fp32.
    """
    for num_experts in sorted({router.num_experts for router in routers}):
        stack = [router for router in routers if router.num_experts == num_experts]
        rate = stack[0].deepep_moe_options.expert_bias_update_rate
        assert rate is not None  # a router without a rate has no bias that moves
        biases = [bias for router in stack if (bias := router.e_score_correction_bias) is not None]
        narrow = {str(bias.dtype).removeprefix("torch.") for bias in biases} - {"float32"}
        if narrow:
            raise TypeError(
                f"e_score_correction_bias of routers has become {' and '.join(narrow)}, in which steps of {rate} are lost: the model was "
                "cast after replace_moe_layers; call replace_moe_layers again"
            )
        stacked = torch.stack(biases)
        update_expert_bias(stacked, torch.stack([router.take_counts() for router in stack]), rate, group)
        torch._foreach_copy_(biases, list(stacked.unbind()))


def move_with(engine: Any, routers: Sequence[GatedRouter]) -> None:
    """Let the steps of `engine` move the biases of `routers` and no others. Without routers the steps are DeepSpeed's own again."""
    step = engine.__dict__.get(_STEP)
    if isinstance(step, StepWithBias):
        step.routers = routers
        if not routers:
            setattr(engine, _STEP, step.own_step)
    elif routers:
        setattr(engine, _STEP, StepWithBias(engine, routers))
