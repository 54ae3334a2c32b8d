"""What a dispatch returns, and the reusable part of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from deepep_moe.event import Event


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """Where the rows of one dispatch came from: what `combine` needs to bring them back and a cached dispatch to repeat the routing.

    Immutable; usable any number of times until its buffer is destroyed. All tensors lie on the device of the dispatch.
    """

    buffer_id: int
    layout: str
    """"rank" or "expert"."""
    expert_alignment: int
    num_rows: int
    """Rows of `recv_x`, padding included."""
    topk_idx: Tensor
    """[num_tokens, num_topk] int32: this rank's routing, -1 = no expert."""
    recv_row_idx: Tensor
    """[num_recv_tokens, num_topk] int32: the row of each lane of each token received, -1 = none; empty in the rank layout."""
    recv_counts: Tensor
    """[num_ranks, num_channels] int32: tokens received from each rank, in the order they were sent."""
    num_recv_tokens_per_expert: Tensor
    """[num_local_experts] int32, without padding."""
    call: Tensor
    """int64 on the CPU: [0] the number of the dispatch among the buffer's calls, by which ranks notice that they use different handles;
    with backend `nvlink`, then [num_ranks] tokens sent to and [num_ranks] received from each rank and [num_local_experts] tokens of each
    local expert, -1 where the host does not know."""
    recv_topk_idx: Tensor | None
    """[num_rows, num_topk] local experts, -1 = another rank's (rank layout only)."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those that lie with the rows."""
        return self.topk_idx, self.recv_row_idx, self.recv_counts, self.num_recv_tokens_per_expert, self.recv_topk_idx

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return self.topk_idx.shape[0]

    @property
    def num_rows_per_expert(self) -> Tensor:
        """[num_local_experts] int32: rows of each expert's group, padding included."""
        return padded(self.num_recv_tokens_per_expert, self.expert_alignment)

    @property
    def num_rows_per_expert_list(self) -> list[int]:
        """The same on the host, [num_local_experts]. On a GPU it is there when `dispatch` returns, before the rows are, unless
        `num_recv_rows` was given: then it waits for the stream."""
        counts: list[int] = self.call.tolist()[1 + 2 * self.recv_counts.shape[0] :]
        if len(counts) != len(self.num_recv_tokens_per_expert) or -1 in counts:
            counts = self.num_recv_tokens_per_expert.tolist()
        alignment = self.expert_alignment
        return counts if alignment == 1 else [-(-count // alignment) * alignment for count in counts]


def padded(counts: Tensor, alignment: int) -> Tensor:
    """`counts` rounded up to multiples of `alignment`."""
    return (counts + (alignment - 1)) // alignment * alignment


class DispatchOutput(NamedTuple):
    """What a rank received. `num_rows` counts (token, expert) pairs and padding in the expert layout, tokens in the rank layout."""

    recv_x: Tensor
    """[num_rows, hidden], dtype of `x`. With backend `nvlink` it may be the first rows of an allocation up to a sixteenth larger."""
    recv_x_scales: Tensor | None
    """[num_rows, ceil(hidden / 128)] fp32, when `x_scales` was given."""
    recv_topk_idx: Tensor | None
    """[num_rows, num_topk] local experts, -1 = another rank's; rank layout only."""
    recv_topk_weights: Tensor | None
    """fp32, when `topk_weights` was given: [num_rows] in the expert layout (0 in padding), [num_rows, num_topk] in the rank layout
    (0 where recv_topk_idx is -1)."""
    num_recv_tokens_per_expert: Tensor
    """[num_local_experts] int32: rows of each local expert, without padding."""
    handle: DispatchHandle
    event: Event | None
    """With `async_op=True`: wait for it before reading any of the tensors above but the counts."""
    hook: Callable[[], None] | None
    """With `return_hook=True`: call it before reading any of the tensors above but the counts."""


class Layout(NamedTuple):
    """Counts of this rank's tokens, before sending."""

    num_tokens_per_rank: Tensor
    """[num_ranks] int32."""
    num_tokens_per_expert: Tensor
    """[num_experts] int32."""
    is_token_in_rank: Tensor
    """[num_tokens, num_ranks] bool."""
