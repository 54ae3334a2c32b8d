"""Dispatch and combine as PyTorch operators, with gradients and fake implementations for `torch.compile`.

Operators take tensors and numbers only: a buffer goes by the number of its calls, a handle by its tensors, the mode of a call by its
fields. Their backwards are each other: dispatch's backward is combine, combine's backward is a cached dispatch. What backward keeps is the
handle, never rows, except where a weighted combine needs its rows for the gradient of the weights. Backward calls run in the buffer's own
mode.

Only calls that PyTorch traces go through the operators. The others go past its dispatcher: to an autograd function where a gradient is
wanted, else straight to the buffer's calls, in both cases with the handle as one object (`deepep_moe.library`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepep_moe.device import is_gpu
from deepep_moe.errors import EPError
from deepep_moe.exchange.backends.base import CachedDispatchArgs, CombineArgs, DispatchArgs, Mode, Rows, RowScaling
from deepep_moe.exchange.backward import tell_failure, watch_backward
from deepep_moe.exchange.calls import Calls, calls_of
from deepep_moe.exchange.checks import EXCHANGE
from deepep_moe.exchange.handle import DispatchHandle, TracedHandle
from deepep_moe.library import call, define, is_watched, needs_gradients, refuse_watchers, register_operator
from deepep_moe.ops.weighted import aligned, differentiable_scale_rows_backward

_HANDLE = "Tensor topk_idx, Tensor recv_row_idx, Tensor recv_counts, Tensor num_recv_tokens_per_expert, Tensor call"
_MODE = "int num_sms, bool is_async, bool is_split"  # num_sms -1: the buffer's


def _mode_arguments(mode: Mode) -> tuple[int, bool, bool]:
    return -1 if mode.num_sms is None else mode.num_sms, mode.is_async, mode.is_split


def _mode(calls: Calls, num_sms: int, is_async: bool, is_split: bool) -> Mode:
    return calls.mode_of(None if num_sms < 0 else num_sms, is_async, is_split)


def _call_operator(calls: Calls, operator: Any, tensors: tuple[Tensor | None, ...], *args: Any) -> Any:
    """What fails on the way to an operator, such as a tensor's own `__torch_dispatch__`, is told to the peers."""
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


def _handle(
    number: int, layout: str, expert_alignment: int, num_rows: Any, tensors: Sequence[Tensor], recv_topk_idx: Tensor | None = None
) -> DispatchHandle:
    topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert, call = tensors
    return TracedHandle(
        number, layout, expert_alignment, num_rows, topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert, call, recv_topk_idx
    )


def _tensors(handle: DispatchHandle) -> tuple[Tensor, ...]:
    """As the operators take them."""
    return handle.topk_idx, handle.recv_row_idx, handle.recv_counts, handle.num_recv_tokens_per_expert, handle.call


def _arguments(handle: DispatchHandle) -> tuple[Any, ...]:
    return *_tensors(handle), handle.buffer_id, handle.layout, handle.expert_alignment, handle.num_rows


def keep(ctx: Any, handle: DispatchHandle, rows: Tensor, values: Tensor | None, *more: Tensor) -> None:
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


def given(ctx: Any, *grads: Tensor | None) -> list[Any]:
    """`grads` of the expected outputs, contiguous; zeros for those that nothing has used, so that all ranks make the same calls."""
    return [_or_zeros(grad, like) for grad, like in zip(grads, ctx.expected, strict=True)]


def _or_zeros(grad: Tensor | None, like: tuple[Any, ...] | None) -> Tensor | None:
    if like is None:
        return None
    return torch.zeros(like[0], dtype=like[1], device=like[2]) if grad is None else as_rows(grad)


def as_rows(grad: Tensor) -> Tensor:
    """As calls take it, wherever autograd has it from: contiguous, on a boundary where that can be seen."""
    if is_watched((grad,)):
        return (grad if grad.layout is torch.strided else grad.to_dense()).contiguous()
    return aligned(grad)


# ---- dispatch ----


def dispatch(
    calls: Calls, mode: Mode, x: Tensor, x_scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None, layout: str,
    expert_alignment: int, num_recv_rows: int,
) -> tuple[Tensor, Tensor | None, Tensor | None, DispatchHandle]:  # fmt: skip
    """`calls.dispatch`, with gradients: recv_x, recv_x_scales, recv_topk_weights, the handle."""
    tensors, how = (x, x_scales, topk_idx, topk_weights), (layout, expert_alignment, num_recv_rows)
    if not is_watched(tensors):
        if needs_gradients(tensors):
            return _Dispatch.apply(*tensors, calls, mode, *how)
        rows, handle = calls.dispatch(DispatchArgs(mode, *tensors, *how, calls.number))
        return rows.recv_x, rows.recv_x_scales, rows.recv_topk_weights, handle
    recv_x, scales, idx, weights, *rest = _call_operator(
        calls, torch.ops.deepep_moe.dispatch, tensors, calls.number, *how, *_mode_arguments(mode)
    )
    handle = _handle(calls.number, layout, expert_alignment, recv_x.shape[0], rest, idx if layout == "rank" else None)
    return recv_x, None if x_scales is None else scales, None if topk_weights is None else weights, handle


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, x_scales: Any, topk_idx: Tensor, topk_weights: Any, calls: Calls, mode: Mode, layout: str,
        expert_alignment: int, num_recv_rows: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        how = layout, expert_alignment, num_recv_rows
        rows, handle = calls.dispatch(DispatchArgs(mode, x, x_scales, topk_idx, topk_weights, *how, calls.number))
        keep(ctx, handle, rows.recv_x, rows.recv_topk_weights)
        return rows.recv_x, rows.recv_x_scales, rows.recv_topk_weights, handle

    @staticmethod
    def backward(ctx: Any, grad_recv_x: Any, _scales: Any, grad_recv_topk_weights: Any, _handle: Any) -> tuple[Any, ...]:
        grad_x, grad_topk_weights = dispatch_gradients(ctx, grad_recv_x, grad_recv_topk_weights)
        return grad_x, None, None, grad_topk_weights, *[None] * 5


def dispatch_gradients(ctx: Any, grad_recv_x: Tensor | None, grad_recv_topk_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Of x and topk_weights, cached or not."""
    rows, values = given(ctx, grad_recv_x, grad_recv_topk_weights)
    handle, _ = kept(ctx, rows.shape[0])
    calls = calls_of(handle.buffer_id)
    return combine(calls, calls.own_mode, rows, None, None, values, handle)


define(
    "dispatch(Tensor x, Tensor? x_scales, Tensor topk_idx, Tensor? topk_weights, int buffer, str layout, int expert_alignment, "
    f"SymInt num_recv_rows, {_MODE}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _dispatch_operator(
    x: Tensor, x_scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None, buffer: int, layout: str, expert_alignment: int,
    num_recv_rows: int, num_sms: int, is_async: bool, is_split: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """recv_x, recv_x_scales, recv_topk_idx, recv_topk_weights, tensors of the handle; empty where they do not apply."""
    calls = calls_of(buffer)
    how = layout, expert_alignment, num_recv_rows
    mode = _mode(calls, num_sms, is_async, is_split)
    rows, handle = calls.dispatch(DispatchArgs(mode, x, x_scales, topk_idx, topk_weights, *how, buffer))
    recv_topk_idx = topk_idx.new_empty(0, topk_idx.shape[1]) if handle.recv_topk_idx is None else handle.recv_topk_idx
    recv_x, scales, weights = _filled(rows, topk_idx.shape[1], layout)
    tensors = list(_tensors(handle))
    if not (is_async or is_split):  # such a call is in no graph, and has not written these yet
        if handle.native is not None:
            tensors = [tensor.clone() for tensor in tensors]  # none a view of the same
        if num_recv_rows >= 0 and layout == "expert":  # then no shape depends on data
            tensors[1] = torch.nn.functional.pad(tensors[1], (0, 0, 0, _num_slots(calls) - len(tensors[1])), value=-1)
    return recv_x, scales, recv_topk_idx, weights, *tensors


def _num_slots(calls: Calls) -> int:
    """Tokens that a rank receives at most."""
    return calls.settings.num_ranks * calls.settings.num_max_tokens_per_rank


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
    num_recv_rows: int, *_mode: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    calls, context = calls_of(buffer), torch.library.get_ctx()
    is_expert, (num_tokens, num_topk) = layout == "expert", topk_idx.shape
    num_rows = context.new_dynamic_size() if num_recv_rows < 0 else num_recv_rows
    num_slots = 0 if not is_expert else context.new_dynamic_size() if num_recv_rows < 0 else _num_slots(calls)
    recv_x, recv_x_scales, recv_topk_weights = _fake_rows(x, x_scales, topk_weights, num_topk, layout, num_rows)
    # The first rows may choose a backend for their GPU, which comes with sizes of its own.
    known = calls.capabilities if calls.has_chosen or not is_gpu(x.device) else None
    num_channels = context.new_dynamic_size() if known is None else known.num_channels
    num_handle_numbers = context.new_dynamic_size() if known is None else known.num_handle_numbers
    return (
        recv_x, recv_x_scales, topk_idx.new_empty(0 if is_expert else num_rows, num_topk), recv_topk_weights,
        topk_idx.new_empty(num_tokens, num_topk, dtype=torch.int32), topk_idx.new_empty(num_slots, num_topk, dtype=torch.int32),
        topk_idx.new_empty(calls.settings.num_ranks, num_channels, dtype=torch.int32),
        topk_idx.new_empty(calls.settings.num_local_experts, dtype=torch.int32),
        topk_idx.new_empty(num_handle_numbers, dtype=torch.int64, device="cpu"),
    )  # fmt: skip


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, topk_weights, buffer, layout, expert_alignment, *_ = inputs
    recv_x, _, _, recv_topk_weights, *rest = output
    keep(ctx, _handle(buffer, layout, expert_alignment, -1, rest), recv_x, None if topk_weights is None else recv_topk_weights)


def _dispatch_backward(ctx: Any, grad_recv_x: Any, _scales: Any, _idx: Any, grad_recv_topk_weights: Any, *_: Any) -> tuple[Any, ...]:
    grad_x, grad_topk_weights = dispatch_gradients(ctx, grad_recv_x, grad_recv_topk_weights)
    return grad_x, None, None, grad_topk_weights, *[None] * 7


# ---- dispatch along a handle ----


def dispatch_cached(
    calls: Calls, mode: Mode, x: Tensor, x_scales: Tensor | None, topk_weights: Tensor | None, handle: DispatchHandle
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`calls.dispatch_cached`, with gradients: recv_x, recv_x_scales, recv_topk_weights."""
    tensors = (x, x_scales, topk_weights)
    if not is_watched(tensors):
        if needs_gradients(tensors):
            return _DispatchCached.apply(*tensors, calls, mode, handle)
        rows = calls.dispatch_cached(CachedDispatchArgs(mode, *tensors, handle))
        return rows.recv_x, rows.recv_x_scales, rows.recv_topk_weights
    recv_x, scales, weights = _call_operator(
        calls, torch.ops.deepep_moe.dispatch_cached, tensors, *_arguments(handle), *_mode_arguments(mode)
    )
    return recv_x, None if x_scales is None else scales, None if topk_weights is None else weights


class _DispatchCached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, x_scales: Any, topk_weights: Any, calls: Calls, mode: Mode, handle: DispatchHandle) -> tuple[Any, ...]:
        rows = calls.dispatch_cached(CachedDispatchArgs(mode, x, x_scales, topk_weights, handle))
        keep(ctx, handle, rows.recv_x, rows.recv_topk_weights)
        return rows.recv_x, rows.recv_x_scales, rows.recv_topk_weights

    @staticmethod
    def backward(ctx: Any, grad_recv_x: Any, _scales: Any, grad_recv_topk_weights: Any) -> tuple[Any, ...]:
        grad_x, grad_topk_weights = dispatch_gradients(ctx, grad_recv_x, grad_recv_topk_weights)
        return grad_x, None, grad_topk_weights, None, None, None


define(
    f"dispatch_cached(Tensor x, Tensor? x_scales, Tensor? topk_weights, {_HANDLE}, int buffer, str layout, int expert_alignment, "
    f"SymInt num_rows, {_MODE}) -> (Tensor, Tensor, Tensor)"
)


def _dispatch_cached_operator(
    x: Tensor, x_scales: Tensor | None, topk_weights: Tensor | None, topk_idx: Tensor, recv_row_idx: Tensor, recv_counts: Tensor,
    num_recv_tokens_per_expert: Tensor, call: Tensor, buffer: int, layout: str, expert_alignment: int, num_rows: int, *mode: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    handle = _handle(buffer, layout, expert_alignment, num_rows, (topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert, call))
    calls = calls_of(buffer)
    rows = calls.dispatch_cached(CachedDispatchArgs(_mode(calls, *mode), x, x_scales, topk_weights, handle))
    return _filled(rows, topk_idx.shape[1], layout)


def _fake_dispatch_cached(
    x: Tensor, x_scales: Tensor | None, topk_weights: Tensor | None, topk_idx: Tensor, recv_row_idx: Tensor, recv_counts: Tensor,
    num_recv_tokens_per_expert: Tensor, call: Tensor, buffer: int, layout: str, expert_alignment: int, num_rows: int, *mode: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _fake_rows(x, x_scales, topk_weights, topk_idx.shape[1], layout, num_rows)


def _save_dispatch_cached(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, topk_weights, *tensors, buffer, layout, expert_alignment = inputs[:-4]
    keep(ctx, _handle(buffer, layout, expert_alignment, -1, tensors), output[0], None if topk_weights is None else output[2])


def _dispatch_cached_backward(ctx: Any, grad_recv_x: Any, _scales: Any, grad_recv_topk_weights: Any) -> tuple[Any, ...]:
    grad_x, grad_topk_weights = dispatch_gradients(ctx, grad_recv_x, grad_recv_topk_weights)
    return grad_x, None, grad_topk_weights, *[None] * 12


# ---- combine ----


def combine(
    calls: Calls, mode: Mode, x: Tensor, weights: Tensor | None, bias: Tensor | None, topk_weight_grads: Tensor | None,
    handle: DispatchHandle,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`calls.combine`, with gradients: combined_x, combined gradients of topk_weights."""
    tensors = (x, weights, bias, topk_weight_grads)
    if not is_watched(tensors):
        if needs_gradients(tensors):
            return _Combine.apply(*tensors, calls, mode, handle)
        return calls.combine(CombineArgs(mode, *tensors, handle))
    combined_x, grads = _call_operator(calls, torch.ops.deepep_moe.combine, tensors, *_arguments(handle), *_mode_arguments(mode))
    return combined_x, None if topk_weight_grads is None else grads


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Any, bias: Any, topk_weight_grads: Any, calls: Calls, mode: Mode, handle: DispatchHandle
    ) -> tuple[Any, ...]:
        combined_x, grads = calls.combine(CombineArgs(mode, x, weights, bias, topk_weight_grads, handle))
        _keep_combine(ctx, handle, x, weights, bias, combined_x, grads)
        return combined_x, grads

    @staticmethod
    def backward(ctx: Any, grad_combined_x: Any, grad_grads: Any) -> tuple[Any, ...]:
        return *_combine_gradients(ctx, grad_combined_x, grad_grads), None, None, None


def _keep_combine(
    ctx: Any, handle: DispatchHandle, x: Tensor, weights: Tensor | None, bias: Tensor | None, combined_x: Tensor, values: Tensor | None
) -> None:
    ctx.with_bias, ctx.num_rows = bias is not None, handle.num_rows
    keep(ctx, handle, combined_x, values, *(() if weights is None else (x, weights)))


def _combine_gradients(ctx: Any, grad_combined_x: Tensor | None, grad_grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weights, bias and topk_weight_grads."""
    rows, grads = given(ctx, grad_combined_x, grad_grads)
    handle, scaled = kept(ctx, ctx.num_rows)
    calls, grad_weights, grad_topk_weight_grads = calls_of(handle.buffer_id), None, None
    if scaled:  # by weights, which did not come with gradients of topk_weights
        x, weights = scaled
        grad_x, grad_weights = scaled_gradients(calls, rows, handle, x, weights)
    else:
        grad_x, _, grad_topk_weight_grads = dispatch_cached(calls, calls.own_mode, rows, None, grads, handle)
    watch_backward(calls)
    return grad_x, grad_weights, rows if ctx.with_bias else None, grad_topk_weight_grads


def scaled_gradients(
    calls: Calls, grad: Tensor, handle: DispatchHandle, x: Tensor, weights: Tensor, tokens_per_row: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and of weights, from that of combined_x, whose rows `tokens_per_row` tokens share. They are computed where
    rows arrive, if the backend can."""
    grad = repeated(grad, tokens_per_row)
    if calls.capabilities.can_scale and not torch.is_grad_enabled() and not is_watched((grad,)):
        rows = calls.dispatch_cached(CachedDispatchArgs(calls.own_mode, grad, None, None, handle, RowScaling(weights, aligned(x))))
        return rows.recv_x, rows.grad_weights
    grad_x, _, _ = dispatch_cached(calls, calls.own_mode, grad, None, None, handle)
    if torch.is_grad_enabled():
        return differentiable_scale_rows_backward(grad_x, x, weights)
    return call("scale_rows_backward", (grad_x, x, weights))


def repeated(rows: Tensor, times: int) -> Tensor:
    """Return all rows, once after another."""
    return rows if times == 1 else rows.expand(times, *rows.shape).reshape(-1, rows.shape[1]).contiguous()  # a single row stays a view


def joined(rows: Sequence[Tensor], handle: DispatchHandle, hidden: int) -> Tensor:
    """Return all rows in one tensor, of a tensor for each local expert. Raises TypeError and ValueError for what is not that."""
    counts = handle.num_rows_per_expert_list
    if len(rows) != len(counts):
        raise ValueError(f"there are rows of {len(rows)} experts, and {len(counts)} local experts; give each one's, if only 0 rows")
    for i, (own, count) in enumerate(zip(rows, counts, strict=True)):
        if not isinstance(own, Tensor):
            raise TypeError(f"the rows of local expert {i} must be a torch.Tensor, not {type(own).__name__}")
        if own.dim() == 0 or own.shape[-1] != hidden or own.numel() != count * hidden:
            raise ValueError(
                f"the rows of local expert {i} have shape {list(own.shape)}; an expert must return as many rows and columns as it was "
                f"given, here {count} and {hidden}"
            )
        if own.device != rows[0].device:
            raise ValueError(f"the rows of local expert {i} are on {own.device}, those of the first on {rows[0].device}")
    return torch.cat([(own if own.layout is torch.strided else own.to_dense()).reshape(-1, hidden) for own in rows])


define(
    f"combine(Tensor x, Tensor? weights, Tensor? bias, Tensor? topk_weight_grads, {_HANDLE}, int buffer, str layout, "
    f"int expert_alignment, SymInt num_rows, {_MODE}) -> (Tensor, Tensor)"
)


def _combine_operator(
    x: Tensor, weights: Tensor | None, bias: Tensor | None, topk_weight_grads: Tensor | None, topk_idx: Tensor, recv_row_idx: Tensor,
    recv_counts: Tensor, num_recv_tokens_per_expert: Tensor, call: Tensor, buffer: int, layout: str, expert_alignment: int, num_rows: int,
    *mode: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    handle = _handle(buffer, layout, expert_alignment, num_rows, (topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert, call))
    calls = calls_of(buffer)
    combined_x, grads = calls.combine(CombineArgs(_mode(calls, *mode), x, weights, bias, topk_weight_grads, handle))
    return combined_x, x.new_empty(0, topk_idx.shape[1], dtype=torch.float32) if grads is None else grads


def _fake_combine(
    x: Tensor, weights: Tensor | None, bias: Tensor | None, topk_weight_grads: Tensor | None, topk_idx: Tensor, recv_row_idx: Tensor,
    recv_counts: Tensor, num_recv_tokens_per_expert: Tensor, call: Tensor, buffer: int, layout: str, expert_alignment: int, num_rows: int,
    *mode: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_tokens, num_topk = topk_idx.shape
    return x.new_empty(num_tokens, x.shape[1]), x.new_empty(0 if topk_weight_grads is None else num_tokens, num_topk, dtype=torch.float32)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weights, bias, topk_weight_grads, *tensors, buffer, layout, expert_alignment, num_rows = inputs[:-3]
    handle = _handle(buffer, layout, expert_alignment, num_rows, tensors)
    _keep_combine(ctx, handle, x, weights, bias, output[0], None if topk_weight_grads is None else output[1])


def _combine_backward(ctx: Any, grad_combined_x: Any, grad_grads: Any) -> tuple[Any, ...]:
    return *_combine_gradients(ctx, grad_combined_x, grad_grads), *[None] * 12


register_operator("dispatch", _dispatch_operator, _fake_dispatch, _save_dispatch, _dispatch_backward)
register_operator("dispatch_cached", _dispatch_cached_operator, _fake_dispatch_cached, _save_dispatch_cached, _dispatch_cached_backward)
register_operator("combine", _combine_operator, _fake_combine, _save_combine, _combine_backward)
