"""Backend `shm` of low latency: processes of one host, CPU tensors. Its calls are `shm_calls`, their rows `shm_rows`."""

import os
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deepep_moe.device import DTYPES
from deepep_moe.event import Event
from deepep_moe.group.settings import Settings
from deepep_moe.host_pool import HostPool
from deepep_moe.library import unwatched
from deepep_moe.low_latency.base import LowLatencyBackend
from deepep_moe.low_latency.checks import num_scale_columns
from deepep_moe.low_latency.shm_calls import Rows, ShmCalls, What
from deepep_moe.low_latency.shm_rows import CombineRows, DispatchRows
from deepep_moe.worker import Worker


class Combined(NamedTuple):
    """The results of a combine."""

    combined_x: Tensor
    event: Event | None


class Received(NamedTuple):
    """The results of a dispatch."""

    num_tokens: int
    recv_x: Tensor
    recv_x_scales: Tensor | None
    num_recv_tokens_per_expert: Tensor
    state: Tensor
    event: Event | None


class ShmLowLatencyBackend(LowLatencyBackend):
    """Sends on the caller's thread; receives there, or on a thread of its own."""

    name = "shm"
    device = torch.device("cpu")
    _native: ShmCalls

    def __init__(self, settings: Settings, mask_stalled: bool):
        super().__init__(settings, ShmCalls(settings, mask_stalled))
        self._worker: Worker | None = None
        self._pool = HostPool()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._pool.empty(shape, dtype)

    def address(self) -> tuple[str, int]:
        return self._native.address()

    def connect(self, addresses: list[tuple[str, int]]) -> None:
        self._native.connect(addresses)

    def seal(self) -> None:
        self._native.seal()

    def free(self) -> int:
        """Give back the pages of rows, and of results that nobody uses. The words by which calls stay in step remain."""
        self._pool.trim()
        return self._native.free()

    def open(self, statistics: Tensor) -> None:
        s = self.settings
        self._statistics, self._wait_ns = statistics, statistics[s.num_local_experts : s.num_local_experts + s.num_ranks]

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, fp8: bool, scale_format: str, async_op: bool, return_hook: bool
    ) -> Received:
        recv_x, scales, counts, state = self._receive_buffers(x.dtype, fp8, scale_format)
        is_rounded = scale_format == "ue8m0"
        with unwatched(), torch.inference_mode():
            rows = DispatchRows(self._native, x, topk_idx, topk_weights, state, recv_x, scales, counts, self._statistics, is_rounded)
        what = What(False, DTYPES[x.dtype], scales is not None, is_rounded, topk_weights is not None)
        event = self._run(rows, what, len(x), async_op, return_hook)
        return Received(len(x), recv_x, scales, counts, state, event)

    def combine(
        self, x: Tensor, state: Tensor, num_tokens: int, topk_weights: Tensor | None, out: Tensor | None, wire: str | None,
        async_op: bool, return_hook: bool,
    ) -> Combined:  # fmt: skip
        fp8, combined_x = wire == "fp8", self.empty((num_tokens, self.settings.hidden), x.dtype) if out is None else out
        with unwatched(), torch.inference_mode():
            rows = CombineRows(self._native, x, state, topk_weights, combined_x, fp8)
            last_bits = int(state[:8].view(torch.int64)) & 0xFFFF  # of the number of its dispatch
        what = What(True, DTYPES[x.dtype], fp8, False, topk_weights is not None)
        return Combined(combined_x, self._run(rows, what, last_bits, async_op, return_hook))

    def event(self, output: Received | Combined) -> Event:
        assert output.event is not None
        return output.event

    def _receive_buffers(self, dtype: torch.dtype, fp8: bool, scale_format: str) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return the rows, their scales, their number for each local expert, and the handle's state."""
        s, scales = self.settings, None
        capacity = s.rows_of_expert
        recv_x = self.empty((s.num_local_experts, capacity, s.hidden), torch.float8_e4m3fn if fp8 else dtype)
        if fp8:
            num_columns, scale_dtype = num_scale_columns(s.hidden, scale_format)
            scales = self.empty((s.num_local_experts, num_columns, capacity), scale_dtype).transpose(1, 2)
        counts = self.empty((s.num_local_experts,), torch.int32)
        with torch.inference_mode(False):  # PyTorch counts no changes in this mode
            return recv_x, scales, counts, self.empty((self.handle_bytes,), torch.uint8)

    def _run(self, rows: Rows, what: What, value: int, async_op: bool, return_hook: bool) -> Event | None:
        """Receive now, with the event's wait, or on a thread. What fails before there is an event loses the call."""
        calls, wait_ns = self._native, self._wait_ns
        receive, before, has_hook = partial(calls.receive, rows, what, wait_ns), calls.num_calls, bool(return_hook)
        worker = None if has_hook or not async_op else self._worker or Worker()
        self._worker = worker or self._worker
        try:
            number = calls.send(rows, what, value, wait_ns)
            if has_hook:
                return Event(second_half=partial(receive, number))
            if worker is not None:
                return Event(worker.submit(receive, number))
            receive(number)
        except BaseException:
            calls.lose(before + 1)
            raise
        return None

    def mask(self, rank: int, masked: bool) -> None:
        self._native.mask(rank, masked)

    def rejoin(self) -> None:
        self._native.rejoin()

    def has_failed(self, state: Tensor) -> bool:
        """Return whether rows are missing: the numbers of tokens in the handle are negative until they are received."""
        return bool(min(state[16 : 16 + 4 * self.settings.num_ranks].view(torch.int32).tolist()) < 0)

    def is_untold(self, error: BaseException, num_calls: int) -> bool:
        """The peers know what has ended the half that sends, and each call's own errors; not what a signal's handler or PyTorch has raised
        while it was received."""
        if self._native is None or self.num_calls() == num_calls:  # another thread has destroyed the buffer, or the call has no number
            return super().is_untold(error, num_calls)
        return getattr(error, "known_in_call", 0) != num_calls + 1

    def refuse(self, reason: str) -> None:
        self._native.refuse(reason)

    def destroy(self) -> None:
        if self._worker is not None and os.getpid() == self.process_id:
            self._worker.finish()
        if self._native is not None:
            self._native.destroy()
        super().destroy()
