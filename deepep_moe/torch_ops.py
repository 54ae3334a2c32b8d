"""Dispatch and combine as PyTorch operators, with gradients and fake implementations for `torch.compile`.

Operators take tensors and numbers only: a buffer goes by its number, a handle by its tensors. Their backwards are each other:
dispatch's backward is combine, combine's backward is a cached dispatch. What backward keeps is the handle, never rows, except where
a weighted combine needs its rows for the gradient of the weights.

Only calls that PyTorch traces go through the operators, `call` takes the others past its dispatcher: to an autograd function of the same
three parts where a gradient is wanted, else straight to the implementation. A host that waits for a GPU's counts has no time to lose.
"""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepep_moe.backends.weigh import weigh_backward
from deepep_moe.errors import BufferDestroyedError
from deepep_moe.handle import DispatchHandle

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
    if function is not None and torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return function.apply(*tensors, *arguments)
    return implementation(*tensors, *arguments)


def _is_traced(tensors: tuple[Tensor | None, ...]) -> bool:
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return any(tensor is not None and type(tensor) not in _PLAIN for tensor in tensors)


def _handle(number: int, layout: str, expert_alignment: int, num_rows: int, tensors: tuple[Tensor, ...]) -> DispatchHandle:
    topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert, call = tensors
    return DispatchHandle(
        number, layout, expert_alignment, num_rows, topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert, call, None
    )


# ---- dispatch ----

_library.define(
    "dispatch(Tensor x, Tensor? x_scales, Tensor topk_idx, Tensor? topk_weights, int buffer, str layout, int expert_alignment, "
    "SymInt num_recv_rows) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def dispatch(
    x: Tensor, x_scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None, buffer: int, layout: str, expert_alignment: int,
    num_recv_rows: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, handle = _buffer(buffer)._dispatch(x, x_scales, topk_idx, topk_weights, layout, expert_alignment, num_recv_rows)
    recv_topk_idx = topk_idx.new_empty(0, topk_idx.shape[1]) if handle.recv_topk_idx is None else handle.recv_topk_idx
    return (
        rows.recv_x, rows.recv_x_scales, recv_topk_idx, rows.recv_topk_weights, handle.num_recv_tokens_per_expert, handle.topk_idx,
        handle.recv_row_idx, handle.recv_counts, handle.call,
    )  # fmt: skip


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
        topk_idx.new_empty(owner.num_local_experts, dtype=torch.int32), topk_idx.new_empty(num_tokens, num_topk, dtype=torch.int32),
        topk_idx.new_empty(num_slots, num_topk, dtype=torch.int32),
        topk_idx.new_empty(owner.num_ranks, owner.num_channels, dtype=torch.int32),
        topk_idx.new_empty(owner.num_handle_numbers, dtype=torch.int64, device="cpu"),
    )  # fmt: skip


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, topk_weights, ctx.buffer, ctx.layout, ctx.expert_alignment, _ = inputs
    recv_x, _, _, recv_topk_weights, num_recv_tokens_per_expert, handle_topk_idx, recv_row_idx, recv_counts, call = output
    ctx.with_weights = topk_weights is not None
    _expect_gradients(ctx, recv_x, recv_topk_weights if ctx.with_weights else None)
    ctx.save_for_backward(handle_topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert, call)


def _expect_gradients(ctx: Any, rows: Tensor, values: Tensor | None) -> None:
    """Of these outputs only: PyTorch would fill zeros for each of the others, a kernel apiece. `values`: None where there are none."""
    ctx.set_materialize_grads(False)
    ctx.expected = [None if output is None else (tuple(output.shape), output.dtype, output.device) for output in (rows, values)]


def _given(ctx: Any, *grads: Tensor | None) -> list[Any]:
    """`grads` of the expected outputs, contiguous; zeros for those that nothing has used, so that all ranks make the same calls."""
    return [_or_zeros(grad, like) for grad, like in zip(grads, ctx.expected, strict=True)]


def _or_zeros(grad: Tensor | None, like: tuple[Any, ...] | None) -> Tensor | None:
    if like is None:
        return None
    return torch.zeros(like[0], dtype=like[1], device=like[2]) if grad is None else grad.contiguous()


def _combine_gradients(ctx: Any, grad_recv_x: Tensor | None, grad_recv_topk_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of a dispatch's x and topk_weights."""
    rows, values = _given(ctx, grad_recv_x, grad_recv_topk_weights)
    grad_x, grad_topk_weights = call(
        "combine", (rows, None, None, values), *ctx.saved_tensors, ctx.buffer, ctx.layout, ctx.expert_alignment, rows.shape[0]
    )
    return grad_x, grad_topk_weights if ctx.with_weights else None


def _dispatch_backward(
    ctx: Any, grad_recv_x: Tensor | None, _scales: Any, _idx: Any, grad_recv_topk_weights: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    grad_x, grad_topk_weights = _combine_gradients(ctx, grad_recv_x, grad_recv_topk_weights)
    return grad_x, None, None, grad_topk_weights, None, None, None, None


# ---- dispatch along a handle ----

_library.define(
    f"dispatch_cached(Tensor x, Tensor? x_scales, Tensor? topk_weights, {_HANDLE}, int buffer, str layout, int expert_alignment, "
    "SymInt num_rows) -> (Tensor, Tensor, Tensor)"
)


def dispatch_cached(
    x: Tensor, x_scales: Tensor | None, topk_weights: Tensor | None, topk_idx: Tensor, recv_row_idx: Tensor, recv_counts: Tensor,
    num_recv_tokens_per_expert: Tensor, call: Tensor, buffer: int, layout: str, expert_alignment: int, num_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    handle = _handle(buffer, layout, expert_alignment, num_rows, (topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert, call))
    rows = _buffer(buffer)._dispatch_cached(x, x_scales, topk_weights, handle)
    return rows.recv_x, rows.recv_x_scales, rows.recv_topk_weights


def _fake_dispatch_cached(
    x: Tensor, x_scales: Tensor | None, topk_weights: Tensor | None, topk_idx: Tensor, recv_row_idx: Tensor, recv_counts: Tensor,
    num_recv_tokens_per_expert: Tensor, call: Tensor, buffer: int, layout: str, expert_alignment: int, num_rows: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _fake_rows(x, x_scales, topk_weights, topk_idx.shape[1], layout, num_rows)


def _save_dispatch_cached(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, topk_weights, *handle, ctx.buffer, ctx.layout, ctx.expert_alignment, _ = inputs
    ctx.with_weights = topk_weights is not None
    _expect_gradients(ctx, output[0], output[2] if ctx.with_weights else None)
    ctx.save_for_backward(*handle)


def _dispatch_cached_backward(
    ctx: Any, grad_recv_x: Tensor | None, _: Any, grad_recv_topk_weights: Tensor | None
) -> tuple[Tensor | None, ...]:
    grad_x, grad_topk_weights = _combine_gradients(ctx, grad_recv_x, grad_recv_topk_weights)
    return grad_x, None, grad_topk_weights, *[None] * 9


# ---- combine ----

_library.define(
    f"combine(Tensor x, Tensor? weights, Tensor? bias, Tensor? lane_values, {_HANDLE}, int buffer, str layout, int expert_alignment, "
    "SymInt num_rows) -> (Tensor, Tensor)"
)


def combine(
    x: Tensor, weights: Tensor | None, bias: Tensor | None, lane_values: Tensor | None, topk_idx: Tensor, recv_row_idx: Tensor,
    recv_counts: Tensor, num_recv_tokens_per_expert: Tensor, call: Tensor, buffer: int, layout: str, expert_alignment: int, num_rows: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    handle = _handle(buffer, layout, expert_alignment, num_rows, (topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert, call))
    return _buffer(buffer)._combine(x, weights, bias, lane_values, handle)


def _fake_combine(
    x: Tensor, weights: Tensor | None, bias: Tensor | None, lane_values: Tensor | None, topk_idx: Tensor, recv_row_idx: Tensor,
    recv_counts: Tensor, num_recv_tokens_per_expert: Tensor, call: Tensor, buffer: int, layout: str, expert_alignment: int, num_rows: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_tokens, num_topk = topk_idx.shape
    return x.new_empty(num_tokens, x.shape[1]), x.new_empty(0 if lane_values is None else num_tokens, num_topk, dtype=torch.float32)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weights, bias, lane_values, *handle, ctx.buffer, ctx.layout, ctx.expert_alignment, ctx.num_rows = inputs
    ctx.with_weights, ctx.with_bias, ctx.with_values = weights is not None, bias is not None, lane_values is not None
    _expect_gradients(ctx, output[0], output[1] if ctx.with_values else None)
    ctx.save_for_backward(*handle, *((x, weights) if ctx.with_weights else ()))


def _combine_backward(ctx: Any, grad_combined_x: Tensor | None, grad_values: Tensor | None) -> tuple[Tensor | None, ...]:
    rows, values = _given(ctx, grad_combined_x, grad_values)
    saved = ctx.saved_tensors  # unpacked once: checkpointing allows no more
    handle, rest = saved[:5], saved[5:]
    grad_x, _, grad_lane_values = call(
        "dispatch_cached", (rows, None, values), *handle, ctx.buffer, ctx.layout, ctx.expert_alignment, ctx.num_rows
    )
    grad_weights = None
    if ctx.with_weights:
        grad_x, grad_weights = call("weigh_backward", (grad_x, *rest))
    grad_bias = rows if ctx.with_bias else None
    return grad_x, grad_weights, grad_bias, grad_lane_values if ctx.with_values else None, *[None] * 9


_library.define("weigh_backward(Tensor grad, Tensor x, Tensor weights) -> (Tensor, Tensor)")


def _fake_weigh_backward(grad: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weights)


def register(name: str, implementation: Any, fake: Any, save: Any = None, backward: Any = None) -> None:
    """Make `implementation` that of the operator `name`, which is defined, and of `call`. `save`, `backward`: its gradient, if any."""
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"deepep_moe::{name}", fake, lib=_library)
    if backward is None:
        _eager[name] = implementation, None
        return
    torch.library.register_autograd(f"deepep_moe::{name}", backward, setup_context=save, lib=_library)

    def forward(ctx: Any, *inputs: Any) -> Any:  # a setup_context of its own costs PyTorch a look at signatures at every call
        output = implementation(*inputs)
        save(ctx, inputs, output)
        return output

    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    _eager[name] = implementation, type(name, (torch.autograd.Function,), parts)


register("dispatch", dispatch, _fake_dispatch, _save_dispatch, _dispatch_backward)
register("dispatch_cached", dispatch_cached, _fake_dispatch_cached, _save_dispatch_cached, _dispatch_cached_backward)
register("combine", combine, _fake_combine, _save_combine, _combine_backward)
register("weigh_backward", weigh_backward, _fake_weigh_backward)
