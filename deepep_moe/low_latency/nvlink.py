"""Backends of low latency for GPUs that reach each other's memory (csrc/cuda/low_latency*.cu): `nvlink` within a host, `nvshmem` over
several nodes."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepep_moe import _C, torch_module
from deepep_moe.device import call_stream
from deepep_moe.errors import BufferDestroyedError
from deepep_moe.event import Event
from deepep_moe.group.gpu_memory import GpuMemory, RailMemory
from deepep_moe.group.settings import Settings
from deepep_moe.library import unwatched
from deepep_moe.low_latency.base import DESTROYED, LowLatencyBackend

if TYPE_CHECKING:
    from deepep_moe._torch import InFlight, SecondHalf


class NvlinkLowLatencyBackend(GpuMemory, LowLatencyBackend):
    """Enqueues on the caller's stream, or beside it."""

    name = "nvlink"
    _native: "_C.NvlinkLowLatency"

    def __init__(self, settings: Settings, mask_stalled: bool):
        index, s = torch.cuda.current_device(), settings
        native = _C.NvlinkLowLatency(
            device=index, ranks_per_node=s.ranks_per_node, num_max_tokens=s.num_max_tokens_per_rank, lanes=s.lanes,
            mask_stalled=mask_stalled, **s.native,
        )  # fmt: skip
        super().__init__(settings, native)
        self.device = torch.device("cuda", index)

    def open(self, statistics: Tensor) -> None:
        self.calls = torch_module.needed().LowLatencyCalls(self._native, statistics)

    def run(self, operation: str, *arguments: object) -> Any:
        if self.calls is None:
            raise BufferDestroyedError(DESTROYED)
        with unwatched():
            return getattr(self.calls, operation)(*arguments, True)

    def event(self, output: "InFlight") -> Event:
        half = output.second_half
        return Event(recorded=output.recorded, second_half=None if half is None else partial(self._receive, half))

    def _receive(self, half: "SecondHalf") -> None:
        if not half.finish():
            raise BufferDestroyedError(DESTROYED)

    def has_failed(self, state: Tensor) -> bool:
        if torch.cuda.is_current_stream_capturing():
            return False  # a kernel checks it
        call, failed = state[:16].view(torch.int64).tolist()  # as LowLatencyHandleLayout has them
        return bool(call ^ failed == self._native.failed_mark)

    def check(self) -> None:
        if not torch.cuda.is_current_stream_capturing():  # where nobody may wait for a GPU; a failure stays
            self._native.check()

    def stream(self) -> tuple[int, ...]:
        return (call_stream(self.device),)

    def refuse(self, reason: str) -> None:
        if not torch.cuda.is_current_stream_capturing():  # then nobody is in a call yet, and nobody may wait for a GPU
            super().refuse(reason)

    def destroy(self) -> None:
        if self.calls is not None:
            self.calls.release()
        self.calls = None
        super().destroy()


class NvshmemLowLatencyBackend(RailMemory, NvlinkLowLatencyBackend):
    """Serves the ranks of a node as `NvlinkLowLatencyBackend` does. A row crosses once to each node of its experts, to the rank with the
    sender's index there, through NVSHMEM's symmetric heap (docs/design/low_latency_nodes.md)."""

    name = "nvshmem"

    def __init__(self, settings: Settings, mask_stalled: bool):
        super().__init__(settings, mask_stalled)
        self.add_rail(maps_node=True)
