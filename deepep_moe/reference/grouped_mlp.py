"""Definition of the experts' feed-forward networks on rows that are grouped by expert."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def grouped_mlp(
    x: Tensor,
    counts: Sequence[int],
    w1: Tensor,
    w2: Tensor,
    *,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    probs: Tensor | None = None,
    activation: str | Callable[[Tensor], Tensor] = "swiglu",
) -> Tensor:
    """Compute `deepep_moe.ops.grouped_mlp` expert by expert, for valid arguments only. Differentiable."""
    outputs, start = [], 0
    for expert, count in enumerate(counts):
        rows = slice(start, start + count)
        inner = x[rows] @ w1[expert].t()
        if b1 is not None:
            inner = inner + b1[expert]
        activated = swiglu(inner) if activation == "swiglu" else activation(inner)  # type: ignore[operator]
        output = times(activated, probs, rows) @ w2[expert].t()
        if b2 is not None:
            output = (output + (b2[expert] if probs is None else b2[expert] * probs[rows, None])).to(x.dtype)
        outputs.append(output)
        start += count
    return torch.cat([*outputs, x.new_zeros(len(x) - start, w2.shape[1])])


def swiglu(inner: Tensor) -> Tensor:
    gate, up = inner.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def times(values: Tensor, probs: Tensor | None, rows: slice) -> Tensor:
    return values if probs is None else (values * probs[rows, None]).to(values.dtype)
