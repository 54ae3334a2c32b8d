"""Parameters that each rank has for itself: what data-parallel wrappers, norms of gradients and loss scalers must know of them.

PyTorch decides some things for each process alone: `clip_grad_norm_` by the norm of this process's gradients, `GradScaler` by their
infinities. With experts that differ from rank to rank, ranks would decide differently and their replicated parameters drift apart. So the
first layer over several ranks replaces these two decisions of PyTorch by ones that ask all ranks where an expert's gradient takes part.
"""

import functools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakIdKeyDictionary

from deepep_moe.errors import BufferDestroyedError
from deepep_moe.exchange.buffer import Buffer

# Names that DistributedDataParallel sees where a model of these libraries stands around the one that was marked.
_PREFIXES = ("", "_orig_mod.", "base_model.model.", "_orig_mod.base_model.model.", "base_model.model._orig_mod.")
_IGNORED = "_ddp_params_and_buffers_to_ignore"


class RankExperts(nn.Module):
    """A layer whose `experts` are those of one rank of `buffer`: the base of `MoELayer`, and of the adapters' layers."""

    buffer: Buffer
    experts: nn.Module
    deepep_moe_is_counted = True
    """`deepep_moe.nn.Metrics` can follow the layer."""
    is_marked = False
    """True once `mark_experts` has marked the layer."""

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that differ from rank to rank: keep them out of data-parallel averaging over the buffer's group.

        Their gradients already hold the tokens of all ranks; with a loss averaged over R ranks, divide them by R. `mark_experts` does both
        for `torch.nn.parallel.DistributedDataParallel`. docs/data_parallel.md says what other wrappers need.
        """
        return self.experts.parameters()

    def check_wrappers(self) -> None:
        """Mark the experts' parameters as this rank's own, if that has not happened, and raise ValueError where a data-parallel wrapper has
        mixed them with those of other ranks. A layer calls it when it is made and at the start of each forward."""
        if self.buffer.num_ranks == 1:
            return
        seen, ddp = _seen.get(self), DistributedDataParallel._active_ddp_module
        if seen is None or not seen.is_current(ddp):
            _seen[self] = _look(self, seen, ddp)


def mark_experts(model: nn.Module) -> None:
    """Mark the experts of all layers in `model` as a rank's own for `DistributedDataParallel`, which is made of `model` afterwards.

    It then leaves these parameters and the routers' counts alone, and their gradients become averages over the ranks, as the others are:
    nothing is to be divided by hand. Call it on the module that `DistributedDataParallel` gets, which may be one around the layers.

    Raises:
        TypeError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; it must be a torch.nn.Module")
    apart: set[int] = set()
    for module in model.modules():
        if isinstance(module, RankExperts) and module.buffer.num_ranks > 1:
            module.is_marked = True
            apart |= {id(parameter) for parameter in module.expert_parameters()}
            apart |= {id(buffer) for name, buffer in module.named_buffers() if name.endswith("num_tokens_per_expert")}
    members = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    names = {prefix + name for name, member in members if id(member) in apart for prefix in _PREFIXES}
    setattr(model, _IGNORED, sorted(names.union(getattr(model, _IGNORED, ()))))


@dataclass
class _RankParameter:
    """Describes a parameter of one rank: the buffer whose ranks have others, and the wrapper that averages its gradients."""

    buffer: Buffer
    ddp: "weakref.ref[DistributedDataParallel] | None" = None
    is_hooked: bool = False

    @property
    def group(self) -> dist.ProcessGroup:
        if self.buffer._group is None:
            raise BufferDestroyedError("the experts' buffer was destroyed, so no norm over all ranks can be had; clip before destroy()")
        return self.buffer._group

    def average(self, gradient: Tensor) -> Tensor:
        is_wrapped = self.ddp is not None and self.ddp() is not None
        return gradient / self.buffer.num_ranks if is_wrapped else gradient


@dataclass
class _Seen:
    """The result of the last check of a layer. One parameter represents all, since wrappers take all of them or none."""

    owner: nn.Module | None
    name: str
    parameter: nn.Parameter | None
    requires_grad: bool
    ddp: "weakref.ref[DistributedDataParallel] | None"

    def is_current(self, ddp: DistributedDataParallel | None) -> bool:
        if ddp is not None and (self.ddp is None or self.ddp() is not ddp):
            return False
        if self.owner is None or self.parameter is None:
            return True
        is_same = self.owner._parameters.get(self.name) is self.parameter and self.parameter.requires_grad == self.requires_grad
        return is_same and not getattr(self.parameter, "_fsdp_flattened", False)


_records = WeakIdKeyDictionary()  # parameter -> _RankParameter
_seen: "weakref.WeakKeyDictionary[RankExperts, _Seen]" = weakref.WeakKeyDictionary()


class _NoGroup(str):
    """The name that DeepSpeed takes for the group over which it broadcasts and averages an expert's parameter."""

    def __hash__(self) -> int:
        raise ValueError(
            "DeepSpeed has no process group for experts that deepep_moe has spread, so it cannot train them; use "
            "DistributedDataParallel, or DeepSpeed's AutoEP or MoE layers with deepep_moe (docs/data_parallel.md)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),)


def _look(layer: RankExperts, seen: _Seen | None, ddp: DistributedDataParallel | None) -> _Seen:
    """Mark the parameters of a layer's experts, and raise ValueError if a wrapper has taken them."""
    if getattr(layer, "_is_replica", False):
        raise ValueError("DataParallel runs copies of this layer in one process; start a process for each GPU, with torchrun")
    places = [(module, name, p) for module in layer.experts.modules() for name, p in module._parameters.items() if p is not None]
    is_known = all(parameter in _records for _, _, parameter in places)
    had_parameters = seen is not None and seen.parameter is not None
    was_flattened = had_parameters and (not places or getattr(seen.parameter, "_fsdp_flattened", False))  # type: ignore[union-attr]
    if was_flattened or not is_known:
        _check_shards(layer, [module for module, _, _ in places], was_flattened)
    wrapper = weakref.ref(ddp) if ddp is not None else seen.ddp if seen is not None else None
    if ddp is not None:
        _check_ddp(layer, ddp)
    _teach_torch()
    for _, _, parameter in places:
        record = _records.setdefault(parameter, _RankParameter(layer.buffer))
        parameter.allreduce, parameter.group_name = False, _NoGroup("deepep_moe")  # type: ignore[attr-defined]
        record.ddp = wrapper if layer.is_marked else None
        if parameter.requires_grad and not record.is_hooked:
            parameter.register_hook(record.average)
            record.is_hooked = True
    owner, name, parameter = places[0] if places else (None, "", None)  # type: ignore[assignment]
    return _Seen(owner, name, parameter, parameter is not None and parameter.requires_grad, wrapper)


def _check_ddp(layer: RankExperts, ddp: DistributedDataParallel) -> None:
    taken = {id(parameter) for parameter in ddp._module_parameters}
    if any(id(parameter) in taken for parameter in layer.expert_parameters()):
        raise ValueError(
            "DistributedDataParallel has given this rank the experts of rank 0 and averages their gradients; call "
            f"deepep_moe.nn.mark_experts(model) on the {type(ddp.module).__name__} that it gets, before it, and load the weights again"
        )
    ranks, others = _ranks(layer.buffer._group), _ranks(ddp.process_group)
    if layer.is_marked and ranks != others:
        raise ValueError(
            f"DistributedDataParallel averages over ranks {others}, but the experts are spread over ranks {ranks}, so copies of an expert "
            "would drift apart; spread them over all ranks of DistributedDataParallel"
        )


def _check_shards(layer: RankExperts, modules: list[nn.Module], was_flattened: bool) -> None:
    """Raise ValueError if FSDP, of either kind, shards the experts over ranks that have different experts."""
    ranks, me = set(_ranks(layer.buffer._group)), dist.get_rank()
    advice = "each rank has other ones. Pass the expert parameters (docs/data_parallel.md) as"
    inner: list[Any] = [getattr(module, "process_group", None) for module in layer.experts.modules() if hasattr(module, "_handle")]
    if inner:
        was_flattened = any(ranks.intersection(_ranks(group)) != {me} for group in inner)
    if was_flattened:
        raise ValueError(f"FullyShardedDataParallel shards the experts; {advice} ignored_states to it")
    meshes = list(_meshes_of({id(module) for module in modules}))
    has_shards = any(hasattr(parameter, "full_tensor") for parameter in layer.expert_parameters()) and not meshes
    if has_shards or any(ranks.intersection(mesh.mesh.flatten().tolist()) != {me} for mesh in meshes):
        raise ValueError(f"fully_shard shards the experts; {advice} ignored_params to it")


def _meshes_of(modules: set[int]) -> Iterator[Any]:
    """Return the meshes over which `fully_shard` has sharded parameters of these modules. A forward does not show it: there the parameters
    are whole and plain."""
    for reference in list(_module_state_mapping.values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for shard in getattr(group, "fsdp_params", ()):
                if id(shard._module_info.module) in modules:
                    yield shard.mesh_info.mesh


def _ranks(group: "dist.ProcessGroup | None") -> list[int]:
    return sorted(dist.get_process_group_ranks(group))


@functools.cache
def _teach_torch() -> None:
    """Let the norm of gradients, and what a GradScaler finds in them, be those of all ranks where an expert's gradient takes part."""
    total_norm, unscale = clip_grad._get_total_norm, torch.amp.GradScaler._unscale_grads_

    @functools.wraps(total_norm)
    def total_norm_of_ranks(
        tensors: Tensor | Iterable[Tensor], norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        records = {id(parameter.grad): record for parameter, record in _records.items() if parameter.grad is not None}
        groups: dict[dist.ProcessGroup | None, list[Tensor]] = {None: []}
        for tensor in tensors:
            record = records.get(id(tensor))
            groups.setdefault(None if record is None else record.group, []).append(tensor)
        if len(groups) == 1:
            return total_norm(tensors, norm_type, error_if_nonfinite, foreach)
        norms = []
        for group, members in groups.items():
            norm = total_norm(members, norm_type, False, foreach).to(tensors[0].device)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            norms.append(norm[None] if group is None else _gather(norm, group))
        return total_norm([torch.cat(norms)], norm_type, error_if_nonfinite, foreach)

    @functools.wraps(unscale)
    def unscale_on_ranks(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found_inf = unscale(self, optimizer, *args, **kwargs)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        groups = dict.fromkeys(_records[parameter].group for parameter in parameters if parameter in _records)
        for group in groups:
            for flag in found_inf.values():
                dist.all_reduce(flag, dist.ReduceOp.MAX, group)
        return found_inf

    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = total_norm_of_ranks
    torch.amp.GradScaler._unscale_grads_ = unscale_on_ranks  # type: ignore[method-assign]


def _gather(number: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the number of each rank of the group: a sum, as gloo gathers nothing on GPUs."""
    numbers = torch.zeros(dist.get_world_size(group), dtype=number.dtype, device=number.device)
    numbers[dist.get_rank(group)] = number
    dist.all_reduce(numbers, group=group)
    return numbers
