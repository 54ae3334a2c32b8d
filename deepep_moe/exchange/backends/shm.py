"""Backend `shm`: processes of one host, CPU tensors, rows through shared memory (csrc/cpu, csrc/runtime)."""

import os

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.device import DTYPES
from deepep_moe.errors import Cause
from deepep_moe.exchange.backends.base import (
    Backend,
    CachedDispatchArgs,
    Capabilities,
    CombineArgs,
    DispatchArgs,
    Move,
    Rows,
    check_bounds,
    new_handle,
)
from deepep_moe.exchange.handle import DispatchHandle, padded
from deepep_moe.group.settings import Settings
from deepep_moe.host_pool import HostPool
from deepep_moe.ops.lanes import count_lanes
from deepep_moe.ops.routing import refuse_bad_routing


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")  # whatever the default device is


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


class ShmBackend(Backend):
    """Construction is collective: see `connect`."""

    name = "shm"

    def __init__(self, settings: Settings, num_channels: int):
        self.settings = settings
        self.num_channels = num_channels
        self.capabilities = Capabilities(device_types=("cpu",), moves_on_thread=True, num_channels=num_channels)
        self._exchange = _C.ShmExchange(ranks_per_node=settings.ranks_per_node, num_channels=num_channels, **settings.native)
        self.workspace_bytes: int = self._exchange.workspace_bytes
        self._pool = HostPool()

    def address(self) -> tuple[str, int]:
        """Return what peers need to open this rank's shared memory: its path and this process's id."""
        return self._exchange.path, os.getpid()

    def connect(self, addresses: list[tuple[str, int]]) -> None:
        """Map the shared memory of all ranks; `addresses` by rank. Raises OSError or ValueError where one cannot be opened."""
        self._exchange.connect([path for path, _ in addresses], [pid for _, pid in addresses])

    def seal(self) -> None:
        """Remove the name of this rank's shared memory once all ranks are connected, so that nobody else can open it."""
        self._exchange.seal()

    def free(self) -> int:
        """Give back the pages of rows, and of results that nobody uses. The words by which calls stay in step remain."""
        self._pool.trim()
        return self._exchange.free()

    @property
    def num_calls(self) -> int:
        return self._exchange.num_calls

    def plan(self, args: DispatchArgs) -> tuple[Rows, DispatchHandle, Move]:
        s = self.settings
        args.topk_weights = _contiguous(args.topk_weights)
        refuse_bad_routing(args.topk_idx, s.num_experts)
        topk_idx = args.topk_idx.to(torch.int32, copy=True).contiguous()
        counts = _empty((s.num_ranks, self.num_channels, s.num_ranks + s.num_experts), torch.int32)
        bounds = self._exchange.plan(DTYPES[args.x.dtype], args, self._own_counts(topk_idx), counts)
        needed = check_bounds(args, s, counts.sum(1), bounds)
        num_rows = needed if args.num_recv_rows < 0 else args.num_recv_rows
        recv_counts = counts[:, :, s.rank].contiguous()
        first = s.num_ranks + s.rank * s.num_local_experts
        per_expert = counts[:, :, first : first + s.num_local_experts].flatten(0, 1)  # of each source and channel
        num_recv_tokens_per_expert = per_expert.sum(0, dtype=torch.int32)
        groups = padded(num_recv_tokens_per_expert, args.expert_alignment)
        row_begin = (groups.cumsum(0) - groups + per_expert.cumsum(0) - per_expert).to(torch.int32)
        handle = new_handle(args, self.num_calls, num_rows, int(recv_counts.sum()), topk_idx, recv_counts, num_recv_tokens_per_expert)
        rows = self._allocate(args, handle)
        return rows, handle, lambda: self._exchange.dispatch(handle, args, rows, handle.recv_topk_idx, row_begin)

    def dispatch_cached(self, args: CachedDispatchArgs) -> tuple[Rows, Move]:
        args.topk_weights = _contiguous(args.topk_weights)
        rows = self._allocate(args, args.handle)
        return rows, lambda: self._exchange.dispatch_cached(DTYPES[args.x.dtype], args, rows)

    def combine(self, args: CombineArgs) -> tuple[Tensor, Tensor | None, Move]:
        s, handle = self.settings, args.handle
        combined_x = self._pool.empty((handle.num_tokens, s.hidden), args.x.dtype)
        has_grads = args.topk_weight_grads is not None
        topk_weight_grads = _empty((handle.num_tokens, s.num_topk), torch.float32) if has_grads else None
        return combined_x, topk_weight_grads, lambda: self._exchange.combine(DTYPES[args.x.dtype], args, combined_x, topk_weight_grads)

    def refuse(self, message: str, cause: Cause = Cause.OTHER) -> None:
        self._exchange.refuse(message, cause)

    def abandon(self, message: str) -> None:
        self._exchange.abandon(message)

    def destroy(self) -> None:
        del self._exchange  # tells the peers, unmaps
        self._pool.trim()

    def _own_counts(self, topk_idx: Tensor) -> Tensor:
        """Return [num_channels, num_ranks + num_experts] int32: tokens of each channel, an equal share, for each rank and expert."""
        s, num_tokens = self.settings, len(topk_idx)
        ends = [num_tokens * channel // self.num_channels for channel in range(1, self.num_channels)]
        return torch.stack([torch.cat(count_lanes(part, s.num_experts, s.num_ranks)[:2]) for part in topk_idx.tensor_split(ends)])

    def _allocate(self, args: DispatchArgs | CachedDispatchArgs, handle: DispatchHandle) -> Rows:
        """Allocate the outputs of a dispatch. Rows that nobody sends (padding, and the rest up to a bound) are zero already."""
        num_rows = handle.num_rows
        recv_x = self._pool.empty((num_rows, self.settings.hidden), args.x.dtype)
        scales = weights = None
        if args.x_scales is not None:
            scales = _empty((num_rows, args.x_scales.shape[1]), torch.float32)
        if args.topk_weights is not None:
            weights = _empty((num_rows,) if handle.layout == "expert" else (num_rows, self.settings.num_topk), torch.float32)
        for begin, end in _unsent_rows(handle):
            recv_x[begin:end].view(torch.uint8).zero_()
            for tensor in (scales, weights):
                if tensor is not None:
                    tensor[begin:end].zero_()
        return Rows(recv_x, scales, weights)


def _unsent_rows(handle: DispatchHandle) -> list[tuple[int, int]]:
    """Return the ranges [begin, end) of rows that hold no token."""
    if handle.layout == "rank":
        return [(int(handle.recv_counts.sum()), handle.num_rows)]
    counts = handle.num_recv_tokens_per_expert
    ends = padded(counts, handle.expert_alignment).cumsum(0)
    begins = torch.cat([ends.new_zeros(1), ends])[:-1] + counts
    holes = [(begin, end) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True) if begin < end]
    return [*holes, (int(ends[-1]), handle.num_rows)]
