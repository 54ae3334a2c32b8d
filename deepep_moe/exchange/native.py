"""Calls on GPUs: `deepep_moe._torch` (csrc/torch) makes them in one step, gradients included.

It declines a call with an unsupported argument, and a call that PyTorch watches; the functions here then return None. Python then raises
the error, or makes the call another way.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from deepep_moe import torch_module
from deepep_moe.errors import BufferDestroyedError, BufferSuspendedError
from deepep_moe.event import Event
from deepep_moe.exchange import operators
from deepep_moe.exchange.backends.base import LAYOUTS, CachedDispatchArgs, CombineOptions
from deepep_moe.exchange.calls import Calls, calls_of, watch_backward
from deepep_moe.exchange.checks import MAX_ALIGNMENT, check_owner
from deepep_moe.exchange.handle import DispatchHandle, DispatchOutput, PackedHandle
from deepep_moe.exchange.operators import as_rows, combine, joined, scaled_gradients
from deepep_moe.group.settings import MAX_NUMBER

_PLAIN = CombineOptions()


def dispatch(
    calls: Calls, x: Tensor, x_scales: Tensor | None, topk_idx: Tensor | None, topk_weights: Tensor | None, layout: str,
    expert_alignment: int, num_recv_rows: int | None, num_sms: int | None, async_op: bool, return_hook: bool, layer: int, is_late: bool,
) -> DispatchOutput | None:  # fmt: skip
    """Make a dispatch with fresh routing. is_late: the host need not look at the counts before it returns."""
    bound = -1 if num_recv_rows is None else num_recv_rows
    if calls.native is None or topk_idx is None or layout not in LAYOUTS or type(expert_alignment) is not int or type(bound) is not int:
        return None
    is_async = bool(async_op or return_hook)
    is_late = is_late and not is_async and layout == "expert" and not _are_saved_tensors_watched()
    mode = mode_of(num_sms, async_op, return_hook, layer, is_late)
    if mode is None or not 1 <= expert_alignment <= MAX_ALIGNMENT or not -1 <= bound <= MAX_NUMBER or num_recv_rows == -1:
        return None
    how = layout == "expert", expert_alignment, bound, mode
    output = calls.make("dispatch", x, x_scales, topk_idx, topk_weights, *how, waits=num_recv_rows is None, is_async=is_async)
    return _output(output, None, x_scales, topk_weights, calls.in_flight if is_async else None, return_hook)


def dispatch_along(
    calls: Calls, x: Tensor, x_scales: Tensor | None, topk_weights: Tensor | None, handle: DispatchHandle, num_sms: int | None,
    async_op: bool = False, return_hook: bool = False,
) -> DispatchOutput | None:  # fmt: skip
    """Make a dispatch along a handle."""
    if calls.native is None or (mode := mode_of(num_sms, async_op, return_hook)) is None:
        return None
    is_async = bool(async_op or return_hook)
    output = calls.make("dispatch_cached", x, x_scales, topk_weights, handle, None, None, mode, handle=handle, is_async=is_async)
    return _output(output, handle, x_scales, topk_weights, calls.in_flight if is_async else None, return_hook)


def settle(calls: Calls, output: DispatchOutput) -> DispatchOutput:
    """Do what `Buffer.settle` does."""
    handle = output.handle
    check_owner(handle, calls.number)
    if calls.is_destroyed:
        raise BufferDestroyedError("the buffer was destroyed before the rows of this dispatch were counted")
    if calls.is_suspended:
        raise BufferSuspendedError("the buffer was suspended before the rows of this dispatch were counted; settle them before")
    settled = calls.native.settle(handle.native) if handle.is_late and calls.native is not None else None
    return _output(settled, handle, output.recv_x_scales, output.recv_topk_weights, None, False) or output


def _output(
    native_output: Any, along: DispatchHandle | None, x_scales: object, topk_weights: object, event: Event | None, return_hook: bool
) -> DispatchOutput | None:
    """Return the output of a call, which may have gone `along` a handle; None if it was declined. Attributes of C++ objects are slow to
    read, so those that were not sent are not read."""
    if native_output is None:
        return None
    handle = PackedHandle(native_output.handle) if along is None else along
    scales = None if x_scales is None else native_output.recv_x_scales
    weights = None if topk_weights is None else native_output.recv_topk_weights
    hook = event.wait if return_hook and event is not None else None
    idx = handle.recv_topk_idx if handle.layout == "rank" else None
    return DispatchOutput(native_output.recv_x, scales, idx, weights, handle.num_recv_tokens_per_expert, handle, event, hook)


def combine_rows(
    calls: Calls, x: Tensor, handle: DispatchHandle, topk_weights: Tensor | None, bias: Tensor | None, num_sms: int | None,
    async_op: bool = False, return_hook: bool = False, *, lanes: Tensor | None = None, options: CombineOptions = _PLAIN,
) -> Any:  # fmt: skip
    """Make a combine, and return `_torch.Combined`. `lanes` of top-k come back beside the rows, without gradient."""
    if calls.native is None or (mode := mode_of(num_sms, async_op, return_hook)) is None:
        return None
    how = lanes, options, mode
    return calls.make("combine", x, handle, topk_weights, bias, *how, handle=handle, is_async=bool(async_op or return_hook))


def _are_saved_tensors_watched() -> bool:
    """Return whether somebody counts on each forward saving the same tensors, as PyTorch's checkpoints do."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def mode_of(num_sms: object, async_op: object = False, return_hook: object = False, layer: object = 0, is_late: bool = False) -> Any:
    """Return `_torch.Mode`, or None if an argument has a wrong type or value."""
    if num_sms is None:
        num_sms = -1
    elif type(num_sms) is not int or not 0 <= num_sms <= MAX_NUMBER:
        return None
    if type(layer) is not int or not 0 <= layer <= MAX_NUMBER:
        return None
    return _mode_of(num_sms, bool(async_op), bool(return_hook), layer, is_late)


@lru_cache(1024)
def _mode_of(num_sms: int, is_async: bool, is_split: bool, layer: int, is_late: bool) -> Any:
    return torch_module.needed().Mode(num_sms, is_async, is_split, layer, is_late)


# ---- gradients that C++ declines, such as those of higher order or under a mode ----


def dispatch_gradients(
    native: object, tokens_per_row: int, grad_weights: Tensor | None, grads: list[Tensor], is_by_expert: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and, if they were sent, of topk_weights. `tokens_per_row` tokens share each row of x."""
    handle = PackedHandle(native)
    calls, sent = calls_of(handle.buffer_id), None if grad_weights is None else as_rows(grad_weights)
    rows = calls.refuse_on_failure(joined, grads, handle, calls.settings.hidden) if is_by_expert else as_rows(grads[0])
    grad_x, grad_topk_weights = combine(calls, calls.own_mode, rows, None, None, sent, handle)
    return grad_x if tokens_per_row == 1 else grad_x.view(tokens_per_row, -1, grad_x.shape[1]).sum(0), grad_topk_weights


def combine_gradients(
    native: object, tokens_per_row: int, num_leading: int, grad: Tensor, scaled: list[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of weights, or None, and of rows. num_leading: see csrc/torch/functions.h; -1 means all rows in one tensor.
    scaled: the weights and the rows; empty without weights."""
    handle, grad_weights, rows = PackedHandle(native), None, as_rows(grad)
    calls = calls_of(handle.buffer_id)
    if scaled:
        weights, *parts = scaled
        x = parts[0] if num_leading < 0 else calls.refuse_on_failure(joined, parts, handle, calls.settings.hidden)
        grad_x, grad_weights = scaled_gradients(calls, rows, handle, x, weights, tokens_per_row)
    else:
        grad_x, *_ = operators.dispatch(calls, CachedDispatchArgs(calls.own_mode, rows, None, None, handle))
    watch_backward(calls)
    if num_leading < 0:
        return grad_weights, grad_x
    shaped = grad_x.view(*(1,) * num_leading, *grad_x.shape)
    return grad_weights, *torch.split_with_sizes(shaped, handle.num_rows_per_expert_list, -2)
