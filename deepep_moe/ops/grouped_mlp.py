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
from deepep_moe.library import Context, Function, refuse_transforms
from deepep_moe.ops.fp8_kept import KeptWeights
from deepep_moe.ops.fp8_mlp import WeightGradient, check_fp8_mlp, fp8_mlp
from deepep_moe.ops.grouped_products import Groups, group_sums, has_kernels, multiply, multiply_back, weight_gradients
from deepep_moe.ops.quantized import QuantizedRows
from deepep_moe.ops.swiglu import swiglu, swiglu_backward

Activation = Literal["swiglu"] | Callable[[Tensor], Tensor]
Delay = Callable[[str, Callable[..., Tensor]], None]


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
    act: _SwiGLU | _AnyActivation = _SwiGLU() if _is_swiglu(activation) else _AnyActivation(activation)  # type: ignore[arg-type]
    if isinstance(x, QuantizedRows):
        _check(x, w1, w2, b1, b2, probs)
        check_fp8_mlp(x, counts, w1, w2, (b1, b2))
        custom_act = None if activation == "swiglu" else act
        if kept is None and is_first_microbatch is not None:
            raise ValueError(f"is_first_microbatch is {is_first_microbatch}, but nothing keeps copies; pass kept=KeptWeights(), or None")
        copies = None if kept is None else kept.take(is_first_microbatch, w1, w2)
        return fp8_mlp(x, counts, w1, w2, probs, custom_act, recompute_activation, zero_tail, makers, copies)
    x, w1, w2, b1, b2 = _autocast(x, w1, w2, b1, b2)
    _check(x, w1, w2, b1, b2, probs)
    groups = Groups(counts, len(w1), x)
    inner = _Linear.apply(x, w1, b1, groups, zero_tail, makers[0])
    y: Tensor = _ActivatedLinear.apply(inner, probs, w2, b2, groups, act, recompute_activation, zero_tail, makers[1])
    return y


def clear_tail(values: Tensor, counts: Tensor | Sequence[int]) -> Tensor:
    """Return values [num_rows, ...] with zeros behind the rows that `counts` [num_experts] names. Differentiable; does not wait."""
    refuse_transforms("clear_tail", {"values": values})
    cleared: Tensor = _ClearTail.apply(values, Groups(counts, len(counts), values))
    return cleared


# ---- in C++ ----


def _is_native(x: Tensor, counts: Tensor | Sequence[int]) -> bool:
    """Return whether C++ may take the call; it looks at the tensors itself."""
    if torch_module.MODULE is None or torch.compiler.is_compiling() or isinstance(x, QuantizedRows):
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


class _SwiGLU:
    """Computes silu(gate) * up * prob, for inner = gate and up side by side."""

    def forward(self, inner: Tensor, probs: Tensor | None, groups: Groups) -> Tensor:
        return swiglu(inner, probs, groups)

    def backward(
        self, grad: Tensor, inner: Tensor, probs: Tensor | None, groups: Groups, with_output: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of inner and probs, and the output again if asked for. May overwrite grad. The tail of the probs' gradient
        is zero."""
        return swiglu_backward(grad, inner, probs, groups, with_output)


class _AnyActivation:
    """Any function times prob. Its backward is that of PyTorch, for a second forward."""

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


class _Linear(Function):
    """Computes x @ w.T + b. The tail of the result is not set."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, w: Tensor, b: Tensor | None, groups: Groups, zero_tail: bool, maker: WeightGradient) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.groups, ctx.zero_tail, ctx.maker = groups, zero_tail, maker
        result = multiply(x, w, groups)
        return result if b is None else result.add_(groups.spread(b))

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), groups, needs = ctx.saved_tensors, ctx.groups, ctx.needs_input_grad
        grad_x = multiply_back(grad, w, groups) if needs[0] else None
        if grad_x is not None and ctx.zero_tail:
            groups.clear_tail(grad_x)
        grad_w = ctx.maker.make(partial(weight_gradients, grad, x, groups)) if needs[1] else None
        return grad_x, grad_w, group_sums(grad, groups) if needs[2] else None, None, None, None


class _ActivatedLinear(Function):
    """Computes act(inner) * prob @ w.T + b * prob."""

    @staticmethod
    def forward(
        ctx: Context,
        inner: Tensor,
        probs: Tensor | None,
        w: Tensor,
        b: Tensor | None,
        groups: Groups,
        act: "_SwiGLU | _AnyActivation",
        recompute: bool,
        zero_tail: bool,
        maker: WeightGradient,
    ) -> Tensor:
        activated = act.forward(inner, probs, groups)
        if activated.shape[1] != w.shape[2]:
            raise ValueError(
                f"w2 has shape {list(w.shape)}, but the activation of {inner.shape[1]} columns has {activated.shape[1]}; "
                "the last dimension of w2 must be this"
            )
        ctx.save_for_backward(inner, probs, w, b, None if recompute else activated)
        ctx.groups, ctx.act, ctx.maker = groups, act, maker
        result = multiply(activated, w, groups)
        if b is not None:
            bias = groups.spread(b)
            result.add_(bias if probs is None else bias * probs.unsqueeze(-1))
        return groups.clear_tail(result) if zero_tail else result

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inner, probs, w, b, activated), groups, needs = ctx.saved_tensors, ctx.groups, ctx.needs_input_grad
        grad_inner, grad_probs, again = ctx.act.backward(multiply_back(grad, w, groups), inner, probs, groups, activated is None)
        compute = partial(weight_gradients, grad, again if activated is None else activated, groups)
        grad_w = ctx.maker.make(compute) if needs[2] else None
        grad_b = None
        if b is not None:
            grad_b = group_sums(_times(grad, probs), groups)
            if grad_probs is not None:
                grad_probs += groups.clear_tail((groups.spread(b).to(grad_probs.dtype) * grad).sum(-1))
        return grad_inner, grad_probs, grad_w, grad_b, None, None, None, None, None


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
