"""Rows by expert: dispatch into, and combine from, one tensor per local expert. On GPUs neither forward nor backward concatenates them.

For layers whose experts run one by one. Calls that C++ declines use `operators`, with all rows in one tensor.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.device import is_lazy, readable
from deepep_moe.exchange.backends.base import DispatchArgs
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.calls import Calls
from deepep_moe.exchange.checks import EXCHANGE, check_source_weights
from deepep_moe.exchange.handle import DispatchHandle, PackedHandle
from deepep_moe.exchange.native import mode_of
from deepep_moe.exchange.operators import combine, dispatch, joined
from deepep_moe.library import Context, Function, is_compiled, is_watched, refuse_watchers, unwatched
from deepep_moe.ops.weighted import repeated, weighted_sum


def dispatch_by_expert(
    buffer: Buffer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, leading: tuple[int, ...] = (),
    source_weights: Tensor | None = None, layer: int = 0,
) -> tuple[tuple[Tensor, ...], Tensor | None, DispatchHandle]:  # fmt: skip
    """Dispatch in the expert layout without padding, with gradients, for experts that run one by one.

    x: [num_tokens, hidden]. topk_idx, topk_weights: [num_tokens, num_topk]; the buffer has the same num_topk.
    source_weights: [num_topk, num_tokens] fp32, instead of topk_weights, in a buffer for top-1. Each (lane, token) is then sent as a
    token with one expert, topk_idx [num_topk * num_tokens, 1]. `combine_by_expert` weights and sums the rows on the token's rank.
    layer: the same as in `Buffer.dispatch`.
    Returns the rows of each local expert, [*leading, num_rows, hidden], where `leading` are sizes of 1; recv_topk_weights [rows of all
    experts] or None; the handle. All ranks must need gradients, or none: the backward is collective too.
    """
    calls, num_shared = buffer.calls, 1 if source_weights is None else len(source_weights)
    if source_weights is not None and buffer.num_topk != 1:
        raise calls.refuse(ValueError(f"source_weights were given in a buffer for top-{buffer.num_topk}; they need one for top-1"))
    native = None if is_compiled((x, topk_idx, topk_weights)) else calls.native
    if native is not None and source_weights is not None:
        if native.can_fuse and num_shared <= _C.MAX_TOPK:
            # The weights are sent, so the experts' rank computes the gradients of rows and weights.
            calls.refuse_on_failure(check_source_weights, source_weights, x)
            topk_weights = source_weights.as_subclass(Tensor)
        else:
            native = None
    if native is not None:
        tensors = x, topk_idx, topk_weights
        mode = mode_of(None, layer=layer)
        make = partial(calls.make, "dispatch_by_expert", *tensors, len(leading), num_shared, mode, waits=True)
        if mode is not None and (output := _unseen(calls, tensors, make)) is not None:
            return output.parts, output.recv_topk_weights, PackedHandle(output.handle)
        if topk_weights is not None and source_weights is not None:
            topk_weights = topk_weights.reshape(-1, 1)
    x, how = repeated(x, num_shared), calls.mode_of(None, layer=layer)
    recv_x, _, weights, handle = dispatch(calls, DispatchArgs(how, x, None, topk_idx, topk_weights, "expert", 1, -1, calls.number))
    return Split.apply(recv_x, handle.num_rows_per_expert_list, leading), weights, handle


def combine_by_expert(
    buffer: Buffer, rows: Sequence[Tensor], topk_weights: Tensor | None, handle: DispatchHandle, source_weights: Tensor | None = None
) -> Tensor:
    """Combine the experts' outputs, with gradients. Return combined_x [num_tokens, hidden].

    topk_weights: the weights that the dispatch returned. source_weights: those passed to the dispatch; rows then come back unweighted,
    and the result is their `weighted_sum`.

    rows: [..., num_rows, hidden] of each local expert. Kernels read them in place if all are contiguous, of one dtype and of the right
    shapes; otherwise they are joined first. Raises TypeError or ValueError if they cannot be joined; the peers raise EPPeerError.
    """
    calls = buffer.calls
    were_sent = source_weights is not None and topk_weights is not None
    if calls.native is not None and (were_sent or (source_weights is None and not is_compiled((rows[0], topk_weights)))):
        source = None if source_weights is None else readable(source_weights.detach().as_subclass(Tensor))
        tensors, make = (*rows, topk_weights), partial(calls.make, "combine_by_expert", handle=handle)
        output = _unseen(calls, tensors, partial(make, rows, False, topk_weights, source, handle))
        if output is None and were_sent:  # peers expect rows to be weighted at the source, so this rank cannot take another path
            x = calls.refuse_on_failure(joined, rows, handle, buffer.hidden).as_subclass(Tensor)
            weights = topk_weights.as_subclass(Tensor)  # type: ignore[union-attr]
            output = _unseen(calls, (x, weights), partial(make, [x], True, weights, source, handle))
            if output is None:
                raise calls.refuse(ValueError("rows by expert, or their weights, are not those of this handle on this GPU"))
        if output is not None:
            combined_x: Tensor = output.combined_x
            return combined_x
    calls.refuse_on_failure(refuse_watchers, EXCHANGE, (*rows, topk_weights, source_weights))
    x = calls.refuse_on_failure(joined, rows, handle, buffer.hidden)
    weights = topk_weights if source_weights is None else None
    combined_x, _ = combine(calls, calls.own_mode, x, weights, None, None, handle)
    return combined_x if source_weights is None else weighted_sum(combined_x.view(*source_weights.shape, buffer.hidden), source_weights)


def split_rows(rows: Tensor, counts: list[int], leading: tuple[int, ...]) -> tuple[Tensor, ...]:
    return torch.split_with_sizes(rows.view(*leading, *rows.shape) if leading else rows, counts, -2)


def rows_of_all(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts [..., num_rows, hidden], without gradient: a view, if they lie one behind another in one memory, else a
    copy."""
    hidden, filled = parts[0].shape[-1], [part for part in parts if part.numel()]
    if len(filled) < 2:
        return (filled or parts)[0].reshape(-1, hidden)
    memory, end = filled[0].untyped_storage().data_ptr(), filled[0].data_ptr()
    for part in filled:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != memory or not part.is_contiguous():
            return torch.cat([rows.reshape(-1, hidden) for rows in filled])
        end += part.numel() * part.element_size()
    num_rows = sum(part.shape[-2] for part in filled)
    return filled[0].detach().as_strided((num_rows, hidden), (hidden, 1))


class Split(Function):
    """`split_rows` with gradients that may be sparse; the backward of PyTorch's split cannot join sparse ones."""

    @staticmethod
    def forward(_ctx: Context, rows: Tensor, counts: list[int], leading: tuple[int, ...]) -> tuple[Tensor, ...]:
        return split_rows(rows, counts, leading)

    @staticmethod
    def backward(_ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dense = [grad if grad.layout is torch.strided else grad.to_dense() for grad in grads]
        if torch.is_grad_enabled() or any(map(is_lazy, dense)):
            return torch.cat([grad.reshape(-1, grad.shape[-1]) for grad in dense]), None, None
        return rows_of_all(dense), None, None


def _unseen(calls: Calls, tensors: Sequence[Tensor | None], make: Callable[[], object]) -> Any:
    """Return `make()`, hidden from dispatch modes: a mode may watch this rank only, but all ranks must make the same call."""
    output = make()
    if output is not None or not all(isinstance(tensor, Tensor) or tensor is None for tensor in tensors) or not is_watched(tensors):
        return output
    calls.refuse_on_failure(refuse_watchers, EXCHANGE, tensors, is_operator=False)
    with unwatched():
        return make()
