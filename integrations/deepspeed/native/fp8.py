"""The local experts of a MoE layer in products of fp8 rows, which a dispatch with `fp8="blockwise"` delivers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepep_moe.exchange.handle import DispatchOutput
from deepep_moe.integrations.common.untraced import untraced
from deepep_moe.integrations.deepspeed.expert_weights import ExpertWeights
from deepep_moe.integrations.deepspeed.native.grouped import stack
from deepep_moe.nn.balance import Parts, Product
from deepep_moe.ops.fp8_kept import KeptWeights, NothingKept
from deepep_moe.ops.fp8_products import check_products, check_widths
from deepep_moe.ops.grouped_mlp import grouped_mlp


def check_fp8(weights: Sequence[ExpertWeights], x: Tensor) -> None:
    """Check the weights of all experts, before tokens x [num_tokens, hidden] are sent to them.

    Raises TypeError or ValueError where experts or tokens cannot be served, BackendUnavailableError on a GPU without fp8 products.
    """
    check_products(x.device)
    if x.dtype != torch.bfloat16:
        raise TypeError(f"tokens have dtype {str(x.dtype).removeprefix('torch.')}, but fp8 experts take bfloat16; train in bf16")
    first = weights[0]
    if first.b1 is not None or first.b2 is not None:
        raise ValueError("fp8 is given, but the experts have biases; make them without, or leave fp8 out")
    check_widths(
        **{"the hidden size": x.shape[1], "the width of an expert": first.w2.shape[1], "inner, the rows of w1,": first.w1.shape[0]}
    )


@untraced
def fp8_parts(weights: Sequence[ExpertWeights]) -> Parts:
    """Return the matrices of all experts."""
    w1, w2 = (stack([getattr(expert, name) for expert in weights]) for name in ("w1", "w2"))
    assert w1 is not None and w2 is not None
    return Parts(w1, w2)


def fp8_product(weights: Sequence[ExpertWeights], kept: KeptWeights | None, is_first_microbatch: bool | None) -> Product:
    """Return what gives the experts' outputs [num_rows, hidden] bf16, times the weight of each row, for fp8 rows and weights. `kept` and
    `is_first_microbatch` are as in `grouped_mlp`; without copies False makes some."""

    def product(rows: tuple[Tensor, ...], counts: Tensor, parts: Parts, is_home: bool) -> Tensor:
        of_parts, is_first = kept if is_home else NothingKept(), is_first_microbatch
        if is_home and kept is not None and is_first is not None:
            if parts.up.data_ptr() != weights[0].w1.data_ptr() or parts.down.data_ptr() != weights[0].w2.data_ptr():
                kept.release()  # this forward has copied the weights to other memory than the last one
                is_first = None
            else:
                is_first = is_first or not kept.has(*parts)
        return grouped_mlp(
            rows[0], counts, *parts, probs=rows[1], activation=weights[0].activation, zero_tail=False, kept=of_parts,
            is_first_microbatch=is_first,
        )  # fmt: skip

    return product


@untraced
def run_fp8(
    weights: Sequence[ExpertWeights], out: DispatchOutput, kept: KeptWeights | None = None, is_first_microbatch: bool | None = None
) -> Tensor:
    """Run `fp8_product` on the rows of a dispatch. Experts of the buffer beyond `weights` have no rows."""
    counts = out.handle.num_rows_per_expert[: len(weights)]
    return fp8_product(weights, kept, is_first_microbatch)(weighted_rows(out), counts, fp8_parts(weights), True)


def weighted_rows(out: DispatchOutput) -> tuple[Tensor, Tensor]:
    """Return the rows of a dispatch and their weights."""
    assert out.recv_topk_weights is not None
    return out.recv_x, out.recv_topk_weights
