"""Checks of the arguments of a low-latency call, before anything moves."""

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.arguments import check_choice, check_is_tensor, check_owns_memory, check_tensor, lacks_memory
from deepep_moe.device import FLOATS
from deepep_moe.group.settings import Settings
from deepep_moe.library import refuse_watchers
from deepep_moe.low_latency.base import LowLatencyBackend
from deepep_moe.low_latency.handle import LowLatencyHandle

_SCALE_FORMATS = {"fp32": (1, torch.float32), "ue8m0": (4, torch.int32)}  # scales to an element, its dtype
_WIRES = (None, "fp8")
_MAX_ROWS = 2**31 - 1
_CALLS = "low-latency calls"


def num_scale_columns(hidden: int, scale_format: str) -> tuple[int, torch.dtype]:
    """Elements of a row's scales, and their dtype."""
    scales_each, dtype = _SCALE_FORMATS[scale_format]
    return -(-hidden // (_C.SCALE_BLOCK * scales_each)), dtype


def check_low_latency_settings(s: Settings) -> Settings:
    """Check the bounds that low-latency buffers add to those of every buffer. Raises ValueError."""
    if not 1 <= s.num_max_tokens_per_rank <= _C.LOW_LATENCY_MAX_TOKENS:
        num_tokens, most = s.num_max_tokens_per_rank // s.lanes, _C.LOW_LATENCY_MAX_TOKENS // s.lanes
        raise ValueError(f"num_max_tokens_per_rank is {num_tokens}; it must be 1 to {most}")
    if s.num_local_experts > _C.LOW_LATENCY_MAX_LOCAL_EXPERTS:
        raise ValueError(
            f"num_experts is {s.num_experts}; a rank can hold {_C.LOW_LATENCY_MAX_LOCAL_EXPERTS}, give more ranks or fewer experts"
        )
    num_rows = s.num_local_experts * s.rows_of_expert
    if num_rows > _MAX_ROWS:
        raise ValueError(f"num_experts * num_max_tokens_per_rank is {num_rows}, the rows of a rank; at most {_MAX_ROWS} can be numbered")
    return s


def _check_no_gradient(name: str, x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{name} requires a gradient and low-latency calls have none; use Buffer, or {name}.detach()")


def _check_rows(name: str, x: Tensor, shape: tuple[int, ...], backend: LowLatencyBackend) -> None:
    check_is_tensor(name, x)
    check_owns_memory(name, x)
    if x.device != backend.device:
        raise ValueError(
            f"{name} is on {x.device}; this buffer moves tensors on {backend.device}; create one with another `backend` for {x.device.type}"
        )
    check_tensor(name, x, shape, FLOATS)
    _check_no_gradient(name, x)
    row_bytes = x.shape[-1] * x.element_size()
    if row_bytes % _C.ROW_ALIGNMENT or x.data_ptr() % _C.ROW_ALIGNMENT:
        raise ValueError(
            f"rows of {name} have {row_bytes} bytes and begin at address {x.data_ptr():#x}; both must be multiples of {_C.ROW_ALIGNMENT}: "
            "choose another hidden, or pass a copy"
        )


def check_lane_weights(topk_weights: Tensor | None, num_tokens: int, s: Settings, backend: LowLatencyBackend) -> None:
    """Check weights of the lanes of the caller's tokens."""
    if topk_weights is None:
        return
    check_tensor("topk_weights", topk_weights, (num_tokens, s.num_topk * s.lanes), (torch.float32,), backend.device)
    _check_no_gradient("topk_weights", topk_weights)


def check_memory_of_dispatch(*tensors: object) -> None:
    """Check that x, topk_idx and topk_weights, where they are tensors, have memory that native code can read."""
    named = dict(zip(("x", "topk_idx", "topk_weights"), tensors, strict=True))
    refuse_watchers(_CALLS, {name: named[name] for name in ("x", "topk_weights")}, is_operator=False)
    for name, tensor in named.items():
        if isinstance(tensor, Tensor):
            check_owns_memory(name, tensor)


def check_dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, fp8: bool, scale_format: str, s: Settings, backend: LowLatencyBackend
) -> None:
    """Raises TypeError or ValueError."""
    check_memory_of_dispatch(x, topk_idx, topk_weights)
    if isinstance(x, Tensor) and x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [num_tokens, {s.hidden}]")
    num_tokens = x.shape[0] if isinstance(x, Tensor) else 0
    _check_rows("x", x, (num_tokens, s.hidden), backend)
    check_tensor("topk_idx", topk_idx, (num_tokens, s.num_topk), (torch.int64, torch.int32), x.device)
    if not s.is_by_lane:
        check_lane_weights(topk_weights, num_tokens, s, backend)
    if num_tokens > s.num_max_tokens_per_rank:
        raise ValueError(
            f"x has {num_tokens // s.lanes} tokens, more than the buffer's num_max_tokens_per_rank of "
            f"{s.num_max_tokens_per_rank // s.lanes}; "
            "create the LowLatencyBuffer with a larger bound"
        )
    check_choice("scale_format", scale_format, list(_SCALE_FORMATS))
    if fp8:
        _check_blocks(s)
    elif scale_format != "fp32":
        raise ValueError(f"scale_format {scale_format!r} was given without fp8=True; rows have scales in fp8 only")


def check_combine(
    x: Tensor, handle: object, topk_weights: Tensor | None, out: Tensor | None, wire: str | None, s: Settings, backend: LowLatencyBackend,
    buffer_id: int,
) -> None:  # fmt: skip
    """Raises TypeError or ValueError."""
    refuse_watchers(_CALLS, {"x": x, "topk_weights": topk_weights, "out": out}, is_operator=False)
    if not isinstance(handle, LowLatencyHandle):
        raise TypeError(f"handle must be the LowLatencyHandle of a dispatch, not {type(handle).__name__}")
    if handle.buffer_id != buffer_id:
        raise ValueError(f"handle belongs to low-latency buffer {handle.buffer_id}, this is {buffer_id}; use the buffer that dispatched it")
    if not handle.is_unchanged or lacks_memory(handle.state):
        raise ValueError(
            "handle is not as its dispatch made it: its state was changed in place or freed, a field was set, or it is a copy; "
            "dispatch again"
        )
    if handle.event is not None and handle.event.is_half:
        raise ValueError("handle is of a dispatch that was not received; call its hook, or wait for its event, before combine")
    _check_rows("x", x, (s.num_local_experts, s.rows_of_expert, s.hidden), backend)
    if isinstance(topk_weights, Tensor):
        check_owns_memory("topk_weights", topk_weights)
    check_lane_weights(topk_weights, handle.num_tokens, s, backend)
    if out is not None:
        _check_rows("out", out, (handle.num_tokens, s.hidden), backend)
        check_tensor("out", out, (handle.num_tokens, s.hidden), (x.dtype,), x.device)
    check_choice("wire", wire, _WIRES)
    if wire == "fp8":
        _check_blocks(s)
        if s.is_by_lane:
            raise ValueError(f"wire is 'fp8' with sums={s.sums!r}, whose bits are those of rows in the dtype of x; leave wire out")


def check_combine_input(dtype: torch.dtype, s: Settings, backend: LowLatencyBackend) -> None:
    """Raises what `check_combine` would for rows of this dtype."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}; it must be float32 or bfloat16 or float16")
    _check_rows("combine's x", torch.empty((1, s.hidden), dtype=dtype, device=backend.device), (1, s.hidden), backend)


def _check_blocks(s: Settings) -> None:
    if s.hidden % _C.SCALE_BLOCK:
        raise ValueError(f"hidden is {s.hidden}; rows in fp8 need a multiple of {_C.SCALE_BLOCK}")
