"""Backend `nvlink`: GPUs of one host that reach each other's memory; kernels push rows into it (csrc/cuda, csrc/runtime)."""

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepep_moe import _C, device, torch_module
from deepep_moe.device import DTYPES, call_stream, device_index
from deepep_moe.errors import BufferDestroyedError, Cause, EPCapacityError, EPMismatchError, EPPeerError
from deepep_moe.exchange.backends.base import (
    NO_FUSION,
    CachedDispatchArgs,
    Capabilities,
    CombineArgs,
    DispatchArgs,
    Fusion,
    Mode,
    Move,
    Rows,
    RowScaling,
    tell_peers,
)
from deepep_moe.exchange.handle import DispatchHandle, HandleShape, PackedHandle
from deepep_moe.group.settings import Settings
from deepep_moe.tuning import SETTINGS, Machine, Values


def _nothing() -> None:
    """A move that is made already."""


class NvlinkBackend:
    """Implements `deepep_moe.backends.base.Backend`. Work is enqueued on the caller's current stream, or beside it.

    A dispatch starts before this rank knows what it will receive: where the last two received about as many rows, its kernels have room
    for a sixteenth more (`recv_x` is then the first rows of that); else they send while the host waits for the number. A failure in a
    kernel is raised by the call that waits for its counts (an uncached dispatch), else by the buffer's next call, once that is made.
    """

    name = "nvlink"

    def __init__(self, settings: Settings):
        self.settings = settings
        self.device: torch.device | None = torch.device("cuda", torch.cuda.current_device())
        self._exchange: Any = _C.NvlinkExchange(
            num_ranks=settings.num_ranks,
            rank=settings.rank % settings.ranks_per_node,
            num_nodes=settings.num_nodes,
            node=settings.node,
            device=torch.cuda.current_device(),
            num_experts=settings.num_experts,
            num_topk=settings.num_topk,
            hidden=settings.hidden,
            num_max_tokens=max(1, settings.num_max_tokens_per_rank),
            timeout_s=settings.timeout_s,
        )
        self.capabilities = Capabilities(
            device_types=(device.GPU,), can_split=True, can_fuse=True,
            num_handle_numbers=1 + 2 * settings.num_ranks + settings.num_local_experts,
        )  # fmt: skip
        self.workspace_bytes: int = self._exchange.workspace_bytes
        self.fitted = Values(**{name: getattr(self._exchange.tuning, name) for name in SETTINGS})
        """Settings as the native code has fitted them to the device, before any profile."""
        self._own_stream: torch.cuda.Stream | None = None
        self._handle_shape: HandleShape | None = None  # of the latest dispatch

    @property
    def num_calls(self) -> int:
        return self._exchange.num_calls

    @property
    def tuning(self) -> Any:
        """How kernels divide the GPU (`_C.GpuTuning`); for benchmarks and tests."""
        return self._exchange.tuning

    def use(self, values: Values) -> None:
        """Divide the GPU so from now on. Between two calls it may change; results stay the same."""
        for name in SETTINGS:
            setattr(self._exchange.tuning, name, getattr(values, name))

    @property
    def machine(self) -> Machine:
        """The machine, as profiles name it."""
        name = torch.cuda.get_device_name(torch.cuda.current_device())
        return Machine(name, self._exchange.num_multiprocessors, self.settings.num_ranks, self.settings.num_nodes)

    def limit_sms(self, max_sms: int) -> None:
        self._exchange.tuning.max_sms = max_sms

    def copy_to(self, peer: int, num_bytes: int) -> None:
        """A copy engine's copy of workspace memory to `peer`, on the current stream, between calls: what the link gives; for benchmarks."""
        self._exchange.copy_block(peer, num_bytes, call_stream(self.device))

    def address(self) -> bytes:
        """The CUDA IPC handle of this rank's workspace."""
        return self._exchange.handle()

    def connect(self, addresses: list[bytes]) -> None:
        """Map the workspaces of all ranks. Raises RuntimeError where a GPU cannot reach another."""
        self._exchange.connect(addresses)

    def disconnect(self) -> None:
        self._exchange.disconnect()

    def seal(self) -> None:
        """Nothing to close: CUDA's handles end with the allocation."""

    # ---- dispatch ----

    def plan(self, args: DispatchArgs) -> tuple[Rows, DispatchHandle, Move]:
        """Make the whole call: csrc/runtime/nvlink/exchange.h has the sequence, which calls `allocate` once or twice."""
        handle = self._new_handle(args)
        call = _C.GpuDispatchCall(handle, args.x, args.x_scales, args.topk_idx, args.topk_weights, DTYPES[args.x.dtype], args.num_recv_rows)
        stream, rows, recv_topk_idx = self._stream_of(args.mode), None, None

        def allocate(num_rows: int, is_guess: bool) -> None:
            nonlocal rows, recv_topk_idx
            rows, recv_topk_idx = self._receive_buffers(args, call, num_rows, is_guess)

        try:
            num_rows = self._exchange.dispatch(call, self._num_sms(args.mode), args.mode.is_split, stream, handle.call, allocate)
        except BaseException:
            if args.mode.is_async and self._own_stream is not None:  # which goes on with what it was given
                self._record(self._own_stream, args, handle, *([] if rows is None else [rows]))
            raise
        assert rows is not None
        rows.shrink(num_rows)
        if recv_topk_idx is not None and num_rows < len(recv_topk_idx):
            recv_topk_idx.resize_(num_rows, self.settings.num_topk)
        handle.complete(num_rows, recv_topk_idx, stream)
        return rows, handle, self._second_half(args, call, rows, handle)

    def dispatch_cached(self, args: CachedDispatchArgs) -> tuple[Rows, Move]:
        handle, fusion = args.handle, args.fusion or NO_FUSION
        rows = self._allocate(args, handle.layout, handle.num_rows)
        call = _C.GpuDispatchCall(handle, args.x, args.x_scales, None, args.topk_weights, DTYPES[args.x.dtype])
        call.receive_into(rows.recv_x, rows.recv_x_scales, None, rows.recv_topk_weights, False)
        if fusion.scaling is not None:
            weights, x = fusion.scaling.weights, fusion.scaling.x
            rows.grad_weights = torch.empty_like(weights)
            call.scale(weights, x, fusion.expert_rows, rows.grad_weights, DTYPES[args.x.dtype])
        self._exchange.dispatch_cached(call, self._num_sms(args.mode), args.mode.is_split, self._stream_along(handle, args.mode))
        return rows, self._second_half(args, call, rows, handle)

    # ---- combine ----

    def combine(self, args: CombineArgs) -> tuple[Tensor, Tensor | None, Move]:
        s, handle, fusion = self.settings, args.handle, args.fusion or NO_FUSION
        combined_x = self._empty((handle.num_tokens // fusion.tokens_per_row, s.hidden), args.x.dtype)
        topk_weight_grads = None if args.topk_weight_grads is None else self._empty((handle.num_tokens, s.num_topk), torch.float32)
        weights = args.weights if fusion.source_weights is None else None
        inputs = args.x, fusion.expert_rows, weights, args.bias, args.topk_weight_grads, fusion.source_weights
        call = _C.GpuCombineCall(handle, *inputs, combined_x, topk_weight_grads, DTYPES[args.x.dtype], args.sums_lanes)
        self._exchange.combine(call, self._num_sms(args.mode), args.mode.is_split, self._stream_along(handle, args.mode))
        return combined_x, topk_weight_grads, self._second_half(args, call, combined_x, topk_weight_grads, handle)

    def native_calls(self, number: int, mode: Mode) -> Any:
        """Return `_torch.Calls` for the plain calls of the buffer `number`, which run in `mode`; None where the module is not built."""
        module = torch_module.MODULE
        if module is None:
            return None
        s = self.settings
        return module.Calls(
            shim=self._exchange.shim(), number=number, num_ranks=s.num_ranks, num_local_experts=s.num_local_experts,
            num_topk=s.num_topk, hidden=s.hidden, num_max_tokens=s.num_max_tokens_per_rank, num_sms=self._num_sms(mode),
            device=self.device, shape_of=self.handle_shape, current_stream=partial(call_stream, self.device),
            tell=partial(tell_peers, self),
        )  # fmt: skip

    def allow_excess(self) -> None:
        self._exchange.allows_excess = True

    def check(self) -> None:
        self._exchange.check()
        _C.gpu_gate_check(device_index(self.device))

    def take_failure(self) -> Exception | None:
        if torch.cuda.is_current_stream_capturing():
            return None  # nobody may wait for a GPU now, and a failure stays
        failure = None
        try:
            self._exchange.check()
        except (EPPeerError, EPMismatchError, EPCapacityError, ValueError) as error:
            failure = error
        self._exchange.check_untold()
        return failure

    def refuse(self, message: str, cause: Cause = Cause.OTHER) -> None:
        if torch.cuda.is_current_stream_capturing():
            return  # nobody is in a call yet, and nobody may wait for a GPU now
        self._exchange.refuse(message, cause, call_stream(self.device))

    def abandon(self, message: str) -> None:
        """Peers have what they need of the call: its rows have been sent. They learn `message` in their next call, unless it is what a
        kernel of the call has found, which they know."""
        if not self._exchange.is_void:
            self.refuse(message)

    def check_usable(self) -> None:
        """Every failure can be forgotten."""

    def settle(self) -> int:
        number = self._exchange.settle()
        with contextlib.suppress(ValueError):  # a gate may have seen rows that a failed call has left
            _C.gpu_gate_check(device_index(self.device))
        return number

    def destroy(self) -> None:
        self._exchange = None

    # ---- streams ----

    def recorded(self, *used: Any) -> torch.cuda.Event:
        """Of the asynchronous call just made; its memory is not used again before."""
        assert self._own_stream is not None
        self._record(self._own_stream, *used)
        event = torch.cuda.Event()
        event.record(self._own_stream)
        return event

    def _record(self, stream: torch.cuda.Stream, *used: Any) -> None:
        """`used`: tensors, or what holds some."""
        for value in used:
            if isinstance(value, Tensor):
                if value.is_cuda:
                    value.record_stream(stream)
            elif isinstance(value, DispatchHandle):
                self._record(stream, *value.tensors)
            elif isinstance(value, (Rows, DispatchArgs, CachedDispatchArgs, CombineArgs, Fusion, RowScaling)):
                self._record(stream, *vars(value).values())

    def _stream_along(self, handle: DispatchHandle, mode: Mode) -> int:
        """Return the stream of a call along `handle`, which the caller may drop at once, on its dispatch's stream or another."""
        stream = self._stream_of(mode)
        if isinstance(handle, PackedHandle) and handle.stream not in (None, stream):
            self._record(torch.cuda.current_stream(self.device), handle)
        return stream

    def _stream_of(self, mode: Mode) -> int:
        if not mode.is_async or mode.is_split:
            return call_stream(self.device)
        if self._own_stream is None:
            self._own_stream = torch.cuda.Stream(self.device)
        self._follow_current(mode)
        return self._own_stream.cuda_stream

    def _follow_current(self, mode: Mode) -> None:
        """An asynchronous call goes on after what the caller's stream has been given so far: its arguments, fresh outputs."""
        if mode.is_async and not mode.is_split and self._own_stream is not None:
            self._own_stream.wait_stream(torch.cuda.current_stream(self.device))

    def _second_half(self, args: DispatchArgs | CachedDispatchArgs | CombineArgs, call: Any, *used: Any) -> Move:
        """Return what is left of a call: nothing, or where it was split, its second half, on the stream that is current by then. That holds
        the call's tensors, and has their memory wait for that stream."""
        if not args.mode.is_split:
            return _nothing

        def finish() -> None:
            if self._exchange is None:
                raise BufferDestroyedError("the buffer was destroyed before this call's hook; its results will not come")
            self._record(torch.cuda.current_stream(self.device), args, *used)
            end = self._exchange.end_combine if isinstance(args, CombineArgs) else self._exchange.end_dispatch
            end(call, call_stream(self.device))

        return finish

    @staticmethod
    def _num_sms(mode: Mode) -> int:
        return -1 if mode.num_sms is None else mode.num_sms

    # ---- tensors and params ----

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _new_handle(self, args: DispatchArgs) -> PackedHandle:
        """For the plan to fill, with room for all that may come."""
        shape = self.handle_shape(args.topk_idx.shape[0], args.layout)
        memory = self._empty((shape.starts[-1],), torch.int32)
        call = torch.empty(self.capabilities.num_handle_numbers, dtype=torch.int64, device="cpu")
        return PackedHandle(args.buffer_id, args.layout, args.expert_alignment, -1, shape, memory, call)

    def handle_shape(self, num_tokens: int, layout: str) -> HandleShape:
        s, shape = self.settings, self._handle_shape
        num_slots = s.num_ranks * s.num_max_tokens_per_rank if layout == "expert" else 0
        if shape is None or (shape.num_tokens, shape.num_slots) != (num_tokens, num_slots):  # mostly those of the call before
            nodes = s.num_nodes, 0 if s.num_nodes == 1 else self._exchange.num_node_tokens
            shape = self._handle_shape = HandleShape(num_tokens, s.num_topk, num_slots, s.num_ranks, s.num_local_experts, *nodes)
        return shape

    def _receive_buffers(self, args: DispatchArgs, call: Any, num_rows: int, is_guess: bool) -> tuple[Rows, Tensor | None]:
        rows, recv_topk_idx = self._allocate(args, args.layout, num_rows), None
        if args.layout == "rank":
            recv_topk_idx = self._empty((num_rows, self.settings.num_topk), args.topk_idx.dtype)
            if args.num_recv_rows >= 0:
                recv_topk_idx.fill_(-1)  # rows behind the last
        call.receive_into(rows.recv_x, rows.recv_x_scales, recv_topk_idx, rows.recv_topk_weights, is_guess)
        self._follow_current(args.mode)
        return rows, recv_topk_idx

    def _allocate(self, args: DispatchArgs | CachedDispatchArgs, layout: str, num_rows: int) -> Rows:
        scales = weights = None
        if args.x_scales is not None:
            scales = self._empty((num_rows, args.x_scales.shape[1]), torch.float32)
        if args.topk_weights is not None:
            weights = self._empty((num_rows,) if layout == "expert" else (num_rows, self.settings.num_topk), torch.float32)
        return Rows(self._empty((num_rows, self.settings.hidden), args.x.dtype), scales, weights)
