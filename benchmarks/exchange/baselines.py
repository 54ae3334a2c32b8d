"""Baselines of `dispatch` and `combine`: all-to-alls of rows."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.link import gather_counts
from benchmarks.common.verify import close_to, expected_combine
from benchmarks.common.workload import Inputs, Shape


def words(*columns: Tensor) -> Tensor:
    """Put `columns`, each [num_rows, ...], side by side as words of 8 bytes, which every device permutes at the speed of its memory."""
    rows = torch.cat([column.contiguous().view(torch.uint8) for column in columns], dim=1)
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % 8)).view(torch.int64)


class PlannedRows:
    """An all-to-all of rows with all counts known beforehand, so that no counts are exchanged and no host waits. For any device.

    The whole calls include the permutes that a training step needs. `exchange` and `exchange_back` are the rows alone, as if the permutes
    cost nothing. Weights and choices do not travel.
    """

    tokens: Tensor
    """[num_sent] int64: the token of each row that is sent, by target."""

    def __init__(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: "dist.ProcessGroup | None"):
        """Take rows [num_tokens, num_words] int64, and how many rows go to and come from each rank."""
        self.rows, self.sent, self.received, self.group = rows, sent, received, group
        self.sort()
        self.sending, self.arrived = rows.index_select(0, self.tokens), self._empty(sum(received))

    def sort(self) -> None:
        """Decide where every row goes, and set `tokens`."""
        raise NotImplementedError

    def exchange(self) -> None:
        """Send the rows alone."""
        dist.all_to_all_single(self.arrived, self.sending, self.received, self.sent, group=self.group)

    def exchange_back(self) -> None:
        dist.all_to_all_single(self.sending, self.arrived, self.sent, self.received, group=self.group)

    def cached_dispatch(self) -> Tensor:
        """Permute by target and exchange. Return [num_rows, num_words], by source."""
        arrived = self._empty(sum(self.received))
        dist.all_to_all_single(arrived, self.rows.index_select(0, self.tokens), self.received, self.sent, group=self.group)
        return arrived

    def dispatch(self) -> Tensor:
        """Do the same after the sort that a new routing needs."""
        self.sort()
        return self.cached_dispatch()

    def _return(self, rows: Tensor) -> Tensor:
        """Send `rows` back as they arrived. Return [num_sent, hidden] bf16."""
        returned = self._empty(sum(self.sent))
        dist.all_to_all_single(returned, rows, self.sent, self.received, group=self.group)
        return returned.view(torch.bfloat16)

    def _empty(self, num_rows: int) -> Tensor:
        return self.rows.new_empty(num_rows, self.rows.shape[1])


class PlannedByRank(PlannedRows):
    """Sends a row for every (token, rank), as the rank layout has them. Combine sums the rows of a token."""

    name, layout = "all-to-all of (token, rank) rows", "rank"

    def __init__(self, rows: Tensor, inputs: Inputs, shape: Shape, group: "dist.ProcessGroup | None"):
        """Collective."""
        rank, self.num_ranks = dist.get_rank(), shape.num_ranks
        self.target = inputs.topk_idx.t() // shape.num_local_experts
        from_to = gather_counts(self._goes().sum(1).cpu())
        super().__init__(rows, from_to[rank].tolist(), from_to[:, rank].tolist(), group)
        by_token = self._goes().t()
        self.lanes = self.tokens.argsort(stable=True)
        self.offsets = by_token.sum(1).cumsum(0) - by_token.sum(1)

    def _goes(self) -> Tensor:
        """Return which tokens go to which rank, [num_ranks, num_tokens] bool."""
        goes = torch.zeros(self.num_ranks, self.target.shape[1], dtype=torch.bool, device=self.target.device)
        return goes.scatter_(0, self.target, True)

    def sort(self) -> None:
        self.tokens = self._goes().nonzero_static(size=sum(self.sent))[:, 1]

    def combine(self, rows: Tensor) -> Tensor:
        """Exchange and sum over each token's rows. Return [num_tokens, hidden] bf16."""
        return torch.nn.functional.embedding_bag(self.lanes, self._return(rows), self.offsets, mode="sum")


class PlannedByExpert(PlannedRows):
    """Sends a row for every (token, expert). Combine returns their weighted sum."""

    name, layout = "all-to-all of rows", "expert"

    def __init__(self, rows: Tensor, inputs: Inputs, shape: Shape, group: "dist.ProcessGroup | None"):
        """Collective."""
        self.flat, self.num_topk = inputs.topk_idx.flatten(), inputs.topk_idx.shape[1]
        self.weights = inputs.topk_weights.to(torch.bfloat16)[:, None, :]
        counts = self.flat.bincount(minlength=shape.num_experts).cpu().view(shape.num_ranks, -1)
        from_to = gather_counts(counts)  # [num_ranks, num_ranks, num_local_experts]
        arriving = from_to[:, dist.get_rank()]
        super().__init__(rows, counts.sum(1).tolist(), arriving.sum(1).tolist(), group)
        experts = torch.arange(shape.num_local_experts).repeat(shape.num_ranks).repeat_interleave(arriving.flatten())
        by_expert = experts.argsort(stable=True)
        self.by_expert, self.from_expert = by_expert.to(rows.device), by_expert.argsort().to(rows.device)
        self.from_order = self.order.argsort()

    def sort(self) -> None:
        self.order = self.flat.argsort(stable=True)
        self.tokens = self.order // self.num_topk

    def cached_dispatch(self) -> Tensor:
        """Permute by expert, exchange, and sort by local expert. Return [num_rows, num_words]."""
        return super().cached_dispatch().index_select(0, self.by_expert)

    def combine(self, rows: Tensor) -> Tensor:
        """Unsort, exchange, unpermute, and sum over top-k with weights. Return [num_tokens, hidden] bf16."""
        lanes = self._return(rows.index_select(0, self.from_expert)).index_select(0, self.from_order)
        return torch.bmm(self.weights, lanes.view(-1, self.num_topk, lanes.shape[1])).squeeze(1)


PLANNED: dict[str, type[PlannedByExpert] | type[PlannedByRank]] = {p.layout: p for p in (PlannedByExpert, PlannedByRank)}
"""The baseline of each layout."""


def verify_baseline(baseline: PlannedByExpert | PlannedByRank, inputs: Inputs, shape: Shape) -> Tensor:
    """Check that the baseline does the same work with bf16 rows, and return what its dispatch returns. Collective; raises EPError."""
    rows = baseline.dispatch()
    close_to("the all-to-all's combine", baseline.combine(rows), expected_combine(inputs, shape, baseline.layout))
    return rows
