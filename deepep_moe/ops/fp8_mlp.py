"""What `grouped_mlp` of fp8 rows does otherwise: both products, and all four of the backward, take fp8 (docs/design/fp8_training.md)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepep_moe.device import on_device
from deepep_moe.ops.fp8_kept import Fp8Copies
from deepep_moe.ops.fp8_products import (
    GROUP_ALIGNMENT,
    check_alignment,
    check_products,
    check_widths,
    grouped_fp8_product,
    grouped_fp8_weight_gradient,
    rescale_transpose,
)
from deepep_moe.ops.grouped_products import Groups, add_to
from deepep_moe.ops.quant import quantize_fp8, quantize_fp8_weights, quantize_fp8_weights_both
from deepep_moe.ops.quantized import QuantizedRows
from deepep_moe.ops.swiglu import readable_probs, swiglu, swiglu_backward

_GRADIENTS = (torch.float32, torch.bfloat16)
_Fp8 = tuple[Tensor, Tensor]  # values and scales


def check_fp8_mlp(x: QuantizedRows, counts: Tensor | Sequence[int], w1: Tensor, w2: Tensor, biases: Sequence[Tensor | None]) -> None:
    """Raise for arguments that fp8 products do not take."""
    check_products(x.device)
    check_widths(**{"inner, the rows of w1,": w1.shape[1], "out, the rows of w2,": w2.shape[1], "the columns of w2": w2.shape[2]})
    check_alignment("the number of rows", len(x))
    for name, weight in (("w1", w1), ("w2", w2)):
        if weight.dtype not in _GRADIENTS:
            raise TypeError(f"{name} has dtype {str(weight.dtype).removeprefix('torch.')}; fp8 experts take float32 or bfloat16 weights")
    if any(bias is not None for bias in biases):
        raise ValueError("b1 or b2 is given, but fp8 experts have no biases; leave them out, or switch fp8 off")
    if isinstance(counts, Tensor) and counts.is_cuda:
        return  # they are not waited for
    sizes = counts.tolist() if isinstance(counts, Tensor) else list(counts)
    if any(size % GROUP_ALIGNMENT for size in sizes):
        raise ValueError(
            f"counts is {sizes}; fp8 experts need multiples of {GROUP_ALIGNMENT}: dispatch with expert_alignment={GROUP_ALIGNMENT}"
        )


class Fp8Products:
    """The products of one weight in fp8. Rows and matrices have values and scales."""

    def __init__(self, copies: Fp8Copies | None, keeps: bool):
        """copies: the weight in fp8; None quantizes it here. keeps: the forward may save what only the backward needs."""
        self._copies, self._keeps = copies, keeps  # not saved: hooks that move saved tensors away would move copies that others use too

    def rows_of(self, x: Tensor) -> _Fp8:
        return (x.values, x.scales) if isinstance(x, QuantizedRows) else quantize_fp8(x.contiguous(), power_of_two=True)

    def gradients_of(self, grad: Tensor) -> _Fp8:
        if isinstance(grad, QuantizedRows) and grad.values.is_cuda:
            grad.record_stream_of(torch.cuda.current_stream(grad.values.device))  # autograd does it for tensors that have memory
        return self.rows_of(grad)

    def multiply(self, rows: _Fp8, w: Tensor, groups: Groups, has_backward: bool) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return the product, and the transposed weight if the backward is to use it: one kernel makes both forms."""
        if self._copies is None and self._keeps and has_backward:
            matrices, transposed = quantize_fp8_weights_both(w)
            return _product(rows, matrices, groups), transposed
        return _product(rows, quantize_fp8_weights(w) if self._copies is None else self._copies.plain, groups), ()

    def multiply_back(self, grads: _Fp8, w: Tensor, groups: Groups, saved: Sequence[Tensor]) -> Tensor:
        if self._copies is not None:
            return _product(grads, self._copies.transposed, groups)
        values, scales = saved or quantize_fp8_weights(w, transposed=True)
        return _product(grads, (values, scales), groups)

    def weight_gradient(self, grads: _Fp8, rows: _Fp8, w: Tensor, groups: Groups, into: Tensor | None = None) -> Tensor:
        out = torch.empty(w.shape, dtype=w.dtype, device=w.device)
        if len(rows[0]) == 0:
            return out.zero_()
        return add_to(into, grouped_fp8_weight_gradient(*rescale_transpose(*grads), *rescale_transpose(*rows), groups.offsets, out))

    def activated(self, act: Any, inner: Tensor, probs: Tensor | None, groups: Groups) -> _Fp8:
        if act is None and _swiglu_has_kernels(inner, probs):
            from deepep_moe.ops import fp8_row_kernels  # this imports Triton

            with on_device(inner):
                return fp8_row_kernels.swiglu_quantized(inner, readable_probs(probs), groups.offsets)
        return self.rows_of((swiglu if act is None else act.forward)(inner, probs, groups))

    def activated_back(
        self, act: Any, grad: Tensor, inner: Tensor, probs: Tensor | None, groups: Groups, rows: Any, needs_rows: bool
    ) -> tuple[Tensor, Tensor | None, Any]:
        if rows[0] is None and needs_rows:
            rows = self.activated(act, inner, probs, groups)
        if act is None and _swiglu_has_kernels(inner, probs):
            from deepep_moe.ops import fp8_row_kernels

            with on_device(inner):
                of_inner, grad_probs = fp8_row_kernels.swiglu_backward_quantized(grad, inner, readable_probs(probs), groups.offsets)
            return QuantizedRows(*of_inner), grad_probs, rows
        grad_inner, grad_probs, _ = (swiglu_backward if act is None else act.backward)(grad, inner, probs, groups, False)
        return grad_inner, grad_probs, rows


def _product(rows: _Fp8, matrices: _Fp8, groups: Groups) -> Tensor:
    if len(rows[0]) == 0:
        return rows[0].new_empty(0, matrices[0].shape[1], dtype=torch.bfloat16)
    return grouped_fp8_product(*rows, *matrices, groups.offsets)


def _swiglu_has_kernels(inner: Tensor, probs: Tensor | None) -> bool:
    return inner.is_cuda and (probs is None or probs.dtype == torch.float32)
