"""The low-latency buffers behind a DeepEP buffer, and what calls of them leave: handles, and how long ranks were waited for."""

import bisect
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe import _C, config
from deepep_moe.compat.deep_ep.core import Buffers
from deepep_moe.compat.deep_ep.graphs import outside_graphs
from deepep_moe.device import is_gpu
from deepep_moe.errors import EPTimeoutError
from deepep_moe.low_latency.buffer import LowLatencyBuffer
from deepep_moe.low_latency.handle import LowLatencyHandle, row_sources

_Error = TypeVar("_Error", bound=Exception)
_SIZES = "num_max_dispatch_tokens_per_rank", "hidden", "num_experts", "num_topk"
_GROWTH = 2  # least factor between two bounds, so that all buffers together take no more than twice the memory of the largest


class LowLatencyBuffers(Buffers):
    """One `LowLatencyBuffer` for each (hidden, num_experts, num_topk) of calls, over one group.

    A buffer has room for the tokens that fit `num_bytes` (from `get_low_latency_rdma_size_hint`), or for the most that a call has asked
    for. A call with fewer tokens uses a part of it. All ranks make a buffer together in the first call with its sizes, and again in a call
    with more tokens than it has room for.

    The backend for GPU tensors is `nvlink` on one host, and `nvshmem` on several hosts or if `ranks_per_node` makes several nodes. For CPU
    tensors it is `shm`, also if the group is gloo. A mask applies to all buffers.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, enable_shrink: bool, ranks_per_node: int | None = None) -> None:
        super().__init__(group, ranks_per_node)
        self._num_bytes, self._enable_shrink = num_bytes, enable_shrink
        self._masked_early: set[int] = set()
        """Ranks that were masked before there was a buffer."""

    def get(self, x: Tensor, topk_idx: Tensor, num_max_tokens: int, num_experts: int) -> LowLatencyBuffer:
        """Return the buffer for a dispatch of the matrices `x` and `topk_idx`, with room for `num_max_tokens` tokens of a rank or more.
        Collective where there is none yet. Raises what the construction of a LowLatencyBuffer raises."""
        sizes = x.shape[1], num_experts, topk_idx.shape[1]
        buffer = self._of(sizes, num_max_tokens)
        self._latest = latest = self._make(sizes, num_max_tokens, x.device) if buffer is None else buffer
        return latest

    def refuse_dispatch(self, error: _Error, x: Tensor, topk_idx: Tensor, num_max_tokens: int, num_experts: int) -> _Error:
        """Tell the peers that this rank does not make the dispatch for which they call `get` with these arguments. Return `error`."""
        return self._refuse(error, self._of((x.shape[1], num_experts, topk_idx.shape[1]), num_max_tokens))

    def _of(self, sizes: tuple[int, int, int], num_max_tokens: int) -> LowLatencyBuffer | None:
        buffer = self._buffers.get(sizes)
        return None if buffer is None or buffer.num_max_tokens_per_rank < num_max_tokens else buffer

    def _make(self, sizes: tuple[int, int, int], num_max_tokens: int, device: torch.device) -> LowLatencyBuffer:
        masked, room = self.masked_ranks(), self._room(sizes, num_max_tokens)
        try:
            self._greet()
            where = {"backend": self._gpu_backend, "ranks_per_node": self._ranks_per_node} if is_gpu(device) else {"backend": "shm"}
            buffer = LowLatencyBuffer(self.group, room, *sizes, mask_stalled=self._enable_shrink, sums=config.sums(), **where)
        except EPTimeoutError as error:
            if not masked:
                raise
            raise EPTimeoutError(
                f"the sizes {dict(zip(_SIZES, (num_max_tokens, *sizes), strict=True))} are new, so all ranks make a buffer for them, and "
                f"ranks {sorted(masked)} are masked; dispatch once with all sizes before a rank may be gone, or take these ranks back",
                rank=error.rank, phase=error.phase,
            ) from error  # fmt: skip
        for rank in masked:
            buffer.mask_rank(rank)
        self._masked_early.clear()
        self._buffers.pop(sizes, None)  # handles of the smaller one keep it as long as they need it
        self._keep(sizes, buffer)
        return buffer

    def _room(self, sizes: tuple[int, int, int], num_max_tokens: int) -> int:
        """Return the tokens of a rank that a new buffer has room for: as many as the caller's bytes are the size hint of, or more where a
        call asks for more."""
        hidden, num_experts, _ = sizes
        smaller, most = self._buffers.get(sizes), _C.LOW_LATENCY_MAX_TOKENS // (1 if config.sums() == "ranks" else sizes[2])
        at_least = num_max_tokens if smaller is None else max(num_max_tokens, min(most, _GROWTH * smaller.num_max_tokens_per_rank))

        def bytes_of(num_tokens: int) -> int:
            return size_hint(num_tokens, hidden, self.num_ranks, num_experts)

        held = bisect.bisect_right(range(1, most + 1), self._num_bytes, key=bytes_of)
        is_hint = held > 0 and bytes_of(held) == self._num_bytes
        return max(at_least, held) if is_hint else at_least

    def mask(self, rank: int, masked: bool) -> None:
        """Leave a rank out in all buffers, those to come too, or take it back. Raises ValueError for this rank, or for one
        that does not exist."""
        self.check_alive()
        own_rank = self.group.rank()
        if not 0 <= rank < self.num_ranks or rank == own_rank:
            raise ValueError(f"rank_to_mask is {rank}; it must be one of 0 to {self.num_ranks - 1}, and not this rank, {own_rank}")
        if not self._buffers:
            (self._masked_early.add if masked else self._masked_early.discard)(rank)
        for buffer in self._buffers.values():
            buffer.mask_rank(rank, masked)

    def masked_ranks(self) -> set[int]:
        """Return the ranks that any buffer leaves out, as far as the host can see."""
        self.check_alive()
        return self._masked_early.union(*(buffer.masked_ranks for buffer in self._buffers.values()))

    def rejoin(self) -> None:
        """Come back, on a rank that the others take back."""
        self.check_alive()
        for buffer in self._buffers.values():
            buffer.rejoin()


def size_hint(num_max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Return the bytes of a rank's workspace on a GPU, for any number of experts a token. More tokens take more bytes."""
    return _C.low_latency_gpu_workspace_bytes(
        num_ranks=num_ranks, num_experts=num_experts, num_topk=_C.MAX_TOPK, hidden=hidden, num_max_tokens=num_max_tokens
    )


@outside_graphs
class DispatchHandle(Sequence[Any]):
    """The handle of a low-latency dispatch, a sequence of V1's five items.

    Item 0 is packed_recv_src_info [num_local_experts, num_ranks * max] int32, the token of each row. Item 1 is packed_recv_layout_range
    [num_local_experts, num_ranks] int64, (first row << 32) | number of rows from each rank. The others are
    num_max_dispatch_tokens_per_rank, hidden, num_experts. Few callers read the tensors, so they are computed on access, once the dispatch
    was received.
    """

    def __init__(self, buffer: LowLatencyBuffer, native: LowLatencyHandle, num_max_tokens: int) -> None:
        self.buffer = buffer
        self.native = native
        self.num_rows = buffer.num_ranks * num_max_tokens
        """Rows of a local expert in tensors of the caller; tensors of `buffer` may have more."""
        self._sizes = num_max_tokens, buffer.hidden, buffer.num_experts

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: Any) -> Any:
        place = range(len(self))[index]
        return self._sizes[place - 2] if isinstance(place, int) and place >= 2 else self._values()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values())

    def _values(self) -> tuple[Any, ...]:
        sources = row_sources(self.native, self.buffer)
        num_rows = sources.num_tokens.long()
        first_rows = num_rows.cumsum(1) - num_rows
        return sources.token_idx[:, : self.num_rows].contiguous(), first_rows << 32 | num_rows, *self._sizes


class Waits:
    """Adds what a call waits for each rank to the caller's counter, each time it is left."""

    def __init__(self, stats: Tensor | None, buffer: LowLatencyBuffer):
        """stats: [num_ranks] int64 on the device of the calls, or None."""
        self.stats, self.buffer = stats, buffer

    def __enter__(self) -> None:
        if self.stats is not None:
            self.before = self.buffer.statistics().wait_ns.clone()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self.stats is not None and error is None:
            self.stats.add_(self.buffer.statistics().wait_ns - self.before)
