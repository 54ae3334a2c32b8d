"""What moves the rows of a `LowLatencyBuffer`: checks of its calls, and a backend over each native communicator."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.backends.base import DTYPES, Settings
from deepep_moe.backends.checks import check_tensor
from deepep_moe.backends.output_pool import OutputPool
from deepep_moe.errors import BufferDestroyedError
from deepep_moe.event import Event

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SCALE_FORMATS = {"fp32": (1, torch.float32), "ue8m0": (4, torch.int32)}  # scales to an element, its dtype
_WIRES = (None, "fp8")
_MAX_ROWS = 2**31 - 1
DESTROYED = "this LowLatencyBuffer was destroyed; create another"


@dataclass(frozen=True)
class DispatchCall:
    """Tensors of a dispatch, checked; the last five are written."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor | None
    is_rounded: bool
    handle: Tensor
    recv_x: Tensor
    recv_x_scales: Tensor | None
    num_recv_tokens_per_expert: Tensor
    statistics: Tensor


@dataclass(frozen=True)
class CombineCall:
    """Tensors of a combine, checked; the last three are written."""

    x: Tensor
    handle: Tensor
    fp8: bool
    call: Tensor
    combined_x: Tensor
    statistics: Tensor


def num_scale_columns(hidden: int, scale_format: str) -> tuple[int, torch.dtype]:
    """Elements of a row's scales, and their dtype."""
    scales_each, dtype = _SCALE_FORMATS[scale_format]
    return -(-hidden // (_C.SCALE_BLOCK * scales_each)), dtype


# ---- checks ----


def check_low_latency_settings(s: Settings) -> Settings:
    """Bounds beyond those of every buffer. Raises ValueError."""
    if not 1 <= s.num_max_tokens_per_rank <= _C.LOW_LATENCY_MAX_TOKENS:
        raise ValueError(f"num_max_tokens_per_rank is {s.num_max_tokens_per_rank}; it must be 1 to {_C.LOW_LATENCY_MAX_TOKENS}")
    if s.num_local_experts > _C.LOW_LATENCY_MAX_LOCAL_EXPERTS:
        raise ValueError(
            f"num_experts is {s.num_experts}; a rank can hold {_C.LOW_LATENCY_MAX_LOCAL_EXPERTS}, give more ranks or fewer experts"
        )
    num_rows = s.num_experts * s.num_max_tokens_per_rank
    if num_rows > _MAX_ROWS:
        raise ValueError(f"num_experts * num_max_tokens_per_rank is {num_rows}, the rows of a rank; at most {_MAX_ROWS} can be numbered")
    return s


def _check_no_gradient(name: str, x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{name} requires a gradient and low-latency calls have none; use Buffer, or {name}.detach()")


def _check_rows(name: str, x: Tensor, shape: tuple[int, ...], backend: "LowLatencyBackend") -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
    if x.device != backend.device:
        raise ValueError(f"{name} is on {x.device}; this buffer moves tensors on {backend.device}")
    check_tensor(name, x, shape, _DTYPES)
    _check_no_gradient(name, x)
    row_bytes = x.shape[-1] * x.element_size()
    if row_bytes % _C.ROW_ALIGNMENT or x.data_ptr() % _C.ROW_ALIGNMENT:
        raise ValueError(
            f"rows of {name} have {row_bytes} bytes and begin at address {x.data_ptr():#x}; both must be multiples of {_C.ROW_ALIGNMENT}: "
            "choose another hidden, or pass a copy"
        )


def check_dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, fp8: bool, scale_format: str, s: Settings, backend: "LowLatencyBackend"
) -> None:
    """Raises TypeError or ValueError."""
    if isinstance(x, Tensor) and x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [num_tokens, {s.hidden}]")
    num_tokens = x.shape[0] if isinstance(x, Tensor) else 0
    _check_rows("x", x, (num_tokens, s.hidden), backend)
    check_tensor("topk_idx", topk_idx, (num_tokens, s.num_topk), (torch.int64, torch.int32), x.device)
    if topk_weights is not None:
        check_tensor("topk_weights", topk_weights, (num_tokens, s.num_topk), (torch.float32,), x.device)
        _check_no_gradient("topk_weights", topk_weights)
    if num_tokens > s.num_max_tokens_per_rank:
        raise ValueError(
            f"x has {num_tokens} tokens, more than the buffer's num_max_tokens_per_rank of {s.num_max_tokens_per_rank}; "
            "create the LowLatencyBuffer with a larger bound"
        )
    if scale_format not in _SCALE_FORMATS:
        raise ValueError(f"scale_format is {scale_format!r}; it must be one of {list(_SCALE_FORMATS)}")
    if fp8:
        _check_blocks(s)
    elif scale_format != "fp32":
        raise ValueError(f"scale_format {scale_format!r} was given without fp8=True; rows have scales in fp8 only")


def check_combine(
    x: Tensor, handle: Any, out: Tensor | None, wire: str | None, s: Settings, backend: "LowLatencyBackend", buffer_id: int
) -> None:
    """Raises TypeError or ValueError."""
    if getattr(handle, "state", None) is None:
        raise TypeError(f"handle must be the LowLatencyHandle of a dispatch, not {type(handle).__name__}")
    if handle.buffer_id != buffer_id:
        raise ValueError(f"handle belongs to low-latency buffer {handle.buffer_id}, this is {buffer_id}; use the buffer that dispatched it")
    if handle.event is not None and handle.event.is_half:
        raise ValueError("handle is of a dispatch that was not received; call its hook, or wait for its event, before combine")
    _check_rows("x", x, (s.num_local_experts, s.num_ranks * s.num_max_tokens_per_rank, s.hidden), backend)
    if out is not None:
        _check_rows("out", out, (handle.num_tokens, s.hidden), backend)
        check_tensor("out", out, (handle.num_tokens, s.hidden), (x.dtype,), x.device)
    if wire not in _WIRES:
        raise ValueError(f"wire is {wire!r}; it must be one of {list(_WIRES)}")
    if wire == "fp8":
        _check_blocks(s)


def check_combine_input(dtype: torch.dtype, s: Settings, backend: "LowLatencyBackend") -> None:
    """Raises what `check_combine` would for rows of this dtype."""
    _check_rows("combine's x", torch.empty((1, s.hidden), dtype=dtype, device=backend.device), (1, s.hidden), backend)


def _check_blocks(s: Settings) -> None:
    if s.hidden % _C.SCALE_BLOCK:
        raise ValueError(f"hidden is {s.hidden}; rows in fp8 need a multiple of {_C.SCALE_BLOCK}")


# ---- backends ----


class LowLatencyBackend:
    """One way to move the rows. A call has two halves, sending and receiving."""

    name: str
    device: torch.device

    def __init__(self, settings: Settings, communicator: Any):
        self.settings = settings
        self.process_id = os.getpid()
        self._communicator = communicator
        self.workspace_bytes: int = communicator.workspace_bytes
        self.handle_bytes: int = communicator.handle_bytes

    # ---- calls ----

    def run(self, call: DispatchCall | CombineCall) -> None:
        """Both halves."""
        self._move(call, True, True)

    def start(self, call: DispatchCall | CombineCall) -> Event:
        """Send; waiting for the event receives."""
        self._move(call, True, False)
        return Event(second_half=partial(self._move, call, False, True))

    def start_async(self, call: DispatchCall | CombineCall) -> Event:
        """Both halves, beside the caller's stream or thread."""
        raise NotImplementedError

    def _move(self, call: DispatchCall | CombineCall, sends: bool, receives: bool) -> None:
        raise NotImplementedError

    # ---- the rest ----

    def mask(self, rank: int, masked: bool) -> None:
        raise NotImplementedError

    def rejoin(self) -> None:
        raise NotImplementedError

    def refuse(self, reason: str) -> None:
        """Tell the peers, who are or will be in the same call, why this rank refuses its arguments."""
        raise NotImplementedError

    def masked(self) -> list[int]:
        masks = self._communicator.masks
        return [rank for rank in range(self.settings.num_ranks) if masks >> rank & 1]

    def check(self) -> None:
        self._communicator.check()

    def has_failed(self, state: Tensor) -> bool:
        """Has the dispatch of a handle, of which this is the memory, failed, as far as it has come?"""
        raise NotImplementedError

    def destroy(self) -> None:
        self._communicator = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def zeros(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # it outlives the mode that it is made in
            return torch.zeros(shape, dtype=dtype, device=self.device)

    def _params(self, call: DispatchCall | CombineCall) -> Any:
        return _dispatch_params(call) if isinstance(call, DispatchCall) else _combine_params(call)

    def _method(self, call: DispatchCall | CombineCall) -> Callable[..., None]:
        if self._communicator is None:
            raise BufferDestroyedError(DESTROYED)
        return self._communicator.dispatch if isinstance(call, DispatchCall) else self._communicator.combine


class ShmLowLatencyBackend(LowLatencyBackend):
    """Processes of one host, CPU tensors (csrc/cpu/low_latency.cpp). Sends on the caller's thread; receives there, or on one of its own."""

    name = "shm"
    device = torch.device("cpu")

    def __init__(self, settings: Settings, mask_stalled: bool):
        super().__init__(settings, _C.ShmLowLatency(**_native_settings(settings, mask_stalled)))
        self._executor: ThreadPoolExecutor | None = None
        self._pool = OutputPool()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._pool.empty(shape, dtype)

    def address(self) -> tuple[str, int]:
        """What peers need to open this rank's shared memory: its path and this process's id."""
        return self._communicator.path, os.getpid()

    def connect(self, addresses: list[tuple[str, int]]) -> None:
        self._communicator.connect([path for path, _ in addresses], [pid for _, pid in addresses])

    def seal(self) -> None:
        self._communicator.seal()

    def start_async(self, call: DispatchCall | CombineCall) -> Event:
        self._move(call, True, False)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deepep_moe")
        return Event(self._executor.submit(self._move, call, False, True))

    def _move(self, call: DispatchCall | CombineCall, sends: bool, receives: bool) -> None:
        self._method(call)(self._params(call), sends, receives)

    def mask(self, rank: int, masked: bool) -> None:
        self._communicator.mask(rank, masked)

    def rejoin(self) -> None:
        self._communicator.rejoin()

    def has_failed(self, state: Tensor) -> bool:
        """As LowLatencyHandleLayout has it, no rank's tokens are known before they are received."""
        return min(state[16 : 16 + 4 * self.settings.num_ranks].view(torch.int32).tolist()) < 0

    def refuse(self, reason: str) -> None:
        self._communicator.refuse(reason)

    def destroy(self) -> None:
        if self._executor is not None and os.getpid() == self.process_id:
            self._executor.shutdown(wait=True)
        super().destroy()


class NvlinkLowLatencyBackend(LowLatencyBackend):
    """GPUs of one host that reach each other's memory (csrc/cuda/low_latency*.cu). Enqueues on the caller's stream, or beside it."""

    name = "nvlink"

    def __init__(self, settings: Settings, mask_stalled: bool):
        index = torch.cuda.current_device()
        super().__init__(settings, _C.NvlinkLowLatency(device=index, **_native_settings(settings, mask_stalled)))
        self.device = torch.device("cuda", index)
        self._own_stream: torch.cuda.Stream | None = None

    def address(self) -> bytes:
        """The CUDA IPC handle of this rank's workspace, and where its GPU is."""
        return self._communicator.handle()

    def connect(self, addresses: list[bytes]) -> None:
        self._communicator.connect(addresses)

    def seal(self) -> None:
        """Nothing to close: CUDA's handles end with the allocation."""

    def start_async(self, call: DispatchCall | CombineCall) -> Event:
        current = torch.cuda.current_stream(self.device)
        if self._own_stream is None:
            self._own_stream = torch.cuda.Stream(self.device)
        self._own_stream.wait_stream(current)
        self._method(call)(self._params(call), True, True, self._own_stream.cuda_stream)
        self._keep(call, self._own_stream)
        recorded = torch.cuda.Event()
        recorded.record(self._own_stream)
        return Event(recorded=recorded)

    def start(self, call: DispatchCall | CombineCall) -> Event:
        self._move(call, True, False)
        return Event(second_half=partial(self._receive, call, torch.cuda.current_stream(self.device)))

    def _receive(self, call: DispatchCall | CombineCall, sent_on: torch.cuda.Stream) -> None:
        current = torch.cuda.current_stream(self.device)
        if current != sent_on:
            self._keep(call, current)
        self._move(call, False, True)

    def _keep(self, call: DispatchCall | CombineCall, stream: torch.cuda.Stream) -> None:
        """The memory of the call's tensors is not used again before `stream` is through with it."""
        for value in vars(call).values():
            if isinstance(value, Tensor):
                value.record_stream(stream)

    def _move(self, call: DispatchCall | CombineCall, sends: bool, receives: bool) -> None:
        self._method(call)(self._params(call), sends, receives, self._stream())

    def has_failed(self, state: Tensor) -> bool:
        if torch.cuda.is_current_stream_capturing():
            return False  # a kernel finds out
        call, failed = state[:16].view(torch.int64).tolist()  # as LowLatencyHandleLayout has them
        return call ^ failed == self._communicator.failed_mark

    def check(self) -> None:
        if not torch.cuda.is_current_stream_capturing():  # where nobody may wait for a GPU; a failure stays
            super().check()

    def mask(self, rank: int, masked: bool) -> None:
        self._communicator.mask(rank, masked, self._stream())

    def rejoin(self) -> None:
        self._communicator.rejoin(self._stream())

    def refuse(self, reason: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            return  # nobody is in a call yet, and nobody may wait for a GPU now
        self._communicator.refuse(reason, self._stream())

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream


def _native_settings(s: Settings, mask_stalled: bool) -> dict[str, Any]:
    return {
        "num_ranks": s.num_ranks, "rank": s.rank, "num_experts": s.num_experts, "num_topk": s.num_topk, "hidden": s.hidden,
        "num_max_tokens": s.num_max_tokens_per_rank, "timeout_s": s.timeout_s, "mask_stalled": mask_stalled,
    }  # fmt: skip


def _dispatch_params(call: DispatchCall) -> Any:
    params = _C.LowLatencyDispatchParams()
    params.dtype = DTYPES[call.x.dtype]
    params.fp8, params.is_rounded = call.recv_x_scales is not None, call.is_rounded
    params.num_tokens, params.is_int64 = call.x.shape[0], call.topk_idx.dtype == torch.int64
    params.x, params.topk_idx, params.topk_weights = call.x.data_ptr(), call.topk_idx.data_ptr(), _address(call.topk_weights)
    params.has_weights = call.topk_weights is not None
    params.handle, params.statistics = call.handle.data_ptr(), call.statistics.data_ptr()
    params.recv_x, params.recv_x_scales = call.recv_x.data_ptr(), _address(call.recv_x_scales)
    params.num_recv_tokens_per_expert = call.num_recv_tokens_per_expert.data_ptr()
    return params


def _combine_params(call: CombineCall) -> Any:
    params = _C.LowLatencyCombineParams()
    params.dtype, params.fp8 = DTYPES[call.x.dtype], call.fp8
    params.num_tokens = call.combined_x.shape[0]
    params.handle, params.call, params.statistics = call.handle.data_ptr(), call.call.data_ptr(), call.statistics.data_ptr()
    params.x, params.combined_x = call.x.data_ptr(), call.combined_x.data_ptr()
    return params


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
