"""The path of rows: one row for each (token, node) crosses, to the rank with the sender's index in the other node.

```
 dispatch   source (m, i) ==row==> forwarder (n, i) --row--> each rank (n, j) with an expert of the token
 combine    source (m, i) <==sum== forwarder (n, i) <--row-- each rank (n, j), added up in ascending j, in fp32
```

(n, i) is rank i of node n. With a single node there is no forwarder, and one exchange. `Steps` is a generator: it yields exchanges of the
whole group, is sent the rows received, returns the result.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from deepep_moe.group.settings import Settings
from deepep_moe.ops.routing import is_token_in_rank

_Result = TypeVar("_Result")


def picked(parts: Iterable[Tensor], rows: Tensor) -> list[Tensor]:
    """Return the given rows of each part. fp8 is indexed as bytes, because PyTorch 2.8 cannot index fp8 on CPUs."""
    return [(part.view(torch.uint8) if part.element_size() == 1 else part)[rows.to(part.device)].view(part.dtype) for part in parts]


class Step(NamedTuple):
    """Holds rows of several kinds for every rank, which go in one message: `all_to_all_single` of the group."""

    parts: list[Tensor]
    """Rows of each kind, by destination."""
    num_sent: list[int]
    num_received: list[int]
    is_last: bool


Steps = Generator[Step, list[Tensor], _Result]
Merge = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Returns values of lanes, with those of another rank, which has the experts where the third tensor is True."""


class Sums(NamedTuple):
    """The sums that come back to a source from one node."""

    tokens: Tensor
    """[n]: tokens of this rank."""
    rows: Tensor
    """[n, hidden]: fp32 from the source's own node, else the dtype of the rows."""
    values: Tensor | None
    """[n, num_topk] fp32, one for each lane."""


class TwoHops:
    """The exchanges of one rank."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._size, self._num_nodes, self._is_alone = settings.ranks_per_node, settings.num_nodes, settings.num_nodes == 1
        self._node, index = divmod(settings.rank, self._size)
        self._of_index = range(index, settings.num_ranks, self._size)  # ranks of this index, by node
        self._of_node = range(self._node * self._size, (self._node + 1) * self._size)

    def num_tokens_per_node(self, topk_idx: Tensor) -> Tensor:
        """Return [num_nodes]: how many tokens of this rank have an expert in each node."""
        return self._in_nodes(topk_idx).sum(0)

    def num_to_forward(self, num_tokens_per_node: Tensor) -> list[int]:
        """Return how many tokens each rank of this index has for this node, from the counts of all ranks [num_ranks, num_nodes]."""
        return num_tokens_per_node[self._of_index.start :: self._size, self._node].tolist()

    def dispatch(self, parts: list[Tensor], topk_idx: Tensor, num_to_forward: list[int], num_received: list[int]) -> Steps[list[Tensor]]:
        """Send the rows of `parts` [num_tokens, ...], one of which is `topk_idx`. Return the rows received, by (source rank, token).
        num_received: rows from each source rank."""
        here, lanes = parts, next(i for i, part in enumerate(parts) if part is topk_idx)
        if not self._is_alone:
            nodes, tokens = self._in_nodes(topk_idx).t().nonzero(as_tuple=True)
            sent = self._at(self._of_index, nodes.bincount(minlength=self._num_nodes).tolist())
            here = yield Step(picked(parts, tokens), sent, self._at(self._of_index, num_to_forward), False)
        targets, rows = self._in_ranks(here[lanes]).t().nonzero(as_tuple=True)
        sent = self._at(self._of_node, targets.bincount(minlength=self._size).tolist())
        arrived = yield Step(picked(here, rows), sent, self._at(self._of_node, self._by_index(num_received)), True)
        if self._is_alone:
            return arrived
        order = _transposed(num_received, self._num_nodes, self._size)  # blocks have arrived by index, then node
        return picked(arrived, order.argsort())

    def combine(
        self, parts: list[Tensor], topk_idx: Tensor, num_to_forward: list[int], num_received: list[int], merge: Merge
    ) -> Steps[list[Sums]]:
        """Send back this rank's row of each token received, by (source rank, token), and values of its lanes if there are any. Return the
        sums of this rank's own tokens from each node. merge: joins values of several ranks."""
        nodes, tokens = self._in_nodes(topk_idx).t().nonzero(as_tuple=True)
        per_node, lanes = nodes.bincount(minlength=self._num_nodes).tolist(), topk_idx[tokens]
        if not self._is_alone:
            (lanes,) = yield Step([lanes], self._at(self._of_index, per_node), self._at(self._of_index, num_to_forward), False)
            parts = picked(parts, _transposed(num_received, self._num_nodes, self._size))
        in_ranks = self._in_ranks(lanes)
        sent = self._at(self._of_node, self._by_index(num_received))
        per_rank = in_ranks.sum(0).tolist()
        rows = yield Step(parts, sent, self._at(self._of_node, per_rank), self._is_alone)
        sums = self._add_up(rows, in_ranks, lanes, per_rank, merge)
        if self._is_alone:
            return [Sums(tokens, sums[0], sums[1] if len(sums) > 1 else None)]
        is_own = torch.repeat_interleave(torch.tensor(num_to_forward, device="cpu")) == self._node
        own_rows, others = is_own.nonzero().flatten(), (~is_own).nonzero().flatten()
        back = [sums[0][others].to(parts[0].dtype), *(values[others] for values in sums[1:])]
        sent, received = (self._at(self._of_index, numbers) for numbers in (num_to_forward, per_node))
        sent[self.settings.rank] = received[self.settings.rank] = 0
        arrived = yield Step(back, sent, received, True)
        by_node, first = [], 0
        for node, of_node in enumerate(tokens.split(per_node)):
            end = first + (0 if node == self._node else len(of_node))
            pieces = [part[own_rows] for part in sums] if node == self._node else [part[first:end] for part in arrived]
            by_node.append(Sums(of_node, pieces[0], pieces[1] if len(pieces) > 1 else None))
            first = end
        return by_node

    def _add_up(self, rows: list[Tensor], in_ranks: Tensor, lanes: Tensor, per_rank: list[int], merge: Merge) -> list[Tensor]:
        """Return the sums over this node's ranks, in ascending order, in fp32, and the values of all lanes."""
        total = rows[0].new_zeros(len(lanes), rows[0].shape[1], dtype=torch.float32)
        values = [part.new_zeros(lanes.shape) for part in rows[1:]]
        pieces = [part.split(per_rank) for part in rows]
        for index, rank in enumerate(self._of_node):
            tokens = in_ranks[:, index].nonzero().flatten()
            total[tokens] = total[tokens] + pieces[0][index].float()
            for value, piece in zip(values, pieces[1:], strict=True):
                there = (lanes[tokens] >= 0) & (lanes[tokens] // self.settings.num_local_experts == rank)
                value[tokens] = merge(value[tokens], piece[index], there)
        return [total, *values]

    # ---- ranks and nodes ----

    def _in_nodes(self, topk_idx: Tensor) -> Tensor:
        """Return [num_tokens, num_nodes] bool: whether the token has an expert in the node."""
        return is_token_in_rank(topk_idx, self._num_nodes, self._size * self.settings.num_local_experts)

    def _in_ranks(self, topk_idx: Tensor) -> Tensor:
        """Return [num_tokens, ranks of this node] bool: whether the token has an expert on the rank."""
        everywhere = is_token_in_rank(topk_idx, self.settings.num_ranks, self.settings.num_local_experts)
        return everywhere[:, self._of_node.start : self._of_node.stop]

    def _at(self, ranks: Iterable[int], numbers: Sequence[int]) -> list[int]:
        """Return one number for each rank: `numbers` for `ranks`, 0 for all others."""
        of_all = [0] * self.settings.num_ranks
        for rank, number in zip(ranks, numbers, strict=True):
            of_all[rank] = number
        return of_all

    def _by_index(self, per_rank: list[int]) -> list[int]:
        """Return the sum over the ranks of each index."""
        return [sum(per_rank[index :: self._size]) for index in range(self._size)]


def _transposed(sizes: list[int], num_outer: int, num_inner: int) -> Tensor:
    """Return the row order that turns blocks of `sizes`, sorted by (outer, inner), into blocks sorted by (inner, outer)."""
    starts = [0, *accumulate(sizes)]
    blocks = [outer * num_inner + inner for inner in range(num_inner) for outer in range(num_outer)]
    return torch.cat([torch.arange(starts[block], starts[block + 1], device="cpu") for block in blocks])
