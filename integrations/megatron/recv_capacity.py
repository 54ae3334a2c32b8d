"""Room for the rows that a dispatch brings, where the host does not wait to learn how many come (`sync_free`)."""

import math

import torch

from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.handle import DispatchHandle
from deepep_moe.integrations.megatron.options import Config, Options, check_capacity_factor

FACTOR_FIELD = "moe_expert_rank_capacity_factor"


class RecvCapacity:
    """Computes the room for rows of a rank in a layer, and notes whether more have come.

    If there is no factor, there is room for every routing: each token of each rank may come to all local experts that it can be routed to.
    With one there is room for that many times an even share. `over_budget.py` says what happens to a dispatch that brings more.
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

    def grow(self, times: float) -> None:
        if self.factor is not None:
            self.factor *= times

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
