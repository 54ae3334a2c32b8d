"""Checks of the arguments of one call, before anything moves. Wrong types raise TypeError, wrong values ValueError."""

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.arguments import as_int, check_choice, check_is_tensor, check_plain, check_tensor, lacks_memory
from deepep_moe.device import DTYPE_NAMES, FLOATS, is_gpu
from deepep_moe.exchange.backends.base import LAYOUTS, Backend, CachedDispatchArgs, CombineArgs, DispatchArgs
from deepep_moe.exchange.handle import DispatchHandle
from deepep_moe.group.settings import MAX_NUMBER, Settings
from deepep_moe.library import refuse_watchers
from deepep_moe.ops.fp8_products import check_alignment
from deepep_moe.ops.quantized import QuantizedRows
from deepep_moe.ops.routing import refuse_bad_routing

MAX_ALIGNMENT = 1 << 16
BLOCKWISE = "blockwise"
"""The mode of `fp8` for training: scales are powers of two, and grouped products take the rows."""
GUESS = "guess"
"""`num_recv_rows` of a dispatch that returns before the host knows how many rows come."""
EXCHANGE = "dispatch and combine"
"""The name for `refuse_watchers` of the operations that have no rule for transforms of torch.func."""
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_ALL = tuple(DTYPE_NAMES)


# ---- before an operator can be called at all ----


def check_tensors(x: Tensor, *, is_operator: bool = True, **tensors: Tensor | None) -> None:
    """Check the types of `x`, and of `tensors` that may be None. is_operator: see `refuse_watchers`."""
    named = {"x": x} | {name: tensor for name, tensor in tensors.items() if tensor is not None}
    refuse_watchers(EXCHANGE, named, is_operator=is_operator)
    for name, tensor in named.items():
        check_is_tensor(name, tensor)
        check_plain(name, tensor)


def check_owner(handle: object, buffer_id: int) -> None:
    if not isinstance(handle, DispatchHandle):
        raise TypeError(f"handle must be the DispatchHandle of a dispatch, not {type(handle).__name__}")
    if not handle.is_traced and handle.sealed is None:
        raise ValueError("handle is not of a dispatch, but made by hand or a copy with other fields; pass the one that dispatch returned")
    if handle.buffer_id != buffer_id:
        raise ValueError(f"handle belongs to buffer {handle.buffer_id}, this is buffer {buffer_id}; use the buffer that dispatched it")


def check_routing(topk_idx: Tensor | None, layout: object, expert_alignment: object, num_recv_rows: object) -> tuple[str, int, int]:
    """Return layout, expert_alignment and num_recv_rows, the numbers as plain ints; -1 for no bound of rows."""
    if topk_idx is None:
        raise ValueError("topk_idx is missing; give topk_idx, or the handle of an earlier dispatch")
    if num_recv_rows is not None:
        num_recv_rows = as_int("num_recv_rows", num_recv_rows, 'a whole number, None or "guess"')
        if isinstance(num_recv_rows, int) and not 0 <= num_recv_rows <= MAX_NUMBER:
            raise ValueError(f"num_recv_rows is {num_recv_rows}; it must be None or a number of rows, at most {MAX_NUMBER}")
    if not isinstance(layout, str):
        raise TypeError(f"layout is {layout!r}; it must be one of {list(LAYOUTS)}")
    return layout, as_int("expert_alignment", expert_alignment, "a whole number"), -1 if num_recv_rows is None else num_recv_rows


def check_beside_handle(
    handle: DispatchHandle, topk_idx: Tensor | None, layout: object, expert_alignment: object, num_recv_rows: object
) -> None:
    """Refuse arguments that contradict the handle, and a handle whose recv_topk_idx was changed: the dispatch would return it again."""
    if not handle.has_recv_topk_idx:
        raise ValueError(
            "recv_topk_idx of this handle was changed in place, and a dispatch along the handle returns it again; change a clone of it"
        )
    if topk_idx is not None:
        raise ValueError("topk_idx and handle were both given; a handle repeats the routing of its own dispatch")
    if num_recv_rows is not None or layout not in ("expert", handle.layout) or expert_alignment not in (1, handle.expert_alignment):
        raise ValueError(
            f"layout {layout!r}, expert_alignment {expert_alignment} and num_recv_rows {num_recv_rows} were given beside a handle "
            f"with layout {handle.layout!r} and expert_alignment {handle.expert_alignment}; leave them out, the handle has its own"
        )


def check_quantizable(x: Tensor, x_scales: Tensor | None) -> None:
    check_tensors(x)
    if x_scales is not None:
        raise ValueError("fp8 and x_scales were both given; rows with scales are fp8 already")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError("fp8=True has no gradient and x requires one; call it with x.detach()")


def check_fp8_mode(fp8: object) -> None:
    if not isinstance(fp8, bool) and fp8 != BLOCKWISE:
        raise ValueError(f"fp8 is {fp8!r}; it must be True, False or {BLOCKWISE!r}")


def check_blockwise(x: Tensor, x_scales: Tensor | None, layout: object, expert_alignment: int, num_rows: int) -> None:
    """Refuse rows that fp8 products cannot take, before anything is sent. num_rows: rows received, -1 if unknown."""
    if x_scales is not None:
        raise ValueError(f"fp8={BLOCKWISE!r} and x_scales were both given; rows with scales are fp8 already")
    if x.dtype != torch.bfloat16:
        raise TypeError(f"x has dtype {str(x.dtype).removeprefix('torch.')}; fp8={BLOCKWISE!r} takes bfloat16")
    if x.dim() != 2 or x.shape[1] % _C.SCALE_BLOCK or not x.is_contiguous():
        raise ValueError(
            f"x has shape {list(x.shape)}; fp8={BLOCKWISE!r} takes contiguous [num_tokens, hidden], hidden a multiple of {_C.SCALE_BLOCK}"
        )
    if layout != "expert":
        raise ValueError(f"layout is {layout!r}; fp8={BLOCKWISE!r} needs 'expert', whose rows the products take as they are")
    for name, value in (("expert_alignment", expert_alignment), ("num_recv_rows", max(num_rows, 0))):
        check_alignment(name, value)


def check_blockwise_combine(x: Tensor, topk_weights: Tensor | None, handle: DispatchHandle) -> None:
    if topk_weights is not None:
        raise ValueError('topk_weights and fp8="blockwise" were both given; let the experts apply the weights, as `probs` of grouped_mlp')
    check_blockwise(x, None, handle.layout, handle.expert_alignment, handle.num_rows)


# ---- of a call ----


def _check_address(name: str, tensor: Tensor | None) -> None:
    """Refuse an unaligned address: GPUs move rows in pieces of 16 bytes."""
    if tensor is None or not tensor.is_cuda or tensor.shape[1] * tensor.element_size() % _C.ROW_ALIGNMENT:
        return
    if tensor.data_ptr() % _C.ROW_ALIGNMENT:
        raise ValueError(f"{name} begins at an address that is not a multiple of {_C.ROW_ALIGNMENT} bytes; pass {name}.clone()")


def _check_rows(name: str, x: Tensor, num_rows: int | None, settings: Settings, dtypes: tuple[torch.dtype, ...]) -> None:
    rows = 0 if num_rows is None else num_rows
    if isinstance(x, Tensor):
        if x.dim() != 2:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [num_tokens, {settings.hidden}]")
        rows = x.shape[0] if num_rows is None else num_rows
    check_tensor(name, x, (rows, settings.hidden), dtypes)
    row_bytes = settings.hidden * x.element_size()
    if row_bytes % _C.ROW_ALIGNMENT:
        raise ValueError(
            f"a row of {name}, {settings.hidden} columns of {DTYPE_NAMES[x.dtype]}, has {row_bytes} bytes; "
            f"it must be a multiple of {_C.ROW_ALIGNMENT}"
        )
    _check_address(name, x)


def _check_scales(x: Tensor, x_scales: Tensor | None) -> None:
    if (x.dtype in _FP8) != (x_scales is not None):
        state = "given" if x_scales is not None else "missing"
        raise ValueError(f"x is {DTYPE_NAMES[x.dtype]} and x_scales is {state}; fp8 rows, and only they, have scales")
    if x_scales is not None:
        num_scales = -(-x.shape[1] // _C.SCALE_BLOCK)
        check_tensor("x_scales", x_scales, (x.shape[0], num_scales), (torch.float32,), x.device)
        _check_address("x_scales", x_scales)


def _check_weights(name: str, weights: Tensor | None, shape: tuple[int, ...], x: Tensor, *, any_strides: bool = False) -> None:
    if weights is not None:
        check_tensor(name, weights, shape, (torch.float32,), x.device, any_strides=any_strides)


def _check_layout(layout: str, expert_alignment: int) -> None:
    check_choice("layout", layout, LAYOUTS)
    if not 1 <= expert_alignment <= MAX_ALIGNMENT:
        raise ValueError(f"expert_alignment is {expert_alignment}; it must be at least 1 and at most {MAX_ALIGNMENT}")


def check_source_weights(source_weights: Tensor, x: Tensor) -> None:
    """Check source_weights: [tokens that share a row, rows of x] fp32."""
    check_is_tensor("x", x)
    check_tensor("source_weights", source_weights, (len(source_weights), len(x)), (torch.float32,), x.device, any_strides=True)


def check_device(x: Tensor, backend: Backend) -> None:
    if not isinstance(x, Tensor):
        return
    device, buffer_device = x.device, backend.device
    if device.type not in backend.capabilities.device_types:
        types = " or ".join(backend.capabilities.device_types)
        raise ValueError(
            f"x is on {device}; backend {backend.name!r} moves tensors on {types}; create a Buffer with another `backend` for {device.type}"
        )
    if buffer_device is not None and device != buffer_device:
        raise ValueError(f"x is on {device}; this buffer was made on {buffer_device}, the current device then")


def check_dispatch(args: DispatchArgs, s: Settings) -> None:
    _check_rows("x", args.x, None, s, _ALL)
    num_tokens = args.x.shape[0] * s.lanes
    check_tensor("topk_idx", args.topk_idx, (num_tokens, s.num_topk), (torch.int64, torch.int32), args.x.device, any_strides=True)
    _check_weights("topk_weights", args.topk_weights, (num_tokens, s.num_topk), args.x, any_strides=True)
    _check_scales(args.x, args.x_scales)
    _check_layout(args.layout, args.expert_alignment)
    if s.is_by_lane and args.layout != "expert":
        raise ValueError(f"layout is {args.layout!r}; with sums={s.sums!r} it must be 'expert': a rank's sum of a token is not by lanes")
    if s.is_by_lane and not is_gpu(args.x.device):  # a backend does not see which lanes are of one token
        refuse_bad_routing(args.topk_idx.reshape(-1, s.lanes), s.num_experts)
    if num_tokens > s.num_max_tokens_per_rank:
        raise ValueError(
            f"x has {args.x.shape[0]} tokens, more than the buffer's num_max_tokens_per_rank of {s.num_max_tokens_per_rank // s.lanes}; "
            "create the Buffer with a larger bound"
        )


def check_handle(handle: DispatchHandle, s: Settings) -> None:
    """Refuse a handle that was changed after its dispatch. The tensors of a traced handle must fit the buffer and each other, as operators
    get them one by one."""
    if not handle.is_traced:
        if not handle.is_unchanged:
            what = "a tensor of this handle was changed in place" if handle.has_parts else "a field of this handle was set"
            raise ValueError(f"{what} after its dispatch; it must stay as it is: dispatch again")
        if any(map(lacks_memory, handle.to_save())):
            raise ValueError("a tensor of this handle was freed after its dispatch; it must stay as it is: dispatch again")
        return
    check_tensor("handle.topk_idx", handle.topk_idx, (handle.num_tokens, s.num_topk), (torch.int32,))
    check_tensor("handle.recv_counts", handle.recv_counts, (s.num_ranks, handle.recv_counts.shape[-1]), (torch.int32,))
    if handle.layout == "expert" and not handle.recv_counts.is_cuda:
        least = int(handle.recv_counts.sum())
        shape = (max(least, len(handle.recv_row_idx)), s.num_topk)  # it may have more rows
        check_tensor("handle.recv_row_idx", handle.recv_row_idx, shape, (torch.int32,))


def check_cached_dispatch(args: CachedDispatchArgs, s: Settings) -> None:
    num_tokens = args.handle.num_tokens
    _check_rows("x", args.x, num_tokens // s.lanes, s, _ALL)
    _check_weights("topk_weights", args.topk_weights, (num_tokens, s.num_topk), args.x, any_strides=True)
    _check_scales(args.x, args.x_scales)


def check_combine(args: CombineArgs, s: Settings) -> None:
    handle, x = args.handle, args.x
    if isinstance(x, QuantizedRows):
        raise TypeError("x is QuantizedRows, the experts' input; combine takes their outputs, or x.dequantized()")
    if isinstance(x, Tensor) and x.shape != (handle.num_rows, s.hidden):
        raise ValueError(
            f"x has shape {list(x.shape)}; it must be [{handle.num_rows}, {s.hidden}], a row for each one that the dispatch of this handle "
            "returned, in their order"
        )
    _check_rows("x", x, handle.num_rows, s, FLOATS)
    if args.weights is not None and tuple(args.weights.shape) != (handle.num_rows,):
        raise ValueError(
            f"topk_weights has shape {list(args.weights.shape)}; it must be [{handle.num_rows}], one weight per row of x: "
            "what a dispatch in the expert layout returns as recv_topk_weights"
        )
    _check_weights("topk_weights", args.weights, (handle.num_rows,), x)
    if args.bias is not None:
        check_tensor("bias", args.bias, (handle.num_tokens // s.lanes, s.hidden), (x.dtype,), x.device)
        _check_address("bias", args.bias)
    shape = (handle.num_rows,) if handle.layout == "expert" else (handle.num_rows, s.num_topk)
    _check_weights("topk_weight_grads", args.topk_weight_grads, shape, x)
    if s.is_by_lane and args.weights is not None and args.topk_weight_grads is not None:
        raise ValueError(f"topk_weights and topk_weight_grads were both given; with sums={s.sums!r} one value travels beside a row")


def check_max_sms(max_sms: object) -> int | None:
    """Return it as a plain number. Some SMs send and others receive, so there are 2 at least."""
    return None if max_sms is None else as_int("max_sms", max_sms, "None or a whole number", 2, MAX_NUMBER)


def check_num_sms(num_sms: object) -> int | None:
    """Return it as a plain number."""
    return None if num_sms is None else as_int("num_sms", num_sms, "None or a whole number", 0, MAX_NUMBER)
