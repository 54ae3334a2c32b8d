"""What `dispatch` and `combine` are measured against on the CPU."""

import torch
import torch.distributed as dist
from torch import Tensor


class AllToAllRows:
    """Every (token, expert) row through `all_to_all_single`, as dispatchers without de-duplication do it (Megatron-Core's `alltoall`).

    Permute the rows by expert, exchange counts, exchange rows, sort what arrives by expert; combine runs it backwards and adds the rows
    up in their own dtype. The weights are the experts' affair there, so this combine has less to do than ours.
    """

    name = "all-to-all of rows (gloo)"

    def __init__(self, num_experts: int):
        self.num_ranks, self.num_experts = dist.get_world_size(), num_experts

    def dispatch(self, x: Tensor, topk_idx: Tensor, _topk_weights: Tensor) -> Tensor:
        """[num_rows, hidden], grouped by local expert."""
        num_local_experts = self.num_experts // self.num_ranks
        flat = topk_idx.flatten()
        self.order = flat.argsort(stable=True)
        self.tokens = self.order // topk_idx.shape[1]
        counts = flat.bincount(minlength=self.num_experts).view(self.num_ranks, num_local_experts)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        self.sent, self.received = counts.sum(1).tolist(), arriving.sum(1).tolist()
        rows = x.new_empty(sum(self.received), x.shape[1])
        dist.all_to_all_single(rows, x[self.tokens], self.received, self.sent)
        experts = torch.arange(num_local_experts).repeat(self.num_ranks).repeat_interleave(arriving.flatten())
        self.by_expert = experts.argsort(stable=True)
        return rows[self.by_expert]

    def combine(self, rows: Tensor, num_tokens: int) -> Tensor:
        """[num_tokens, hidden]: the sum of each token's rows."""
        unsorted = torch.empty_like(rows)
        unsorted[self.by_expert] = rows
        returned = rows.new_empty(len(self.tokens), rows.shape[1])
        dist.all_to_all_single(returned, unsorted, self.sent, self.received)
        return rows.new_zeros(num_tokens, rows.shape[1]).index_add_(0, self.tokens, returned)
