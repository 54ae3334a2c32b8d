"""The feed-forward networks of several experts at once: two grouped products, and between them the activation, scaled by the gate's probs.

On Hopper and Blackwell GPUs the host launches a fixed number of kernels for any number of experts, and waits for none.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepep_moe import torch_module
from deepep_moe.arguments import check_is_tensor, check_memory
from deepep_moe.device import is_gpu
from deepep_moe.library import Context, Function, refuse_transforms, untraced
from deepep_moe.ops.fp8_kept import KeptWeights, NothingKept
from deepep_moe.ops.fp8_mlp import Fp8Products, check_fp8_mlp
from deepep_moe.ops.grouped_products import Groups, group_sums, has_kernels, multiply, multiply_back, weight_gradients
from deepep_moe.ops.quantized import QuantizedRows
from deepep_moe.ops.swiglu import swiglu, swiglu_backward

Activation = Literal["swiglu"] | Callable[[Tensor], Tensor]
Delay = Callable[[str, Callable[..., Tensor]], None]
_Rows = Any
"""A tuple: the rows of a product, or for fp8 their values and scales."""


@untraced
def grouped_mlp(
    x: Tensor,
    counts: Tensor | Sequence[int],
    w1: Tensor,
    w2: Tensor,
    *,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    probs: Tensor | None = None,
    activation: Activation = "swiglu",
    recompute_activation: bool = False,
    zero_tail: bool = True,
    delay: Delay | None = None,
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None),
    kept: KeptWeights | None = None,
    is_first_microbatch: bool | None = None,
) -> Tensor:
    """Return, for each row of expert e, `(act(x @ w1[e].T + b1[e]) * prob) @ w2[e].T + b2[e] * prob`.

    On GPUs SwiGLU with its prob is one kernel, and so is its backward; both skip the tail. Where counts are there too, rows are bf16, and
    there are no biases, `zero_tail` and `delay`, both passes are made in C++, which takes the host less time, with the same bits.

    Differentiable once in x, weights, biases and probs. The counts may be on the GPU, which the host then does not wait for. Rows behind
    the last expert's, the tail, have no expert. They may hold anything, NaN too: no other row and no gradient of a weight, bias or prob
    reads them.

    `QuantizedRows`, which a dispatch with `fp8="blockwise"` delivers, are multiplied as fp8 (docs/design/fp8_training.md). Groups
    have multiples of 128 rows, and matrices multiples of 128 rows and columns in fp32 or bf16. There are no biases. The result is bf16.

    A compiled function calls it between two graphs.

    bfloat16 rows on Hopper and Blackwell GPUs use `torch.nn.functional.grouped_mm`. Otherwise the products run one expert after another;
    on GPUs a warning says why, once. Under autocast x, weights and biases are cast first.

    Args:
        x: [num_rows, in], grouped by expert, fp32, bf16 or fp16, or `QuantizedRows`.
        counts: [num_experts] int64 or int32, the rows of each expert. A list will do, or a tensor on the CPU or the device of x. Their
            sum is at most num_rows. On a GPU this is not checked: rows that do not exist are not read.
            With fp8 rows all are multiples of 128, as a dispatch makes them. Others give wrong gradients on a GPU.

        w1: [num_experts, inner, in] in the dtype of x; for "swiglu" inner is 2 x intermediate, the gate's rows first. Each expert's matrix
            is contiguous. There may be other memory between the matrices.
        w2: [num_experts, out, intermediate], likewise.
        b1, b2: [num_experts, inner] and [num_experts, out] in the dtype of x.
        probs: [num_rows], of a floating-point dtype. None stands for ones.

        activation: "swiglu" for `silu(gate) * up`, or a function [num_rows, inner] -> [num_rows, intermediate]. It treats each row alone.
        recompute_activation: keep only `x @ w1.T` and probs for the backward, which computes the activation again.
        zero_tail: clear the tail of the result and of x's gradient. With counts on a GPU that costs a pass over each. False leaves any
            values there, for a caller that does not read them. The tail of the probs' gradient is always zero.

        delay: the backward makes no gradients of weights. It calls `delay("w2", compute)`, then `delay("w1", compute)`, for a schedule that
            makes them later. `compute()` returns the gradient, `compute(main_grad)` adds it there. Until then `compute` holds the tensors
            that it needs.
        main_grads: for w1 and w2, tensors of their shapes, fp32 as a rule, to which the backward adds their gradients. Autograd then gets
            tensors of the right shape that are not initialized.
        kept, is_first_microbatch: `kept` holds fp8 copies of the weights between forwards. This forward makes them (True) or takes them
            (False), as `KeptWeights.take` says. Only for `QuantizedRows`. None: each forward quantizes the weights.

    Returns:
        [num_rows, out] in the dtype of x. Operations and roundings are those of the expression in this dtype, as PyTorch evaluates it
        eagerly; a product with a prob is rounded once.

    Raises:
        TypeError, ValueError: a tensor has another type, dtype, shape or device, counts on the host do not fit, or no fitting copies are
            kept.
    """
    if activation == "swiglu" and b1 is None and b2 is None and not zero_tail and delay is None and _is_native(x, counts):
        output: Tensor | None = torch_module.MODULE.grouped_swiglu(  # type: ignore[union-attr]
            x, counts, w1, w2, probs, recompute_activation, *main_grads
        )
        if output is not None:
            return output
    refuse_transforms("grouped_mlp", {"x": x, "w1": w1, "w2": w2, "b1": b1, "b2": b2, "probs": probs})
    makers = [WeightGradient(name, delay, into) for name, into in zip(("w1", "w2"), main_grads, strict=True)]
    act = None if _is_swiglu(activation) else _AnyActivation(activation)  # type: ignore[arg-type]
    if isinstance(x, QuantizedRows):
        _check(x, w1, w2, b1, b2, probs)
        check_fp8_mlp(x, counts, w1, w2, (b1, b2))
        if kept is None and is_first_microbatch is not None:
            raise ValueError(f"is_first_microbatch is {is_first_microbatch}, but nothing keeps copies; pass kept=KeptWeights(), or None")
        copies = None if kept is None else kept.take(is_first_microbatch, w1, w2)
        keeps = torch.is_grad_enabled() and not recompute_activation and not isinstance(kept, NothingKept)
        of_weights = [Fp8Products(of_weight, keeps) for of_weight in copies or (None, None)]
        return _run(x, counts, w1, w2, b1, b2, probs, act, of_weights, recompute_activation, zero_tail, makers)
    x, w1, w2, b1, b2 = _autocast(x, w1, w2, b1, b2)
    _check(x, w1, w2, b1, b2, probs)
    return _run(x, counts, w1, w2, b1, b2, probs, act, [_Products()] * 2, recompute_activation, zero_tail, makers)


def _run(
    x: Tensor, counts: Tensor | Sequence[int], w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, probs: Tensor | None,
    act: "_AnyActivation | None", products: "Sequence[_Products | Fp8Products]", recompute: bool, zero_tail: bool,
    makers: "Sequence[WeightGradient]",
) -> Tensor:  # fmt: skip
    groups = Groups(counts, len(w1), x)
    inner = _Linear.apply(x, w1, b1, groups, products[0], zero_tail, makers[0])
    y: Tensor = _ActivatedLinear.apply(inner, probs, w2, b2, groups, products[1], act, recompute, zero_tail, makers[1])
    return y


@untraced
def clear_tail(values: Tensor, counts: Tensor | Sequence[int]) -> Tensor:
    """Return values [num_rows, ...] with zeros behind the rows that `counts` [num_experts] names. Differentiable; does not wait."""
    refuse_transforms("clear_tail", {"values": values})
    cleared: Tensor = _ClearTail.apply(values, Groups(counts, len(counts), values))
    return cleared


# ---- in C++ ----


def _is_native(x: Tensor, counts: Tensor | Sequence[int]) -> bool:
    """Return whether C++ may take the call; it looks at the tensors itself."""
    if torch_module.MODULE is None or isinstance(x, QuantizedRows):
        return False
    return isinstance(x, Tensor) and isinstance(counts, Tensor) and is_gpu(x.device) and has_kernels(x.device)


# ---- checks ----


def _is_swiglu(activation: Activation) -> bool:
    if activation == "swiglu" or callable(activation):
        return activation == "swiglu"
    raise ValueError(f"activation is {activation!r}; it must be 'swiglu' or a function")


def _autocast(*tensors: Tensor | None) -> Any:
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor if tensor is None else tensor.to(dtype) for tensor in tensors)


def _check(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, probs: Tensor | None) -> None:
    for name, tensor, dims in (("x", x, 2), ("w1", w1, 3), ("w2", w2, 3)):
        check_is_tensor(name, tensor)
        if tensor.dim() != dims:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; it must have {dims} dimensions")
    if w1.shape[2] != x.shape[1] or w2.shape[0] != w1.shape[0] or w1.shape[0] == 0:
        raise ValueError(
            f"x, w1 and w2 have shapes {list(x.shape)}, {list(w1.shape)} and {list(w2.shape)}; they must be [num_rows, in], "
            "[num_experts, inner, in] and [num_experts, out, intermediate] with at least one expert"
        )
    shapes = (("b1", b1, w1.shape[:2]), ("b2", b2, w2.shape[:2]), ("probs", probs, x.shape[:1]))
    for name, tensor, shape in ((name, tensor, shape) for name, tensor, shape in shapes if tensor is not None):
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}")
    for name, operand in (("x", x), ("w1", w1), ("w2", w2), ("b1", b1), ("b2", b2), ("probs", probs)):
        if operand is not None:
            check_memory(name, operand)
    for name, weight in (("w1", w1), ("w2", w2), ("b1", b1), ("b2", b2)):
        if weight is not None and weight.dtype != x.dtype and not isinstance(x, QuantizedRows):
            raise TypeError(f"{name} has dtype {weight.dtype} and x {x.dtype}; cast one of them, or use autocast")
        if weight is not None and weight.dim() == 3 and not _has_contiguous_matrices(weight):
            raise ValueError(f"{name} with strides {list(weight.stride())} is not contiguous; pass {name}.contiguous()")


def _has_contiguous_matrices(weight: Tensor) -> bool:
    return weight.is_contiguous() or (weight[0].is_contiguous() and weight.stride(0) >= weight[0].numel())


# ---- activations ----


class _AnyActivation:
    """Does for any function times prob what `swiglu` and `swiglu_backward` do. Its backward is that of PyTorch, for a second forward."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        self._function = function

    def forward(self, inner: Tensor, probs: Tensor | None, groups: Groups) -> Tensor:
        values = self._function(inner)
        return values if probs is None else (values * probs.unsqueeze(-1)).to(values.dtype)

    def backward(
        self, grad: Tensor, inner: Tensor, probs: Tensor | None, groups: Groups, with_output: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        leaves = [tensor.detach().requires_grad_() for tensor in (inner, probs) if tensor is not None]
        with torch.enable_grad():
            output = self.forward(leaves[0], leaves[1] if probs is not None else None, groups)
            grads = torch.autograd.grad(output, leaves, grad)
        grad_probs = groups.clear_tail(grads[1]) if probs is not None else None
        return grads[0], grad_probs, output.detach() if with_output else None


# ---- autograd ----


class _Products:
    """The products in the dtype of the rows. `Fp8Products` has the same methods, for rows in two parts."""

    def rows_of(self, x: Tensor) -> _Rows:
        return (x,)

    gradients_of = rows_of

    def multiply(self, rows: _Rows, w: Tensor, groups: Groups, _has_backward: bool) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return the product, and what `multiply_back` needs beside w."""
        return multiply(rows[0], w, groups), ()

    def multiply_back(self, grads: _Rows, w: Tensor, groups: Groups, _saved: Sequence[Tensor | None]) -> Tensor:
        return multiply_back(grads[0], w, groups)

    def weight_gradient(self, grads: _Rows, rows: _Rows, _w: Tensor, groups: Groups, into: Tensor | None = None) -> Tensor:
        return weight_gradients(grads[0], rows[0], groups, into)

    def activated(self, act: _AnyActivation | None, inner: Tensor, probs: Tensor | None, groups: Groups) -> _Rows:
        return ((swiglu if act is None else act.forward)(inner, probs, groups),)

    def activated_back(
        self, act: _AnyActivation | None, grad: Tensor, inner: Tensor, probs: Tensor | None, groups: Groups, rows: Sequence[Tensor | None],
        _needs_rows: bool,
    ) -> tuple[Tensor, Tensor | None, Any]:  # fmt: skip
        """Return the gradients of inner and probs, and `rows`, or what `activated` has returned if they were not kept."""
        back = swiglu_backward if act is None else act.backward
        grad_inner, grad_probs, again = back(grad, inner, probs, groups, rows[0] is None)
        return grad_inner, grad_probs, rows if again is None else (again,)


class WeightGradient:
    """Makes the gradient of one weight in a backward: now or later, and added to `main_grad` or not."""

    def __init__(self, name: str, delay: Delay | None, main_grad: Tensor | None):
        self._name, self._delay, self._main_grad = name, delay, main_grad

    def make(self, compute: Callable[..., Tensor]) -> Tensor | None:
        """Return `compute(main_grad)`, the gradient; with `delay`, pass it the computation and return None."""
        if self._delay is None:
            return compute(into=self._main_grad)
        self._delay(self._name, compute)
        return None


class _Linear(Function):
    """Computes x @ w.T + b. The tail of the result is not set."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, w: Tensor, b: Tensor | None, groups: Groups, products: _Products | Fp8Products, zero_tail: bool,
        maker: WeightGradient,
    ) -> Tensor:  # fmt: skip
        rows = products.rows_of(x)
        result, more = products.multiply(rows, w, groups, ctx.needs_input_grad[0])
        ctx.save_for_backward(w, *rows, *more)
        ctx.num_parts, ctx.groups, ctx.products, ctx.zero_tail, ctx.maker = len(rows), groups, products, zero_tail, maker
        return result if b is None else result.add_(groups.spread(b))

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (w, *saved), n, groups, products, needs = ctx.saved_tensors, ctx.num_parts, ctx.groups, ctx.products, ctx.needs_input_grad
        grads = products.gradients_of(grad)
        grad_x = products.multiply_back(grads, w, groups, saved[n:]) if needs[0] else None
        if grad_x is not None and ctx.zero_tail:
            groups.clear_tail(grad_x)
        grad_w = ctx.maker.make(partial(products.weight_gradient, grads, saved[:n], w, groups)) if needs[1] else None
        return grad_x, grad_w, group_sums(grad, groups) if needs[2] else None, None, None, None, None


class _ActivatedLinear(Function):
    """Computes act(inner) * prob @ w.T + b * prob. With fp8 rows its gradient may be `QuantizedRows`."""

    @staticmethod
    def forward(
        ctx: Context, inner: Tensor, probs: Tensor | None, w: Tensor, b: Tensor | None, groups: Groups, products: _Products | Fp8Products,
        act: _AnyActivation | None, recompute: bool, zero_tail: bool, maker: WeightGradient,
    ) -> Tensor:  # fmt: skip
        rows = products.activated(act, inner, probs, groups)
        if rows[0].shape[1] != w.shape[2]:
            raise ValueError(
                f"w2 has shape {list(w.shape)}, but the activation of {inner.shape[1]} columns has {rows[0].shape[1]}; "
                "the last dimension of w2 must be this"
            )
        result, more = products.multiply(rows, w, groups, ctx.needs_input_grad[0])
        ctx.save_for_backward(inner, probs, w, b, *((None,) * len(rows) if recompute else rows), *more)
        ctx.num_parts, ctx.groups, ctx.products, ctx.act, ctx.maker = len(rows), groups, products, act, maker
        if b is not None:
            bias = groups.spread(b)
            result.add_(bias if probs is None else bias * probs.unsqueeze(-1))
        return groups.clear_tail(result) if zero_tail else result

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inner, probs, w, b, *saved), groups, products, needs = ctx.saved_tensors, ctx.groups, ctx.products, ctx.needs_input_grad
        grads, n = products.gradients_of(grad), ctx.num_parts
        of_activated = products.multiply_back(grads, w, groups, saved[n:])
        grad_inner, grad_probs, rows = products.activated_back(ctx.act, of_activated, inner, probs, groups, saved[:n], needs[2])
        grad_w = ctx.maker.make(partial(products.weight_gradient, grads, rows, w, groups)) if needs[2] else None
        grad_b = None
        if b is not None:
            grad_b = group_sums(_times(grad, probs), groups)
            if grad_probs is not None:
                grad_probs += groups.clear_tail((groups.spread(b).to(grad_probs.dtype) * grad).sum(-1))
        return grad_inner, grad_probs, grad_w, grad_b, None, None, None, None, None, None


def _times(rows: Tensor, probs: Tensor | None) -> Tensor:
    return rows if probs is None else (rows * probs.unsqueeze(-1)).to(rows.dtype)


class _ClearTail(Function):
    @staticmethod
    def forward(ctx: Context, values: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return groups.clear_tail(values.clone())

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return _ClearTail.apply(grad, ctx.groups), None
