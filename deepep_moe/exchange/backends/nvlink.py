"""Backend `nvlink`: GPUs of one host that reach each other's memory; kernels push rows into it (csrc/cuda, csrc/runtime)."""

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepep_moe import _C, device, torch_module
from deepep_moe.device import DTYPES, current_stream
from deepep_moe.errors import BufferDestroyedError, EPCapacityError, EPMismatchError, EPPeerError
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
)
from deepep_moe.exchange.handle import DispatchHandle, HandleShape, PackedHandle
from deepep_moe.group.settings import Settings

DEFAULT_NUM_SMS, DEFAULT_NUM_SMS_OF_SUMS = 12, 14  # the latter for sums for several peers


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
        self._communicator: Any = _C.GpuCommunicator(
            num_ranks=settings.num_ranks,
            rank=settings.rank,
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
        self.workspace_bytes: int = self._communicator.workspace_bytes
        self._own_stream: torch.cuda.Stream | None = None
        self._handle_shape: HandleShape | None = None  # of the latest dispatch
        self._guesses: defaultdict[tuple[str, int], Any] = defaultdict(_C.RowGuess)  # by layout and alignment

    @property
    def num_calls(self) -> int:
        return self._communicator.num_calls

    @property
    def tuning(self) -> Any:
        """How kernels divide the GPU (`_C.GpuTuning`); for benchmarks and tests."""
        return self._communicator.tuning

    def copy_to(self, peer: int, num_bytes: int) -> None:
        """A copy engine's copy of workspace memory to `peer`, on the current stream, between calls: what the link gives; for benchmarks."""
        self._communicator.copy_block(peer, num_bytes, current_stream(self.device))

    def address(self) -> bytes:
        """The CUDA IPC handle of this rank's workspace."""
        return self._communicator.handle()

    def connect(self, addresses: list[bytes]) -> None:
        """Map the workspaces of all ranks. Raises RuntimeError where a GPU cannot reach another."""
        self._communicator.connect(addresses)

    def seal(self) -> None:
        """Nothing to close: CUDA's handles end with the allocation."""

    # ---- dispatch ----

    def plan(self, args: DispatchArgs) -> tuple[Rows, DispatchHandle, Move]:
        num_sms, is_bounded = self._num_sms(args.mode), args.num_recv_rows >= 0
        if is_bounded and num_sms == 0:
            raise ValueError("num_sms=0 and num_recv_rows were both given: copy engines need counts on the host; give one of them")
        handle = self._new_handle(args)
        dtype, weights = DTYPES[args.x.dtype], args.topk_weights
        call = _C.GpuDispatchCall(handle, args.x, args.x_scales, args.topk_idx, weights, dtype, args.num_recv_rows)
        room = args.num_recv_rows if is_bounded else self._guess(args, num_sms)
        is_guess = room >= 0 and not is_bounded
        if room >= 0:  # whatever can fail does so before the call is entered
            rows, recv_topk_idx = self._receive_buffers(args, call, room, is_guess)
        stream = self._enter(call, args.mode)
        if is_bounded:
            handle.call.fill_(-1)[0] = self._communicator.call_number
            handle.complete(room, recv_topk_idx, stream)
            return rows, handle, self._dispatch_move(args, call, num_sms, stream, rows, handle)
        (self._communicator.dispatch if is_guess else self._communicator.start_dispatch)(call, num_sms, stream)
        try:
            num_rows = self._communicator.wait_counts(handle.call.data_ptr()).num_rows  # from here on rows wait for receivers
            if num_sms == 0:
                self._communicator.copy(handle.call[1 : 1 + self.settings.num_ranks].tolist(), call.slot_bytes, stream)
            if num_rows > room:
                new_rows, recv_topk_idx = self._receive_buffers(args, call, num_rows, False)
        except BaseException:
            self._communicator.abandon()
            if args.mode.is_async and self._own_stream is not None:  # which goes on with what it was given
                self._record(self._own_stream, args, handle, *([rows] if is_guess else []))
            raise
        if num_rows > room:
            rows = new_rows
            if not args.mode.is_split:
                self._communicator.end_dispatch(call, stream)
        elif num_rows < room:
            rows.shrink(num_rows)
            if recv_topk_idx is not None:
                recv_topk_idx.resize_(num_rows, self.settings.num_topk)
        self._guesses[args.layout, args.expert_alignment].remember(num_rows)
        handle.complete(num_rows, recv_topk_idx, stream)
        return rows, handle, partial(self._end, args, call, rows, handle) if args.mode.is_split else _nothing

    def _guess(self, args: DispatchArgs, num_sms: int) -> int:
        """Rows to allocate before they are counted; -1: none."""
        can_guess = not args.mode.is_split and num_sms > 0
        return self._guesses[args.layout, args.expert_alignment].room() if can_guess else -1

    def dispatch_cached(self, args: CachedDispatchArgs) -> tuple[Rows, Move]:
        handle, num_sms = args.handle, self._num_sms(args.mode)
        counts = self._counts(handle, num_sms, is_dispatch=True)
        rows = self._allocate(args, handle.layout, handle.num_rows)
        call = _C.GpuDispatchCall(handle, args.x, args.x_scales, None, args.topk_weights, DTYPES[args.x.dtype])
        call.receive_into(rows.recv_x, rows.recv_x_scales, None, rows.recv_topk_weights, False)
        fusion = args.fusion or NO_FUSION
        scaling = fusion.scaling
        if scaling is not None:
            rows.grad_weights = torch.empty_like(scaling.weights)
            call.weigh(scaling.weights, scaling.x, fusion.expert_rows, rows.grad_weights, DTYPES[args.x.dtype])
        stream = self._enter_along(handle, call, args.mode)
        return rows, self._dispatch_move(args, call, num_sms, stream, rows, handle, counts)

    def _dispatch_move(
        self, args: DispatchArgs | CachedDispatchArgs, call: Any, num_sms: int, stream: int, rows: Rows, handle: DispatchHandle,
        counts: list[int] | None = None,
    ) -> Move:  # fmt: skip
        """The rest of a dispatch whose outputs are allocated: all of it, or what follows the start."""
        if num_sms > 0 and not args.mode.is_split:
            return partial(self._communicator.dispatch, call, num_sms, stream)
        self._communicator.start_dispatch(call, num_sms, stream)
        if num_sms == 0:
            self._communicator.copy(counts or [], call.slot_bytes, stream)
        return partial(self._end, args, call, rows, handle)

    # ---- combine ----

    def combine(self, args: CombineArgs) -> tuple[Tensor, Tensor | None, Move]:
        s, handle, fusion = self.settings, args.handle, args.fusion or NO_FUSION
        num_sms = self._num_sms(args.mode, self._default_num_sms_of_sums(handle.layout))
        counts = self._counts(handle, num_sms, is_dispatch=False)
        combined_x = self._empty((handle.num_tokens // fusion.tokens_per_row, s.hidden), args.x.dtype)
        topk_weight_grads = None if args.topk_weight_grads is None else self._empty((handle.num_tokens, s.num_topk), torch.float32)
        weights = args.weights if fusion.source_weights is None else None
        inputs = args.x, fusion.expert_rows, weights, args.bias, args.topk_weight_grads, fusion.source_weights
        call = _C.GpuCombineCall(handle, *inputs, combined_x, topk_weight_grads, DTYPES[args.x.dtype], num_sms == 0)
        stream = self._enter_along(handle, call, args.mode)
        if num_sms > 0 and not args.mode.is_split:
            return combined_x, topk_weight_grads, partial(self._communicator.combine, call, num_sms, stream)
        self._communicator.start_combine(call, num_sms, stream)
        if num_sms == 0:
            self._communicator.copy(counts, call.slot_bytes, stream)
        return combined_x, topk_weight_grads, partial(self._end, args, call, combined_x, topk_weight_grads, handle)

    def by_expert(self, number: int, mode: Mode) -> Any:
        """Return `ByExpert` of `torch_module`; None without it, where copy engines send, or for a number that calls refuse."""
        module = torch_module.MODULE
        if module is None:
            return None
        if mode.num_sms is not None and not 0 < mode.num_sms <= self._communicator.num_multiprocessors:
            return None
        s = self.settings
        return module.ByExpert(
            communicator=self._communicator, number=number, num_ranks=s.num_ranks, num_local_experts=s.num_local_experts,
            num_topk=s.num_topk, hidden=s.hidden, num_max_tokens=s.num_max_tokens_per_rank, num_sms=self._num_sms(mode),
            num_sms_of_sums=self._num_sms(mode, self._default_num_sms_of_sums("expert")), device=self.device,
            shape_of=partial(self.handle_shape, layout="expert"), current_stream=partial(current_stream, self.device),
            abort=self._refuse_for,
        )  # fmt: skip

    def check(self) -> None:
        self._communicator.check()
        _C.gpu_gate_check()

    def take_failure(self) -> Exception | None:
        if torch.cuda.is_current_stream_capturing():
            return None  # nobody may wait for a GPU now, and a failure stays
        try:
            self._communicator.check()
        except (EPPeerError, EPMismatchError, EPCapacityError, ValueError) as error:
            return error
        return None

    def refuse(self, message: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            return  # nobody is in a call yet, and nobody may wait for a GPU now
        self._communicator.refuse(message, current_stream(self.device))

    def _refuse_for(self, error: Exception) -> None:
        self.refuse(f"{type(error).__name__}: {error}")

    def destroy(self) -> None:
        self._communicator = None

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

    def _enter(self, call: Any, mode: Mode) -> int:
        """Enqueue the plan of a call, which enters it; returns the stream of the call."""
        stream = self._stream_of(mode)
        self._communicator.plan(call, stream)
        return stream

    def _enter_along(self, handle: DispatchHandle, call: Any, mode: Mode) -> int:
        """The same. The caller may drop the handle at once, also on another stream than that of its dispatch."""
        stream = self._enter(call, mode)
        if isinstance(handle, PackedHandle) and handle.stream not in (None, stream):
            self._record(torch.cuda.current_stream(self.device), handle)
        return stream

    def _stream_of(self, mode: Mode) -> int:
        if not mode.is_async or mode.is_split:
            return current_stream(self.device)
        if self._own_stream is None:
            self._own_stream = torch.cuda.Stream(self.device)
        self._follow_current(mode)
        return self._own_stream.cuda_stream

    def _follow_current(self, mode: Mode) -> None:
        """An asynchronous call goes on after what the caller's stream has been given so far: its arguments, fresh outputs."""
        if mode.is_async and not mode.is_split and self._own_stream is not None:
            self._own_stream.wait_stream(torch.cuda.current_stream(self.device))

    def _end(self, args: DispatchArgs | CachedDispatchArgs | CombineArgs, call: Any, *used: Any) -> None:
        """The second half of a call; in split mode on the stream that is current by now. Holds the call's tensors until then, and has
        their memory wait for that stream."""
        if self._communicator is None:
            raise BufferDestroyedError("the buffer was destroyed before this call's hook; its results will not come")
        own = self._own_stream if args.mode.is_async and not args.mode.is_split else None
        if own is None:
            self._record(torch.cuda.current_stream(self.device), args, *used)
        stream = (own or torch.cuda.current_stream(self.device)).cuda_stream
        if isinstance(args, CombineArgs):
            self._communicator.end_combine(call, stream)
        else:
            self._communicator.end_dispatch(call, stream)

    def _default_num_sms_of_sums(self, layout: str) -> int:
        return DEFAULT_NUM_SMS_OF_SUMS if layout == "expert" and self.settings.num_ranks > 2 else DEFAULT_NUM_SMS

    def _num_sms(self, mode: Mode, default: int = DEFAULT_NUM_SMS) -> int:
        most = self._communicator.num_multiprocessors
        num_sms = min(default, most) if mode.num_sms is None else mode.num_sms
        if not 0 <= num_sms <= most:
            raise ValueError(f"num_sms is {num_sms}; this GPU has {most}: give 1 to {most}, or 0 for copy engines")
        if num_sms == 0 and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "num_sms=0 cannot be captured in a CUDA graph: the host waits for the peers before it has copy engines start; give num_sms "
                "of 1 or more"
            )
        return num_sms

    def _counts(self, handle: DispatchHandle, num_sms: int, *, is_dispatch: bool) -> list[int]:
        """[num_ranks] rows that a call along `handle` sends to each rank, where copy engines need to know."""
        numbers, n = handle.call, self.settings.num_ranks
        if num_sms > 0:
            return []
        counts = numbers[1 : 1 + n].tolist() if is_dispatch else numbers[1 + n : 1 + 2 * n].tolist()
        if min(counts) < 0:
            raise ValueError("num_sms=0 needs counts on the host, and this handle's dispatch had num_recv_rows; give num_sms of 1 or more")
        return counts

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
            shape = self._handle_shape = HandleShape(num_tokens, s.num_topk, num_slots, s.num_ranks, s.num_local_experts)
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
