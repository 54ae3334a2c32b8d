"""Balance AutoEP's experts without auxiliary loss, by a bias that moves with the optimizer (Wang et al. 2024, arXiv 2408.15664)."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe.integrations.deepspeed.autoep.router import GatedRouter, has_moving_bias
from deepep_moe.ops.balance import update_expert_bias

_STEP = "_take_model_step"  # both `step` and a pipeline engine's `train_batch` call this method of the engine


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
    """Move each router's bias by its `expert_bias_update_rate`, against the load over the ranks of `group` since the last call.

    Collective, with one all-reduce for all routers that have the same number of experts and the same rate. Raises TypeError for biases
    that are no longer fp32.
    """

    def kind(router: GatedRouter) -> tuple[int, float]:
        rate = router.deepep_moe_options.expert_bias_update_rate
        assert rate is not None  # a router without a rate has no bias that moves
        return router.num_experts, rate

    for (_, rate), alike in groupby(sorted(routers, key=kind), kind):
        stack = list(alike)
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
