"""DeepEP's arguments as `deepep_moe.Buffer` takes them."""

from typing import Any

import torch
from torch import Tensor

from deepep_moe._C import SCALE_BLOCK
from deepep_moe.arguments import check_is_tensor
from deepep_moe.ops import ue8m0


def rows_and_scales(x: object) -> tuple[Tensor, Tensor | None]:
    """Return the rows [num_tokens, hidden] and the scales of `x`, rows or a pair, without gradient. DeepEP's callers keep scales in column
    order, which `in_rows` turns, on the stream of the call. Raises TypeError, or ValueError for rows of another shape."""
    x_scales = None
    if type(x) is not Tensor and isinstance(x, (tuple, list)) and len(x) == 2:
        x, x_scales = x
    if not isinstance(x, Tensor) or (x_scales is not None and not isinstance(x_scales, Tensor)):
        wrong = type(x if not isinstance(x, Tensor) else x_scales).__name__
        raise TypeError(f"x holds a {wrong}; it must be a torch.Tensor, or a pair of fp8 rows and their scales")
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [num_tokens, hidden]")
    if x_scales is not None and x_scales.dtype == torch.int32:
        shape = [len(x), ue8m0.num_words(_num_scales(x))]
        if list(x_scales.shape) != shape:
            raise ValueError(f"x_scales of int32 has shape {list(x_scales.shape)}; it must be {shape}, four exponents to a number")
    return detached(x), x_scales


def _num_scales(x: Tensor) -> int:
    return -(-x.shape[1] // SCALE_BLOCK)


def checked_routing(topk_idx: Tensor) -> Tensor:
    """Return `topk_idx` [num_tokens, num_topk]. Raises TypeError, or ValueError for another shape; the dispatch checks the rest."""
    check_is_tensor("topk_idx", topk_idx)
    if topk_idx.dim() != 2:
        raise ValueError(f"topk_idx has shape {list(topk_idx.shape)}; it must be [num_tokens, num_topk]")
    return topk_idx


def in_rows(x_scales: Tensor | None, x: Tensor) -> Tensor | None:
    """Return the scales of the rows `x` as they travel: fp32, row by row."""
    if x_scales is None:
        return None
    if x_scales.dtype == torch.int32:
        return ue8m0.unpack(x_scales.contiguous(), _num_scales(x))
    return x_scales.contiguous()


def as_given(recv_scales: Tensor | None, x_scales: Tensor | None) -> Tensor | None:
    """Return scales that were received in the format of those that were sent."""
    return recv_scales if recv_scales is None or x_scales is None or x_scales.dtype != torch.int32 else ue8m0.pack(recv_scales)


def detached(tensor: Tensor) -> Tensor:
    """Return `tensor` without gradient: DeepEP's calls are not differentiable."""
    return tensor.detach() if tensor.requires_grad and torch.is_grad_enabled() else tensor


def combine_arguments(x: Any, topk_weights: Any, bias: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the rows, the weights to come back and the bias of a combine, without gradient. Raises TypeError or ValueError for what is no
    tensor; the combine checks the rest. The biases of a pair are added first, in their dtype."""
    check_is_tensor("x", x)
    if topk_weights is not None:
        check_is_tensor("topk_weights", topk_weights)
        topk_weights = detached(topk_weights).contiguous()
    if bias is not None:
        pair = bias if isinstance(bias, (tuple, list)) else (bias, None)
        if len(pair) != 2:
            raise ValueError(f"bias has {len(pair)} tensors; it must be a tensor, a pair of them or None")
        there = [detached(part) for part in pair if part is not None]
        bias = there[0] + there[1] if len(there) == 2 else there[0] if there else None
    return detached(x), topk_weights, bias
