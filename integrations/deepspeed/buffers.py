"""The buffers that the MoE layers of one process share."""

import atexit
import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepep_moe import torch_module
from deepep_moe._C import ROW_ALIGNMENT
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.integrations.deepspeed.options import Options
from deepep_moe.integrations.growing_buffer import GrowingBuffer
from deepep_moe.integrations.say_once import say_once

_OPTION = 'num_max_tokens_per_rank, an argument of replace_moe_layers and a key of "deepep_moe" in ds_config,'


def why_not_rows(x: torch.Tensor) -> str | None:
    """The reason that no buffer takes rows such as those of x [..., hidden], or None."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"rows are {x.dtype}, not torch.float32, torch.bfloat16 or torch.float16"
    multiple = ROW_ALIGNMENT // x.element_size()
    return f"the hidden size is {x.shape[-1]}; in {x.dtype} it must be a multiple of {multiple}" if x.shape[-1] % multiple else None


@dataclass(frozen=True, eq=False)
class Plan:
    """What swapped layers that share buffers have in common: the options, the most that one of them needs, and the buffers."""

    options: Options
    num_local_experts: int
    """Experts of a rank in the buffer: the largest count of the layers that share it."""
    num_topk: int
    """Experts of a token, of the layer with most."""
    buffers: dict[tuple[Any, ...], GrowingBuffer] = field(default_factory=dict, init=False, repr=False)
    """By group, width of rows and type of device. Layers that share one run one after another, in any dtype."""
    layers: "weakref.WeakSet[nn.Module]" = field(default_factory=weakref.WeakSet, init=False, repr=False)
    """That use it; without any the buffers may go."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.options, self.num_local_experts, self.num_topk)  # copies of layers get buffers of their own

    def release(self, layers: Iterable[nn.Module]) -> None:
        """These use it no more; without any that do the buffers go. No rank needs to know what another has left."""
        self.layers.difference_update(layers)
        if not self.layers:
            self.destroy()

    def destroy(self) -> None:
        """Destroy the buffers. The next dispatch constructs new ones."""
        while self.buffers:
            self.buffers.popitem()[1].destroy()


def groups_of(layer: Any) -> tuple[Any, ...]:
    """That together have the ranks of a layer's stage of the pipeline; none for a layer whose groups nobody has made."""
    from deepspeed.utils import groups

    if layer.ep_group is None:
        return ()
    return layer.ep_group, groups._EXPERT_DATA_PARALLEL_GROUP.get(layer.ep_group_name)


def ready(group: dist.ProcessGroup, x: torch.Tensor, plan: Plan) -> GrowingBuffer:
    """The plan's buffer for x [num_tokens, hidden]. Collective over `group` when it constructs it. Raises as `Buffer`."""
    key = (group, x.shape[1], x.device.type)
    found = plan.buffers.get(key)
    if found is None:
        _plans.add(plan)
        # Of the plan's numbers, not of the plan: buffers go at once when the last layer does, and not with a collection of cycles.
        construct = functools.partial(_construct, group, x.shape[1], plan.options, plan.num_local_experts, plan.num_topk)
        found = plan.buffers[key] = GrowingBuffer(group, x.shape[0], x.device, construct, plan.options.num_max_tokens_per_rank, _OPTION)
    return found


def _construct(group: dist.ProcessGroup, hidden: int, options: Options, num_local_experts: int, num_topk: int, num_tokens: int) -> Buffer:
    """Exact mode sends a row for each expert of a token, fast mode one with all of them as lanes."""
    num_rows, lanes = (num_tokens * num_topk, 1) if options.exact else (num_tokens, num_topk)
    num_experts = num_local_experts * dist.get_world_size(group)
    buffer = Buffer(group, num_rows, hidden, num_experts, lanes, backend=options.backend, num_sms=options.num_sms)
    if buffer.backend == "nvlink" and torch_module.MODULE is None:
        why_not = torch_module.WHY_NOT
        say_once(f"MoE layers with few experts a token wait for the host longer than they must: deepep_moe._autograd is {why_not}", group)
    return buffer


# ---- of the process ----

_plans: "weakref.WeakSet[Plan]" = weakref.WeakSet()


def all_buffers() -> list[Buffer]:
    """Those in use, of all plans."""
    return [growing.buffer for plan in _plans for growing in plan.buffers.values()]


def destroy_all() -> None:
    """Destroy the buffers of all plans."""
    for plan in list(_plans):
        plan.destroy()


atexit.register(destroy_all)
