"""Rows by expert: dispatch and combine of a tensor for each local expert, which none of the four calls of a forward and a backward joins.

For layers whose experts run one by one. Calls that PyTorch traces go through the operators of `operators`, of all rows.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.device import readable
from deepep_moe.exchange.backends.base import CombineArgs, DispatchArgs
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.calls import Calls
from deepep_moe.exchange.checks import EXCHANGE
from deepep_moe.exchange.expert_rows import combine_gradients, dispatch_gradients, rows_of, sharing, split_rows
from deepep_moe.exchange.handle import DispatchHandle, PackedHandle
from deepep_moe.exchange.operators import combine, dispatch, keep_handle, kept, repeated
from deepep_moe.library import is_compiled, refuse_watchers
from deepep_moe.ops.weighted import weighted_sum


def dispatch_by_expert(
    buffer: Buffer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, leading: tuple[int, ...] = (),
    source_weights: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], Tensor | None, DispatchHandle]:  # fmt: skip
    """A dispatch in the expert layout without padding, with gradients, for experts that run one by one.

    x: [num_tokens, hidden]. topk_idx, topk_weights: [num_tokens, num_topk], in a buffer for as many.
    source_weights: [num_topk, num_tokens] fp32, in a buffer for top-1, instead of topk_weights: each expert of a token is a token of its
    own, topk_idx [num_topk * num_tokens, 1], and `combine_by_expert` weights and sums their rows where they come back.
    Returns the rows of each local expert, [*leading, num_rows, hidden] where `leading` are sizes of 1; recv_topk_weights [num_rows of
    all] or None; the handle. All ranks have gradients or none has: the backward is collective too.
    """
    calls, is_apart, tokens_per_row = buffer.calls, is_compiled((x, topk_idx, topk_weights)), 1
    if source_weights is not None:
        if not is_apart and calls.capabilities.can_fuse and len(source_weights) <= _C.MAX_TOPK:
            # They are sent: rows and weights get their gradients where the rows are.
            topk_weights, tokens_per_row = source_weights, len(source_weights)
        else:
            x = repeated(x, len(source_weights))
    if is_apart:
        recv_x, _, weights, handle = dispatch(calls, calls.own_mode, x, None, topk_idx, topk_weights, "expert", 1, -1)
        return split_rows(recv_x, handle.num_rows_per_expert_list, leading), weights, handle
    native = calls.native
    if native is not None:
        made = native.dispatch_by_expert(x, topk_idx, topk_weights, len(leading), tokens_per_row)
        if made is not None:
            return made.parts, made.recv_topk_weights, PackedHandle(made.handle)
    calls.refuse_on_failure(refuse_watchers, EXCHANGE, (x, topk_weights), is_operator=False)
    weights, handle, *rows = _DispatchByExpert.apply(x, topk_idx, topk_weights, calls, leading, tokens_per_row)
    return tuple(rows), weights, handle


def combine_by_expert(
    buffer: Buffer, rows: Sequence[Tensor], topk_weights: Tensor | None, handle: DispatchHandle, source_weights: Tensor | None = None
) -> Tensor:
    """A combine of such rows, after the experts, with gradients: combined_x [num_tokens, hidden].

    topk_weights: what the dispatch returned. source_weights: what it was given; the result is the `weighted_sum` of rows that come back as
    they are.

    rows: [..., num_rows, hidden] of each local expert. They are read where they are if the backend can and they are alike, contiguous
    and of the right shapes; else joined first. Raises TypeError and ValueError for what cannot be joined; the peers raise EPPeerError.
    """
    # All ranks must take the same branch here. So it may depend only on what the dispatch agreed on, and never on how the rows of this
    # rank's experts lie in memory.
    calls = buffer.calls
    is_weighted_after = source_weights is not None and topk_weights is None
    is_unusual = is_compiled((rows[0], topk_weights))
    is_apart = is_weighted_after or (source_weights is None and is_unusual)
    source = None if source_weights is None or is_apart else readable(source_weights.detach())
    native = None if is_unusual or is_apart else calls.native
    if native is not None and _is_by_expert(handle, calls):
        made = native.combine_by_expert(rows, topk_weights, source, handle)
        if made is not None:
            return made
    calls.refuse_on_failure(refuse_watchers, EXCHANGE, (*rows, topk_weights, source_weights), is_operator=is_apart)
    x, expert_rows = rows_of(calls, handle, rows, may_stay=not (is_apart or is_unusual))
    if is_apart:
        weights = topk_weights if source_weights is None else None
        combined_x, _ = combine(calls, calls.own_mode, x, weights, None, None, handle)
        return combined_x if source_weights is None else weighted_sum(combined_x.view(*source_weights.shape, buffer.hidden), source_weights)
    if expert_rows is not None:
        return _CombineByExpert.apply(topk_weights, calls, handle, expert_rows, source, *rows)
    return _CombineByExpert.apply(topk_weights, calls, handle, None, source, x.as_subclass(Tensor) if is_unusual else x)


def _is_by_expert(handle: DispatchHandle, calls: Calls) -> TypeGuard[PackedHandle]:
    """Does it have the rows of `dispatch_by_expert`, unchanged?"""
    is_own = isinstance(handle, PackedHandle) and handle.buffer_id == calls.number and handle.is_unchanged
    return is_own and handle.layout == "expert" and handle.expert_alignment == 1


class _Function(torch.autograd.Function):
    """For operations of many tensors. `torch.autograd.Function.apply` looks at each of them for transforms of torch.func; this does not."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class _DispatchByExpert(_Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, topk_idx: Tensor, topk_weights: Any, calls: Calls, leading: tuple[int, ...], tokens_per_row: int
    ) -> tuple[Any, ...]:
        ctx.weights_shape = None if topk_weights is None else topk_weights.shape
        if topk_weights is not None and topk_weights.shape != topk_idx.shape and topk_weights.numel() == topk_idx.numel():
            topk_weights = topk_weights.reshape(topk_idx.shape)  # lane by lane
        fusion = sharing(tokens_per_row)
        args = DispatchArgs(calls.own_mode, x, None, topk_idx, topk_weights, "expert", 1, -1, calls.number, fusion)
        rows, handle = calls.dispatch(args)
        ctx.num_rows, ctx.tokens_per_row = handle.num_rows, tokens_per_row
        keep_handle(ctx, handle)
        return rows.recv_topk_weights, handle, *split_rows(rows.recv_x, handle.num_rows_per_expert_list, leading)

    @staticmethod
    def backward(ctx: Any, grad_topk_weights: Any, _handle: Any, *grads: Tensor) -> tuple[Any, ...]:
        handle, _ = kept(ctx, ctx.num_rows)
        grad_x, grad_topk_weights = dispatch_gradients(handle, ctx.tokens_per_row, grad_topk_weights, grads)
        if grad_topk_weights is not None and grad_topk_weights.shape != ctx.weights_shape:
            grad_topk_weights = grad_topk_weights.view(ctx.weights_shape)
        return grad_x, None, grad_topk_weights, None, None, None


class _CombineByExpert(_Function):
    """`rows`: those of each expert, where `expert_rows` says; or all in one, without it."""

    @staticmethod
    def forward(
        ctx: Any, weights: Any, calls: Calls, handle: DispatchHandle, expert_rows: Any, source_weights: Any, *rows: Tensor
    ) -> Tensor:
        ctx.num_rows, ctx.leading, ctx.expert_rows = handle.num_rows, rows[0].shape[:-2], expert_rows
        ctx.tokens_per_row = 1 if source_weights is None else len(source_weights)
        keep_handle(ctx, handle, *(() if weights is None else (weights, *rows)))
        fusion = sharing(ctx.tokens_per_row, expert_rows, source_weights)
        return calls.combine(CombineArgs(calls.own_mode, rows[0], weights, None, None, handle, fusion))[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        handle, scaled = kept(ctx, ctx.num_rows)
        how = ctx.tokens_per_row, ctx.leading, grad, scaled, ctx.expert_rows
        grad_weights, *grads = combine_gradients(handle, *how, is_joined=ctx.expert_rows is None)
        return grad_weights, None, None, None, None, *grads
