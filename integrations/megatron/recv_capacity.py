"""Room for the rows that a dispatch brings, where the host does not wait to learn how many come (`sync_free`).

A layer that receives more rows than it has room for is over budget, in Megatron-Core's words. A single expert-parallel group learns it from
its dispatch, which raises EPCapacityError on all its ranks. If other ranks step too (more such groups, or pipeline stages), an error in the
middle of a step would leave them waiting for this group. A dispatch then only notes it, the step goes on, and all ranks of the job agree at
its end:

- Megatron-Core's PagedStashRunner (0.19) asks `check_over_budget()` of each layer, and runs the step again with room for every routing;
- `finalize_model_grads` otherwise raises EPCapacityError on all ranks of the job.

On GPUs such a step has lost rows until it is run again. On CPUs the dispatch is repeated at once with room for every routing.
"""

import math
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.handle import DispatchHandle
from deepep_moe.integrations.megatron.options import Config, Options, check_capacity_factor

FACTOR_FIELD = "moe_expert_rank_capacity_factor"
HOW_TO_GO_ON = (
    "Nothing was dropped. Run the step again after deepep_moe.integrations.megatron.recover() and grow_recv_capacity(), or give a larger "
    "recv_capacity_factor."
)
JUDGES = "_deepep_moe_judges_steps"  # attribute of our finalize_model_grads


class RecvCapacity:
    """Computes the room for rows of a rank in a layer, and notes whether more have come.

    If there is no factor, there is room for every routing: each token of each rank may come to all local experts that it can be routed to.
    With one there is room for that many times an even share.
    """

    def __init__(self, factor: float | None):
        self.factor = factor
        self.has_runner = False
        """A PagedStashRunner of Megatron-Core asks after each step and runs it again."""
        self.over_budget: torch.Tensor | None = None
        """[1] bool, on the device of the rows, None before the first dispatch: more rows have come than there was room for, and no error
        has said so yet."""

    def num_rows(self, buffer: Buffer, expert_alignment: int, *, every_routing: bool = False) -> int:
        """Return `num_recv_rows` for a dispatch, padding included, a multiple of the alignment. The same in every step, as CUDA graphs
        need."""
        num_tokens, num_local_experts = buffer.num_max_tokens_per_rank, buffer.num_local_experts
        num_rows = buffer.num_ranks * num_tokens * min(buffer.num_topk, num_local_experts)
        if self.factor is not None and not every_routing:
            num_rows = min(num_rows, math.ceil(self.factor * num_tokens * buffer.num_topk))
        num_rows += num_local_experts * (expert_alignment - 1)
        return -(-num_rows // expert_alignment) * expert_alignment

    def note(self, handle: DispatchHandle) -> None:
        """Note whether the dispatch of `handle` has brought more rows than it had room for. The host does not wait."""
        counts = handle.num_rows_per_expert
        self._flag(counts.device).logical_or_(counts.sum() > handle.num_rows)

    def note_excess(self, device: torch.device) -> None:
        self._flag(device).fill_(True)

    def reset(self) -> None:
        if self.over_budget is not None:
            self.over_budget.fill_(False)

    def _flag(self, device: torch.device) -> torch.Tensor:
        if self.over_budget is None:
            self.over_budget = torch.zeros(1, dtype=torch.bool, device=device)
        return self.over_budget


def capacity_factor_of(config: Config, options: Options) -> tuple[bool, float | None]:
    """Return whether layers with this config are sync-free, and their factor. The config's own goes first."""
    factor = getattr(config, FACTOR_FIELD, None)
    if factor is None:
        return options.sync_free, options.recv_capacity_factor
    check_capacity_factor(FACTOR_FIELD, factor)
    return True, factor


def is_judged_at_end(config: Config, group: Any) -> bool:
    """Return whether the steps of layers with this config end with an agreement of all ranks of the job. They do if more ranks step
    together than are in `group`, and the schedule calls our `finalize_model_grads`."""
    judges = getattr(getattr(config, "finalize_model_grads_func", None), JUDGES, False)
    return bool(judges) and dist.get_world_size() > dist.get_world_size(group)


def take_notes(capacities: Collection[RecvCapacity], *, of_all_ranks: bool) -> int | None:
    """Return a rank that has noted an excess, or None, and forget it. Looks at this rank, or at all ranks of the job, which then call it
    together. The host waits for the GPU."""
    flags = [capacity.over_budget for capacity in capacities if capacity.over_budget is not None]
    is_over = any(bool(flag) for flag in flags)
    for capacity in capacities:
        capacity.reset()
    if not of_all_ranks:
        return dist.get_rank() if is_over else None
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")
    num_ranks = dist.get_world_size()
    lowest = torch.tensor([dist.get_rank() if is_over else num_ranks], dtype=torch.int64, device=device)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    rank = int(lowest.item())
    return rank if rank < num_ranks else None
