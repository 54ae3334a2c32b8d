"""The handle of a dispatch as DeepEP's callers see it: a sequence of tensors, which are made when somebody looks."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deepep_moe.compat.deep_ep.graphs import outside_graphs
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.handle import DispatchHandle
from deepep_moe.ops.routing import is_token_in_rank

_NUM_TENSORS, _NUM_TENSORS_OF_NODES = 6, 10


@outside_graphs
class Handle(Sequence[Any]):
    """The handle that `combine` and a cached dispatch take. It holds `along`, the handle of deepep_moe, and the `buffer` that made it.

    As a sequence it has DeepEP's six tensors: rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix, recv_src_idx,
    is_token_in_rank, send_head; with several nodes it has the ten of DeepEP's internode handle. Calls do not read them. -1 stands for
    numbers that a rank of this library does not know: columns of other ranks in rank_prefix_matrix, recv_src_idx, and what concerns
    DeepEP's channels between nodes.
    """

    def __init__(self, buffer: Buffer, along: DispatchHandle) -> None:
        self.buffer = buffer
        self.along = along

    def __len__(self) -> int:
        return _NUM_TENSORS if self.buffer.num_ranks == self.buffer.ranks_per_node else _NUM_TENSORS_OF_NODES

    def __getitem__(self, index: Any) -> Any:
        return self._tensors[index]

    def __repr__(self) -> str:
        return f"Handle({self.along.num_tokens} tokens sent, {self.along.num_rows} rows received, {self.buffer!r})"

    @cached_property
    def recv_rank_prefix_sum(self) -> Tensor:
        """Return [num_ranks] int32: rows received from ranks up to each one."""
        return self.along.recv_counts.sum(1).cumsum(0).to(torch.int32)

    @cached_property
    def _tensors(self) -> tuple[Tensor, ...]:
        buffer, along = self.buffer, self.along
        in_rank = is_token_in_rank(along.topk_idx, buffer.num_ranks, buffer.num_local_experts)
        return self._of_one_node(in_rank) if len(self) == _NUM_TENSORS else self._of_nodes(in_rank)

    def _of_one_node(self, in_rank: Tensor) -> tuple[Tensor, ...]:
        num_ranks, device = self.buffer.num_ranks, in_rank.device
        prefixes = torch.full((num_ranks, num_ranks), -1, dtype=torch.int32, device=device)
        prefixes[:, self.buffer.rank] = self.recv_rank_prefix_sum
        sent = in_rank.sum(0, dtype=torch.int32)[:, None]
        starts = torch.zeros(num_ranks, 1, dtype=torch.int32, device=device)
        return prefixes, sent, starts, self._unknown(self.along.num_rows), in_rank, _heads(in_rank)

    def _of_nodes(self, in_rank: Tensor) -> tuple[Tensor, ...]:
        num_ranks, per_node = self.buffer.num_ranks, self.buffer.ranks_per_node
        in_node = in_rank.unflatten(1, (-1, per_node)).any(2)
        num_nodes, sent = in_node.shape[1], in_rank.sum(0, dtype=torch.int32)[:, None]
        return (
            in_rank, in_node.sum(0, dtype=torch.int32)[:, None], sent, self._unknown(num_nodes, 1), self._unknown(num_nodes),
            self._unknown(num_ranks, 1), self.recv_rank_prefix_sum, self._unknown(self.along.num_rows), _heads(in_node),
            self._unknown(0, per_node),
        )  # fmt: skip

    def _unknown(self, *shape: int) -> Tensor:
        return torch.full(shape, -1, dtype=torch.int32, device=self.along.recv_counts.device)


def _heads(is_sent: Tensor) -> Tensor:
    """Return [num_tokens, num_peers] int32: the index of each token among the rows for a peer, or -1 if it does not go there."""
    return torch.where(is_sent, is_sent.cumsum(0) - 1, -1).to(torch.int32)
