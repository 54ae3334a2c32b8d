"""The buffers that the MoE layers of DeepSpeed share, and the plans that say which layers share one."""

import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepep_moe import config
from deepep_moe._C import ROW_ALIGNMENT
from deepep_moe.device import FLOATS
from deepep_moe.errors import EPTimeoutError
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.growing import GrowingBuffer
from deepep_moe.group.rendezvous import check_same, gather_objects
from deepep_moe.integrations.common.registry import BufferRegistry
from deepep_moe.integrations.common.warn_once import say_on
from deepep_moe.integrations.deepspeed.options import Layer, Options
from deepep_moe.nn.balance import Copies

_OPTION = 'num_max_tokens_per_rank, an argument of replace_moe_layers and a key of "deepep_moe" in ds_config,'


@dataclass(frozen=True, eq=False)
class Plan:
    """The options, sizes and buffers that swapped layers share. The sizes are those of the largest layer."""

    options: Options
    num_local_experts: int
    """Experts of a rank in the buffer: the largest count of the layers that share it, and slots for copies."""
    num_topk: int
    """Experts of a token: the largest count of the layers that share it."""
    buffers: BufferRegistry = field(default_factory=BufferRegistry, init=False, repr=False)
    """Keys are a group, a width of rows and a type of device. Layers that share a buffer run one after another, in any dtype."""
    layers: "weakref.WeakSet[nn.Module]" = field(default_factory=weakref.WeakSet, init=False, repr=False)
    """The layers that use the plan. The buffers may go when there are none."""
    copies: "weakref.WeakKeyDictionary[nn.Module, Copies]" = field(default_factory=weakref.WeakKeyDictionary, init=False, repr=False)
    """The copies of experts of each layer's latest forward."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.options, self.num_local_experts, self.num_topk)  # copies of layers get buffers of their own

    def release(self, layers: Iterable[nn.Module]) -> None:
        """Forget these layers, and destroy the buffers with the last one. Not collective: ranks may release layers at different times."""
        self.layers.difference_update(layers)
        if not self.layers:
            self.buffers.destroy()


class Swapped:
    """The attributes that swapped layers of both kinds have and DeepSpeed's do not."""

    deepep_moe_plan: Plan
    deepep_moe_number: int = 0
    """`layer` of its dispatches."""
    deepep_moe_is_counted = True
    """`deepep_moe.nn.Metrics` can follow the layer."""

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore a copy of a layer, whose plan is a copy too."""
        super().__setstate__(state)  # type: ignore[misc]
        self.deepep_moe_plan.layers.add(self)  # type: ignore[arg-type]


def unswap(module: Layer, stock: type) -> None:
    """Give a layer, or a router, its class in DeepSpeed back."""
    for name in (*Swapped.__annotations__, *type(module).__annotations__):
        module.__dict__.pop(name, None)
    module.__class__ = stock


def why_not_served(layer: Layer, x: torch.Tensor, num_topk: int, most: int) -> str | None:
    """Return the reason why a layer of either kind cannot send rows such as those of x [..., hidden], of which it may send `most` each in
    fast mode, or None."""
    if layer.ep_group is None:
        return "the layer has no expert-parallel group; deepspeed.initialize makes one"
    if x.dtype not in FLOATS:
        return f"rows are {x.dtype}, not torch.float32, torch.bfloat16 or torch.float16"
    if x.shape[-1] * x.element_size() % ROW_ALIGNMENT:
        return f"the hidden size is {x.shape[-1]}; in {x.dtype} it must be a multiple of {ROW_ALIGNMENT // x.element_size()}"
    if not layer.deepep_moe_plan.options.exact and num_topk > most:
        return f"top-{num_topk} is more than the {most} experts of a token that fast mode serves here; use exact=True"
    return None


def groups_of(layer: Layer) -> tuple[Any, ...]:
    """Return the groups that together have the ranks of a layer's pipeline stage; none where nobody has made the layer's groups."""
    from deepspeed.utils import groups

    if layer.ep_group is None:
        return ()
    return layer.ep_group, groups._EXPERT_DATA_PARALLEL_GROUP.get(layer.ep_group_name)


def ready(group: dist.ProcessGroup, x: torch.Tensor, plan: Plan) -> GrowingBuffer:
    """Return the plan's buffer for x [num_tokens, hidden]. Collective over `group` where it constructs one. Raises as `Buffer`."""
    return plan.buffers.get((group, x.shape[1], x.device.type), lambda: _growing(group, x, plan))


def _growing(group: dist.ProcessGroup, x: torch.Tensor, plan: Plan) -> GrowingBuffer:
    _check_same_plan(group, plan)
    # It keeps the plan's numbers and not the plan: buffers go at once with the last layer, not with a collection of cycles.
    construct = functools.partial(_construct, group, x.shape[1], plan.options, plan.num_local_experts, plan.num_topk)
    growing = GrowingBuffer(group, x.shape[0], x.device, construct, plan.options.num_max_tokens_per_rank, _OPTION)
    layers, mode = list(plan.layers), "exact" if plan.options.exact else "fast"
    experts = {_whose_experts(layer, plan.options) for layer in layers}
    if layers:
        say_on(len(layers), f"{growing.buffer.backend} ({mode} mode)", experts, *groups_of(layers[0]))
    return growing


def _whose_experts(layer: Layer, options: Options) -> str:
    if getattr(layer, "_is_autoep_layer", False):
        return "experts are AutoEP's"
    option = options.grouped_experts  # where they can be grouped is known in the forward
    grouped = f"in grouped products where {'that is fast' if option is None else 'they can be read'}"
    return f"experts are DeepSpeed's, {'one by one' if option is False else grouped}"


def _check_same_plan(group: dist.ProcessGroup, plan: Plan) -> None:
    """Compare what the ranks of `group` were given, in the words of the options. Collective. Raises EPMismatchError, and EPTimeoutError
    for a rank that does not come."""
    names = ("exact", "backend", "num_max_tokens_per_rank", "ranks_per_node", "fp8", "sums")
    settings = {name: getattr(plan.options, name) for name in names} | {"balance": repr(plan.options.balance)}
    settings |= {"num_local_experts": plan.num_local_experts, "num_topk": plan.num_topk}
    phase = "comparison of the options of swapped MoE layers"
    try:
        by_rank = gather_objects(settings, group, dist.get_world_size(group), phase, config.timeout_s(), dict)
    except EPTimeoutError as error:
        raise EPTimeoutError(
            f"{error}; swap MoE layers on every rank, before the same forward", rank=error.rank, phase=phase, expected=1, seen=0
        ) from error
    check_same(by_rank, "swap MoE layers with the same options on every rank")


def _construct(group: dist.ProcessGroup, hidden: int, options: Options, num_local_experts: int, num_topk: int, num_tokens: int) -> Buffer:
    """Construct a buffer. Exact mode sends a row for each expert of a token, fast mode one row with all of them as lanes."""
    num_rows, lanes = (num_tokens * num_topk, 1) if options.exact else (num_tokens, num_topk)
    num_experts = num_local_experts * dist.get_world_size(group)
    return Buffer(
        group, num_rows, hidden, num_experts, lanes, backend=options.backend, num_sms=options.num_sms,
        ranks_per_node=options.ranks_per_node, sums=options.sums,
    )  # fmt: skip
