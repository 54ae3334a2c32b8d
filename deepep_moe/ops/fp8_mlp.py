"""`grouped_mlp` of fp8 rows: both products, and all four of the backward, take fp8 (docs/design/fp8_training.md)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from deepep_moe.device import on_device
from deepep_moe.library import Context, Function
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
from deepep_moe.ops.swiglu import swiglu, swiglu_backward

_GRADIENTS = (torch.float32, torch.bfloat16)
_Fp8 = tuple[Tensor, Tensor]  # values and scales


@_disable_dynamo
def fp8_mlp(
    x: QuantizedRows, counts: Tensor | Sequence[int], w1: Tensor, w2: Tensor, probs: Tensor | None, act: object,
    recompute: bool, zero_tail: bool, makers: "Sequence[WeightGradient]", copies: Sequence[Fp8Copies] | None,
) -> Tensor:  # fmt: skip
    """Do what `grouped_mlp` documents; it has checked the shapes. The activation `act` is an object with `forward` and `backward`, None for
    SwiGLU. The `makers` make the gradients of w1 and w2. The `copies` are w1 and w2 in fp8; None quantizes them here."""
    groups = Groups(counts, len(w1), x)
    keeps = torch.is_grad_enabled() and not recompute
    first, second = copies or (None, None)
    inner = _Linear.apply(x, w1, groups, first, keeps and x.requires_grad, zero_tail, makers[0])
    keeps = keeps and inner.requires_grad
    y: Tensor = _ActivatedLinear.apply(inner, probs, w2, groups, second, act, recompute, keeps, zero_tail, makers[1])
    return y


@_disable_dynamo
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


def _product(rows: _Fp8, matrices: _Fp8, groups: Groups) -> Tensor:
    if len(rows[0]) == 0:
        return rows[0].new_empty(0, matrices[0].shape[1], dtype=torch.bfloat16)
    return grouped_fp8_product(*rows, *matrices, groups.offsets)


def _matrices(w: Tensor, copies: Fp8Copies | None, keeps_transposed: bool) -> tuple[_Fp8, tuple[Tensor | None, Tensor | None]]:
    """Return the fp8 matrices of the forward, and those of the backward if it is to keep them: one kernel makes both."""
    if copies is not None:
        return copies.plain, (None, None)
    return quantize_fp8_weights_both(w) if keeps_transposed else (quantize_fp8_weights(w), (None, None))


def _transposed(w: Tensor, copies: Fp8Copies | None, saved: Sequence[Tensor | None]) -> _Fp8:
    if copies is not None:
        return copies.transposed
    values, scales = saved
    return quantize_fp8_weights(w, transposed=True) if values is None or scales is None else (values, scales)


def _weight_gradient(grads: _Fp8, rows: _Fp8, w: Tensor, groups: Groups, into: Tensor | None = None) -> Tensor:
    out = torch.empty(w.shape, dtype=w.dtype, device=w.device)
    if len(rows[0]) == 0:
        return out.zero_()
    return add_to(into, grouped_fp8_weight_gradient(*rescale_transpose(*grads), *rescale_transpose(*rows), groups.offsets, out))


def _quantized(rows: Tensor) -> _Fp8:
    if not isinstance(rows, QuantizedRows):
        return quantize_fp8(rows.contiguous(), power_of_two=True)
    if rows.values.is_cuda:
        rows.record_stream_of(torch.cuda.current_stream(rows.values.device))  # autograd does it for tensors that have memory
    return rows.values, rows.scales


def _activated(act: Any, inner: Tensor, probs: Tensor | None, groups: Groups) -> _Fp8:
    return swiglu_fp8(inner, probs, groups) if act is None else _quantized(act.forward(inner, probs, groups))


class WeightGradient:
    """Makes the gradient of one weight in a backward: now or later, and added to `main_grad` or not."""

    def __init__(self, name: str, delay: Any, main_grad: Tensor | None):
        self._name, self._delay, self._main_grad = name, delay, main_grad

    def make(self, compute: Callable[..., Tensor]) -> Tensor | None:
        """Return `compute(main_grad)`, the gradient; with `delay`, pass it the computation and return None."""
        if self._delay is None:
            return compute(into=self._main_grad)
        self._delay(self._name, compute)
        return None


class _Linear(Function):
    """Computes x @ w.T in bf16. The tail of the result is not set."""

    @staticmethod
    def forward(
        ctx: Context,
        x: QuantizedRows,
        w: Tensor,
        groups: Groups,
        copies: Fp8Copies | None,
        keeps: bool,
        zero_tail: bool,
        maker: WeightGradient,
    ) -> Tensor:
        matrices, transposed = _matrices(w, copies, keeps)
        ctx.save_for_backward(x.values, x.scales, w, *transposed)
        # Not saved: hooks that move saved tensors away would move copies that others use too.
        ctx.groups, ctx.copies, ctx.zero_tail, ctx.maker = groups, copies, zero_tail, maker
        return _product((x.values, x.scales), matrices, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (values, scales, w, *transposed), groups, needs = ctx.saved_tensors, ctx.groups, ctx.needs_input_grad
        grads = _quantized(grad)
        grad_x = _product(grads, _transposed(w, ctx.copies, transposed), groups) if needs[0] else None
        if grad_x is not None and ctx.zero_tail:
            groups.clear_tail(grad_x)
        compute = partial(_weight_gradient, grads, (values, scales), w, groups)
        return grad_x, ctx.maker.make(compute) if needs[1] else None, None, None, None, None, None


class _ActivatedLinear(Function):
    """Computes (act(inner) * prob) @ w.T with the activation in fp8. Its gradient may be `QuantizedRows`."""

    @staticmethod
    def forward(
        ctx: Context, inner: Tensor, probs: Tensor | None, w: Tensor, groups: Groups, copies: Fp8Copies | None, act: Any, recompute: bool,
        keeps: bool, zero_tail: bool, maker: WeightGradient,
    ) -> Tensor:  # fmt: skip
        rows = _activated(act, inner, probs, groups)
        if rows[0].shape[1] != w.shape[2]:
            raise ValueError(
                f"w2 has shape {list(w.shape)}, but the activation of {inner.shape[1]} columns has {rows[0].shape[1]}; "
                "the last dimension of w2 must be this"
            )
        matrices, transposed = _matrices(w, copies, keeps)
        ctx.save_for_backward(inner, probs, w, *((None, None) if recompute else rows), *transposed)
        ctx.groups, ctx.copies, ctx.act, ctx.maker = groups, copies, act, maker
        result = _product(rows, matrices, groups)
        return groups.clear_tail(result) if zero_tail else result

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inner, probs, w, values, scales, *transposed), groups, needs = ctx.saved_tensors, ctx.groups, ctx.needs_input_grad
        grads = _quantized(grad)
        rows = _activated(ctx.act, inner, probs, groups) if values is None and needs[2] else (values, scales)
        grad_activated = _product(grads, _transposed(w, ctx.copies, transposed), groups)
        if ctx.act is None:
            grad_inner, grad_probs = swiglu_backward_fp8(grad_activated, inner, probs, groups)
        else:
            grad_inner, grad_probs, _ = ctx.act.backward(grad_activated, inner, probs, groups, False)
        grad_w = ctx.maker.make(partial(_weight_gradient, grads, rows, w, groups)) if needs[2] else None
        return grad_inner, grad_probs, grad_w, None, None, None, None, None, None, None


# ---- SwiGLU between the products: its result, and the gradient of its input, as fp8 ----


def swiglu_fp8(inner: Tensor, probs: Tensor | None, groups: Groups) -> tuple[Tensor, Tensor]:
    """Return `swiglu` of the same arguments as fp8: values [num_rows, intermediate] e4m3 and scales [num_rows, intermediate / 128].

    inner: [num_rows, 2 * intermediate] bf16, intermediate a multiple of 128. Rows of the tail are not set.
    """
    if _swiglu_has_kernels(inner, probs):
        from deepep_moe.ops import fp8_row_kernels  # this imports Triton

        with on_device(inner):
            return fp8_row_kernels.swiglu_quantized(inner, _contiguous(probs), groups.offsets)
    return quantize_fp8(swiglu(inner, probs, groups).contiguous(), power_of_two=True)


def swiglu_backward_fp8(grad: Tensor, inner: Tensor, probs: Tensor | None, groups: Groups) -> tuple[QuantizedRows, Tensor | None]:
    """Return the gradients of inner, as fp8, and of probs, which is zero in the tail. May overwrite grad [num_rows, intermediate] bf16."""
    if _swiglu_has_kernels(inner, probs):
        from deepep_moe.ops import fp8_row_kernels

        with on_device(inner):
            rows, grad_probs = fp8_row_kernels.swiglu_backward_quantized(grad, inner, _contiguous(probs), groups.offsets)
        return QuantizedRows(*rows), grad_probs
    grad_inner, grad_probs, _ = swiglu_backward(grad, inner, probs, groups, with_output=False)
    return QuantizedRows.of(grad_inner), grad_probs


def _contiguous(probs: Tensor | None) -> Tensor | None:
    return None if probs is None else probs.contiguous()


def _swiglu_has_kernels(inner: Tensor, probs: Tensor | None) -> bool:
    return inner.is_cuda and (probs is None or probs.dtype == torch.float32)
