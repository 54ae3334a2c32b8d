"""Backend `shm` of low latency: processes of one host, CPU tensors. Calls are those of csrc/runtime/shm, their rows `shm_rows`."""

import os

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.errors import EPError
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

    def run(self, call: Call) -> None:
        super().run(self._native_call(call))

    def start(self, call: Call) -> Event:
        return super().start(self._native_call(call))

    def start_async(self, call: Call) -> Event:
        call = self._native_call(call)
        if self._worker is None:
            self._worker = Worker()
        self._move(call, True, False)
        return Event(self._worker.submit(self._move, call, False, True))

    def _native_call(self, call: Call) -> Call:
        """Make all that both halves need before the first one: what fails later loses the call."""
        s = self.settings
        rows: DispatchRows | CombineRows
        with unwatched(), torch.inference_mode():
            if call.operation == "dispatch":
                x, topk_idx, topk_weights, state, recv_x, recv_x_scales, counts, statistics, dtype, is_rounded = call.arguments
                rows = DispatchRows(self._areas, x, topk_idx, topk_weights, state, recv_x, recv_x_scales, counts, statistics, is_rounded)
                what = dtype, recv_x_scales is not None, is_rounded, topk_weights is not None, len(x)
            else:
                x, state, topk_weights, _, combined_x, statistics, dtype, fp8 = call.arguments
                rows = CombineRows(self._areas, x, state, topk_weights, combined_x, fp8)
                last_bits = int(state[:8].view(torch.int64)) & 0xFFFF  # of the number of its dispatch
                what = dtype, fp8, False, topk_weights is not None, last_bits
            wait_ns = statistics[s.num_local_experts : s.num_local_experts + s.num_ranks]
        return Call(call.operation, (rows, *what, wait_ns))

    def _move(self, call: Call, sends: bool, receives: bool) -> None:
        self._call(call, sends, receives)

    def num_calls(self) -> int:
        return self._native.num_calls

    def mask(self, rank: int, masked: bool) -> None:
        self._native.mask(rank, masked)

    def rejoin(self) -> None:
        self._native.rejoin()

    def has_failed(self, state: Tensor) -> bool:
        """As LowLatencyHandleLayout has it, no rank's tokens are known before they are received."""
        return min(state[16 : 16 + 4 * self.settings.num_ranks].view(torch.int32).tolist()) < 0

    def is_untold(self, error: BaseException, num_calls: int) -> bool:
        """Native code tells why it refuses a call, and not what a signal's handler or PyTorch has raised, of whatever class."""
        if self._native is None:  # another thread has destroyed the buffer
            return False
        if self.num_calls() == num_calls:  # the error came before the call had a number
            return not isinstance(error, EPError)
        return self._native.is_interrupted(num_calls + 1) or not isinstance(error, (EPError, ValueError))

    def refuse(self, reason: str) -> None:
        self._native.refuse(reason)

    def destroy(self) -> None:
        if self._worker is not None and os.getpid() == self.process_id:
            self._worker.finish()
        self._areas.close()
        super().destroy()
