"""Plain calls from C++, where the module that links PyTorch is there: the same bits, and less work for the host.

`_torch.Calls` (csrc/torch) makes a call in one step, gradients included, if everything about it is plain. It declines the others, for which
these functions return None. Python then makes the call, and says what is wrong with it.
"""

from typing import Any

from torch import Tensor

from deepep_moe import torch_module
from deepep_moe.device import call_stream
from deepep_moe.exchange import expert_rows
from deepep_moe.exchange.backends.base import LAYOUTS
from deepep_moe.exchange.backward import pass_failed
from deepep_moe.exchange.calls import Calls, calls_of, live_calls
from deepep_moe.exchange.checks import MAX_ALIGNMENT
from deepep_moe.exchange.handle import DispatchHandle, DispatchOutput, HandleShape, PackedHandle
from deepep_moe.exchange.operators import as_rows, combine
from deepep_moe.group.settings import MAX_NUMBER


def dispatch(
    calls: Calls, x: Tensor, x_scales: Tensor | None, topk_idx: Tensor | None, topk_weights: Tensor | None, layout: str,
    expert_alignment: int, num_recv_rows: int | None, num_sms: int | None,
) -> DispatchOutput | None:  # fmt: skip
    """Make a dispatch with fresh routing."""
    native, bound = calls.native, 0 if num_recv_rows is None else num_recv_rows
    if native is None or topk_idx is None or layout not in LAYOUTS or type(expert_alignment) is not int or type(bound) is not int:
        return None
    if not 1 <= expert_alignment <= MAX_ALIGNMENT or not 0 <= bound <= MAX_NUMBER or not _is_plain(num_sms):
        return None
    bound, senders = -1 if num_recv_rows is None else bound, -1 if num_sms is None else num_sms
    made = native.dispatch(x, x_scales, topk_idx, topk_weights, layout == "expert", expert_alignment, bound, senders)
    if made is None:
        return None
    recv_x, scales, recv_topk_idx, weights, counts, shape, num_rows, memory, numbers = made
    handle = PackedHandle(calls.number, layout, expert_alignment, num_rows, shape, memory, numbers)
    handle.complete(num_rows, recv_topk_idx, call_stream(x.device))
    handle.__dict__["num_recv_tokens_per_expert"] = counts
    handle.seal()
    return DispatchOutput(recv_x, scales, recv_topk_idx, weights, counts, handle, None, None)


def dispatch_along(
    calls: Calls, x: Tensor, x_scales: Tensor | None, topk_weights: Tensor | None, handle: DispatchHandle, num_sms: int | None
) -> DispatchOutput | None:
    """Make a dispatch along a handle."""
    native = calls.native
    if native is None or not _is_plain(num_sms) or not _is_on_stream(handle, x) or not handle.has_recv_topk_idx:
        return None
    made = native.dispatch_cached(x, x_scales, topk_weights, handle, -1 if num_sms is None else num_sms)
    if made is None:
        return None
    recv_x, scales, weights = made
    return DispatchOutput(recv_x, scales, handle.recv_topk_idx, weights, handle.num_recv_tokens_per_expert, handle, None, None)


def combine_rows(
    calls: Calls, x: Tensor, handle: DispatchHandle, topk_weights: Tensor | None, bias: Tensor | None, num_sms: int | None
) -> Tensor | None:
    """Make a combine of all rows in one tensor."""
    native = calls.native
    if native is None or not _is_plain(num_sms) or not _is_on_stream(handle, x):
        return None
    return native.combine(x, handle, topk_weights, bias, -1 if num_sms is None else num_sms)


def combine_with_lanes(
    calls: Calls, x: Tensor, handle: DispatchHandle, lanes: Tensor, bias: Tensor | None, num_sms: int | None
) -> tuple[Tensor, Tensor] | None:
    """Make a combine that sums lanes of top-k beside the rows, without gradient."""
    native = calls.native
    if native is None or not _is_plain(num_sms) or not _is_on_stream(handle, x):
        return None
    return native.combine_with_lanes(x, handle, lanes, bias, -1 if num_sms is None else num_sms)


def _is_plain(num_sms: Any) -> bool:
    return num_sms is None or (type(num_sms) is int and num_sms >= 0)


def _is_on_stream(handle: DispatchHandle, x: Any) -> bool:
    """Is the handle as it was made, and the call on its dispatch's stream, so that its memory need not be protected?"""
    if not isinstance(handle, PackedHandle) or not isinstance(x, Tensor):
        return False
    return handle.is_unchanged and handle.stream in (None, call_stream(x.device))


# ---- what C++ calls: it declines gradients too, of higher order or of tensors that kernels cannot read ----


def _native(number: int) -> Any:
    calls = live_calls.get(number)
    return None if calls is None else calls.native


def _handle_of(
    number: int, layout: str, expert_alignment: int, num_rows: int, num_tokens: int, memory: Tensor, numbers: Tensor
) -> PackedHandle:
    shape = HandleShape.of(calls_of(number).settings, num_tokens, layout)
    handle = PackedHandle(number, layout, expert_alignment, num_rows, shape, memory, numbers)
    handle.seal()
    return handle


def _dispatch_gradients(
    handle: tuple[Any, ...], tokens_per_row: int, grad_weights: Tensor | None, grads: list[Tensor], is_by_expert: bool
) -> tuple[Any, ...]:
    """Return the gradients of x and of topk_weights, of rows by expert or of all rows in one tensor."""
    along = _handle_of(*handle)
    if is_by_expert:
        return expert_rows.dispatch_gradients(along, tokens_per_row, grad_weights, grads)
    calls, sent = calls_of(along.buffer_id), None if grad_weights is None else as_rows(grad_weights)
    return combine(calls, calls.own_mode, as_rows(grads[0]), None, None, sent, along)


def _combine_gradients(
    handle: tuple[Any, ...], tokens_per_row: int, num_leading: int, grad: Tensor, scaled: list[Tensor]
) -> tuple[Any, ...]:
    """Return the gradients of weights and of rows; num_leading: as csrc/torch/functions.h has it, -1 for all rows in one tensor."""
    leading, is_joined = (1,) * max(0, num_leading), num_leading < 0
    return expert_rows.combine_gradients(_handle_of(*handle), tokens_per_row, leading, grad, scaled, None, is_joined=is_joined)


if torch_module.MODULE is not None:
    torch_module.MODULE.set_hooks(
        plain=_native, pass_failed=pass_failed, dispatch_gradients=_dispatch_gradients, combine_gradients=_combine_gradients
    )
