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

from deepep_moe.exchange.by_expert import Split, rows_of_all, split_rows
from deepep_moe.integrations.deepspeed.expert_weights import ExpertWeights, Reader, name_of, read_known
from deepep_moe.integrations.deepspeed.native.watched import has_hooks, is_replaced
from deepep_moe.library import Context, Function
from deepep_moe.nn.balance import Parts, Product
from deepep_moe.ops.fp8_kept import KeptWeights, NothingKept
from deepep_moe.ops.fp8_products import check_products, check_widths
from deepep_moe.ops.grouped_mlp import grouped_mlp
from deepep_moe.ops.grouped_products import why_not_grouped
from deepep_moe.ops.quantized import QuantizedRows

_ALIGNMENT = 16  # matrices must begin at multiples of this many bytes for grouped products to read them in place


def run_grouped(weights: Sequence[ExpertWeights], parts: Sequence[Tensor]) -> list[Tensor]:
    """Run all experts at once. parts: [..., num_rows, hidden] for each; those beyond the experts are empty. Returns the same shapes.

    The parameters of an expert without rows get gradients of zeros. Raises as `deepep_moe.ops.grouped_mlp`.
    """
    counts = [part.shape[-2] for part in parts]
    y = run_joined(weights, (_Joined.apply(*parts),), counts[: len(weights)])
    return list(Split.apply(y, counts, parts[0].shape[:-2]))


def run_joined(
    weights: Sequence[ExpertWeights], rows: tuple[Tensor, ...], counts: Tensor | list[int], kept: KeptWeights | None = None,
    is_first_microbatch: bool | None = None,
) -> Tensor:  # fmt: skip
    """Run all experts at once on the rows of a dispatch, and return [num_rows, hidden]. Rows behind the last group hold anything. Arguments
    are those of `product_of`. Raises as `deepep_moe.ops.grouped_mlp`."""
    parts, biases = stacked(weights, None if isinstance(rows[0], QuantizedRows) else rows[0].device)
    return product_of(weights, kept, is_first_microbatch, biases)(rows, counts, parts, True)  # type: ignore[arg-type]  # a list will do


def stacked(weights: Sequence[ExpertWeights], device: torch.device | None) -> tuple[Parts, tuple[Tensor | None, Tensor | None]]:
    """Return the matrices of all experts and their biases, [num_experts, ...], in the dtype of autocast on the device. None: in theirs."""
    dtype = None if device is None or not torch.is_autocast_enabled(device.type) else torch.get_autocast_dtype(device.type)
    w1, b1, w2, b2 = (stack([getattr(expert, name) for expert in weights], dtype) for name in ("w1", "b1", "w2", "b2"))
    assert w1 is not None and w2 is not None
    return Parts(w1, w2), (b1, b2)


def product_of(
    weights: Sequence[ExpertWeights], kept: KeptWeights | None = None, is_first_microbatch: bool | None = None,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Product:  # fmt: skip
    """Return what runs the rows of experts, and of copies, with such weights. It takes fp8 rows with the weight of each, by which outputs
    are multiplied. `kept` and `is_first_microbatch` are as in `grouped_mlp`; without copies of the weights False makes some."""

    def product(rows: tuple[Tensor, ...], counts: Tensor, parts: Parts, is_home: bool) -> Tensor:
        of_parts, is_first = kept if is_home else NothingKept(), is_first_microbatch
        if is_home and kept is not None and is_first is not None:
            if parts.up.data_ptr() != weights[0].w1.data_ptr() or parts.down.data_ptr() != weights[0].w2.data_ptr():
                kept.release()  # this forward has copied the weights to other memory than the last one
                is_first = None
            else:
                is_first = is_first or not kept.has(*parts)
        return grouped_mlp(
            rows[0], counts, *parts, b1=biases[0], b2=biases[1], probs=rows[1] if len(rows) > 1 else None,
            activation=weights[0].activation, zero_tail=False, kept=of_parts, is_first_microbatch=is_first,
        )  # fmt: skip

    return product


def check_no_biases(weights: Sequence[ExpertWeights], option: str) -> None:
    """Raise ValueError for experts with biases, for which `option` cannot be given."""
    if weights[0].b1 is not None or weights[0].b2 is not None:
        raise ValueError(f"{option} is given, but the experts have biases; make them without, or leave {option} out")


def check_fp8(weights: Sequence[ExpertWeights], x: Tensor) -> None:
    """Check the weights of all experts, before tokens x [num_tokens, hidden] are sent to them.

    Raises TypeError or ValueError where experts or tokens cannot be served, BackendUnavailableError on a GPU without fp8 products.
    """
    check_products(x.device)
    if x.dtype != torch.bfloat16:
        raise TypeError(f"tokens have dtype {str(x.dtype).removeprefix('torch.')}, but fp8 experts take bfloat16; train in bf16")
    check_no_biases(weights, "fp8")
    inner, width = len(weights[0].w1), weights[0].w2.shape[1]
    check_widths(**{"the hidden size": x.shape[1], "the width of an expert": width, "inner, the rows of w1,": inner})


# ---- which experts ----


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
            if (form := _form(mine)) != (wanted := _form(first)):
                return f"{name} of local expert {i} is {_words(form)}, and {_words(wanted)} in the first"
        if of_expert.activation != weights[0].activation:
            return f"local expert {i} has another activation than the first; it must be the same object"
        if torch.is_grad_enabled() and (left := _parameters_left(expert, of_expert)):
            return f"parameters {left} of local expert {i} are not among its ExpertWeights"
    return None


def _form(tensor: Tensor | None) -> tuple[torch.Size, torch.dtype, torch.device] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def _words(form: tuple[torch.Size, torch.dtype, torch.device] | None) -> str:
    return "None" if form is None else f"{list(form[0])} {form[1]} on {form[2]}"


def _parameters_left(expert: nn.Module, weights: ExpertWeights) -> list[str]:
    """Return the names of parameters that want a gradient and would get none."""
    tensors = [tensor for tensor in weights[:4] if tensor is not None]
    served = {id(tensor) for tensor in tensors}
    computed = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    if computed:  # from parameters
        served |= _leaves(computed)
    parameters = (parameter for module in _modules(expert) for parameter in module._parameters.values())
    wanting = {id(parameter) for parameter in parameters if parameter is not None and parameter.requires_grad}
    if wanting <= served:
        return []
    return [name for name, parameter in expert.named_parameters() if id(parameter) in wanting - served]


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
        return rows_of_all(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, ...]:
        return split_rows(grad, ctx.counts, ctx.leading)
