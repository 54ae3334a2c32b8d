"""Backend `nvlink` of low latency: GPUs of one host that reach each other's memory (csrc/cuda/low_latency*.cu)."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepep_moe import _C, torch_module
from deepep_moe.device import call_stream
from deepep_moe.event import Event
from deepep_moe.group.settings import Settings
from deepep_moe.low_latency.base import Call, LowLatencyBackend, native_settings


class NvlinkLowLatencyBackend(LowLatencyBackend):
    """Enqueues on the caller's stream, or beside it."""

    name = "nvlink"

    def __init__(self, settings: Settings, mask_stalled: bool):
        index = torch.cuda.current_device()
        super().__init__(
            settings, _C.NvlinkLowLatency(device=index, ranks_per_node=settings.ranks_per_node, **native_settings(settings, mask_stalled))
        )
        self.device = torch.device("cuda", index)
        self._own_stream: Any = torch_module.needed().OwnStream(self.device)
        self._num_calls = 0

    def address(self) -> bytes:
        """The CUDA IPC handle of this rank's workspace, and where its GPU is."""
        return self._native.handle()

    def connect(self, addresses: list[bytes]) -> None:
        self._native.connect(addresses)

    def disconnect(self) -> None:
        self._native.disconnect()

    def seal(self) -> None:
        """Nothing to close: CUDA's handles end with the allocation."""

    def start_async(self, call: Call) -> Event:
        self._enqueue(call, True, True, self._own_stream.follow())
        self._own_stream.keep(_tensors(call))
        return Event(recorded=self._own_stream.record())

    def start(self, call: Call) -> Event:
        self._move(call, True, False)
        return Event(second_half=partial(self._receive, call, self.stream()))

    def _receive(self, call: Call, sent_on: int) -> None:
        if self.stream() != sent_on:
            torch_module.needed().keep_for_current(self.device, _tensors(call))
        self._move(call, False, True)

    def _move(self, call: Call, sends: bool, receives: bool) -> None:
        self._enqueue(call, sends, receives, self.stream())

    def _enqueue(self, call: Call, sends: bool, receives: bool, stream: int) -> None:
        self._call(call, sends, receives, stream)
        self._num_calls += sends

    def plain_calls(self, statistics: Tensor) -> Any:
        s = self.settings
        return torch_module.needed().LowLatencyCalls(
            shim=self._native.shim(), num_ranks=s.num_ranks, num_local_experts=s.num_local_experts, num_topk=s.num_topk,
            hidden=s.hidden, num_max_tokens=s.num_max_tokens_per_rank, handle_bytes=self.handle_bytes, statistics=statistics,
        )  # fmt: skip

    def stream(self) -> int:
        return call_stream(self.device)

    def keep_for_current(self, tensor: Tensor) -> None:
        torch_module.needed().keep_for_current(self.device, [tensor])

    def has_failed(self, state: Tensor) -> bool:
        if torch.cuda.is_current_stream_capturing():
            return False  # a kernel finds out
        call, failed = state[:16].view(torch.int64).tolist()  # as LowLatencyHandleLayout has them
        return call ^ failed == self._native.failed_mark

    def check(self) -> None:
        if not torch.cuda.is_current_stream_capturing():  # where nobody may wait for a GPU; a failure stays
            super().check()

    def mask(self, rank: int, masked: bool) -> None:
        self._native.mask(rank, masked, self.stream())

    def rejoin(self) -> None:
        self._native.rejoin(self.stream())

    def refuse(self, reason: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            return  # nobody is in a call yet, and nobody may wait for a GPU now
        self._native.refuse(reason, self.stream())
        self._num_calls += 1

    def num_calls(self) -> int:
        return self._num_calls


def _tensors(call: Call) -> list[Tensor]:
    return [value for value in call.arguments if isinstance(value, Tensor)]
