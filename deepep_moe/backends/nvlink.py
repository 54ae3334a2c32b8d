"""Backend `nvlink`: GPUs of one host that reach each other's memory; kernels push rows into it (csrc/cuda, csrc/runtime)."""

from typing import Any

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.backends.base import DTYPE_NAMES, CachedDispatchArgs, CombineArgs, DispatchArgs, Move, Rows, Settings
from deepep_moe.handle import DispatchHandle

_NUM_SEND_BLOCKS = 24


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


class NvlinkBackend:
    """Implements `deepep_moe.backends.base.Backend`. Work is enqueued on the caller's current stream.

    A failure in a kernel is raised by the call that waits for its counts (an uncached dispatch), else by the buffer's next call.
    """

    name = "nvlink"
    device_types: tuple[str, ...] = ("cuda",)
    num_channels = 1
    moves_on_thread = False  # kernels are asynchronous by themselves

    def __init__(self, settings: Settings):
        self.settings = settings
        self.device: torch.device | None = torch.device("cuda", torch.cuda.current_device())
        self._communicator = _C.GpuCommunicator(
            num_ranks=settings.num_ranks,
            rank=settings.rank,
            device=torch.cuda.current_device(),
            num_experts=settings.num_experts,
            num_topk=settings.num_topk,
            hidden=settings.hidden,
            num_max_tokens=max(1, settings.num_max_tokens_per_rank),
            timeout_s=settings.timeout_s,
        )
        self.num_calls = 0
        self.workspace_bytes: int = self._communicator.workspace_bytes

    def address(self) -> bytes:
        """The CUDA IPC handle of this rank's workspace."""
        return self._communicator.handle()

    def connect(self, addresses: list[bytes]) -> None:
        """Map the workspaces of all ranks. Raises RuntimeError where a GPU cannot reach another."""
        self._communicator.connect(addresses)

    def seal(self) -> None:
        """Nothing to close: CUDA's handles end with the allocation."""

    def plan(self, args: DispatchArgs) -> tuple[Rows, DispatchHandle, Move]:
        self._communicator.check()
        s, num_tokens = self.settings, args.topk_idx.shape[0]
        topk_idx = self._empty((num_tokens, s.num_topk), torch.int32)
        recv_counts = self._empty((s.num_ranks, 1), torch.int32)
        num_recv_tokens_per_expert = self._empty((s.num_local_experts,), torch.int32)
        is_expert = args.layout == "expert"
        plan = self._plan_params(args.topk_idx, cached=False)
        plan.is_expert_layout, plan.expert_alignment = is_expert, args.expert_alignment
        plan.num_recv_rows_bound = args.num_recv_rows
        plan.narrow_topk_idx = _address(topk_idx)
        plan.recv_counts, plan.num_recv_tokens_per_expert = _address(recv_counts), _address(num_recv_tokens_per_expert)
        self.num_calls += 1
        self._communicator.plan(plan, self._stream())
        counts = self._communicator.wait_counts()

        num_rows = counts.num_rows if args.num_recv_rows < 0 else args.num_recv_rows
        recv_row_idx = self._empty((counts.num_recv_tokens if is_expert else 0, s.num_topk), torch.int32)
        recv_topk_idx = None if is_expert else torch.full((num_rows, s.num_topk), -1, dtype=args.topk_idx.dtype, device=self.device)
        handle = DispatchHandle(
            -1,
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
        return rows, handle, lambda: self._communicator.dispatch(params, self._stream())

    def dispatch_cached(self, args: CachedDispatchArgs) -> tuple[Rows, Move]:
        rows = self._allocate(args, args.handle)
        params = self._dispatch_params(args, args.handle, rows)
        params.cached = True
        plan = self._plan_params(args.handle.topk_idx, cached=True)
        plan.is_expert_layout = args.handle.layout == "expert"

        def move() -> None:
            self._communicator.check()
            self.num_calls += 1
            self._communicator.plan(plan, self._stream())
            self._communicator.dispatch(params, self._stream())

        return rows, move

    def combine(self, args: CombineArgs) -> tuple[Tensor, Tensor, Move]:
        s, handle = self.settings, args.handle
        combined_x = self._empty((handle.num_tokens, s.hidden), args.x.dtype)
        lane_values = self._empty((handle.num_tokens if args.lane_values is not None else 0, s.num_topk), torch.float32)
        plan = self._plan_params(handle.topk_idx, cached=True)
        params = _C.GpuCombineParams()
        params.topk_idx, params.num_tokens = _address(handle.topk_idx), handle.num_tokens
        params.is_expert_layout = handle.layout == "expert"
        params.dtype = getattr(_C.DType, DTYPE_NAMES[args.x.dtype])
        params.num_send_blocks = _NUM_SEND_BLOCKS
        params.recv_counts, params.recv_row_idx = _address(handle.recv_counts), _address(handle.recv_row_idx)
        params.x, params.weights, params.bias = _address(args.x), _address(args.weights), _address(args.bias)
        params.lane_values = _address(args.lane_values)
        params.combined_x, params.combined_lane_values = _address(combined_x), _address(lane_values)

        def move() -> None:
            self._communicator.check()
            self.num_calls += 1
            self._communicator.plan(plan, self._stream())
            self._communicator.combine(params, self._stream())

        return combined_x, lane_values, move

    def abort(self, message: str) -> None:
        self.num_calls += 1
        self._communicator.refuse(self._stream())

    def destroy(self) -> None:
        del self._communicator

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _plan_params(self, topk_idx: Tensor, *, cached: bool) -> Any:
        plan = _C.GpuPlanParams()
        plan.topk_idx, plan.topk_idx_is_int64, plan.num_tokens = _address(topk_idx), topk_idx.dtype == torch.int64, topk_idx.shape[0]
        plan.cached = cached
        plan.expert_alignment = 1
        plan.num_recv_rows_bound = -1
        return plan

    def _allocate(self, args: DispatchArgs | CachedDispatchArgs, handle: DispatchHandle) -> Rows:
        num_rows, num_topk = handle.num_rows, self.settings.num_topk
        num_scales = 0 if args.x_scales is None else args.x_scales.shape[1]
        num_weights = 0 if args.topk_weights is None else num_rows
        return Rows(
            self._empty((num_rows, self.settings.hidden), args.x.dtype),
            self._empty((num_rows if num_scales else 0, num_scales), torch.float32),
            self._empty((num_weights,) if handle.layout == "expert" else (num_weights, num_topk), torch.float32),
        )

    def _dispatch_params(self, args: DispatchArgs | CachedDispatchArgs, handle: DispatchHandle, rows: Rows) -> Any:
        params = _C.GpuDispatchParams()
        params.topk_idx, params.num_tokens = _address(handle.topk_idx), handle.num_tokens
        params.is_expert_layout, params.expert_alignment = handle.layout == "expert", handle.expert_alignment
        params.num_send_blocks = _NUM_SEND_BLOCKS if self.settings.num_ranks > 1 else 0
        params.row_bytes = self.settings.hidden * args.x.element_size()
        params.scale_bytes = 0 if args.x_scales is None else args.x_scales.shape[1] * args.x_scales.element_size()
        params.num_rows = handle.num_rows
        params.x, params.x_scales, params.topk_weights = _address(args.x), _address(args.x_scales), _address(args.topk_weights)
        params.recv_counts = _address(handle.recv_counts)
        params.num_recv_tokens_per_expert = _address(handle.num_recv_tokens_per_expert)
        params.recv_x, params.recv_x_scales = _address(rows.recv_x), _address(rows.recv_x_scales)
        params.recv_topk_weights, params.recv_row_idx = _address(rows.recv_topk_weights), _address(handle.recv_row_idx)
        return params
