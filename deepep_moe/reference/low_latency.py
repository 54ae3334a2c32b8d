"""Definition of low-latency dispatch and combine: those of `exchange`, in other places and formats."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepep_moe.reference import exchange
from deepep_moe.reference.exchange import Received
from deepep_moe.reference.quant import BLOCK, quantize_fp8


def dispatch(
    x: Sequence[Tensor], topk_idx: Sequence[Tensor], topk_weights: Sequence[Tensor] | None, num_experts: int, *, fp8: bool = False,
    is_rounded: bool = False,
) -> list[Received]:  # fmt: skip
    """Dispatch for all ranks, in the expert layout without padding: the first rows of each expert of a `LowLatencyOutput`, one after the
    other, with scales [num_rows, hidden / 128] fp32."""
    scales = None
    if fp8:
        rows = [(round_scales if is_rounded else quantize_fp8)(rows) for rows in x]
        x, scales = [y for y, _ in rows], [s for _, s in rows]
    weights = [torch.ones(idx.shape) for idx in topk_idx] if topk_weights is None else topk_weights
    return exchange.dispatch(x, topk_idx, weights, num_experts, x_scales=scales)


def round_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize as `quantize_fp8` does, with scales rounded up to powers of two. A block with NaN or infinity has an infinite scale
    (exponent 0xFF), zeros in its finite columns and NaN in the others."""
    _, scales = quantize_fp8(x)
    mantissas, exponents = scales.frexp()
    powers = torch.ldexp(torch.ones_like(scales), exponents - (mantissas == 0.5).int())
    scales = torch.where(scales.isfinite(), powers, torch.inf)
    y = x.float() / scales.repeat_interleave(BLOCK, dim=1)[:, : x.shape[1]]
    return y.clamp(-448, 448).to(torch.float8_e4m3fn), scales


def combine(
    x: Sequence[Tensor], received: Sequence[Received], num_tokens: Sequence[int], *, fp8: bool = False,
    topk_weights: Sequence[Tensor] | None = None, ranks_per_node: int | None = None, sums: str = "ranks",
) -> list[Tensor]:  # fmt: skip
    """Return the combine of all ranks for rows `x` [num_rows, hidden] in the order of `received`. Rows are weighted by its
    `recv_topk_weights`, or by `topk_weights` [num_tokens, num_topk] of the tokens' ranks, as if the dispatch had sent these.

    fp8: sums are quantized from fp32 when they are sent: an expert rank's sum, and a node's sum if the token is another node's.
    ranks_per_node, sums: the same as in `exchange.combine`.
    """
    weights = [there.recv_topk_weights for there in received if there.recv_topk_weights is not None]
    if topk_weights is not None:
        weights = [_weights_of_rows(there, topk_weights) for there in received]
    sums, rounded = ("ranks", _through_fp8) if fp8 else (sums, None)
    return exchange.combine(x, received, num_tokens, weights, ranks_per_node=ranks_per_node, sums=sums, rounded=rounded)


def _through_fp8(rows: Tensor) -> Tensor:
    y, scales = quantize_fp8(rows)
    return y.float() * scales.repeat_interleave(BLOCK, dim=1)


def _weights_of_rows(there: Received, topk_weights: Sequence[Tensor]) -> Tensor:
    weights = torch.zeros(len(there.recv_x))
    for (source, token), rows in zip(there.tokens, there.row_of_lane, strict=True):
        for lane, row in rows.items():
            weights[row] = topk_weights[source][token, lane]
    return weights
