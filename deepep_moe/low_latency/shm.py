"""Backend `shm` of low latency: processes of one host, CPU tensors. Calls are those of csrc/runtime/shm, their rows `shm_rows`."""

import os

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.event import Event
from deepep_moe.group.settings import Settings
from deepep_moe.host_pool import HostPool
from deepep_moe.library import unwatched
from deepep_moe.low_latency.base import Call, LowLatencyBackend, native_settings
from deepep_moe.low_latency.shm_rows import Areas, CombineRows, DispatchRows
from deepep_moe.worker import Worker


class ShmLowLatencyBackend(LowLatencyBackend):
    """Sends on the caller's thread; receives there, or on a thread of its own."""

    name = "shm"
    device = torch.device("cpu")
    can_be_interrupted = True

    def __init__(self, settings: Settings, mask_stalled: bool):
        super().__init__(settings, _C.ShmLowLatency(**native_settings(settings, mask_stalled)))
        self._areas = Areas(self._native, settings)
        self._worker: Worker | None = None
        self._pool = HostPool()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._pool.empty(shape, dtype)

    def address(self) -> tuple[str, int]:
        """What peers need to open this rank's shared memory: its path and this process's id."""
        return self._native.path, os.getpid()

    def connect(self, addresses: list[tuple[str, int]]) -> None:
        self._native.connect([path for path, _ in addresses], [pid for _, pid in addresses])

    def disconnect(self) -> None:
        """Mappings end with the backend: each keeps the memory."""

    def seal(self) -> None:
        self._native.seal()

    def start_async(self, call: Call) -> Event:
        self._move(call, True, False)
        if self._worker is None:
            self._worker = Worker()
        return Event(self._worker.submit(self._move, call, False, True))

    def _move(self, call: Call, sends: bool, receives: bool) -> None:
        s = self.settings
        rows: DispatchRows | CombineRows
        with unwatched(), torch.inference_mode():
            if call.operation == "dispatch":
                x, topk_idx, topk_weights, state, recv_x, recv_x_scales, counts, statistics, dtype, is_rounded = call.arguments
                rows = DispatchRows(self._areas, x, topk_idx, topk_weights, state, recv_x, recv_x_scales, counts, statistics, is_rounded)
                what = dtype, recv_x_scales is not None, is_rounded, topk_weights is not None, len(x)
                number = state[:8].view(torch.int64)
            else:
                x, state, topk_weights, number, combined_x, statistics, dtype, fp8 = call.arguments
                rows = CombineRows(self._areas, x, state, topk_weights, number, combined_x, fp8)
                last_bits = int(state[:8].view(torch.int64)) & 0xFFFF  # of the number of its dispatch
                what = dtype, fp8, False, topk_weights is not None, last_bits
            wait_ns = statistics[s.num_local_experts : s.num_local_experts + s.num_ranks]
            self._call(Call(call.operation, (rows, *what, 0 if sends else int(number), wait_ns)), sends, receives)

    def num_calls(self) -> int:
        return self._native.num_calls

    def mask(self, rank: int, masked: bool) -> None:
        self._native.mask(rank, masked)

    def rejoin(self) -> None:
        self._native.rejoin()

    def has_failed(self, state: Tensor) -> bool:
        """As LowLatencyHandleLayout has it, no rank's tokens are known before they are received."""
        return min(state[16 : 16 + 4 * self.settings.num_ranks].view(torch.int32).tolist()) < 0

    def is_broken_off(self) -> bool:
        is_broken_off: bool = self._native.is_broken_off
        return is_broken_off

    def refuse(self, reason: str) -> None:
        self._native.refuse(reason)

    def destroy(self) -> None:
        if self._worker is not None and os.getpid() == self.process_id:
            self._worker.finish()
        self._areas.close()
        super().destroy()
