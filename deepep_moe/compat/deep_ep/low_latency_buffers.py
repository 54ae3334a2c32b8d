"""The low-latency buffers behind a DeepEP buffer, and what calls of them leave: handles, and how long ranks were waited for."""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe.arguments import check_tensor
from deepep_moe.compat.deep_ep.core import greet
from deepep_moe.device import is_gpu
from deepep_moe.errors import EPError, EPTimeoutError
from deepep_moe.low_latency.buffer import LowLatencyBuffer
from deepep_moe.low_latency.handle import LowLatencyHandle, row_sources

_Error = TypeVar("_Error", bound=Exception)
_SIZES = "num_max_dispatch_tokens_per_rank", "hidden", "num_experts", "num_topk"


class LowLatencyBuffers:
    """One `LowLatencyBuffer` for each (num_max_tokens_per_rank, hidden, num_experts, num_topk) that calls have had, over one group.

    The first call for new sizes makes a buffer, so all ranks make it together. The backend is `nvlink` for tensors on GPUs of one host,
    `nvshmem` for those of several, or of nodes that the caller makes of ranks, and `shm` for tensors on the CPU, also where the group is
    gloo. Masks are those of all buffers.
    """

    def __init__(self, group: dist.ProcessGroup, enable_shrink: bool, ranks_per_node: int | None = None) -> None:
        self._group, self._enable_shrink, self._ranks_per_node = group, enable_shrink, ranks_per_node
        self._buffers: dict[tuple[int, int, int, int], LowLatencyBuffer] = {}
        self._latest: LowLatencyBuffer | None = None
        self._masked_early: set[int] = set()
        """Ranks that were masked before there was a buffer."""

    def get(self, x: Tensor, topk_idx: Tensor, num_max_tokens_per_rank: int, num_experts: int) -> LowLatencyBuffer:
        """Return the buffer for a dispatch of the matrices `x` and `topk_idx`. Collective for new sizes. Raises what the construction of a
        LowLatencyBuffer raises."""
        sizes = _sizes(x, topk_idx, num_max_tokens_per_rank, num_experts)
        buffer = self._buffers.get(sizes)
        self._latest = self._make(sizes, x.device) if buffer is None else buffer
        return self._latest

    def refuse_dispatch(self, error: _Error, *arguments: Any) -> _Error:
        """Tell the peers that this rank does not make the dispatch for which they call `get` with these arguments. Return `error`."""
        return self._refuse(error, self._buffers.get(_sizes(*arguments)))

    def refuse(self, error: _Error) -> _Error:
        """Tell the peers that this rank does not make its call, which does not say in which buffer they are: that of the latest dispatch is
        taken, and where there is none, their first call. Return `error`, to be raised."""
        return self._refuse(error, self._latest)

    def _refuse(self, error: _Error, buffer: LowLatencyBuffer | None) -> _Error:
        with contextlib.suppress(EPError):  # of peers that do not come: `error` says more
            if buffer is not None:
                buffer.refuse(error)
            else:
                greet(self._group, error)
        return error

    def _make(self, sizes: tuple[int, int, int, int], device: torch.device) -> LowLatencyBuffer:
        masked = self.masked_ranks()
        try:
            where = self._where(device, len(set(greet(self._group))))
            buffer = LowLatencyBuffer(self._group, *sizes, mask_stalled=self._enable_shrink, **where)
        except EPTimeoutError as error:
            if not masked:
                raise
            raise EPTimeoutError(
                f"the sizes {dict(zip(_SIZES, sizes, strict=True))} are new, so all ranks make a buffer for them, and ranks "
                f"{sorted(masked)} are masked; dispatch once with all sizes before a rank may be gone, or take these ranks back",
                rank=error.rank, phase=error.phase,
            ) from error  # fmt: skip
        for rank in masked:
            buffer.mask_rank(rank)
        self._masked_early.clear()
        self._buffers[sizes] = buffer
        return buffer

    def _where(self, device: torch.device, num_hosts: int) -> dict[str, Any]:
        if not is_gpu(device):
            return {"backend": "shm"}
        per_node = self._ranks_per_node
        is_one_node = num_hosts == 1 if per_node is None else per_node == self._group.size()
        return {"backend": "nvlink" if is_one_node else "nvshmem", "ranks_per_node": per_node}

    def mask(self, rank: int, masked: bool) -> None:
        """Leave a rank out in all buffers, those to come too, or take it back."""
        if not self._buffers:
            (self._masked_early.add if masked else self._masked_early.discard)(rank)
        for buffer in self._buffers.values():
            buffer.mask_rank(rank, masked)

    def masked_ranks(self) -> set[int]:
        """Return the ranks that any buffer leaves out, as far as the host can see."""
        return self._masked_early.union(*(buffer.masked_ranks for buffer in self._buffers.values()))

    def rejoin(self) -> None:
        """Come back, on a rank that the others take back."""
        for buffer in self._buffers.values():
            buffer.rejoin()

    def destroy(self) -> None:
        """Destroy all buffers. Not collective."""
        self._latest = None
        while self._buffers:
            self._buffers.popitem()[1].destroy()


def _sizes(x: Tensor, topk_idx: Tensor, num_max_tokens_per_rank: int, num_experts: int) -> tuple[int, int, int, int]:
    return num_max_tokens_per_rank, x.shape[1], num_experts, topk_idx.shape[1]


def check_matrices(**tensors: Any) -> None:
    """Raise ValueError for what is no tensor of two dimensions."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dim() != 2:
            raise ValueError(f"{name} is {tensor!r:.80}; it must be a tensor of two dimensions")


class DispatchHandle(tuple[Any, ...]):
    """The handle of a low-latency dispatch as V1 returns it, a tuple of five: packed_recv_src_info [num_local_experts, num_ranks * max]
    int32, the token that each row is of; packed_recv_layout_range [num_local_experts, num_ranks] int64, (first row << 32) | number of rows
    from each rank; num_max_dispatch_tokens_per_rank, hidden, num_experts.

    The two tensors are worked out when they are asked for, once the dispatch was received: few callers read them.
    """

    buffer: LowLatencyBuffer
    native: LowLatencyHandle

    def __new__(cls, buffer: LowLatencyBuffer, native: LowLatencyHandle) -> "DispatchHandle":
        self = super().__new__(cls, (None, None, buffer.num_max_tokens_per_rank, buffer.hidden, buffer.num_experts))
        self.buffer, self.native = buffer, native
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values())

    def __getitem__(self, index: Any) -> Any:
        is_number = isinstance(index, int) and index % len(self) >= 2
        return super().__getitem__(index) if is_number else self._values()[index]

    def _values(self) -> tuple[Any, ...]:
        sources = row_sources(self.native, self.buffer)
        num_rows = sources.num_tokens.long()
        first_rows = num_rows.cumsum(1) - num_rows
        return (sources.token_idx, first_rows << 32 | num_rows, *super().__getitem__(slice(2, None)))


class Waits:
    """Adds what a call waits for each rank to the caller's counter, each time it is left."""

    def __init__(self, name: str, stats: Tensor | None, buffer: LowLatencyBuffer):
        self.name, self.stats, self.buffer = name, stats, buffer

    def __enter__(self) -> None:
        if self.stats is not None:
            self.before = self.buffer.statistics().wait_ns.clone()

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        if self.stats is None or error is not None:
            return
        check_tensor(self.name, self.stats, (self.buffer.num_ranks,), (torch.int64,), self.before.device)
        self.stats.add_(self.buffer.statistics().wait_ns - self.before)
