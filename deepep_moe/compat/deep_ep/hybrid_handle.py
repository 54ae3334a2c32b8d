"""The objects that HybridEP's callers get: the handle of a dispatch, and a buffer's settings."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deepep_moe.compat.deep_ep.core import check_knows_tokens
from deepep_moe.compat.deep_ep.graphs import outside_graphs
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.handle import DispatchHandle
from deepep_moe.ops.routing import is_token_in_rank


class HybridConfig(SimpleNamespace):
    """Settings of a buffer. Callers read hidden_dim, max_num_of_tokens_per_rank and num_of_experts_per_rank; other names may be set, and
    change nothing."""


@outside_graphs
class HybridHandle(Sequence[Any]):
    """The handle for a combine, or a dispatch, along the same routing: `native`, the handle of deepep_moe, and the `buffer` that made it.

    As a sequence it has HybridEP's items: 7, or 11 after a dispatch with permutation. HybridEP's maps of memory slots do not exist here
    and are `None`; so are the tokens received and their map, where sums go by lanes. Items that need work are computed on access, on the
    stream that is current then.
    """

    def __init__(self, buffer: Buffer, native: DispatchHandle, topk_idx: Tensor, config: HybridConfig, has_dropped: Tensor | None) -> None:
        self.buffer = buffer
        self.native = native
        self.topk_idx = topk_idx
        """[num_tokens, num_topk] int64: the experts of each lane, -1 = none or dropped."""
        self.config = config
        self._has_dropped = has_dropped

    def __len__(self) -> int:
        return 11 if self.native.layout == "expert" else 7

    def __getitem__(self, index: Any) -> Any:
        if index in (-1, 10) and len(self) == 11:
            return self.overflow_flag  # the host waits for nothing
        return self._items[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __repr__(self) -> str:
        return f"HybridHandle({len(self.topk_idx)} tokens sent, {self.native.num_rows} rows received, {self.buffer!r})"

    @property
    def is_bounded(self) -> bool:
        """Return whether its dispatch was given the number of rows, so that the host does not know their counts."""
        return self._has_dropped is not None

    @cached_property
    def overflow_flag(self) -> Tensor:
        """Return [] int32: 1 where a rank of the group has dropped rows, else 0."""
        return self.topk_idx.new_zeros((), dtype=torch.int32) if self._has_dropped is None else self._has_dropped.to(torch.int32)

    @cached_property
    def num_dispatched_tokens_tensor(self) -> Tensor:
        """Return [1] int32: tokens received, each counted once."""
        check_knows_tokens(self.buffer, "num_dispatched_tokens_tensor")
        return self.native.recv_counts.sum(dtype=torch.int32).view(1)

    @cached_property
    def local_expert_routing_map(self) -> Tensor:
        """Return [num_recv_tokens, num_local_experts] bool: the local experts of each token received. The host waits for their number."""
        num_tokens, num_local_experts = int(self.num_dispatched_tokens_tensor), self.buffer.num_local_experts
        if self.native.layout == "rank":
            assert self.native.recv_topk_idx is not None
            return is_token_in_rank(self.native.recv_topk_idx[:num_tokens], num_local_experts, 1)
        rows = self.native.recv_row_idx[:num_tokens]
        ends = self.native.num_rows_per_expert.cumsum(0)
        experts = torch.searchsorted(ends, rows.long(), right=True).masked_fill(rows < 0, -1)
        return is_token_in_rank(experts, num_local_experts, 1)

    @cached_property
    def _items(self) -> tuple[Any, ...]:
        knows_tokens = self.buffer.sums == "ranks"
        received = (self.num_dispatched_tokens_tensor, self.local_expert_routing_map) if knows_tokens else (None, None)
        if self.native.layout == "rank":
            return None, None, None, *received, len(self.topk_idx), self.config
        per_expert = self.native.num_recv_tokens_per_expert, len(self.topk_idx), self.config
        return None, None, None, *received, None, None, *per_expert, self.overflow_flag
