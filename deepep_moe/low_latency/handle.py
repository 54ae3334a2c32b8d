"""The results of the calls of a `LowLatencyBuffer`."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.event import Event
from deepep_moe.group.settings import Settings, Sizes


class State:
    """Views of a handle's memory, which LowLatencyHandleLayout describes. PyTorch does not count changes made through them."""

    def __init__(self, state: Tensor, s: Settings):
        first_count, first_mask, first_row, _ = handle_offsets(s)
        memory = state.data
        num_tokens, num_lanes = s.num_max_tokens_per_rank, s.num_ranks * s.num_max_tokens_per_rank * s.num_topk
        rows = memory[first_row : first_row + 8 * num_lanes]
        shape = (s.num_ranks, num_tokens, s.num_topk, 2)
        self.number = memory[:8].view(torch.int64)
        self.num_tokens = memory[first_count : first_count + 4 * s.num_ranks].view(torch.int32)
        self.rank_masks = memory[first_mask : first_mask + 4 * num_tokens].view(torch.int32)
        self.rows = rows.view(torch.int32).view(shape)[..., 0]
        self.weights = rows.view(torch.float32).view(shape)[..., 1]


def handle_offsets(s: Settings) -> tuple[int, int, int, int]:
    """Return where a handle's memory has num_tokens, rank_masks and rows, and its bytes."""
    return _C.low_latency_handle_offsets(
        num_ranks=s.num_ranks, num_experts=s.num_experts, num_topk=s.num_topk, hidden=s.hidden, num_max_tokens=s.num_max_tokens_per_rank
    )


@dataclass(frozen=True, eq=False)
class LowLatencyHandle:
    """Tells `combine` where the rows of one dispatch came from, to bring them back any number of times. Immutable."""

    buffer_id: int
    num_tokens: int
    """The tokens of this rank."""
    state: Tensor
    """uint8, on the device of the dispatch: csrc/common/low_latency.h says what it holds."""
    event: Event | None = None
    """The end of a dispatch with `async_op` or `return_hook`."""
    topk_weights: Tensor | None = None
    """[num_tokens, num_topk] fp32, 0 for no expert: the weights of the dispatch where sums go by lanes and weights were given."""
    is_sent: Tensor | None = None
    """[num_tokens, num_topk] bool where sums go by lanes: whether there is an expert."""

    sealed: ClassVar[tuple[object, ...]] = ()
    """The fields as the dispatch made them, and the version of `state`, by which PyTorch counts changes in place."""

    def seal(self) -> "LowLatencyHandle":
        """Mark the handle as that of a dispatch: a copy with other fields has no such mark, and a change shows."""
        self.__dict__["sealed"] = self.buffer_id, self.num_tokens, self.state, self.event, self.state._version
        return self

    @property
    def is_unchanged(self) -> bool:
        """Is the handle as a dispatch made it?"""
        fields = self.buffer_id, self.num_tokens, self.state, self.event
        return len(self.sealed) == 5 and all(map(is_, fields, self.sealed)) and self.state._version == self.sealed[4]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a LowLatencyHandle says where the rows of this process are and cannot be saved or sent; dispatch again")


class LowLatencyOutput(NamedTuple):
    """The results of a dispatch. docs/design/contract.md has the symbols of shapes. C is num_ranks * num_max_tokens_per_rank."""

    recv_x: Tensor
    """[E / R, C, H], dtype of `x` or float8_e4m3fn: rows of each local expert, by (source rank, token). Nothing is written behind the first
    `num_recv_tokens_per_expert` of an expert."""
    recv_x_scales: Tensor | None
    """With `fp8`: [E / R, C, H / 128] fp32, column-major (`stride(1) == 1`), as grouped GEMMs in fp8 take them. With
    `scale_format="ue8m0"`: [E / R, C, ceil(H / 512)] int32 of four biased exponents each, the first in the lowest byte."""
    num_recv_tokens_per_expert: Tensor
    """[E / R] int32, on the device."""
    handle: LowLatencyHandle
    event: Event | None
    hook: Callable[[], None] | None


class LowLatencyStatistics(NamedTuple):
    """Sums over all calls since the buffer was made or `reset_statistics`, as int64 tensors on the device; reading them waits for it."""

    num_tokens_per_expert: Tensor
    """[num_local_experts] rows received."""
    wait_ns: Tensor
    """[num_ranks] nanoseconds from a receiver's start until it had heard of each rank: who is late."""
    num_dropped: Tensor
    """[] (token, expert) pairs of this rank that were not sent, as the expert's rank was masked."""


class RowSources(NamedTuple):
    """The sources of the rows of one dispatch."""

    token_idx: Tensor
    """[num_local_experts, capacity] int32: the token that a row is of, by its index at its rank; -1 behind the rows of an expert."""
    num_tokens: Tensor
    """[num_local_experts, num_ranks] int32: rows from each rank. They lie by rank."""


def row_sources(handle: LowLatencyHandle, sizes: Sizes) -> RowSources:
    """Return where the rows came from that the dispatch of `handle` has received, on its device and without a wait for it.

    Args:
        handle: of a dispatch that was received.
        sizes: the buffer of that dispatch.
    """
    s, device = sizes._settings, handle.state.device
    num_ranks, num_local, capacity = s.num_ranks, s.num_local_experts, s.rows_of_expert
    state = State(handle.state, s)  # behind a rank's number of tokens nothing was written
    rows, tokens = state.rows, torch.arange(s.num_max_tokens_per_rank, dtype=torch.int32, device=device)
    is_row = (rows >= 0) & (tokens < state.num_tokens[:, None])[..., None]
    nowhere = num_local * capacity
    places = torch.where(is_row, rows, nowhere).long()
    token_idx = torch.full((nowhere + 1,), -1, dtype=torch.int32, device=device)
    numbers = tokens // s.lanes  # of the caller's tokens
    token_idx.scatter_(0, places.flatten(), numbers[None, :, None].expand_as(rows).flatten())
    ranks = torch.arange(num_ranks, device=device)[:, None, None]
    num_tokens = torch.zeros((num_local + 1) * num_ranks, dtype=torch.int32, device=device)
    num_tokens.scatter_add_(0, (places // capacity * num_ranks + ranks).flatten(), torch.ones_like(rows).flatten())
    return RowSources(token_idx[:-1].view(num_local, capacity), num_tokens.view(num_local + 1, num_ranks)[:-1])
