"""Rows in a tensor for each local expert: found where they are, joined, split, and the gradients of their dispatch and combine."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepep_moe.device import is_lazy
from deepep_moe.exchange.backends.base import CombineArgs, Fusion
from deepep_moe.exchange.backward import watch_backward
from deepep_moe.exchange.calls import Calls, calls_of
from deepep_moe.exchange.handle import DispatchHandle
from deepep_moe.exchange.operators import as_rows, combine, dispatch_cached, may_fuse, scaled_gradients
from deepep_moe.library import is_watched


def rows_of(calls: Calls, handle: DispatchHandle, rows: Sequence[Tensor], *, may_stay: bool, found: Any = None) -> tuple[Tensor, Any]:
    """Return all rows, joined; or, where they may stay and kernels can read them there, the first expert's and `_torch.ExpertRows` of all.
    `found`: the `_torch.ExpertRows` of these rows before they were saved, which hold unless saving has moved them."""
    if may_stay and calls.capabilities.can_fuse and all(isinstance(row, Tensor) and not is_lazy(row) for row in rows):
        is_there = found is not None and found.lie_in(rows)
        expert_rows = found if is_there else calls.backend.expert_rows_of(rows, handle)  # type: ignore[attr-defined]
        if expert_rows is not None:
            return rows[0], expert_rows
    return calls.refuse_on_failure(_joined, rows, handle, calls.settings.hidden), None


def split_rows(rows: Tensor, counts: list[int], leading: tuple[int, ...]) -> tuple[Tensor, ...]:
    return torch.split_with_sizes(rows.view(*leading, *rows.shape) if leading else rows, counts, -2)


def _joined(rows: Sequence[Tensor], handle: DispatchHandle, hidden: int) -> Tensor:
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


def sharing(tokens_per_row: int, expert_rows: Any = None, source_weights: Tensor | None = None) -> Fusion | None:
    is_plain = tokens_per_row == 1 and expert_rows is None and source_weights is None
    return None if is_plain else Fusion(expert_rows, tokens_per_row, source_weights)


def dispatch_gradients(
    handle: DispatchHandle, tokens_per_row: int, grad_topk_weights: Tensor | None, grads: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x, whose rows `tokens_per_row` tokens share, and of topk_weights, if they were sent."""
    calls, is_plain = calls_of(handle.buffer_id), not torch.is_grad_enabled() and not is_watched(tuple(grads))
    rows, expert_rows = rows_of(calls, handle, grads, may_stay=is_plain)
    sent = None if grad_topk_weights is None else as_rows(grad_topk_weights)
    if is_plain:
        return calls.combine(CombineArgs(calls.own_mode, rows, None, None, sent, handle, sharing(tokens_per_row, expert_rows)))
    grad_x, grad_topk_weights = combine(calls, calls.own_mode, rows, None, None, sent, handle)
    return grad_x if tokens_per_row == 1 else grad_x.view(tokens_per_row, -1, grad_x.shape[1]).sum(0), grad_topk_weights


def combine_gradients(
    handle: DispatchHandle, tokens_per_row: int, leading: tuple[int, ...], grad: Tensor, scaled: Sequence[Tensor], found: Any, *,
    is_joined: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of weights, if there were some, and of rows, which are one tensor if they were joined. scaled: the weights and
    the rows, or nothing. found: as of `rows_of`."""
    calls, grad, grad_weights = calls_of(handle.buffer_id), as_rows(grad), None
    if scaled:
        weights, *rows = scaled
        x, expert_rows = rows[0], None
        if not is_joined:
            x, expert_rows = rows_of(calls, handle, rows, may_stay=may_fuse(calls, grad), found=found)
        grad_x, grad_weights = scaled_gradients(calls, grad, handle, x, weights, tokens_per_row, expert_rows)
    else:
        grad_x, _, _ = dispatch_cached(calls, calls.own_mode, grad, None, None, handle)
    watch_backward(calls)
    return grad_weights, *((grad_x,) if is_joined else split_rows(grad_x, handle.num_rows_per_expert_list, leading))
