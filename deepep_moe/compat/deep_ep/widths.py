"""Calls along a handle with rows of another width than its dispatch had. DeepEP takes the width from each call."""

from dataclasses import replace

import torch
from torch import Tensor

from deepep_moe.device import is_gpu
from deepep_moe.exchange import native
from deepep_moe.exchange.backends.base import CachedDispatchArgs, CombineArgs, CombineOptions
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.checks import check_beside_handle, check_cached_dispatch, check_combine, check_owner, check_tensors
from deepep_moe.exchange.handle import DispatchHandle, DispatchOutput
from deepep_moe.group.settings import Settings, one_by_one

_WORD = torch.float32  # rows of any dtype are sent as this one, as a dispatch copies bits; every row is a multiple of 16 bytes


def dispatch_along(
    buffer: Buffer, x: Tensor, x_scales: Tensor | None, handle: DispatchHandle, topk_weights: Tensor | None = None,
    num_sms: int | None = None, topk_idx: Tensor | None = None, return_hook: bool = False,
) -> DispatchOutput:  # fmt: skip
    """Dispatch along a handle of `buffer`, as its `dispatch` does: it refuses `topk_idx`. Rows of another width are sent as several rows of
    the buffer's width; then there is no second half, and `hook` is None. Raises the errors of `Buffer.dispatch`."""
    if not _is_of_another_width(buffer, x):
        return buffer.dispatch(x, topk_idx, topk_weights, x_scales=x_scales, handle=handle, num_sms=num_sms, return_hook=return_hook)
    buffer.calls.refuse_on_failure(_check_dispatch, buffer, x, x_scales, topk_weights, handle, topk_idx)
    num_words, num_scales = x.shape[1] * x.itemsize // _WORD.itemsize, 0 if x_scales is None else x_scales.shape[1]
    parts = buffer.calls.refuse_on_failure(lambda: _in_parts(_words(x, x_scales), buffer.hidden))
    outs = [buffer.dispatch(parts[0], None, topk_weights, handle=handle, num_sms=num_sms)]
    if len(parts) > 1:
        _hear_refusals(buffer, x)
    outs += [buffer.dispatch(part, None, handle=handle, num_sms=num_sms) for part in parts[1:]]
    recv = torch.cat([out.recv_x for out in outs], 1)
    recv_x = recv[:, :num_words].contiguous().view(x.dtype)
    recv_scales = None if x_scales is None else recv[:, num_words : num_words + num_scales].contiguous()
    return outs[0]._replace(recv_x=recv_x, recv_x_scales=recv_scales)


def combine_along(
    buffer: Buffer, x: Tensor, handle: DispatchHandle, lanes: Tensor | None = None, bias: Tensor | None = None, num_sms: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the sums and those of `lanes`, as `Buffer.combine` and `combine_with_lanes` do, of rows of any width. Raises what they
    raise."""
    if not _is_of_another_width(buffer, x):
        if lanes is None:
            return buffer.combine(x, handle, bias=bias, num_sms=num_sms), None
        return combine_with_lanes(buffer, x, handle, lanes, bias, num_sms)
    buffer.calls.refuse_on_failure(_check_combine, buffer, x, lanes, bias, handle)
    parts = buffer.calls.refuse_on_failure(_in_parts, x, buffer.hidden)
    biases: list[Tensor | None] = [None] * len(parts)
    if bias is not None:
        biases = list(buffer.calls.refuse_on_failure(_in_parts, bias, buffer.hidden))
    first, sums = combine_along(buffer, parts[0], handle, lanes, biases[0], num_sms)
    if len(parts) > 1:
        _hear_refusals(buffer, x)
    rest = [buffer.combine(part, handle, bias=added, num_sms=num_sms) for part, added in zip(parts[1:], biases[1:], strict=True)]
    return torch.cat([first, *rest], 1)[:, : x.shape[1]].contiguous(), sums


def combine_with_lanes(
    buffer: Buffer, x: Tensor, handle: DispatchHandle, lanes: Tensor, bias: Tensor | None = None, num_sms: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the rows' sum as `Buffer.combine` makes it, and the lanes' sums [num_tokens, num_topk] fp32. Collective, without gradient.

    lanes: fp32, the shape of recv_topk_weights: [num_rows] in the expert layout, [num_rows, num_topk] in the rank layout. Lane k of a
    token is summed over all ranks that received the token. recv_topk_weights thus come back unchanged, since they are 0 where another rank
    has the expert. Raises the errors of `Buffer.combine`.
    """
    calls = buffer.calls
    options = CombineOptions(sums_lanes=not calls.settings.is_by_lane)  # by lanes each has one row, so there is no sum
    output = native.combine_rows(calls, x, handle, None, bias, num_sms, lanes=lanes, options=options)
    if output is not None:
        sums = output.topk_weight_grads
        return output.combined_x, sums.view(-1, buffer.num_topk) if calls.settings.is_by_lane else sums
    mode = calls.mode_of(num_sms)
    calls.refuse_on_failure(check_tensors, x, is_operator=False, topk_weights=lanes, bias=bias)
    calls.refuse_on_failure(check_owner, handle, calls.number)
    combined_x, sums = calls.combine(CombineArgs(mode, x, None, bias, lanes, handle, options))
    assert sums is not None  # as lanes were given
    return combined_x, sums.view(-1, buffer.num_topk)


def _hear_refusals(buffer: Buffer, x: Tensor) -> None:
    """Raise a failure of the first part before other parts follow: a rank that refuses its arguments takes part in the first one only. The
    host must wait for the GPU to learn of it."""
    if is_gpu(x.device) and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(x.device).synchronize()
        buffer.check()


def _is_of_another_width(buffer: Buffer, x: Tensor) -> bool:
    return x.dim() == 2 and x.shape[1] != buffer.hidden and x.shape[1] > 0


def _as_wide_as(buffer: Buffer, x: Tensor) -> Settings:
    return replace(buffer.calls.settings, hidden=x.shape[1])


def _check_dispatch(
    buffer: Buffer, x: Tensor, x_scales: Tensor | None, topk_weights: Tensor | None, handle: DispatchHandle, topk_idx: Tensor | None
) -> None:
    check_beside_handle(handle, topk_idx, handle.layout, handle.expert_alignment, None)
    check_tensors(x, x_scales=x_scales, topk_weights=topk_weights)
    weights = one_by_one("topk_weights", topk_weights, len(x), buffer.calls.settings) if buffer.sums != "ranks" else topk_weights
    args = CachedDispatchArgs(buffer.calls.own_mode, x, x_scales, weights, handle)
    check_cached_dispatch(args, _as_wide_as(buffer, x))


def _check_combine(buffer: Buffer, x: Tensor, lanes: Tensor | None, bias: Tensor | None, handle: DispatchHandle) -> None:
    check_tensors(x, topk_weights=lanes, bias=bias)
    check_combine(CombineArgs(buffer.calls.own_mode, x, None, bias, lanes, handle), _as_wide_as(buffer, x))


def _words(x: Tensor, x_scales: Tensor | None) -> Tensor:
    """Return the bytes of each row, and those of its scales behind them."""
    if x.storage_offset() * x.itemsize % _WORD.itemsize:
        x = x.clone()
    return x.view(_WORD) if x_scales is None else torch.cat([x.view(_WORD), x_scales], 1)


def _in_parts(rows: Tensor, width: int) -> Tensor:
    """Return [num_parts, num_rows, width]: the columns of `rows` in groups of `width`, the last one filled up with zeros."""
    num_rows, num_columns = rows.shape
    num_parts = -(-num_columns // width)
    columns = rows.new_zeros(num_rows, num_parts * width)
    columns[:, :num_columns] = rows
    return columns.view(num_rows, num_parts, width).transpose(0, 1).contiguous()
