"""Room for the rows that a dispatch brings, where the host does not wait to learn how many come (`sync_free`)."""

import functools
import math
from collections.abc import Callable
from typing import Any

from deepep_moe.exchange.buffer import Buffer
from deepep_moe.integrations.megatron.options import Options, check_capacity_factor
from deepep_moe.integrations.megatron.patches import Patches

_FIELD = "moe_expert_rank_capacity_factor"


class RecvCapacity:
    """How many rows a rank has room for.

    Without a factor there is room for every routing: each token of each rank may come to all local experts that it can be routed to. With
    one there is room for that many times an even share. A dispatch that brings more fails on all ranks of its group with EPCapacityError.
    """

    def __init__(self, factor: float | None):
        self.factor = factor

    def num_rows(self, buffer: Buffer, expert_alignment: int) -> int:
        """Return `num_recv_rows` for a dispatch, padding included. The same in every step, as CUDA graphs need."""
        num_tokens, num_local_experts = buffer.num_max_tokens_per_rank, buffer.num_local_experts
        num_rows = buffer.num_ranks * num_tokens * min(buffer.num_topk, num_local_experts)
        if self.factor is not None:
            num_rows = min(num_rows, math.ceil(self.factor * num_tokens * buffer.num_topk))
        return num_rows + num_local_experts * (expert_alignment - 1)

    def grow(self, times: float) -> None:
        if self.factor is not None:
            self.factor *= times


def capacity_factor_of(config: Any, options: Options) -> tuple[bool, float | None]:
    """Return whether layers with this config are sync-free, and their factor. The config's own goes first."""
    factor = getattr(config, _FIELD, None)
    if factor is None:
        return options.sync_free, options.recv_capacity_factor
    check_capacity_factor(_FIELD, factor)
    return True, factor


def serve_step_ends(patches: Patches, check: Callable[[], None]) -> None:
    """Let `megatron.core.distributed.finalize_model_grads`, which ends the backward of a step, begin with `check()`."""
    from megatron.core import distributed

    stock = distributed.finalize_model_grads

    @functools.wraps(stock)
    def finalize_model_grads(*args: Any, **kwargs: Any) -> Any:
        check()
        return stock(*args, **kwargs)

    patches.set(distributed, "finalize_model_grads", finalize_model_grads)
