"""Dispatch and combine as PyTorch operators, with gradients and fake implementations for `torch.compile`.

Operators take tensors and numbers only: a buffer goes by its number, a handle by its tensors. Their backwards are each other:
dispatch's backward is combine, combine's backward is a cached dispatch. What backward keeps is the handle, never rows, except where
a weighted combine needs its rows for the gradient of the weights.

Only calls that PyTorch traces go through the operators. The others go past its dispatcher: to an autograd function where a gradient is
wanted, else straight to the buffer, in both cases with the handle as one object (`deepep_moe.library`).
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepep_moe.errors import BufferDestroyedError
from deepep_moe.exchange.backends.base import Rows, Weighing
from deepep_moe.exchange.handle import DispatchHandle
from deepep_moe.library import call, define, is_traced, needs_gradients, register_operator
from deepep_moe.ops.weighted import aligned, differentiable_scale_rows_backward

if TYPE_CHECKING:
    from deepep_moe.exchange.buffer import Buffer

live_buffers: "weakref.WeakValueDictionary[int, Buffer]" = weakref.WeakValueDictionary()
_HANDLE = "Tensor topk_idx, Tensor recv_row_idx, Tensor recv_counts, Tensor num_recv_tokens_per_expert, Tensor call"


def register_buffer(number: int, buffer: "Buffer") -> None:
    """Make `buffer` known to the operators as `number`, for as long as it lives."""
    live_buffers[number] = buffer


def buffer_of(number: int) -> "Buffer":
    """The buffer that operators and handles know as `number`."""
    buffer = live_buffers.get(number)
    if buffer is None:
        raise BufferDestroyedError(f"buffer {number} is gone; keep the Buffer alive as long as its handles and graphs are used")
    return buffer


# ---- handles ----


def _handle(
    number: int, layout: str, expert_alignment: int, num_rows: Any, tensors: Sequence[Tensor], recv_topk_idx: Tensor | None = None
) -> DispatchHandle:
    topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert, call = tensors
    return DispatchHandle(
        number, layout, expert_alignment, num_rows, topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert, call, recv_topk_idx
    )


def _tensors(handle: DispatchHandle) -> tuple[Tensor, ...]:
    """As the operators take them."""
    return handle.topk_idx, handle.recv_row_idx, handle.recv_counts, handle.num_recv_tokens_per_expert, handle.call


def _arguments(handle: DispatchHandle) -> tuple[Any, ...]:
    return *_tensors(handle), handle.buffer_id, handle.layout, handle.expert_alignment, handle.num_rows


def _keep(ctx: Any, handle: DispatchHandle, rows: Tensor, values: Tensor | None, *more: Tensor) -> None:
    """For the backward: the handle, `more`, and that gradients are expected of these outputs only: PyTorch would fill zeros for each of the
    others, a kernel apiece. `values`: None where there are none."""
    ctx.set_materialize_grads(False)
    ctx.expected = [None if output is None else (output.shape, output.dtype, output.device) for output in (rows, values)]
    keep_handle(ctx, handle, *more)


def keep_handle(ctx: Any, handle: DispatchHandle, *more: Tensor) -> None:
    """The handle and `more`, for `kept` in the backward."""
    saved = handle.to_save()
    ctx.rebuild, ctx.num_saved = handle.rebuild(), len(saved)
    ctx.save_for_backward(*saved, *more)


def kept(ctx: Any, num_rows: Any) -> tuple[DispatchHandle, tuple[Tensor, ...]]:
    """What `keep_handle` kept."""
    saved, num_saved = ctx.saved_tensors, ctx.num_saved  # unpacked once: checkpointing allows no more
    return ctx.rebuild(num_rows, *saved[:num_saved]), saved[num_saved:]


def _given(ctx: Any, *grads: Tensor | None) -> list[Any]:
    """`grads` of the expected outputs, contiguous; zeros for those that nothing has used, so that all ranks make the same calls."""
    return [_or_zeros(grad, like) for grad, like in zip(grads, ctx.expected, strict=True)]


def _or_zeros(grad: Tensor | None, like: tuple[Any, ...] | None) -> Tensor | None:
    if like is None:
        return None
    return torch.zeros(like[0], dtype=like[1], device=like[2]) if grad is None else as_rows(grad)


def as_rows(grad: Tensor) -> Tensor:
    """As calls take it, wherever autograd has it from: contiguous, on a boundary where that can be seen."""
    return grad.contiguous() if is_traced((grad,)) else aligned(grad)


# ---- dispatch ----


def dispatch(
    buffer: "Buffer", x: Tensor, x_scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None, layout: str,
    expert_alignment: int, num_recv_rows: int,
) -> tuple[Tensor, Tensor | None, Tensor | None, DispatchHandle]:  # fmt: skip
    """`buffer._dispatch`, with gradients: recv_x, recv_x_scales, recv_topk_weights, the handle."""
    tensors, number = (x, x_scales, topk_idx, topk_weights), buffer._number
    if not is_traced(tensors):
        if needs_gradients(tensors):
            return _Dispatch.apply(*tensors, number, layout, expert_alignment, num_recv_rows)
        rows, handle = buffer._dispatch(*tensors, layout, expert_alignment, num_recv_rows)
        return rows.recv_x, rows.recv_x_scales, rows.recv_topk_weights, handle
    recv_x, scales, idx, weights, *rest = torch.ops.deepep_moe.dispatch(*tensors, number, layout, expert_alignment, num_recv_rows)
    handle = _handle(number, layout, expert_alignment, recv_x.shape[0], rest, idx if layout == "rank" else None)
    return recv_x, None if x_scales is None else scales, None if topk_weights is None else weights, handle


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, x_scales: Any, topk_idx: Tensor, topk_weights: Any, buffer: int, *how: Any) -> tuple[Any, ...]:
        rows, handle = buffer_of(buffer)._dispatch(x, x_scales, topk_idx, topk_weights, *how)
        _keep(ctx, handle, rows.recv_x, rows.recv_topk_weights)
        return rows.recv_x, rows.recv_x_scales, rows.recv_topk_weights, handle

    @staticmethod
    def backward(ctx: Any, grad_recv_x: Any, _scales: Any, grad_recv_topk_weights: Any, _handle: Any) -> tuple[Any, ...]:
        grad_x, grad_topk_weights = _dispatch_gradients(ctx, grad_recv_x, grad_recv_topk_weights)
        return grad_x, None, None, grad_topk_weights, None, None, None, None


def _dispatch_gradients(ctx: Any, grad_recv_x: Tensor | None, grad_recv_topk_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Of x and topk_weights, cached or not."""
    rows, values = _given(ctx, grad_recv_x, grad_recv_topk_weights)
    handle, _ = kept(ctx, rows.shape[0])
    return combine(buffer_of(handle.buffer_id), rows, None, None, values, handle)


define(
    "dispatch(Tensor x, Tensor? x_scales, Tensor topk_idx, Tensor? topk_weights, int buffer, str layout, int expert_alignment, "
    "SymInt num_recv_rows) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _dispatch_operator(
    x: Tensor, x_scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None, buffer: int, layout: str, expert_alignment: int,
    num_recv_rows: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """recv_x, recv_x_scales, recv_topk_idx, recv_topk_weights, tensors of the handle; empty where they do not apply."""
    rows, handle = buffer_of(buffer)._dispatch(x, x_scales, topk_idx, topk_weights, layout, expert_alignment, num_recv_rows)
    recv_topk_idx = topk_idx.new_empty(0, topk_idx.shape[1]) if handle.recv_topk_idx is None else handle.recv_topk_idx
    recv_x, scales, weights = _filled(rows, topk_idx.shape[1], layout)
    tensors = _tensors(handle) if handle.memory is None else [tensor.clone() for tensor in _tensors(handle)]  # none a view of the same
    return recv_x, scales, recv_topk_idx, weights, *tensors


def _filled(rows: Rows, num_topk: int, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """`rows` with empty tensors in place of None: operators return tensors."""
    scales, weights, x = rows.recv_x_scales, rows.recv_topk_weights, rows.recv_x
    if scales is None:
        scales = x.new_empty(0, 0, dtype=torch.float32)
    if weights is None:
        weights = x.new_empty((0,) if layout == "expert" else (0, num_topk), dtype=torch.float32)
    return x, scales, weights


def _fake_rows(
    x: Tensor, x_scales: Tensor | None, topk_weights: Tensor | None, num_topk: int, layout: str, num_rows: Any
) -> tuple[Tensor, ...]:
    num_weights = 0 if topk_weights is None else num_rows
    return (
        x.new_empty(num_rows, x.shape[1]),
        x.new_empty(0 if x_scales is None else num_rows, 0 if x_scales is None else x_scales.shape[1], dtype=torch.float32),
        x.new_empty((num_weights,) if layout == "expert" else (num_weights, num_topk), dtype=torch.float32),
    )


def _fake_dispatch(
    x: Tensor, x_scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None, buffer: int, layout: str, expert_alignment: int,
    num_recv_rows: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    owner, context = buffer_of(buffer), torch.library.get_ctx()
    is_expert, (num_tokens, num_topk) = layout == "expert", topk_idx.shape
    num_rows = context.new_dynamic_size() if num_recv_rows < 0 else num_recv_rows
    num_slots = context.new_dynamic_size() if is_expert else 0
    recv_x, recv_x_scales, recv_topk_weights = _fake_rows(x, x_scales, topk_weights, num_topk, layout, num_rows)
    return (
        recv_x, recv_x_scales, topk_idx.new_empty(0 if is_expert else num_rows, num_topk), recv_topk_weights,
        topk_idx.new_empty(num_tokens, num_topk, dtype=torch.int32), topk_idx.new_empty(num_slots, num_topk, dtype=torch.int32),
        topk_idx.new_empty(owner.num_ranks, owner.num_channels, dtype=torch.int32),
        topk_idx.new_empty(owner.num_local_experts, dtype=torch.int32),
        topk_idx.new_empty(owner.num_handle_numbers, dtype=torch.int64, device="cpu"),
    )  # fmt: skip


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, topk_weights, buffer, layout, expert_alignment, _ = inputs
    recv_x, _, _, recv_topk_weights, *rest = output
    _keep(ctx, _handle(buffer, layout, expert_alignment, -1, rest), recv_x, None if topk_weights is None else recv_topk_weights)


def _dispatch_backward(ctx: Any, grad_recv_x: Any, _scales: Any, _idx: Any, grad_recv_topk_weights: Any, *_: Any) -> tuple[Any, ...]:
    grad_x, grad_topk_weights = _dispatch_gradients(ctx, grad_recv_x, grad_recv_topk_weights)
    return grad_x, None, None, grad_topk_weights, None, None, None, None


# ---- dispatch along a handle ----


def dispatch_cached(
    buffer: "Buffer", x: Tensor, x_scales: Tensor | None, topk_weights: Tensor | None, handle: DispatchHandle
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`buffer._dispatch_cached`, with gradients: recv_x, recv_x_scales, recv_topk_weights."""
    tensors = (x, x_scales, topk_weights)
    if not is_traced(tensors):
        if needs_gradients(tensors):
            return _DispatchCached.apply(*tensors, handle)
        rows = buffer._dispatch_cached(*tensors, handle)
        return rows.recv_x, rows.recv_x_scales, rows.recv_topk_weights
    recv_x, scales, weights = torch.ops.deepep_moe.dispatch_cached(*tensors, *_arguments(handle))
    return recv_x, None if x_scales is None else scales, None if topk_weights is None else weights


class _DispatchCached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, x_scales: Any, topk_weights: Any, handle: DispatchHandle) -> tuple[Any, ...]:
        rows = buffer_of(handle.buffer_id)._dispatch_cached(x, x_scales, topk_weights, handle)
        _keep(ctx, handle, rows.recv_x, rows.recv_topk_weights)
        return rows.recv_x, rows.recv_x_scales, rows.recv_topk_weights

    @staticmethod
    def backward(ctx: Any, grad_recv_x: Any, _scales: Any, grad_recv_topk_weights: Any) -> tuple[Any, ...]:
        grad_x, grad_topk_weights = _dispatch_gradients(ctx, grad_recv_x, grad_recv_topk_weights)
        return grad_x, None, grad_topk_weights, None


define(
    f"dispatch_cached(Tensor x, Tensor? x_scales, Tensor? topk_weights, {_HANDLE}, int buffer, str layout, int expert_alignment, "
    "SymInt num_rows) -> (Tensor, Tensor, Tensor)"
)


def _dispatch_cached_operator(
    x: Tensor, x_scales: Tensor | None, topk_weights: Tensor | None, topk_idx: Tensor, recv_row_idx: Tensor, recv_counts: Tensor,
    num_recv_tokens_per_expert: Tensor, call: Tensor, buffer: int, layout: str, expert_alignment: int, num_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    handle = _handle(buffer, layout, expert_alignment, num_rows, (topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert, call))
    owner = buffer_of(buffer)
    owner._check_handle(handle)
    return _filled(owner._dispatch_cached(x, x_scales, topk_weights, handle), topk_idx.shape[1], layout)


def _fake_dispatch_cached(
    x: Tensor, x_scales: Tensor | None, topk_weights: Tensor | None, topk_idx: Tensor, recv_row_idx: Tensor, recv_counts: Tensor,
    num_recv_tokens_per_expert: Tensor, call: Tensor, buffer: int, layout: str, expert_alignment: int, num_rows: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _fake_rows(x, x_scales, topk_weights, topk_idx.shape[1], layout, num_rows)


def _save_dispatch_cached(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, topk_weights, *tensors, buffer, layout, expert_alignment, _ = inputs
    _keep(ctx, _handle(buffer, layout, expert_alignment, -1, tensors), output[0], None if topk_weights is None else output[2])


def _dispatch_cached_backward(ctx: Any, grad_recv_x: Any, _scales: Any, grad_recv_topk_weights: Any) -> tuple[Any, ...]:
    grad_x, grad_topk_weights = _dispatch_gradients(ctx, grad_recv_x, grad_recv_topk_weights)
    return grad_x, None, grad_topk_weights, *[None] * 9


# ---- combine ----


def combine(
    buffer: "Buffer", x: Tensor, weights: Tensor | None, bias: Tensor | None, lane_values: Tensor | None, handle: DispatchHandle
) -> tuple[Tensor, Tensor | None]:
    """`buffer._combine`, with gradients: combined_x, combined lane values."""
    tensors = (x, weights, bias, lane_values)
    if not is_traced(tensors):
        if needs_gradients(tensors):
            return _Combine.apply(*tensors, handle)
        return buffer._combine(*tensors, handle)
    combined_x, values = torch.ops.deepep_moe.combine(*tensors, *_arguments(handle))
    return combined_x, None if lane_values is None else values


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Any, bias: Any, lane_values: Any, handle: DispatchHandle) -> tuple[Any, ...]:
        combined_x, values = buffer_of(handle.buffer_id)._combine(x, weights, bias, lane_values, handle)
        _keep_combine(ctx, handle, x, weights, bias, combined_x, values)
        return combined_x, values

    @staticmethod
    def backward(ctx: Any, grad_combined_x: Any, grad_values: Any) -> tuple[Any, ...]:
        return *_combine_gradients(ctx, grad_combined_x, grad_values), None


def _keep_combine(
    ctx: Any, handle: DispatchHandle, x: Tensor, weights: Tensor | None, bias: Tensor | None, combined_x: Tensor, values: Tensor | None
) -> None:
    ctx.with_bias, ctx.num_rows = bias is not None, handle.num_rows
    _keep(ctx, handle, combined_x, values, *(() if weights is None else (x, weights)))


def _combine_gradients(ctx: Any, grad_combined_x: Tensor | None, grad_values: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of x, weights, bias and lane_values."""
    rows, values = _given(ctx, grad_combined_x, grad_values)
    handle, weighed = kept(ctx, ctx.num_rows)
    buffer, grad_weights, grad_lane_values = buffer_of(handle.buffer_id), None, None
    if weighed:  # by weights that did not come with lane values
        x, weights = weighed
        grad_x, grad_weights = weighed_gradients(buffer, rows, handle, x, weights)
    else:
        grad_x, _, grad_lane_values = dispatch_cached(buffer, rows, None, values, handle)
    return grad_x, grad_weights, rows if ctx.with_bias else None, grad_lane_values


def weighed_gradients(
    buffer: "Buffer", grad: Tensor, handle: DispatchHandle, x: Tensor, weights: Tensor, repeats: int = 1, where: Any = None
) -> tuple[Tensor, Tensor | None]:
    """Of x and of weights, from that of combined_x, whose rows `repeats` tokens share: worked out where rows arrive, if the backend can.
    where: the `_C.ExpertRows` that x is the first part of, only where `may_fuse`; without them x is all rows."""
    if may_fuse(buffer, grad):
        weighing = Weighing(weights, x if where is not None else aligned(x), where)
        rows = buffer._dispatch_cached(grad, None, None, handle, weighing, repeats)
        return rows.recv_x, rows.grad_weights
    grad_x, _, _ = dispatch_cached(buffer, repeated(grad, repeats), None, None, handle)
    if torch.is_grad_enabled():
        return differentiable_scale_rows_backward(grad_x, x, weights)
    return call("scale_rows_backward", (grad_x, x, weights))


def may_fuse(buffer: "Buffer", grad: Tensor) -> bool:
    """Can kernels weigh this gradient's rows, or read them where they are, and is nothing watching?"""
    return buffer._alive().fuses and not torch.is_grad_enabled() and not is_traced((grad,))


def repeated(rows: Tensor, repeats: int) -> Tensor:
    """All rows, once after another."""
    return rows if repeats == 1 else rows.expand(repeats, *rows.shape).reshape(-1, rows.shape[1]).contiguous()  # a single row stays a view


define(
    f"combine(Tensor x, Tensor? weights, Tensor? bias, Tensor? lane_values, {_HANDLE}, int buffer, str layout, int expert_alignment, "
    "SymInt num_rows) -> (Tensor, Tensor)"
)


def _combine_operator(
    x: Tensor, weights: Tensor | None, bias: Tensor | None, lane_values: Tensor | None, topk_idx: Tensor, recv_row_idx: Tensor,
    recv_counts: Tensor, num_recv_tokens_per_expert: Tensor, call: Tensor, buffer: int, layout: str, expert_alignment: int, num_rows: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    handle = _handle(buffer, layout, expert_alignment, num_rows, (topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert, call))
    owner = buffer_of(buffer)
    owner._check_handle(handle)
    combined_x, values = owner._combine(x, weights, bias, lane_values, handle)
    return combined_x, x.new_empty(0, topk_idx.shape[1], dtype=torch.float32) if values is None else values


def _fake_combine(
    x: Tensor, weights: Tensor | None, bias: Tensor | None, lane_values: Tensor | None, topk_idx: Tensor, recv_row_idx: Tensor,
    recv_counts: Tensor, num_recv_tokens_per_expert: Tensor, call: Tensor, buffer: int, layout: str, expert_alignment: int, num_rows: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_tokens, num_topk = topk_idx.shape
    return x.new_empty(num_tokens, x.shape[1]), x.new_empty(0 if lane_values is None else num_tokens, num_topk, dtype=torch.float32)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weights, bias, lane_values, *tensors, buffer, layout, expert_alignment, num_rows = inputs
    handle = _handle(buffer, layout, expert_alignment, num_rows, tensors)
    _keep_combine(ctx, handle, x, weights, bias, output[0], None if lane_values is None else output[1])


def _combine_backward(ctx: Any, grad_combined_x: Any, grad_values: Any) -> tuple[Any, ...]:
    return *_combine_gradients(ctx, grad_combined_x, grad_values), *[None] * 9


register_operator("dispatch", _dispatch_operator, _fake_dispatch, _save_dispatch, _dispatch_backward)
register_operator("dispatch_cached", _dispatch_cached_operator, _fake_dispatch_cached, _save_dispatch_cached, _dispatch_cached_backward)
register_operator("combine", _combine_operator, _fake_combine, _save_combine, _combine_backward)
