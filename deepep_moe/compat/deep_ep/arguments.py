"""DeepEP's arguments as `deepep_moe.Buffer` takes them."""

from typing import Any

import torch
from torch import Tensor

_DEFAULT_NUM_SMS = 20


def senders_of(num_sms: int) -> int | None:
    """Return the SMs that send, of DeepEP's number, half of which receive. None for its default: deepep_moe chooses."""
    return None if num_sms == _DEFAULT_NUM_SMS else max(1, num_sms // 2)


def rows_and_scales(x: Any) -> tuple[Tensor, Tensor | None]:
    """Return the rows and the scales of `x`, rows or a pair, without gradient. Raises TypeError for anything else. DeepEP's callers keep
    scales in column order, which `in_rows` turns, on the stream of the call."""
    x, x_scales = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, None)
    if not isinstance(x, Tensor) or not isinstance(x_scales, (Tensor, type(None))):
        given = type(x if not isinstance(x, Tensor) else x_scales).__name__
        raise TypeError(f"x holds a {given}; it must be a torch.Tensor, or a pair of fp8 rows and their scales")
    return detached(x), x_scales


def in_rows(x_scales: Tensor | None) -> Tensor | None:
    return None if x_scales is None else x_scales.contiguous()


def detached(tensor: Tensor) -> Tensor:
    """Return `tensor` without gradient: DeepEP's calls are not differentiable."""
    return tensor.detach() if tensor.requires_grad and torch.is_grad_enabled() else tensor


def one_bias(bias: Any) -> Tensor | None:
    """Return the bias of a combine, of DeepEP's tensor, pair of tensors, or None. A pair is added first, in its dtype."""
    if not isinstance(bias, (tuple, list)):
        return None if bias is None else detached(bias)
    there = [detached(part) for part in bias if part is not None]
    if len(bias) != 2:
        raise ValueError(f"bias has {len(bias)} tensors; it must be a tensor, a pair of them or None")
    return there[0] + there[1] if len(there) == 2 else there[0] if there else None
