"""The load-balancing region of DeepEP 2.5: tensors for copies of other ranks' experts."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe.compat.deep_ep.events import EventOverlap
from deepep_moe.compat.deep_ep.streams import CommStream
from deepep_moe.exchange.expert_slots import ALIGNMENT, ExpertSlots


class BufferAllocator:
    """A plan of the tensors of a region. They are on the device `meta` until an `EPBuffer` is made with the plan. That raises RuntimeError
    while a tensor has views or weak references, so take views afterwards."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def allocate(self, shape: "tuple[int, ...]", dtype: torch.dtype) -> Tensor:
        """Return a tensor of the plan. All ranks must plan the same tensors in the same order."""
        self._tensors.append(torch.empty(shape, dtype=dtype, device="meta"))
        return self._tensors[-1]

    def place(self, group: dist.ProcessGroup) -> ExpertSlots:
        """Give the tensors their memory: on a GPU where there is one. Collective.

        Raises ValueError for a plan without tensors, or with some that have memory."""
        if not self._tensors or any(not tensor.is_meta for tensor in self._tensors):
            raise ValueError("the plan has no tensor, or another buffer has it already; allocate tensors of a new BufferAllocator")
        backend = "nvlink" if torch.cuda.is_available() else "collective"
        slots = ExpertSlots(group, sum(tensor.nbytes + ALIGNMENT for tensor in self._tensors), backend=backend)
        for tensor in self._tensors:
            torch.utils.swap_tensors(tensor, slots.empty(*tensor.shape, dtype=tensor.dtype))
        return slots


def move(stream: CommStream, call: Callable[..., None], slots: Any, home: Any, copies: Tensor, num_sms: int, after: Any) -> EventOverlap:
    """Make a call of `ExpertSlots` on the communication stream, after the event `after`."""
    callers = stream.begin(copies, after, True)
    try:
        call(copies, slots, home, num_sms=num_sms or None)
    except BaseException:
        stream.abort(callers)
        raise
    moved = [tensor for tensors in (slots, home) for tensor in ([tensors] if isinstance(tensors, Tensor) else tensors)]
    return stream.end(callers, True, [copies, *moved], [])
