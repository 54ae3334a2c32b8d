"""The local experts of a MoE layer in grouped products: one for all first matrices, and one for all second ones.

`deepep_moe.ops.grouped_mlp` takes all rows in one tensor and the matrices of all experts in another. Parameters stay those of the experts,
as DeepSpeed's optimizers, ZeRO and checkpoints know them by name.

- ZeRO 1 and 2 put the parameters of all experts into one memory, where those of alike experts begin at equal distances. There grouped
  products read them in place.
- Otherwise each forward copies the weights of all local experts. That reads and writes their bytes once. The copy stays until the
  backward. Under autocast the copy is in the narrow dtype.

The gradients of each weight come out in one memory, of which each expert's parameter gets its part. Rows are not copied either, where they
lie one behind another.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules import module as torch_module
from torch.nn.modules.dropout import _DropoutNd

from deepep_moe.exchange.by_expert import split_rows
from deepep_moe.exchange.handle import DispatchOutput
from deepep_moe.integrations.common.untraced import untraced
from deepep_moe.integrations.deepspeed.expert_weights import ExpertWeights, Reader, name_of, read_known
from deepep_moe.integrations.deepspeed.native.watched import has_hooks, is_replaced
from deepep_moe.library import Context, Function
from deepep_moe.nn.balance import Parts, Product
from deepep_moe.ops.grouped_mlp import grouped_mlp
from deepep_moe.ops.grouped_products import why_not_grouped

_ALIGNMENT = 16  # matrices must begin at multiples of this many bytes for grouped products to read them in place


@untraced
def run_grouped(weights: Sequence[ExpertWeights], parts: Sequence[Tensor]) -> list[Tensor]:
    """Run all experts at once. parts: [..., num_rows, hidden] for each; those beyond the experts are empty. Returns the same shapes.

    The parameters of an expert without rows get gradients of zeros. Raises as `deepep_moe.ops.grouped_mlp`.
    """
    counts = [part.shape[-2] for part in parts]
    y = _products(weights, _Joined.apply(*parts), counts[: len(weights)])
    return list(_Apart.apply(y, counts, parts[0].shape[:-2]))


@untraced
def parts_of(weights: Sequence[ExpertWeights], device: torch.device) -> Parts:
    """Return the matrices of all experts as copies of experts need them. Raises ValueError for experts with biases."""
    w1, b1, w2, b2 = _stacked(weights, device)
    if b1 is not None or b2 is not None:
        raise ValueError("balance is given, but experts have biases, which copies do not have; leave balance out")
    return Parts(w1, w2)


def product_of(weights: Sequence[ExpertWeights]) -> Product:
    """Return what runs the rows of experts, and of copies, with such weights."""
    activation = weights[0].activation

    def product(rows: tuple[Tensor, ...], counts: Tensor, parts: Parts, _: bool) -> Tensor:
        return grouped_mlp(rows[0], counts, parts.up, parts.down, activation=activation, zero_tail=False)

    return product


@untraced
def run_joined(weights: Sequence[ExpertWeights], out: DispatchOutput) -> Tensor:
    """Run all experts at once on the rows of a dispatch, and return [num_rows, hidden]. Experts of the buffer beyond `weights` have no
    rows. Rows behind the last group hold anything. Raises as `deepep_moe.ops.grouped_mlp`."""
    return _products(weights, out.recv_x, out.handle.num_rows_per_expert[: len(weights)])


def _products(weights: Sequence[ExpertWeights], rows: Tensor, counts: Tensor | list[int]) -> Tensor:
    w1, b1, w2, b2 = _stacked(weights, rows.device)
    return grouped_mlp(rows, counts, w1, w2, b1=b1, b2=b2, activation=weights[0].activation, zero_tail=False)


def _stacked(weights: Sequence[ExpertWeights], device: torch.device) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return w1, b1, w2 and b2 of all experts, [num_experts, ...], under autocast in its dtype."""
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    w1, b1, w2, b2 = (stack([getattr(expert, name) for expert in weights], dtype) for name in ("w1", "b1", "w2", "b2"))
    assert w1 is not None and w2 is not None
    return w1, b1, w2, b2


# ---- which experts ----


@untraced
def weights_of(experts: Sequence[nn.Module], option: bool | Reader) -> list[ExpertWeights] | str:
    """Return the weights of all experts; or the reason why grouped products could not stand for calls of the experts.

    option: True for experts that are known, or a function that reads them. Raises TypeError for a function that returns something else,
    and what the function raises.
    """
    reason = _why_called(experts)
    if reason is not None:
        return reason
    weights: list[ExpertWeights] = []
    for expert in experts:
        of_expert = read_known(expert) if option is True else _read(expert, option)
        if of_expert is None:
            return _why_unread(expert, option)
        weights.append(of_expert)
    return _why_different(experts, weights) or weights


def _why_called(experts: Sequence[nn.Module]) -> str | None:
    """Return what a call of the experts would do beside its computation, or None."""
    if torch_module._has_any_global_hook():
        return "PyTorch has hooks for all modules, which would not run"
    for i, expert in enumerate(experts):
        for module in _modules(expert):
            what = _why_module_is_called(module)
            if what is not None:
                return f"{type(module).__name__} of local expert {i} {what}"
    return None


def _modules(expert: nn.Module) -> list[nn.Module]:
    """Return the expert and all modules in it, as `nn.Module.modules` does in several times the time. One may come twice."""
    modules = [expert]
    for module in modules:
        modules.extend(child for child in module._modules.values() if child is not None)
    return modules


def _why_module_is_called(module: nn.Module) -> str | None:
    if has_hooks(module):
        return "has hooks, which would not run"
    if is_replaced(module):
        return "has a forward that was replaced or wrapped"
    if module._compiled_call_impl is not None:
        return "was compiled by itself"
    if "parametrizations" in module._modules:
        return "has parametrizations"
    if isinstance(module, _DropoutNd) and module.training and module.p > 0:
        return f"drops with p={module.p} in training"
    if any(hasattr(parameter, "ds_id") for parameter in module._parameters.values()):
        return "has parameters that ZeRO-3 partitions"
    return None


def _read(expert: nn.Module, read: Any) -> ExpertWeights | None:
    weights = read(expert)
    if weights is not None and not (isinstance(weights, tuple) and len(weights) == len(ExpertWeights._fields)):
        raise TypeError(f"the function grouped_experts returned {type(weights).__name__}; it must return ExpertWeights, or None")
    return None if weights is None else ExpertWeights(*weights)


def _why_unread(expert: nn.Module, option: bool | Reader) -> str:
    if option is not True:
        return f"the function grouped_experts returned None for {name_of(expert)}"
    return (
        f"experts are {name_of(expert)}, whose weights deepep_moe cannot read; pass replace_moe_layers a function as grouped_experts that "
        "returns the ExpertWeights of an expert"
    )


def _why_different(experts: Sequence[nn.Module], weights: Sequence[ExpertWeights]) -> str | None:
    """Return in what experts differ so that they cannot be grouped, or None."""
    classes = sorted({type(expert).__name__ for expert in experts})
    if len(classes) > 1:
        return f"experts are of the classes {classes}; they must be of one"
    for i, (expert, of_expert) in enumerate(zip(experts, weights, strict=True)):
        for name in ("w1", "b1", "w2", "b2"):
            mine, first = getattr(of_expert, name), getattr(weights[0], name)
            if mine is not None and type(mine) not in (nn.Parameter, Tensor):
                return f"{name} of local expert {i} is a {type(mine).__name__}; it must be a plain tensor"
            if not _is_alike(mine, first):
                return f"{name} of local expert {i} is {_form(mine)}, and {_form(first)} in the first"
        if of_expert.activation != weights[0].activation:
            return f"local expert {i} has another activation than the first; it must be the same object"
        if torch.is_grad_enabled() and (left := _parameters_left(expert, of_expert)):
            return f"parameters {left} of local expert {i} are not among its ExpertWeights"
    return None


def _is_alike(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _form(tensor: Any) -> str:
    return "None" if tensor is None else f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _parameters_left(expert: nn.Module, weights: ExpertWeights) -> list[str]:
    """Return the names of parameters that want a gradient and would get none."""
    tensors = [tensor for tensor in weights[:4] if tensor is not None]
    served = {id(tensor) for tensor in tensors}
    computed = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    if computed:  # from parameters
        served |= _leaves(computed)
    wanting = {id(parameter) for module in _modules(expert) for parameter in module._parameters.values() if _wants_gradient(parameter)}
    if wanting <= served:
        return []
    return [name for name, parameter in expert.named_parameters() if id(parameter) in wanting - served]


def _wants_gradient(parameter: Tensor | None) -> bool:
    return parameter is not None and parameter.requires_grad


def _leaves(nodes: Iterable[Any]) -> set[int]:
    """Return the ids of the tensors to which the gradients of these nodes of autograd go."""
    leaves, todo, seen = set(), list(nodes), set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        todo += [after for after, _ in node.next_functions if after is not None]
    return leaves


# ---- weights ----


def stack(tensors: Sequence[Tensor | None], dtype: torch.dtype | None = None) -> Tensor | None:
    """Return [num_experts, ...] of the tensors of all experts, in `dtype` or in theirs, with gradients. None where the first is None."""
    return None if tensors[0] is None else _Stacked.apply(dtype or tensors[0].dtype, *tensors)


def why_not_by_default(weights: Sequence[ExpertWeights], dtype: torch.dtype) -> str | None:
    """Return why grouped products of rows of this dtype would be slow, or copy the weights in each forward; None if not."""
    first = weights[0]
    for matrix in (first.w1, first.w2):
        reason = why_not_grouped(matrix[:0], len(matrix))
        if reason is not None:
            return reason
    if first.w1.dtype == dtype and all(_at_equal_distances([of_expert[i] for of_expert in weights]) is not None for i in (0, 2)):  # type: ignore[misc]
        return None
    return (
        "their weights do not lie in one memory in the rows' dtype, as with ZeRO 1 or 2; grouped_experts=True copies them in each forward"
    )


class _Stacked(Function):
    """A view of the memory that the tensors share, if they lie at equal distances there and have the dtype, else a copy."""

    @staticmethod
    def forward(ctx: Context, dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        ctx.dtype = tensors[0].dtype
        view = _at_equal_distances(tensors)
        if view is not None and dtype == ctx.dtype:
            ctx.save_for_backward(*tensors)  # PyTorch then sees if one is changed before the backward
            return view
        return (torch.stack(tensors) if view is None else view).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return None, *grad.to(ctx.dtype).unbind()


def _at_equal_distances(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return all tensors as one view [num_experts, ...] of their memory, or None if they do not lie so."""
    first = tensors[0]
    begin, num_bytes, memory = first.data_ptr(), first.numel() * first.element_size(), first.untyped_storage().data_ptr()
    distance = tensors[1].data_ptr() - begin if len(tensors) > 1 else num_bytes
    if begin % _ALIGNMENT or distance % _ALIGNMENT or distance < num_bytes:
        return None
    for i, tensor in enumerate(tensors):
        is_there = tensor.data_ptr() == begin + i * distance and tensor.untyped_storage().data_ptr() == memory
        if not is_there or not tensor.is_contiguous():
            return None
    shape, strides = (len(tensors), *first.shape), (distance // first.element_size(), *first.stride())
    return first.detach().as_strided(shape, strides)


# ---- rows ----


class _Joined(Function):
    """Joins the rows [..., num_rows, hidden] of each expert to [num_rows of all, hidden]."""

    @staticmethod
    def forward(ctx: Context, *parts: Tensor) -> Tensor:
        ctx.counts, ctx.leading = [part.shape[-2] for part in parts], parts[0].shape[:-2]
        return _joined(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, ...]:
        return split_rows(grad, ctx.counts, ctx.leading)


class _Apart(Function):
    """Splits the rows of all experts in one tensor into those of each."""

    @staticmethod
    def forward(ctx: Context, rows: Tensor, counts: list[int], leading: tuple[int, ...]) -> tuple[Tensor, ...]:
        return split_rows(rows, counts, leading)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _joined(grads), None, None


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return all rows as a view, if they lie one behind another in one memory, else as a copy."""
    hidden, filled = parts[0].shape[-1], [part for part in parts if part.numel()]
    if len(filled) < 2:
        return (filled or parts)[0].reshape(-1, hidden)
    memory, end = filled[0].untyped_storage().data_ptr(), filled[0].data_ptr()
    for part in filled:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != memory or not part.is_contiguous():
            return torch.cat([rows.reshape(-1, hidden) for rows in filled])
        end += part.numel() * part.element_size()
    num_rows = sum(part.shape[-2] for part in filled)
    return filled[0].detach().as_strided((num_rows, hidden), (hidden, 1))
