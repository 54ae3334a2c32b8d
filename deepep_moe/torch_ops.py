"""Dispatch and combine as PyTorch operators, with gradients and fake implementations for `torch.compile`.

Operators take tensors and numbers only: a buffer goes by its number, a handle by its tensors. Their backwards are each other:
dispatch's backward is combine, combine's backward is a cached dispatch. What backward keeps is the handle, never rows, except where
a weighted combine needs its rows for the gradient of the weights.

Only calls that PyTorch traces go through the operators. The others go past its dispatcher: to an autograd function where a gradient is
wanted, else straight to the buffer, in both cases with the handle as one object. A host that waits for a GPU's counts has no time to lose.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from deepep_moe import _C, autograd_module
from deepep_moe.backends import weigh
from deepep_moe.backends.base import Rows, Weighing
from deepep_moe.errors import BufferDestroyedError
from deepep_moe.handle import DispatchHandle, PackedHandle

if TYPE_CHECKING:
    from deepep_moe.buffer import Buffer

_buffers: "weakref.WeakValueDictionary[int, Buffer]" = weakref.WeakValueDictionary()
_library = torch.library.Library("deepep_moe", "FRAGMENT")
_PLAIN = (Tensor, torch.nn.Parameter)
_eager: dict[str, tuple[Any, type[torch.autograd.Function] | None]] = {}
_HANDLE = "Tensor topk_idx, Tensor recv_row_idx, Tensor recv_counts, Tensor num_recv_tokens_per_expert, Tensor call"


def register_buffer(number: int, buffer: "Buffer") -> None:
    """Make `buffer` known to the operators as `number`, for as long as it lives."""
    _buffers[number] = buffer


def _buffer(number: int) -> "Buffer":
    buffer = _buffers.get(number)
    if buffer is None:
        raise BufferDestroyedError(f"buffer {number} is gone; keep the Buffer alive as long as its handles and graphs are used")
    return buffer


def call(name: str, tensors: tuple[Tensor | None, ...], *arguments: Any) -> Any:
    """The operator `name` with `tensors`, those that may need gradients or be of a class of their own, and further `arguments`."""
    if _is_traced(tensors):
        return getattr(torch.ops.deepep_moe, name)(*tensors, *arguments)
    implementation, function = _eager[name]
    if function is not None and _needs_gradients(tensors):
        return function.apply(*tensors, *arguments)
    return implementation(*tensors, *arguments)


def _needs_gradients(tensors: tuple[Tensor | None, ...]) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _is_traced(tensors: tuple[Tensor | None, ...]) -> bool:
    return _is_compiled(tensors) or torch._C._len_torch_dispatch_stack() > 0  # Dynamo knows the first only


def _is_compiled(tensors: tuple[Tensor | None, ...]) -> bool:
    """Traced, and not merely watched by a mode, as one rank's operations may be."""
    if torch.compiler.is_compiling():
        return True
    for tensor in tensors:  # noqa: SIM110, as `any` takes four times as long
        if tensor is not None and type(tensor) not in _PLAIN:
            return True
    return False


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
    _keep_handle(ctx, handle, *more)


def _keep_handle(ctx: Any, handle: DispatchHandle, *more: Tensor) -> None:
    saved = handle.to_save()
    ctx.rebuild, ctx.num_saved = handle.rebuild(), len(saved)
    ctx.save_for_backward(*saved, *more)


def _kept(ctx: Any, num_rows: Any) -> tuple[DispatchHandle, tuple[Tensor, ...]]:
    saved, num_saved = ctx.saved_tensors, ctx.num_saved  # unpacked once: checkpointing allows no more
    return ctx.rebuild(num_rows, *saved[:num_saved]), saved[num_saved:]


def _given(ctx: Any, *grads: Tensor | None) -> list[Any]:
    """`grads` of the expected outputs, contiguous; zeros for those that nothing has used, so that all ranks make the same calls."""
    return [_or_zeros(grad, like) for grad, like in zip(grads, ctx.expected, strict=True)]


def _or_zeros(grad: Tensor | None, like: tuple[Any, ...] | None) -> Tensor | None:
    if like is None:
        return None
    return torch.zeros(like[0], dtype=like[1], device=like[2]) if grad is None else _as_rows(grad)


def _as_rows(grad: Tensor) -> Tensor:
    """As calls take it, wherever autograd has it from: contiguous, on a boundary where that can be seen."""
    return grad.contiguous() if _is_traced((grad,)) else weigh.aligned(grad)


# ---- dispatch ----


def dispatch(
    buffer: "Buffer", x: Tensor, x_scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None, layout: str,
    expert_alignment: int, num_recv_rows: int,
) -> tuple[Tensor, Tensor | None, Tensor | None, DispatchHandle]:  # fmt: skip
    """`buffer._dispatch`, with gradients: recv_x, recv_x_scales, recv_topk_weights, the handle."""
    tensors, number = (x, x_scales, topk_idx, topk_weights), buffer._number
    if not _is_traced(tensors):
        if _needs_gradients(tensors):
            return _Dispatch.apply(*tensors, number, layout, expert_alignment, num_recv_rows)
        rows, handle = buffer._dispatch(*tensors, layout, expert_alignment, num_recv_rows)
        return rows.recv_x, rows.recv_x_scales, rows.recv_topk_weights, handle
    recv_x, scales, idx, weights, *rest = torch.ops.deepep_moe.dispatch(*tensors, number, layout, expert_alignment, num_recv_rows)
    handle = _handle(number, layout, expert_alignment, recv_x.shape[0], rest, idx if layout == "rank" else None)
    return recv_x, None if x_scales is None else scales, None if topk_weights is None else weights, handle


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, x_scales: Any, topk_idx: Tensor, topk_weights: Any, buffer: int, *how: Any) -> tuple[Any, ...]:
        rows, handle = _buffer(buffer)._dispatch(x, x_scales, topk_idx, topk_weights, *how)
        _keep(ctx, handle, rows.recv_x, rows.recv_topk_weights)
        return rows.recv_x, rows.recv_x_scales, rows.recv_topk_weights, handle

    @staticmethod
    def backward(ctx: Any, grad_recv_x: Any, _scales: Any, grad_recv_topk_weights: Any, _handle: Any) -> tuple[Any, ...]:
        grad_x, grad_topk_weights = _dispatch_gradients(ctx, grad_recv_x, grad_recv_topk_weights)
        return grad_x, None, None, grad_topk_weights, None, None, None, None


def _dispatch_gradients(ctx: Any, grad_recv_x: Tensor | None, grad_recv_topk_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Of x and topk_weights, cached or not."""
    rows, values = _given(ctx, grad_recv_x, grad_recv_topk_weights)
    handle, _ = _kept(ctx, rows.shape[0])
    return combine(_buffer(handle.buffer_id), rows, None, None, values, handle)


_library.define(
    "dispatch(Tensor x, Tensor? x_scales, Tensor topk_idx, Tensor? topk_weights, int buffer, str layout, int expert_alignment, "
    "SymInt num_recv_rows) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _dispatch_operator(
    x: Tensor, x_scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None, buffer: int, layout: str, expert_alignment: int,
    num_recv_rows: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """recv_x, recv_x_scales, recv_topk_idx, recv_topk_weights, tensors of the handle; empty where they do not apply."""
    rows, handle = _buffer(buffer)._dispatch(x, x_scales, topk_idx, topk_weights, layout, expert_alignment, num_recv_rows)
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
    owner, context = _buffer(buffer), torch.library.get_ctx()
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
    if not _is_traced(tensors):
        if _needs_gradients(tensors):
            return _DispatchCached.apply(*tensors, handle)
        rows = buffer._dispatch_cached(*tensors, handle)
        return rows.recv_x, rows.recv_x_scales, rows.recv_topk_weights
    recv_x, scales, weights = torch.ops.deepep_moe.dispatch_cached(*tensors, *_arguments(handle))
    return recv_x, None if x_scales is None else scales, None if topk_weights is None else weights


class _DispatchCached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, x_scales: Any, topk_weights: Any, handle: DispatchHandle) -> tuple[Any, ...]:
        rows = _buffer(handle.buffer_id)._dispatch_cached(x, x_scales, topk_weights, handle)
        _keep(ctx, handle, rows.recv_x, rows.recv_topk_weights)
        return rows.recv_x, rows.recv_x_scales, rows.recv_topk_weights

    @staticmethod
    def backward(ctx: Any, grad_recv_x: Any, _scales: Any, grad_recv_topk_weights: Any) -> tuple[Any, ...]:
        grad_x, grad_topk_weights = _dispatch_gradients(ctx, grad_recv_x, grad_recv_topk_weights)
        return grad_x, None, grad_topk_weights, None


_library.define(
    f"dispatch_cached(Tensor x, Tensor? x_scales, Tensor? topk_weights, {_HANDLE}, int buffer, str layout, int expert_alignment, "
    "SymInt num_rows) -> (Tensor, Tensor, Tensor)"
)


def _dispatch_cached_operator(
    x: Tensor, x_scales: Tensor | None, topk_weights: Tensor | None, topk_idx: Tensor, recv_row_idx: Tensor, recv_counts: Tensor,
    num_recv_tokens_per_expert: Tensor, call: Tensor, buffer: int, layout: str, expert_alignment: int, num_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    handle = _handle(buffer, layout, expert_alignment, num_rows, (topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert, call))
    owner = _buffer(buffer)
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
    if not _is_traced(tensors):
        if _needs_gradients(tensors):
            return _Combine.apply(*tensors, handle)
        return buffer._combine(*tensors, handle)
    combined_x, values = torch.ops.deepep_moe.combine(*tensors, *_arguments(handle))
    return combined_x, None if lane_values is None else values


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Any, bias: Any, lane_values: Any, handle: DispatchHandle) -> tuple[Any, ...]:
        combined_x, values = _buffer(handle.buffer_id)._combine(x, weights, bias, lane_values, handle)
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
    handle, weighed = _kept(ctx, ctx.num_rows)
    buffer, grad_weights, grad_lane_values = _buffer(handle.buffer_id), None, None
    if weighed:  # by weights that did not come with lane values
        x, weights = weighed
        grad_x, grad_weights = _weighed_gradients(buffer, rows, handle, x, weights)
    else:
        grad_x, _, grad_lane_values = dispatch_cached(buffer, rows, None, values, handle)
    return grad_x, grad_weights, rows if ctx.with_bias else None, grad_lane_values


def _weighed_gradients(
    buffer: "Buffer",
    grad: Tensor,
    handle: DispatchHandle,
    x: Tensor | Sequence[Tensor],
    weights: Tensor,
    repeats: int = 1,
    were: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """Of x, all rows or those of each local expert and where they `were`, and of weights, from that of combined_x, whose rows `repeats`
    tokens share: worked out where rows arrive, if the backend can."""
    is_fused = buffer._alive().fuses and not torch.is_grad_enabled() and not _is_traced((grad,))
    x, where = _rows_of(buffer, handle, x, may_stay=is_fused, were=were)
    if is_fused:
        weighing = Weighing(weights, x if where is not None else weigh.aligned(x), where)
        rows = buffer._dispatch_cached(grad, None, None, handle, weighing, repeats)
        return rows.recv_x, rows.grad_weights
    grad_x, _, _ = dispatch_cached(buffer, _repeated(grad, repeats), None, None, handle)
    if torch.is_grad_enabled():
        return _differentiable_weigh_backward(grad_x, x, weights)
    return call("weigh_backward", (grad_x, x, weights))


_library.define(
    f"combine(Tensor x, Tensor? weights, Tensor? bias, Tensor? lane_values, {_HANDLE}, int buffer, str layout, int expert_alignment, "
    "SymInt num_rows) -> (Tensor, Tensor)"
)


def _combine_operator(
    x: Tensor, weights: Tensor | None, bias: Tensor | None, lane_values: Tensor | None, topk_idx: Tensor, recv_row_idx: Tensor,
    recv_counts: Tensor, num_recv_tokens_per_expert: Tensor, call: Tensor, buffer: int, layout: str, expert_alignment: int, num_rows: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    handle = _handle(buffer, layout, expert_alignment, num_rows, (topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert, call))
    owner = _buffer(buffer)
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


# ---- rows by expert: in a tensor for each local expert, which none of the four calls of a forward and a backward has to join ----


def dispatch_by_expert(
    buffer: "Buffer", x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, leading: tuple[int, ...] = (),
    at_source: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], Tensor | None, DispatchHandle]:  # fmt: skip
    """A dispatch in the expert layout without padding, with gradients, for experts that run one by one.

    x: [num_tokens, hidden]. topk_idx, topk_weights: [num_tokens, num_topk], in a buffer for as many.
    at_source: [num_topk, num_tokens] fp32, in a buffer for top-1, instead of topk_weights: each expert of a token is a token of its own,
    topk_idx [num_topk * num_tokens, 1], and `combine_by_expert` weighs and sums their rows where they come back.
    Returns the rows of each local expert, [*leading, num_rows, hidden] where `leading` are sizes of 1; recv_topk_weights [num_rows of
    all] or None; the handle. All ranks have gradients or none has: the backward is collective too.
    """
    is_compiled, repeats = _is_compiled((x, topk_idx, topk_weights)), 1
    if at_source is not None:
        if not is_compiled and buffer._alive().fuses and len(at_source) <= _C.MAX_TOPK:
            topk_weights, repeats = at_source, len(at_source)  # sent: rows and weights get their gradients where the rows are
        else:
            x = _repeated(x, len(at_source))
    if is_compiled:
        recv_x, _, weights, handle = dispatch(buffer, x, None, topk_idx, topk_weights, "expert", 1, -1)
        return _split(recv_x, handle.num_rows_per_expert_list, leading), weights, handle
    native = buffer._native()
    if native is not None:
        made = native.dispatch(x, topk_idx, topk_weights, len(leading), repeats)
        if made is not None:
            parts, weights, shape, num_rows, memory, numbers = made
            return parts, weights, PackedHandle(buffer._number, "expert", 1, num_rows, shape, memory, numbers)
    weights, handle, *parts = _DispatchByExpert.apply(x, topk_idx, topk_weights, buffer._number, leading, repeats)
    return tuple(parts), weights, handle


def combine_by_expert(
    buffer: "Buffer", parts: Sequence[Tensor], topk_weights: Tensor | None, handle: DispatchHandle, at_source: Tensor | None = None
) -> Tensor:
    """A combine of such rows, after the experts, with gradients: combined_x [num_tokens, hidden].

    topk_weights: what the dispatch returned. at_source: what it was given; the result is the `weighed_sum` of rows that come back as they
    are.

    parts: [..., num_rows, hidden] of each local expert. They are read where they are if the backend can and they are alike, contiguous
    and of the right shapes; else joined first. Raises TypeError and ValueError for what cannot be joined; the peers raise EPPeerError.
    """
    # Where rows get their gradients all ranks have decided in the dispatch; how an expert's rows lie may differ from rank to rank.
    is_weighed_after = at_source is not None and topk_weights is None
    is_apart = is_weighed_after or _is_compiled((parts[0], topk_weights))
    source = None if at_source is None or is_apart else at_source.detach().contiguous()
    native = None if is_apart else buffer._native()
    if native is not None and _is_by_expert(handle, buffer):
        made = native.combine(parts, topk_weights, source, handle.memory, handle.call, handle.starts, handle.num_rows, handle.num_tokens)
        if made is not None:
            return made
    rows, where = _rows_of(buffer, handle, parts, may_stay=not is_apart)
    if is_apart:
        combined_x, _ = combine(buffer, rows, topk_weights if at_source is None else None, None, None, handle)
        return combined_x if at_source is None else weighed_sum(combined_x.view(*at_source.shape, buffer.hidden), at_source)
    return _CombineByExpert.apply(topk_weights, handle, where, source, *((rows,) if where is None else parts))


def _is_by_expert(handle: DispatchHandle, buffer: "Buffer") -> TypeGuard[PackedHandle]:
    """Does it have the rows of `dispatch_by_expert`?"""
    is_own = isinstance(handle, PackedHandle) and handle.buffer_id == buffer._number
    return is_own and handle.layout == "expert" and handle.expert_alignment == 1


def weighed_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """rows [num_topk, num_tokens, hidden] fp32, bf16 or fp16, weights [num_topk, num_tokens] fp32 -> [num_tokens, hidden], rows' dtype.

    Products and their sum in fp32, rounded once; in forward and backward bit for bit `(rows * weights.unsqueeze(-1)).sum(0)` and the
    cast that DeepSpeed 0.19.4 and newer has there. On GPUs, one pass each, that holds for sums of one and two lanes, more being added
    in ascending order, and not for the gradient of weights, a sum over columns.
    """
    return _WeighedSum.apply(rows, weights)


class _WeighedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return weigh.weighed_sum(rows, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return weigh.weighed_sum_backward(grad, rows, weights)
        return _differentiable_weigh_backward(grad, rows, weights)


def _differentiable_weigh_backward(grad: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """As `weigh_backward`, to be differentiated once more."""
    wide = grad.float()
    return (wide * weights.unsqueeze(-1)).to(x.dtype), (wide * x.float()).sum(-1)


def _repeated(rows: Tensor, repeats: int) -> Tensor:
    """All rows, once after another."""
    return rows if repeats == 1 else rows.expand(repeats, *rows.shape).reshape(-1, rows.shape[1])


def _rows_of(
    buffer: "Buffer", handle: DispatchHandle, parts: Tensor | Sequence[Tensor], *, may_stay: bool, were: Any = None
) -> tuple[Tensor, Any]:
    """All rows, joined if they are in parts; or, where they may stay and kernels can read them there, the first part and `_C.GpuParts`,
    those that they `were` if saving has not moved them."""
    if isinstance(parts, Tensor):
        return parts, None
    if may_stay and buffer._alive().fuses:
        where = were if were is not None and were.lie_in(parts) else _C.GpuParts.of(handle, parts, buffer.num_local_experts, buffer.hidden)
        if where is not None:
            return parts[0], where
    return buffer._or_refuse(_joined, parts, handle, buffer.hidden), None


def _split(rows: Tensor, counts: list[int], leading: tuple[int, ...]) -> tuple[Tensor, ...]:
    return torch.split_with_sizes(rows.view(*leading, *rows.shape) if leading else rows, counts, -2)


def _joined(parts: Sequence[Tensor], handle: DispatchHandle, hidden: int) -> Tensor:
    counts = handle.num_rows_per_expert_list
    if len(parts) != len(counts):
        raise ValueError(f"there are rows of {len(parts)} experts, and {len(counts)} local experts; give each one's, if only 0 rows")
    for i, (part, count) in enumerate(zip(parts, counts, strict=True)):
        if not isinstance(part, Tensor):
            raise TypeError(f"the rows of local expert {i} must be a torch.Tensor, not {type(part).__name__}")
        if part.dim() == 0 or part.shape[-1] != hidden or part.numel() != count * hidden:
            raise ValueError(
                f"the rows of local expert {i} have shape {list(part.shape)}; an expert must return as many rows and columns as it was "
                f"given, here {count} and {hidden}"
            )
        if part.device != parts[0].device:
            raise ValueError(f"the rows of local expert {i} are on {part.device}, those of the first on {parts[0].device}")
    return torch.cat([part.reshape(-1, hidden) for part in parts])


class _Function(torch.autograd.Function):
    """For operations of many tensors. What `apply` does more is to look at each of them for transforms of torch.func."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class _DispatchByExpert(_Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, topk_idx: Tensor, topk_weights: Any, buffer: int, leading: tuple[int, ...], repeats: int
    ) -> tuple[Any, ...]:
        ctx.weights_shape = None if topk_weights is None else topk_weights.shape
        if topk_weights is not None and topk_weights.shape != topk_idx.shape and topk_weights.numel() == topk_idx.numel():
            topk_weights = topk_weights.reshape(topk_idx.shape)  # lane by lane
        rows, handle = _buffer(buffer)._dispatch(x, None, topk_idx, topk_weights, "expert", 1, -1, repeats)
        ctx.num_rows, ctx.repeats = handle.num_rows, repeats
        _keep_handle(ctx, handle)
        return rows.recv_topk_weights, handle, *_split(rows.recv_x, handle.num_rows_per_expert_list, leading)

    @staticmethod
    def backward(ctx: Any, grad_topk_weights: Any, _handle: Any, *grads: Tensor) -> tuple[Any, ...]:
        handle, _ = _kept(ctx, ctx.num_rows)
        grad_x, grad_topk_weights = _dispatch_by_expert_gradients(handle, ctx.repeats, grad_topk_weights, grads)
        if grad_topk_weights is not None and grad_topk_weights.shape != ctx.weights_shape:
            grad_topk_weights = grad_topk_weights.view(ctx.weights_shape)
        return grad_x, None, grad_topk_weights, None, None, None


def _dispatch_by_expert_gradients(
    handle: DispatchHandle, repeats: int, grad_topk_weights: Tensor | None, grads: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Of x, whose rows `repeats` tokens share, and of topk_weights, if they were sent."""
    buffer, is_plain = _buffer(handle.buffer_id), not torch.is_grad_enabled() and not _is_traced(tuple(grads))
    rows, where = _rows_of(buffer, handle, grads, may_stay=is_plain)
    values = None if grad_topk_weights is None else grad_topk_weights.contiguous()
    if is_plain:
        return buffer._combine(rows, None, None, values, handle, where, repeats)
    grad_x, grad_topk_weights = combine(buffer, rows, None, None, values, handle)
    return grad_x if repeats == 1 else grad_x.view(repeats, -1, grad_x.shape[1]).sum(0), grad_topk_weights


class _CombineByExpert(_Function):
    """`parts`: as `where` says, or all rows in one."""

    @staticmethod
    def forward(ctx: Any, weights: Any, handle: DispatchHandle, where: Any, at_source: Any, *parts: Tensor) -> Tensor:
        ctx.num_rows, ctx.leading, ctx.repeats = handle.num_rows, parts[0].shape[:-2], 1 if at_source is None else len(at_source)
        ctx.where = where
        _keep_handle(ctx, handle, *(() if weights is None else (weights, *parts)))
        return _buffer(handle.buffer_id)._combine(parts[0], weights, None, None, handle, where, ctx.repeats, at_source)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        handle, weighed = _kept(ctx, ctx.num_rows)
        how = ctx.repeats, ctx.leading, grad, weighed, ctx.where
        grad_weights, *grads = _combine_by_expert_gradients(handle, *how, is_joined=ctx.where is None)
        return grad_weights, None, None, None, *grads


def _combine_by_expert_gradients(
    handle: DispatchHandle, repeats: int, leading: tuple[int, ...], grad: Tensor, weighed: Sequence[Tensor], where: Any, *, is_joined: bool
) -> tuple[Tensor | None, ...]:
    """Of weights, if there were some, and of parts, which are one if they were joined. weighed: the weights and the parts, or nothing."""
    buffer, grad, grad_weights = _buffer(handle.buffer_id), _as_rows(grad), None
    if weighed:
        weights, *parts = weighed
        grad_x, grad_weights = _weighed_gradients(buffer, grad, handle, parts[0] if is_joined else parts, weights, repeats, where)
    else:
        grad_x, _, _ = dispatch_cached(buffer, grad, None, None, handle)
    return grad_weights, *((grad_x,) if is_joined else _split(grad_x, handle.num_rows_per_expert_list, leading))


# ---- the same in C++, where `_autograd` was built: it calls back for what it declines ----


def _native(number: int) -> Any:
    buffer = _buffers.get(number)
    return None if buffer is None else buffer._native()


def _handle_of(number: int, num_tokens: int, num_rows: int, memory: Tensor, numbers: Tensor) -> PackedHandle:
    backend: Any = _buffer(number)._alive()
    return PackedHandle(number, "expert", 1, num_rows, backend.handle_shape(num_tokens, "expert"), memory, numbers)


def _native_dispatch_gradients(kept: tuple[Any, ...], repeats: int, grad_weights: Tensor | None, grads: list[Tensor]) -> tuple[Any, ...]:
    return _dispatch_by_expert_gradients(_handle_of(*kept), repeats, grad_weights, grads)


def _native_combine_gradients(
    kept: tuple[Any, ...], repeats: int, num_leading: int, grad: Tensor, weighed: list[Tensor]
) -> tuple[Any, ...]:
    return _combine_by_expert_gradients(_handle_of(*kept), repeats, (1,) * num_leading, grad, weighed, None, is_joined=False)


if autograd_module.MODULE is not None:
    autograd_module.MODULE.set_hooks(
        plain=_native, dispatch_gradients=_native_dispatch_gradients, combine_gradients=_native_combine_gradients
    )


_library.define("weigh_backward(Tensor grad, Tensor x, Tensor weights) -> (Tensor, Tensor)")


def _fake_weigh_backward(grad: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weights)


def _register_operator(name: str, implementation: Any, fake: Any, save: Any = None, backward: Any = None) -> None:
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"deepep_moe::{name}", fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(f"deepep_moe::{name}", backward, setup_context=save, lib=_library)


def register(name: str, implementation: Any, fake: Any, save: Any = None, backward: Any = None) -> None:
    """Make `implementation` that of the operator `name`, which is defined, and of `call`. `save`, `backward`: its gradient, if any."""
    _register_operator(name, implementation, fake, save, backward)
    if backward is None:
        _eager[name] = implementation, None
        return

    def forward(ctx: Any, *inputs: Any) -> Any:  # a setup_context of its own costs PyTorch a look at signatures at every call
        output = implementation(*inputs)
        save(ctx, inputs, output)
        return output

    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    _eager[name] = implementation, type(name, (torch.autograd.Function,), parts)


_register_operator("dispatch", _dispatch_operator, _fake_dispatch, _save_dispatch, _dispatch_backward)
_register_operator("dispatch_cached", _dispatch_cached_operator, _fake_dispatch_cached, _save_dispatch_cached, _dispatch_cached_backward)
_register_operator("combine", _combine_operator, _fake_combine, _save_combine, _combine_backward)
register("weigh_backward", weigh.weigh_backward, _fake_weigh_backward)
