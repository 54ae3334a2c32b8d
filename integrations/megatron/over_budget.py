"""Reports that a layer has received more rows than it has room for: it is over budget, in Megatron-Core's words.

A single expert-parallel group learns it from its dispatch, which raises EPCapacityError on all its ranks. If other ranks step too (more
such groups, or pipeline stages), an error in the middle of a step would leave them waiting for this group. A dispatch then only notes it,
the step goes on, and all ranks of the job agree at its end:

- Megatron-Core's PagedStashRunner (0.19) asks `check_over_budget()` of each layer, and runs the step again with room for every routing;
- `finalize_model_grads` otherwise raises EPCapacityError on all ranks of the job.

On GPUs such a step has lost rows until it is run again. On CPUs the dispatch is repeated at once with room for every routing.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe.errors import EPCapacityError
from deepep_moe.integrations.megatron.options import Config
from deepep_moe.integrations.megatron.patches import Patches, Stock
from deepep_moe.integrations.megatron.recv_capacity import RecvCapacity

HOW_TO_GO_ON = (
    "Nothing was dropped. Run the step again after deepep_moe.integrations.megatron.recover() and grow_recv_capacity(), or give a larger "
    "recv_capacity_factor."
)
_JUDGES = "_deepep_moe_judges_steps"  # attribute of our finalize_model_grads


def is_judged_at_end(config: Config, group: Any) -> bool:
    """Return whether the steps of layers with this config end with an agreement of all ranks of the job. They do if more ranks step
    together than are in `group`, and the schedule calls our `finalize_model_grads`."""
    judges = getattr(getattr(config, "finalize_model_grads_func", None), _JUDGES, False)
    return bool(judges) and dist.get_world_size() > dist.get_world_size(group)


def agree(capacities: Collection[RecvCapacity], device: torch.device) -> None:
    """Raise EPCapacityError on all ranks of the job if a rank's capacities have noted an excess. Collective over all ranks; waits."""
    is_over = take_notes(capacities)
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    lowest = torch.tensor([num_ranks - rank if is_over else 0], dtype=torch.int64, device=device)
    dist.all_reduce(lowest, op=dist.ReduceOp.MAX)
    if (reversed_rank := int(lowest.item())) > 0:
        raise excess_error(num_ranks - reversed_rank)


def take_notes(capacities: Collection[RecvCapacity]) -> bool:
    """Return whether one of them has noted an excess, and forget it. The host waits for the GPU."""
    flags = [capacity.over_budget for capacity in capacities if capacity.over_budget is not None]
    is_over = any(bool(flag) for flag in flags)
    for capacity in capacities:
        capacity.reset()
    return is_over


def excess_error(rank: int) -> EPCapacityError:
    error = EPCapacityError(f"MoE layers of rank {rank} received more rows than they have room for in this step", rank=rank)
    error.add_note(HOW_TO_GO_ON)
    return error


def serve_step_ends(patches: Patches, end_step: Callable[[list[object]], None]) -> None:
    """Let `megatron.core.distributed.finalize_model_grads(model)`, which ends the backward of a step, begin with `end_step(model)`."""
    from megatron.core import distributed

    @patches.around(distributed, "finalize_model_grads")
    def judge(stock: Stock, model: list[object], *args: object, **kwargs: object) -> object:
        try:
            end_step(model)
        except EPCapacityError:
            for chunk in model:  # reductions of gradients may be under way, and the step is run again
                if hasattr(chunk, "finish_grad_sync"):
                    chunk.finish_grad_sync()
            raise
        return stock(model, *args, **kwargs)

    setattr(distributed.finalize_model_grads, _JUDGES, True)


def serve_runners(patches: Patches, note: Callable[[], None]) -> None:
    """Let Megatron-Core's PagedStashRunner (0.19) find the layers with our dispatcher, and them know of it. `note()` is called where one is
    made, which all ranks do."""
    try:
        from megatron.core.transformer.moe.paged_stash import PagedStashRunner
    except ImportError:  # before 0.19
        return
    from deepep_moe.integrations.megatron.dispatcher import NativeTokenDispatcher

    @patches.around(PagedStashRunner, "__init__")
    def construct(stock: Stock, runner: PagedStashRunner, /, *args: object, **kwargs: object) -> None:
        stock(runner, *args, **kwargs)
        note()
        for layer in runner.moe_layers:
            if isinstance(layer.token_dispatcher, NativeTokenDispatcher):
                layer.token_dispatcher.follow_runner()
