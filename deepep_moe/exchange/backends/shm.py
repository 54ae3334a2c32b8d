"""Backend `shm`: processes of one host, CPU tensors, rows through shared memory (csrc/cpu, csrc/runtime)."""

import os
from typing import Any

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.device import DTYPES
from deepep_moe.exchange.backends.base import CachedDispatchArgs, Capabilities, CombineArgs, DispatchArgs, Mode, Move, Rows
from deepep_moe.exchange.handle import DispatchHandle, padded
from deepep_moe.group.settings import Settings
from deepep_moe.host_pool import HostPool

# Outputs larger than this are written past the caches, which could not hold them anyway.
_STREAMING_BYTES = 8 << 20


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


class ShmBackend:
    """Implements `deepep_moe.exchange.backends.base.Backend`. Construction is collective: see `connect`."""

    name = "shm"
    device: torch.device | None = None

    def __init__(self, settings: Settings, num_channels: int):
        self.settings = settings
        self.num_channels = num_channels
        self.capabilities = Capabilities(device_types=("cpu",), moves_on_thread=True, num_channels=num_channels)
        self._communicator = _C.ShmExchange(
            num_ranks=settings.num_ranks,
            rank=settings.rank,
            num_channels=num_channels,
            num_experts=settings.num_experts,
            num_topk=settings.num_topk,
            hidden=settings.hidden,
            timeout_s=settings.timeout_s,
        )
        self.workspace_bytes: int = self._communicator.workspace_bytes
        self._pool = HostPool()

    def address(self) -> tuple[str, int]:
        """What peers need to open this rank's shared memory: its path and this process's id."""
        return self._communicator.path, os.getpid()

    def connect(self, addresses: list[tuple[str, int]]) -> None:
        """Map the shared memory of all ranks; `addresses` by rank. Raises OSError or ValueError where one cannot be opened."""
        self._communicator.connect([path for path, _ in addresses], [pid for _, pid in addresses])

    def seal(self) -> None:
        """Once all ranks are connected: nobody else can open this rank's shared memory any more."""
        self._communicator.seal()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._pool.empty(shape, dtype)

    @property
    def num_calls(self) -> int:
        return self._communicator.num_calls

    def plan(self, args: DispatchArgs) -> tuple[Rows, DispatchHandle, Move]:
        s, num_tokens = self.settings, args.topk_idx.shape[0]
        args.topk_idx, args.topk_weights = args.topk_idx.contiguous(), _contiguous(args.topk_weights)
        topk_idx = torch.empty(num_tokens, s.num_topk, dtype=torch.int32)
        recv_counts = torch.empty(s.num_ranks, self.num_channels, dtype=torch.int32)
        num_recv_tokens_per_expert = torch.empty(s.num_local_experts, dtype=torch.int32)
        layout = layout_params(args.topk_idx, s.num_ranks, s.num_experts)
        layout.narrow_topk_idx = _address(topk_idx)
        plan = _C.PlanParams(self._signature("dispatch", args.x, args.layout, args), layout)
        plan.num_recv_rows_bound = args.num_recv_rows
        plan.recv_counts = _address(recv_counts)
        plan.num_recv_tokens_per_expert = _address(num_recv_tokens_per_expert)
        result = self._communicator.plan(plan)

        num_rows = result.num_rows if args.num_recv_rows < 0 else args.num_recv_rows
        is_expert = args.layout == "expert"
        # -1 until the rows are there: a dispatch that fails half way leaves a handle that leads nowhere, not anywhere.
        recv_row_idx = torch.full((result.num_recv_tokens if is_expert else 0, s.num_topk), -1, dtype=torch.int32)
        recv_topk_idx = None if is_expert else torch.full((num_rows, s.num_topk), -1, dtype=args.topk_idx.dtype)
        handle = DispatchHandle(
            args.buffer_id,
            args.layout,
            args.expert_alignment,
            num_rows,
            topk_idx,
            recv_row_idx,
            recv_counts,
            num_recv_tokens_per_expert,
            torch.tensor([self.num_calls]),
            recv_topk_idx,
        )
        rows = self._allocate(args, handle)
        params = self._dispatch_params(args, handle, rows)
        if recv_topk_idx is not None:
            params.recv_topk_idx = _address(recv_topk_idx)
            params.recv_topk_idx_is_int64 = recv_topk_idx.dtype == torch.int64
        return rows, handle, lambda: self._communicator.dispatch(params)

    def dispatch_cached(self, args: CachedDispatchArgs) -> tuple[Rows, Move]:
        args.topk_weights = _contiguous(args.topk_weights)
        rows = self._allocate(args, args.handle)
        params = self._dispatch_params(args, args.handle, rows)
        params.cached = True
        signature = self._signature("cached_dispatch", args.x, args.handle.layout, args)
        return rows, lambda: self._communicator.dispatch_cached(signature, params)

    def combine(self, args: CombineArgs) -> tuple[Tensor, Tensor | None, Move]:
        s, handle = self.settings, args.handle
        combined_x = self.empty((handle.num_tokens, s.hidden), args.x.dtype)
        has_grads = args.topk_weight_grads is not None
        topk_weight_grads = torch.empty(handle.num_tokens, s.num_topk, dtype=torch.float32) if has_grads else None
        params = _C.CombineParams()
        params.dtype = DTYPES[args.x.dtype]
        params.layout = getattr(_C.Layout, handle.layout)
        params.num_topk, params.num_experts, params.hidden = s.num_topk, s.num_experts, s.hidden
        params.num_tokens = handle.num_tokens
        params.recv_counts = _address(handle.recv_counts)
        params.recv_row_idx = _address(handle.recv_row_idx)
        params.x, params.weights, params.bias = _address(args.x), _address(args.weights), _address(args.bias)
        params.topk_weight_grads = _address(args.topk_weight_grads)
        params.topk_idx = _address(handle.topk_idx)
        params.combined_x, params.combined_topk_weight_grads = _address(combined_x), _address(topk_weight_grads)
        signature = _C.Signature(
            _C.Operation.combine, params.dtype, params.layout, handle_call=int(handle.call), has_topk_weight_grads=has_grads
        )
        return combined_x, topk_weight_grads, lambda: self._communicator.combine(signature, params)

    def native_calls(self, number: int, mode: Mode) -> None:
        """Its calls are made from Python."""

    def recorded(self, *used: Any) -> None:
        """Its asynchronous calls run on a thread."""

    def check(self) -> None:
        """Its calls raise what they have to say."""

    def take_failure(self) -> None:
        return None

    def refuse(self, message: str) -> None:
        self._communicator.refuse(message)

    def destroy(self) -> None:
        del self._communicator  # tells the peers, unmaps
        self._pool.trim()

    def _signature(self, operation: str, x: Tensor, layout: str, args: DispatchArgs | CachedDispatchArgs) -> Any:
        return _C.Signature(
            getattr(_C.Operation, operation),
            DTYPES[x.dtype],
            getattr(_C.Layout, layout),
            expert_alignment=args.expert_alignment if isinstance(args, DispatchArgs) else args.handle.expert_alignment,
            handle_call=0 if isinstance(args, DispatchArgs) else int(args.handle.call),
            has_weights=args.topk_weights is not None,
            has_scales=args.x_scales is not None,
        )

    def _allocate(self, args: DispatchArgs | CachedDispatchArgs, handle: DispatchHandle) -> Rows:
        """Outputs of a dispatch, with the rows that nobody sends (padding, and the rest up to a bound) already zero."""
        num_rows = handle.num_rows
        recv_x = self.empty((num_rows, self.settings.hidden), args.x.dtype)
        scales = weights = None
        if args.x_scales is not None:
            scales = torch.empty(num_rows, args.x_scales.shape[1], dtype=torch.float32)
        if args.topk_weights is not None:
            weights = torch.empty((num_rows,) if handle.layout == "expert" else (num_rows, self.settings.num_topk), dtype=torch.float32)
        for begin, end in _unsent_rows(handle):
            recv_x[begin:end].view(torch.uint8).zero_()
            for tensor in (scales, weights):
                if tensor is not None:
                    tensor[begin:end].zero_()
        return Rows(recv_x, scales, weights)

    def _dispatch_params(self, args: DispatchArgs | CachedDispatchArgs, handle: DispatchHandle, rows: Rows) -> Any:
        params = _C.DispatchParams()
        params.layout = getattr(_C.Layout, handle.layout)
        params.streaming = rows.recv_x.nbytes > _STREAMING_BYTES
        params.num_topk, params.num_experts = self.settings.num_topk, self.settings.num_experts
        params.row_bytes = self.settings.hidden * args.x.element_size()
        params.scale_bytes = 0 if args.x_scales is None else args.x_scales.shape[1] * args.x_scales.element_size()
        params.num_tokens = handle.num_tokens
        params.x, params.x_scales, params.topk_weights = _address(args.x), _address(args.x_scales), _address(args.topk_weights)
        params.topk_idx, params.recv_counts = _address(handle.topk_idx), _address(handle.recv_counts)
        params.recv_row_idx = _address(handle.recv_row_idx)
        params.recv_x, params.recv_x_scales = _address(rows.recv_x), _address(rows.recv_x_scales)
        params.recv_topk_weights = _address(rows.recv_topk_weights)
        return params


def layout_params(topk_idx: Tensor, num_ranks: int, num_experts: int) -> Any:
    """`_C.LayoutParams` of a contiguous int32 or int64 CPU tensor [num_tokens, num_topk]."""
    params = _C.LayoutParams()
    params.topk_idx = _address(topk_idx)
    params.is_int64 = topk_idx.dtype == torch.int64
    params.num_tokens, params.num_topk = topk_idx.shape
    params.num_ranks, params.num_experts = num_ranks, num_experts
    return params


def _unsent_rows(handle: DispatchHandle) -> list[tuple[int, int]]:
    """[begin, end) of the rows of a dispatch that hold no token."""
    if handle.layout == "rank":
        return [(int(handle.recv_counts.sum()), handle.num_rows)]
    counts = handle.num_recv_tokens_per_expert
    ends = padded(counts, handle.expert_alignment).cumsum(0)
    begins = torch.cat([ends.new_zeros(1), ends])[:-1] + counts
    holes = [(begin, end) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True) if begin < end]
    return [*holes, (int(ends[-1]), handle.num_rows)]
