"""The gradients of dispatch and combine, and both as PyTorch operators with fake implementations for `torch.compile`.

Dispatch's backward is combine, combine's backward is a cached dispatch. Backward keeps the handle and no rows; only a weighted combine
keeps its rows, for the gradient of the weights. Backward calls run in the buffer's own mode.

Only calls that PyTorch traces go through the operators. These take tensors and numbers only: the number of a buffer, the tensors of a
handle, the SMs of a mode. Each is over when it returns. All other calls bypass PyTorch's dispatcher (`deepep_moe.library`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepep_moe.device import is_gpu
from deepep_moe.errors import EPError
from deepep_moe.exchange.backends.base import CachedDispatchArgs, CombineArgs, DispatchArgs, Mode, Rows, RowScaling
from deepep_moe.exchange.calls import Calls, calls_of, tell_failure, watch_backward
from deepep_moe.exchange.checks import EXCHANGE
from deepep_moe.exchange.handle import DispatchHandle, TracedHandle, traced
from deepep_moe.library import Context, Function, Inputs, call, is_watched, needs_gradients, refuse_watchers, register_operator
from deepep_moe.ops.quantized import QuantizedRows
from deepep_moe.ops.weighted import aligned, differentiable_scale_rows_backward, repeated

_Received = tuple[Tensor, Tensor | None, Tensor | None, DispatchHandle]
"""recv_x, recv_x_scales, recv_topk_weights, the handle."""
_HANDLE = "Tensor[] handle, int buffer, str layout, int expert_alignment, SymInt num_rows"
with torch.inference_mode(False):  # a backward saves it
    _NO_MEMORY = torch.empty(0, dtype=torch.int32, device="cpu")
_OF_HANDLE_AND_SMS = [None] * 6, *[None] * 5
"""The gradients of the arguments `_HANDLE` and `num_sms`."""


def _call_operator(
    calls: Calls, operator: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor | None, ...], *args: object
) -> tuple[Tensor, ...]:
    """Call an operator. Tell the peers if something fails before its call, such as a tensor's own `__torch_dispatch__`."""
    if torch.compiler.is_compiling():
        return operator(*tensors, *args)
    calls.refuse_on_failure(refuse_watchers, EXCHANGE, tensors)
    num_calls = calls.num_calls
    try:
        return operator(*tensors, *args)
    except BaseException as error:
        if not isinstance(error, EPError) and calls.num_calls == num_calls:
            tell_failure(calls, error)
        raise


# ---- handles ----


def _tensors(handle: DispatchHandle) -> list[Tensor]:
    """Return the handle's tensors for an operator: its fields, and the memory that a GPU reads (empty on CPUs)."""
    if isinstance(handle, TracedHandle):
        return [*handle.to_save()]
    return [*DispatchHandle.to_save(handle), _NO_MEMORY if handle.native is None else handle.native.memory]


def _arguments(handle: DispatchHandle) -> tuple[object, ...]:
    return _tensors(handle), handle.buffer_id, handle.layout, handle.expert_alignment, handle.num_rows


def _to_save(buffer: int, layout: str, expert_alignment: int, num_rows: object, tensors: Sequence[Tensor]) -> TracedHandle:
    """Return the handle that a backward saves. If a GPU's memory holds its parts, anything small stands for the copies of them."""
    idx, *copies, call, memory = tensors
    if calls_of(buffer).native is not None:
        copies = [call] * 3
    return traced(buffer, layout, expert_alignment, num_rows, idx, *copies, call, memory)


def _along(handle: DispatchHandle) -> DispatchHandle:
    """Return the handle for a call that is made now: of a GPU's memory, what stands for its copies may be wrong."""
    if not isinstance(handle, TracedHandle) or (calls := calls_of(handle.buffer_id)).native is None:
        return handle
    return calls.refuse_on_failure(handle.packed, calls.native)


# ---- saved tensors and incoming gradients of a backward ----


def _keep(ctx: Context, handle: DispatchHandle, rows: Tensor, values: Tensor | None, *more: Tensor) -> None:
    """Save the handle and `more`. Only `rows` and `values` (which may be None) get gradients: PyTorch would otherwise launch a kernel to
    fill zeros for every other output."""
    ctx.set_materialize_grads(False)
    ctx.expected = [None if output is None else (output.shape, output.dtype, output.device) for output in (rows, values)]
    saved = handle.to_save()
    ctx.rebuild, ctx.num_saved = handle.rebuild(), len(saved)
    ctx.save_for_backward(*saved, *more)


def _kept(ctx: Context, num_rows: object) -> tuple[DispatchHandle, tuple[Tensor, ...]]:
    """Return what `_keep` kept."""
    saved, num_saved = ctx.saved_tensors, ctx.num_saved  # unpacked once: checkpointing allows no more
    handle = ctx.rebuild(num_rows, *saved[:num_saved])
    return handle if is_watched(saved) else _along(handle), saved[num_saved:]


def _given(ctx: Context, rows: Tensor | None, values: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return contiguous gradients of the expected outputs. Unused outputs get zeros, so that all ranks make the same calls."""
    of_rows, of_values = ctx.expected
    return _or_zeros(rows, of_rows), None if of_values is None else _or_zeros(values, of_values)


def _or_zeros(grad: Tensor | None, like: tuple[torch.Size, torch.dtype, torch.device]) -> Tensor:
    return torch.zeros(like[0], dtype=like[1], device=like[2]) if grad is None else as_rows(grad)


def as_rows(grad: Tensor) -> Tensor:
    """Return `grad` contiguous and 16-byte aligned, as the calls require. While tracing only contiguity can be checked."""
    if is_watched((grad,)):
        return (grad if grad.layout is torch.strided else grad.to_dense()).contiguous()
    return aligned(grad)


# ---- dispatch ----


def dispatch(calls: Calls, args: DispatchArgs | CachedDispatchArgs, *, quantizes: bool = False) -> _Received:
    """Make `calls.dispatch` differentiable.

    quantizes: quantize the rows before they are sent. recv_x is `QuantizedRows` then, whose gradient is bf16
    (docs/design/fp8_training.md has the arithmetic)."""
    x, x_scales, topk_weights = args.x, args.x_scales, args.topk_weights
    if quantizes or not is_watched((x, x_scales, args.topk_idx if isinstance(args, DispatchArgs) else None, topk_weights)):
        if quantizes:
            rows = calls.refuse_on_failure(QuantizedRows.of, x)
            args = replace(args, x=rows.values, x_scales=rows.scales)
        send = partial(_send, calls, args, quantizes)
        received: _Received = _Dispatch.apply(x, topk_weights, send) if needs_gradients((x, topk_weights)) else send()
        return received
    if isinstance(args, DispatchArgs):
        tensors, how = (x, x_scales, args.topk_idx, topk_weights), (args.layout, args.expert_alignment, args.num_recv_rows)
        outputs = _call_operator(calls, torch.ops.deepep_moe.dispatch, tensors, calls.number, *how, args.mode.num_sms)
        recv_x, scales, idx, weights, *rest = outputs
        idx_of_rank = idx if args.layout == "rank" else None
        handle: DispatchHandle = traced(calls.number, *how[:2], recv_x.shape[0], *rest, recv_topk_idx=idx_of_rank)
    else:
        handle, operator = args.handle, torch.ops.deepep_moe.dispatch_cached
        recv_x, scales, weights = _call_operator(calls, operator, (x, x_scales, topk_weights), *_arguments(handle), args.mode.num_sms)
    return recv_x, None if x_scales is None else scales, None if topk_weights is None else weights, handle


def _send(calls: Calls, args: DispatchArgs | CachedDispatchArgs, is_quantized: bool) -> _Received:
    rows, handle = calls.dispatch(args)
    if is_quantized:
        assert rows.recv_x_scales is not None  # they were sent
        return QuantizedRows(rows.recv_x, rows.recv_x_scales), None, rows.recv_topk_weights, handle
    return rows.recv_x, rows.recv_x_scales, rows.recv_topk_weights, handle


class _Dispatch(Function):
    """A dispatch with fresh routing or along a handle."""

    @staticmethod
    def forward(ctx: Context, _x: Tensor, _topk_weights: Tensor | None, send: Callable[[], _Received]) -> _Received:
        received = send()
        recv_x, _, recv_topk_weights, handle = received
        _keep(ctx, handle, recv_x, recv_topk_weights)
        return received

    @staticmethod
    def backward(
        ctx: Context, grad_recv_x: Tensor | None, _scales: object, grad_recv_topk_weights: Tensor | None, _handle: object
    ) -> tuple[Tensor | None, ...]:
        return *_dispatch_gradients(ctx, grad_recv_x, grad_recv_topk_weights), None


def _dispatch_gradients(ctx: Context, grad_recv_x: Tensor | None, grad_recv_topk_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and topk_weights."""
    rows, values = _given(ctx, grad_recv_x, grad_recv_topk_weights)
    handle, _ = _kept(ctx, rows.shape[0])
    calls = calls_of(handle.buffer_id)
    return combine(calls, calls.own_mode, rows, None, None, values, handle)


_DISPATCH = (
    "dispatch(Tensor x, Tensor? x_scales, Tensor topk_idx, Tensor? topk_weights, int buffer, str layout, int expert_alignment, "
    "SymInt num_recv_rows, int? num_sms) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _dispatch_operator(
    x: Tensor, x_scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None, buffer: int, layout: str, expert_alignment: int,
    num_recv_rows: int, num_sms: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return recv_x, recv_x_scales, recv_topk_idx, recv_topk_weights and the handle's tensors; empty tensors if they do not apply."""
    calls = calls_of(buffer)
    how = layout, expert_alignment, num_recv_rows
    rows, handle = calls.dispatch(DispatchArgs(calls.mode_of(num_sms), x, x_scales, topk_idx, topk_weights, *how, buffer))
    recv_topk_idx = topk_idx.new_empty(0, topk_idx.shape[1]) if handle.recv_topk_idx is None else handle.recv_topk_idx
    recv_x, scales, weights = _filled(rows, topk_idx.shape[1], layout)
    tensors = _tensors(handle)
    if handle.native is None:
        tensors[-1] = topk_idx.new_empty(0, dtype=torch.int32)  # an operator may not return the tensor that all calls share
    else:
        tensors[:-1] = [tensor.clone() for tensor in tensors[:-1]]  # an operator's outputs must not share memory
    if num_recv_rows >= 0 and layout == "expert":  # then no shape depends on data
        tensors[1] = torch.nn.functional.pad(tensors[1], (0, 0, 0, _num_slots(calls) - len(tensors[1])), value=-1)
    return recv_x, scales, recv_topk_idx, weights, *tensors


def _num_slots(calls: Calls) -> int:
    """Return the most tokens that a rank can receive."""
    return calls.settings.num_ranks * calls.settings.num_max_tokens_per_rank


def _filled(rows: Rows, num_topk: int, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors of `rows`, with empty ones for None, as operators must return tensors."""
    scales, weights, x = rows.recv_x_scales, rows.recv_topk_weights, rows.recv_x
    if scales is None:
        scales = x.new_empty(0, 0, dtype=torch.float32)
    if weights is None:
        weights = x.new_empty((0,) if layout == "expert" else (0, num_topk), dtype=torch.float32)
    return x, scales, weights


def _fake_rows(
    x: Tensor, x_scales: Tensor | None, topk_weights: Tensor | None, num_topk: int, layout: str, num_rows: int | torch.SymInt
) -> tuple[Tensor, ...]:
    num_weights = 0 if topk_weights is None else num_rows
    return (
        x.new_empty(num_rows, x.shape[1]),
        x.new_empty(0 if x_scales is None else num_rows, 0 if x_scales is None else x_scales.shape[1], dtype=torch.float32),
        x.new_empty((num_weights,) if layout == "expert" else (num_weights, num_topk), dtype=torch.float32),
    )


def _fake_dispatch(
    x: Tensor, x_scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None, buffer: int, layout: str, expert_alignment: int,
    num_recv_rows: int, _num_sms: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    calls, context = calls_of(buffer), torch.library.get_ctx()
    is_expert, (num_tokens, num_topk) = layout == "expert", topk_idx.shape
    num_rows = context.new_dynamic_size() if num_recv_rows < 0 else num_recv_rows
    num_slots = 0 if not is_expert else context.new_dynamic_size() if num_recv_rows < 0 else _num_slots(calls)
    recv_x, recv_x_scales, recv_topk_weights = _fake_rows(x, x_scales, topk_weights, num_topk, layout, num_rows)
    # If the first rows lie on a GPU, they may still switch the backend, whose sizes are unknown here.
    known = calls.capabilities if calls.has_chosen or not is_gpu(x.device) else None
    if known is None:
        sizes: tuple[int | torch.SymInt, ...] = tuple(context.new_dynamic_size() for _ in range(3))
    elif calls.native is None:
        sizes = known.num_channels, 1, 0
    else:
        sizes = known.num_channels, calls.native.num_handle_numbers, calls.native.num_handle_ints(num_tokens, is_expert)
    num_channels, num_numbers, num_ints = sizes
    return (
        recv_x, recv_x_scales, topk_idx.new_empty(0 if is_expert else num_rows, num_topk), recv_topk_weights,
        topk_idx.new_empty(num_tokens, num_topk, dtype=torch.int32), topk_idx.new_empty(num_slots, num_topk, dtype=torch.int32),
        topk_idx.new_empty(calls.settings.num_ranks, num_channels, dtype=torch.int32),
        topk_idx.new_empty(calls.settings.num_local_experts, dtype=torch.int32),
        topk_idx.new_empty(num_numbers, dtype=torch.int64, device="cpu"), topk_idx.new_empty(num_ints, dtype=torch.int32),
    )  # fmt: skip


def _save_dispatch(ctx: Context, inputs: Inputs, output: tuple[Tensor, ...]) -> None:
    _, _, _, topk_weights, buffer, layout, expert_alignment, *_ = inputs
    recv_x, _, _, recv_topk_weights, *rest = output
    _keep(ctx, _to_save(buffer, layout, expert_alignment, -1, rest), recv_x, None if topk_weights is None else recv_topk_weights)


def _dispatch_backward(
    ctx: Context, grad_recv_x: Tensor | None, _scales: object, _idx: object, grad_recv_topk_weights: Tensor | None, *_: object
) -> tuple[Tensor | None, ...]:
    grad_x, grad_topk_weights = _dispatch_gradients(ctx, grad_recv_x, grad_recv_topk_weights)
    return grad_x, None, None, grad_topk_weights, *[None] * 5


# ---- dispatch along a handle ----


_CACHED = f"dispatch_cached(Tensor x, Tensor? x_scales, Tensor? topk_weights, {_HANDLE}, int? num_sms) -> (Tensor, Tensor, Tensor)"


def _dispatch_cached_operator(
    x: Tensor, x_scales: Tensor | None, topk_weights: Tensor | None, handle: list[Tensor], buffer: int, layout: str, expert_alignment: int,
    num_rows: int, num_sms: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    calls, along = calls_of(buffer), _along(traced(buffer, layout, expert_alignment, num_rows, *handle))
    rows, _ = calls.dispatch(CachedDispatchArgs(calls.mode_of(num_sms), x, x_scales, topk_weights, along))
    return _filled(rows, handle[0].shape[1], layout)


def _fake_dispatch_cached(
    x: Tensor, x_scales: Tensor | None, topk_weights: Tensor | None, handle: list[Tensor], buffer: int, layout: str, expert_alignment: int,
    num_rows: int, _num_sms: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _fake_rows(x, x_scales, topk_weights, handle[0].shape[1], layout, num_rows)


def _save_dispatch_cached(ctx: Context, inputs: Inputs, output: tuple[Tensor, ...]) -> None:
    _, _, topk_weights, tensors, buffer, layout, expert_alignment, *_ = inputs
    _keep(ctx, _to_save(buffer, layout, expert_alignment, -1, tensors), output[0], None if topk_weights is None else output[2])


def _dispatch_cached_backward(
    ctx: Context, grad_recv_x: Tensor | None, _scales: object, grad_recv_topk_weights: Tensor | None
) -> tuple[object, ...]:
    grad_x, grad_topk_weights = _dispatch_gradients(ctx, grad_recv_x, grad_recv_topk_weights)
    return grad_x, None, grad_topk_weights, *_OF_HANDLE_AND_SMS


# ---- combine ----


def combine(
    calls: Calls, mode: Mode, x: Tensor, weights: Tensor | None, bias: Tensor | None, topk_weight_grads: Tensor | None,
    handle: DispatchHandle, *, quantizes: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Make `calls.combine` differentiable. Return combined_x, and the combined gradients of topk_weights, or None without them.

    quantizes: the backward quantizes its gradient before it is sent, as `dispatch` does with x."""
    tensors = (x, weights, bias, topk_weight_grads)
    if quantizes or not is_watched(tensors):
        bring_back = partial(calls.combine, CombineArgs(mode, *tensors, handle))
        kind = _CombineForQuantized if quantizes else _Combine
        return kind.apply(*tensors, handle, bring_back) if needs_gradients(tensors) else bring_back()
    combined_x, grads = _call_operator(calls, torch.ops.deepep_moe.combine, tensors, *_arguments(handle), mode.num_sms)
    return combined_x, None if topk_weight_grads is None else grads


class _Combine(Function):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weights: Tensor | None, bias: Tensor | None, _topk_weight_grads: Tensor | None, handle: DispatchHandle,
        bring_back: Callable[[], tuple[Tensor, Tensor | None]],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        combined_x, grads = bring_back()
        _keep_combine(ctx, handle, x, weights, bias, combined_x, grads)
        return combined_x, grads

    @staticmethod
    def backward(ctx: Context, grad_combined_x: Tensor | None, grad_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_combine_gradients(ctx, grad_combined_x, grad_grads), None, None


class _CombineForQuantized(_Combine):
    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_combined_x: Tensor | None, _grads: object) -> tuple[Tensor | None, ...]:
        return *_combine_gradients(ctx, grad_combined_x, None, quantizes=True), None, None


def _keep_combine(
    ctx: Context, handle: DispatchHandle, x: Tensor, weights: Tensor | None, bias: Tensor | None, combined_x: Tensor, values: Tensor | None
) -> None:
    ctx.with_bias, ctx.num_rows = bias is not None, handle.num_rows
    _keep(ctx, handle, combined_x, values, *(() if weights is None else (x, weights)))


def _combine_gradients(
    ctx: Context, grad_combined_x: Tensor | None, grad_grads: Tensor | None, quantizes: bool = False
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weights, bias and topk_weight_grads."""
    rows, grads = _given(ctx, grad_combined_x, grad_grads)
    handle, scaled = _kept(ctx, ctx.num_rows)
    calls, grad_weights, grad_topk_weight_grads = calls_of(handle.buffer_id), None, None
    if scaled:  # a weighted combine never has topk_weight_grads
        x, weights = scaled
        grad_x, grad_weights = scaled_gradients(calls, rows, handle, x, weights)
    else:
        args = CachedDispatchArgs(calls.own_mode, rows, None, grads, handle)
        grad_x, _, grad_topk_weight_grads, _ = dispatch(calls, args, quantizes=quantizes)
    watch_backward(calls)
    return grad_x, grad_weights, rows if ctx.with_bias else None, grad_topk_weight_grads


def scaled_gradients(
    calls: Calls, grad: Tensor, handle: DispatchHandle, x: Tensor, weights: Tensor, tokens_per_row: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and of weights from `grad`, the gradient of combined_x. `tokens_per_row` tokens share each of its rows. If
    the backend can, the experts' ranks compute them."""
    grad = repeated(grad, tokens_per_row)
    if calls.capabilities.can_scale and not torch.is_grad_enabled() and not is_watched((grad,)):
        rows, _ = calls.dispatch(CachedDispatchArgs(calls.own_mode, grad, None, None, handle, RowScaling(weights, aligned(x))))
        return rows.recv_x, rows.grad_weights
    grad_x, *_ = dispatch(calls, CachedDispatchArgs(calls.own_mode, grad, None, None, handle))
    if torch.is_grad_enabled():
        return differentiable_scale_rows_backward(grad_x, x, weights)
    gradients: tuple[Tensor, Tensor] = call("scale_rows_backward", (grad_x, x, weights))
    return gradients


def joined(rows: Sequence[Tensor], handle: DispatchHandle, hidden: int) -> Tensor:
    """Join the tensors of all local experts into one. Raises TypeError or ValueError if `rows` has not one right tensor per expert."""
    counts = handle.num_rows_per_expert_list
    if len(rows) != len(counts):
        raise ValueError(f"there are rows of {len(rows)} experts, and {len(counts)} local experts; give each one's, if only 0 rows")
    for i, (part, count) in enumerate(zip(rows, counts, strict=True)):
        if not isinstance(part, Tensor):
            raise TypeError(f"the rows of local expert {i} must be a torch.Tensor, not {type(part).__name__}")
        if part.dim() == 0 or part.shape[-1] != hidden or part.numel() != count * hidden:
            raise ValueError(
                f"the rows of local expert {i} have shape {list(part.shape)}; an expert must return as many rows and columns as it was "
                f"given, here {count} and {hidden}"
            )
        if part.device != rows[0].device:
            raise ValueError(f"the rows of local expert {i} are on {part.device}, those of the first on {rows[0].device}")
    return torch.cat([(part if part.layout is torch.strided else part.to_dense()).reshape(-1, hidden) for part in rows])


_COMBINE = f"combine(Tensor x, Tensor? weights, Tensor? bias, Tensor? topk_weight_grads, {_HANDLE}, int? num_sms) -> (Tensor, Tensor)"


def _combine_operator(
    x: Tensor, weights: Tensor | None, bias: Tensor | None, topk_weight_grads: Tensor | None, handle: list[Tensor], buffer: int,
    layout: str, expert_alignment: int, num_rows: int, num_sms: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    calls, along = calls_of(buffer), _along(traced(buffer, layout, expert_alignment, num_rows, *handle))
    combined_x, grads = calls.combine(CombineArgs(calls.mode_of(num_sms), x, weights, bias, topk_weight_grads, along))
    return combined_x, x.new_empty(0, handle[0].shape[1], dtype=torch.float32) if grads is None else grads


def _fake_combine(
    x: Tensor, _weights: object, _bias: object, topk_weight_grads: Tensor | None, handle: list[Tensor], buffer: int, *_: object
) -> tuple[Tensor, Tensor]:
    num_tokens, num_topk = handle[0].shape
    grads = x.new_empty(0 if topk_weight_grads is None else num_tokens, num_topk, dtype=torch.float32)
    return x.new_empty(num_tokens // calls_of(buffer).settings.lanes, x.shape[1]), grads


def _save_combine(ctx: Context, inputs: Inputs, output: tuple[Tensor, ...]) -> None:
    x, weights, bias, topk_weight_grads, tensors, buffer, layout, expert_alignment, num_rows, _ = inputs
    handle = _to_save(buffer, layout, expert_alignment, num_rows, tensors)
    _keep_combine(ctx, handle, x, weights, bias, output[0], None if topk_weight_grads is None else output[1])


def _combine_backward(ctx: Context, grad_combined_x: Tensor | None, grad_grads: Tensor | None) -> tuple[object, ...]:
    return *_combine_gradients(ctx, grad_combined_x, grad_grads), *_OF_HANDLE_AND_SMS


register_operator(_DISPATCH, _dispatch_operator, _fake_dispatch, _save_dispatch, _dispatch_backward)
register_operator(_CACHED, _dispatch_cached_operator, _fake_dispatch_cached, _save_dispatch_cached, _dispatch_cached_backward)
register_operator(_COMBINE, _combine_operator, _fake_combine, _save_combine, _combine_backward)
