"""The handle that a dispatch of DeepEP 2 returns with the rows."""

from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe.compat.deep_ep.core import check_knows_tokens
from deepep_moe.compat.deep_ep.graphs import outside_graphs
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.handle import DispatchHandle
from deepep_moe.ops.routing import is_token_in_rank


@outside_graphs
class EPHandle:
    """The routing of one dispatch, for `combine` and for dispatches that repeat it.

    The tensors are made when they are first read, on the stream that is current then, so wait for the dispatch's event before. All counts
    are int32 and lie with the rows.
    """

    token_metadata_at_forward: None = None
    channel_linked_list: None = None

    def __init__(
        self, group: dist.ProcessGroup, buffer: Buffer, native: DispatchHandle, topk_idx: Tensor | None, index_dtype: torch.dtype,
        do_expand: bool, num_max_tokens_per_rank: int, num_sms: int, do_cpu_sync: bool,
    ) -> None:  # fmt: skip
        """topk_idx: the caller's tensor, where the handle is to refer to it, of dtype `index_dtype`."""
        self._group = group
        self._topk_idx, self._index_dtype = topk_idx, index_dtype
        self.buffer = buffer
        """The native buffer that made the dispatch."""
        self.native = native
        """Its handle there."""
        self.do_expand = do_expand
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = num_sms
        self.has_counts_on_host = do_cpu_sync
        """True if the dispatch has waited for its counts."""

    @property
    def topk_idx(self) -> Tensor:
        """Return [num_tokens, num_topk], as the caller gave it, or a copy."""
        if self._topk_idx is None:
            self._topk_idx = self.dst_buffer_slot_idx.to(self._index_dtype, copy=True)  # the dispatch has kept it
        return self._topk_idx

    @property
    def num_experts(self) -> int:
        """Return the number of experts of all ranks."""
        return self.buffer.num_experts

    @property
    def expert_alignment(self) -> int:
        """Return the multiple to which rows of each expert are padded."""
        return self.native.expert_alignment

    @cached_property
    def num_recv_tokens_per_expert_list(self) -> list[int]:
        """Return the number of rows of each local expert, rounded up to `expert_alignment`; empty after a dispatch with
        do_cpu_sync=False."""
        return self.native.num_rows_per_expert_list if self.has_counts_on_host else []

    @cached_property
    def num_recv_tokens(self) -> int:
        """Return the number of tokens received, each counted once; after a dispatch with do_cpu_sync=False the most that may come."""
        if not self.has_counts_on_host:
            return self.buffer.num_ranks * self.num_max_tokens_per_rank
        check_knows_tokens(self.buffer, "num_recv_tokens")
        return int(self.native.recv_counts.sum()) if self.do_expand else self.native.num_rows

    @property
    def num_expanded_tokens(self) -> int:
        """Return the number of rows of the expanded layout, padding included; after a dispatch with do_cpu_sync=False the room for them. 0
        where rows are compact."""
        return self.native.num_rows if self.do_expand else 0

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Tensor:
        """Return [num_ranks] int32: the running sum of the tokens received from each rank."""
        check_knows_tokens(self.buffer, "psum_num_recv_tokens_per_scaleup_rank")
        return self.native.recv_counts.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32)

    @property
    def num_unaligned_recv_tokens_per_expert(self) -> Tensor:
        """Return [num_local_experts]: rows of each local expert, without padding."""
        return self.native.num_recv_tokens_per_expert

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> Tensor:
        """Return [num_local_experts] int32: the end of each local expert's rows. Groups before it are rounded up to `expert_alignment`; its
        own group is rounded up too, unless rows are expanded."""
        ends = self.native.num_rows_per_expert.cumsum(0, dtype=torch.int32)
        if not self.do_expand:
            return ends
        return ends - self.native.num_rows_per_expert + self.native.num_recv_tokens_per_expert

    @property
    def dst_buffer_slot_idx(self) -> Tensor:
        """Return [num_tokens, num_topk]: the expert of each lane, -1 = none. There are no slots here; the routing determines each row's
        place."""
        return self.native.topk_idx.view(-1, self.buffer.num_topk)

    @cached_property
    def recv_src_metadata(self) -> Tensor:
        """Return [num_recv_tokens, 2 + num_topk] int32, one row per token received. Column 0 is source rank * num_max_tokens_per_rank +
        token. Column 1 is the token's place among those received. The rest is the row of each lane in the expanded layout, -1 = none.

        No call needs it and no dispatch sends it. The first read is collective: all ranks must read it, and the host waits.
        """
        check_knows_tokens(self.buffer, "recv_src_metadata")
        sources = _tokens_received(self.native, self.buffer, self._group, self.num_max_tokens_per_rank)
        num_tokens = len(sources)
        place = torch.arange(num_tokens, device=sources.device)
        rows = self.native.recv_row_idx[:num_tokens] if self.do_expand else sources.new_full((num_tokens, self.buffer.num_topk), -1)
        return torch.cat([torch.stack([sources, place], 1), rows], 1).to(torch.int32)


def _tokens_received(native: DispatchHandle, buffer: Buffer, group: dist.ProcessGroup, num_max_tokens: int) -> Tensor:
    """Return [num_recv_tokens] int64: source rank * num_max_tokens + token for each token received, in order. Collective."""
    routing = native.topk_idx
    sizes = routing.new_zeros(buffer.num_ranks)
    sizes[buffer.rank] = len(routing)
    dist.all_reduce(sizes, group=group)
    lengths = sizes.tolist()
    table = routing.new_full((buffer.num_ranks, max(lengths), buffer.num_topk), -2)
    table[buffer.rank, : len(routing)] = routing
    dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    came = [is_token_in_rank(table[r, :n], buffer.num_ranks, buffer.num_local_experts)[:, buffer.rank] for r, n in enumerate(lengths)]
    return torch.cat([r * num_max_tokens + tokens.nonzero().flatten() for r, tokens in enumerate(came)])
