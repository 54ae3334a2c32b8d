"""Rows by expert: dispatch and combine of a tensor for each local expert, which none of the four calls of a forward and a backward joins.

For layers whose experts run one by one. Calls that PyTorch traces go through the operators of `operators`, of all rows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from deepep_moe import _C, torch_module
from deepep_moe.exchange.handle import DispatchHandle, PackedHandle
from deepep_moe.exchange.operators import (
    as_rows,
    buffer_of,
    combine,
    dispatch,
    dispatch_cached,
    keep_handle,
    kept,
    live_buffers,
    may_fuse,
    repeated,
    weighed_gradients,
)
from deepep_moe.library import is_compiled, is_traced
from deepep_moe.ops.weighted import weighted_sum

if TYPE_CHECKING:
    from deepep_moe.exchange.buffer import Buffer


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
    is_apart, repeats = is_compiled((x, topk_idx, topk_weights)), 1
    if at_source is not None:
        if not is_apart and buffer._alive().fuses and len(at_source) <= _C.MAX_TOPK:
            topk_weights, repeats = at_source, len(at_source)  # sent: rows and weights get their gradients where the rows are
        else:
            x = repeated(x, len(at_source))
    if is_apart:
        recv_x, _, weights, handle = dispatch(buffer, x, None, topk_idx, topk_weights, "expert", 1, -1)
        return _split(recv_x, handle.num_rows_per_expert_list, leading), weights, handle
    native = buffer._native()
    if native is not None:
        made = native.dispatch_by_expert(x, topk_idx, topk_weights, len(leading), repeats)
        if made is not None:
            parts, weights, shape, num_rows, memory, numbers = made
            return parts, weights, PackedHandle(buffer._number, "expert", 1, num_rows, shape, memory, numbers)
    weights, handle, *parts = _DispatchByExpert.apply(x, topk_idx, topk_weights, buffer._number, leading, repeats)
    return tuple(parts), weights, handle


def combine_by_expert(
    buffer: "Buffer", parts: Sequence[Tensor], topk_weights: Tensor | None, handle: DispatchHandle, at_source: Tensor | None = None
) -> Tensor:
    """A combine of such rows, after the experts, with gradients: combined_x [num_tokens, hidden].

    topk_weights: what the dispatch returned. at_source: what it was given; the result is the `weighted_sum` of rows that come back as they
    are.

    parts: [..., num_rows, hidden] of each local expert. They are read where they are if the backend can and they are alike, contiguous
    and of the right shapes; else joined first. Raises TypeError and ValueError for what cannot be joined; the peers raise EPPeerError.
    """
    # Where rows get their gradients all ranks have decided in the dispatch; how an expert's rows lie may differ from rank to rank.
    is_weighed_after = at_source is not None and topk_weights is None
    is_unusual = is_compiled((parts[0], topk_weights))
    is_apart = is_weighed_after or (at_source is None and is_unusual)
    source = None if at_source is None or is_apart else at_source.detach().contiguous()
    native = None if is_unusual or is_apart else buffer._native()
    if native is not None and _is_by_expert(handle, buffer):
        made = native.combine_by_expert(parts, topk_weights, source, handle)
        if made is not None:
            return made
    rows, where = _rows_of(buffer, handle, parts, may_stay=not (is_apart or is_unusual))
    if is_apart:
        combined_x, _ = combine(buffer, rows, topk_weights if at_source is None else None, None, None, handle)
        return combined_x if at_source is None else weighted_sum(combined_x.view(*at_source.shape, buffer.hidden), at_source)
    if where is not None:
        return _CombineByExpert.apply(topk_weights, handle, where, source, *parts)
    return _CombineByExpert.apply(topk_weights, handle, None, source, rows.as_subclass(Tensor) if is_unusual else rows)


def _is_by_expert(handle: DispatchHandle, buffer: "Buffer") -> TypeGuard[PackedHandle]:
    """Does it have the rows of `dispatch_by_expert`?"""
    is_own = isinstance(handle, PackedHandle) and handle.buffer_id == buffer._number
    return is_own and handle.layout == "expert" and handle.expert_alignment == 1


def _rows_of(buffer: "Buffer", handle: DispatchHandle, parts: Sequence[Tensor], *, may_stay: bool, were: Any = None) -> tuple[Tensor, Any]:
    """All rows, joined; or, where they may stay and kernels can read them there, the first part and `_C.ExpertRows`, those that they `were`
    if saving has not moved them."""
    if may_stay and buffer._alive().fuses:
        where = (
            were if were is not None and were.lie_in(parts) else _C.ExpertRows.of(handle, parts, buffer.num_local_experts, buffer.hidden)
        )
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
        rows, handle = buffer_of(buffer)._dispatch(x, None, topk_idx, topk_weights, "expert", 1, -1, repeats)
        ctx.num_rows, ctx.repeats = handle.num_rows, repeats
        keep_handle(ctx, handle)
        return rows.recv_topk_weights, handle, *_split(rows.recv_x, handle.num_rows_per_expert_list, leading)

    @staticmethod
    def backward(ctx: Any, grad_topk_weights: Any, _handle: Any, *grads: Tensor) -> tuple[Any, ...]:
        handle, _ = kept(ctx, ctx.num_rows)
        grad_x, grad_topk_weights = _dispatch_by_expert_gradients(handle, ctx.repeats, grad_topk_weights, grads)
        if grad_topk_weights is not None and grad_topk_weights.shape != ctx.weights_shape:
            grad_topk_weights = grad_topk_weights.view(ctx.weights_shape)
        return grad_x, None, grad_topk_weights, None, None, None


def _dispatch_by_expert_gradients(
    handle: DispatchHandle, repeats: int, grad_topk_weights: Tensor | None, grads: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Of x, whose rows `repeats` tokens share, and of topk_weights, if they were sent."""
    buffer, is_plain = buffer_of(handle.buffer_id), not torch.is_grad_enabled() and not is_traced(tuple(grads))
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
        keep_handle(ctx, handle, *(() if weights is None else (weights, *parts)))
        return buffer_of(handle.buffer_id)._combine(parts[0], weights, None, None, handle, where, ctx.repeats, at_source)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        handle, weighed = kept(ctx, ctx.num_rows)
        how = ctx.repeats, ctx.leading, grad, weighed, ctx.where
        grad_weights, *grads = _combine_by_expert_gradients(handle, *how, is_joined=ctx.where is None)
        return grad_weights, None, None, None, *grads


def _combine_by_expert_gradients(
    handle: DispatchHandle, repeats: int, leading: tuple[int, ...], grad: Tensor, weighed: Sequence[Tensor], where: Any, *, is_joined: bool
) -> tuple[Tensor | None, ...]:
    """Of weights, if there were some, and of parts, which are one if they were joined. weighed: the weights and the parts, or nothing."""
    buffer, grad, grad_weights = buffer_of(handle.buffer_id), as_rows(grad), None
    if weighed:
        weights, *parts = weighed
        rows = parts[0]
        if not is_joined:
            rows, where = _rows_of(buffer, handle, parts, may_stay=may_fuse(buffer, grad), were=where)
        grad_x, grad_weights = weighed_gradients(buffer, grad, handle, rows, weights, repeats, where)
    else:
        grad_x, _, _ = dispatch_cached(buffer, grad, None, None, handle)
    return grad_weights, *((grad_x,) if is_joined else _split(grad_x, handle.num_rows_per_expert_list, leading))


# ---- the same in C++, where `_torch` was built: it calls back for what it declines ----


def _native(number: int) -> Any:
    buffer = live_buffers.get(number)
    return None if buffer is None else buffer._native()


def _handle_of(
    number: int, layout: str, expert_alignment: int, num_rows: int, num_tokens: int, memory: Tensor, numbers: Tensor
) -> PackedHandle:
    backend: Any = buffer_of(number)._alive()
    return PackedHandle(number, layout, expert_alignment, num_rows, backend.handle_shape(num_tokens, layout), memory, numbers)


def _native_dispatch_gradients(
    handle: tuple[Any, ...], repeats: int, grad_weights: Tensor | None, grads: list[Tensor], is_by_expert: bool
) -> tuple[Any, ...]:
    if is_by_expert:
        return _dispatch_by_expert_gradients(_handle_of(*handle), repeats, grad_weights, grads)
    along = _handle_of(*handle)
    values = None if grad_weights is None else as_rows(grad_weights)
    return combine(buffer_of(along.buffer_id), as_rows(grads[0]), None, None, values, along)


def _native_combine_gradients(
    handle: tuple[Any, ...], repeats: int, num_leading: int, grad: Tensor, weighed: list[Tensor]
) -> tuple[Any, ...]:
    is_joined = num_leading < 0
    return _combine_by_expert_gradients(_handle_of(*handle), repeats, (1,) * max(0, num_leading), grad, weighed, None, is_joined=is_joined)


if torch_module.MODULE is not None:
    torch_module.MODULE.set_hooks(plain=_native, dispatch_gradients=_native_dispatch_gradients, combine_gradients=_native_combine_gradients)
