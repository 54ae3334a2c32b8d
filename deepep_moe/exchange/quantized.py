"""Dispatch and combine of a layer whose experts compute in fp8: both send rows that are quantized once, at their source.

Dispatch quantizes x and delivers `QuantizedRows`, whose gradient is bf16. Combine moves bf16 rows, and its backward dispatches the gradient
as dispatch does x. docs/design/fp8_training.md has the arithmetic.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepep_moe.exchange import native
from deepep_moe.exchange.backends.base import CachedDispatchArgs, CombineArgs, DispatchArgs, Mode
from deepep_moe.exchange.backward import watch_backward
from deepep_moe.exchange.calls import Calls, calls_of
from deepep_moe.exchange.checks import check_beside_handle, check_blockwise, check_owner, check_routing, check_tensors
from deepep_moe.exchange.handle import DispatchHandle, DispatchOutput
from deepep_moe.exchange.operators import dispatch_gradients, given, keep, kept
from deepep_moe.library import needs_gradients
from deepep_moe.ops.quantized import QuantizedRows


@torch._disable_dynamo
def dispatch(
    calls: Calls, x: Tensor, topk_idx: Tensor | None, topk_weights: Tensor | None, *, x_scales: Tensor | None, layout: str,
    expert_alignment: int, handle: DispatchHandle | None, num_recv_rows: int | None, num_sms: int | None, async_op: bool,
    return_hook: bool,
) -> DispatchOutput:  # fmt: skip
    """Make `Buffer.dispatch` with `fp8="blockwise"`."""
    mode = calls.mode_of(num_sms, async_op, return_hook)
    calls.refuse_on_failure(check_tensors, x, is_operator=False, x_scales=x_scales, topk_idx=topk_idx, topk_weights=topk_weights)
    if handle is not None:
        calls.refuse_on_failure(check_owner, handle, calls.number)
        calls.refuse_on_failure(check_beside_handle, handle, topk_idx, layout, expert_alignment, num_recv_rows)
        how: Any = handle.layout, handle.expert_alignment, None
    else:
        how = calls.refuse_on_failure(check_routing, topk_idx, layout, expert_alignment, num_recv_rows)
    calls.refuse_on_failure(check_blockwise, x, x_scales, *how[:2], how[2] if handle is None else handle.num_rows)
    sent = calls.refuse_on_failure(QuantizedRows.of, x)
    args = x, topk_weights, topk_idx, sent, calls, mode, handle, how
    recv_x, weights, made = _Dispatch.apply(*args) if needs_gradients((x, topk_weights)) else _send(*args)
    event = calls.event(mode, x)
    hook = event.wait if event is not None and return_hook else None
    return DispatchOutput(recv_x, recv_x.scales, None, weights, made.num_recv_tokens_per_expert, made, event, hook)


@torch._disable_dynamo
def combine(
    calls: Calls, x: Tensor, handle: DispatchHandle, topk_weights: Tensor | None, bias: Tensor | None, num_sms: int | None,
    async_op: bool, return_hook: bool,
) -> Any:  # fmt: skip
    """Make `Buffer.combine` with `fp8="blockwise"`."""
    mode = calls.mode_of(num_sms, async_op, return_hook)
    calls.refuse_on_failure(check_tensors, x, is_operator=False, topk_weights=topk_weights, bias=bias)
    calls.refuse_on_failure(check_owner, handle, calls.number)
    calls.refuse_on_failure(_check_combine, x, topk_weights, handle)
    args = x, bias, calls, mode, handle
    combined_x = _Combine.apply(*args) if needs_gradients((x, bias)) else _bring_back(*args)
    event = calls.event(mode, x)
    if event is None:
        return combined_x
    return combined_x, event.wait if return_hook else event


def _check_combine(x: Tensor, topk_weights: Tensor | None, handle: DispatchHandle) -> None:
    if topk_weights is not None:
        raise ValueError('topk_weights and fp8="blockwise" were both given; let the experts apply the weights, as `probs` of grouped_mlp')
    check_blockwise(x, None, handle.layout, handle.expert_alignment, handle.num_rows)


def _send(
    _x: Tensor, topk_weights: Tensor | None, topk_idx: Any, sent: QuantizedRows, calls: Calls, mode: Mode, handle: DispatchHandle | None,
    how: Any,
) -> tuple[QuantizedRows, Tensor | None, DispatchHandle]:  # fmt: skip
    if (made := _send_in_cpp(topk_weights, topk_idx, sent, calls, mode, handle, how)) is not None:
        assert made.recv_x_scales is not None  # they were sent
        return QuantizedRows(made.recv_x, made.recv_x_scales), made.recv_topk_weights, made.handle
    if handle is None:
        layout, alignment, bound = how
        rows, handle = calls.dispatch(
            DispatchArgs(
                mode, sent.values, sent.scales, topk_idx, topk_weights, layout, alignment, -1 if bound is None else bound, calls.number
            )
        )
    else:
        rows = calls.dispatch_cached(CachedDispatchArgs(mode, sent.values, sent.scales, topk_weights, handle))
    assert rows.recv_x_scales is not None  # they were sent
    return QuantizedRows(rows.recv_x, rows.recv_x_scales), rows.recv_topk_weights, handle


def _send_in_cpp(
    topk_weights: Tensor | None, topk_idx: Any, sent: QuantizedRows, calls: Calls, mode: Mode, handle: DispatchHandle | None, how: Any
) -> DispatchOutput | None:
    """See `deepep_moe.exchange.native`. Gradients are this module's, so there is none to be made here."""
    weights = None if topk_weights is None else topk_weights.detach()
    runs = mode.num_sms, mode.is_async, mode.is_split
    if handle is None:
        layout, alignment, bound = how
        return native.dispatch(calls, sent.values, sent.scales, topk_idx, weights, layout, alignment, bound, *runs)
    return native.dispatch_along(calls, sent.values, sent.scales, weights, handle, *runs)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Any, ...]:
        recv_x, weights, handle = _send(*args)
        keep(ctx, handle, recv_x, weights)
        return recv_x, weights, handle

    @staticmethod
    def backward(ctx: Any, grad_recv_x: Any, grad_recv_topk_weights: Any, _handle: Any) -> tuple[Any, ...]:
        return *dispatch_gradients(ctx, grad_recv_x, grad_recv_topk_weights), *[None] * 6


def _bring_back(x: Tensor, bias: Tensor | None, calls: Calls, mode: Mode, handle: DispatchHandle) -> Tensor:
    plain = x.detach(), handle, None, None if bias is None else bias.detach()
    if (made := native.combine_rows(calls, *plain, mode.num_sms, mode.is_async, mode.is_split)) is not None:
        return made.combined_x
    return calls.combine(CombineArgs(mode, x, None, bias, None, handle))[0]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, calls: Calls, mode: Mode, handle: DispatchHandle) -> Tensor:
        combined_x = _bring_back(x, bias, calls, mode, handle)
        ctx.num_rows, ctx.with_bias = handle.num_rows, bias is not None
        keep(ctx, handle, combined_x, None)
        return combined_x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        rows, _ = given(ctx, grad, None)
        handle, _ = kept(ctx, ctx.num_rows)
        calls = calls_of(handle.buffer_id)
        sent = calls.refuse_on_failure(QuantizedRows.of, rows)
        received, _, _ = _send(rows, None, None, sent, calls, calls.own_mode, handle, None)
        watch_backward(calls)
        return received, rows if ctx.with_bias else None, None, None, None
