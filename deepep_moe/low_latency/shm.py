"""Backend `shm` of low latency: processes of one host, CPU tensors. Its calls are `shm_calls`, their rows `shm_rows`."""

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepep_moe.event import Event
from deepep_moe.group.settings import Settings
from deepep_moe.host_pool import HostPool
from deepep_moe.low_latency.base import LowLatencyBackend
from deepep_moe.low_latency.handle import State
from deepep_moe.low_latency.shm_calls import Rows, ShmCalls
from deepep_moe.low_latency.shm_rows import CombineRows, DispatchRows
from deepep_moe.worker import Worker


class ShmLowLatencyBackend(LowLatencyBackend):
    """Sends on the caller's thread; receives there, or on a thread of its own."""

    name = "shm"
    device = torch.device("cpu")
    _native: ShmCalls

    def __init__(self, settings: Settings, mask_stalled: bool):
        super().__init__(settings, ShmCalls(settings, mask_stalled))
        self._worker: Worker | None = None
        self._pool = HostPool()

    def address(self) -> tuple[str, int]:
        """Return what peers need to open this rank's shared memory: its path and this process's id."""
        return self._native.peers.path, os.getpid()

    def connect(self, addresses: list[tuple[str, int]]) -> None:
        self._native.connect(addresses)

    def seal(self) -> None:
        self._native.peers.seal()

    def free(self) -> int:
        """Give back the pages of rows, and of results that nobody uses. The words by which calls stay in step remain."""
        self._pool.trim()
        return self._native.free()

    def open(self, statistics: Tensor) -> None:
        self._native.statistics = statistics

    def event(self, output: Rows) -> Event:
        event, output.event = output.event, None  # the event refers to the output
        assert event is not None
        return event

    def run(self, operation: str, *arguments: Any) -> Rows:
        """Receive now, with the event's wait, or on a thread. What fails before there is an event loses the call."""
        make, calls = DispatchRows if operation == "dispatch" else CombineRows, self._native
        *of_rows, async_op, return_hook = arguments
        rows, before, has_hook = make(calls, self._pool.empty, *of_rows), calls.num_calls, bool(return_hook)
        receive = partial(calls.receive, rows)
        worker = None if has_hook or not async_op else self._worker or Worker()
        self._worker = worker or self._worker
        try:
            number = calls.send(rows)
            if has_hook:
                rows.event = Event(second_half=partial(receive, number))
            elif worker is not None:
                rows.event = Event(worker.submit(receive, number))
            else:
                receive(number)
        except BaseException:
            calls.lose(before + 1)
            raise
        return rows

    def has_failed(self, state: Tensor) -> bool:
        """Return whether rows are missing: the numbers of tokens in the handle are negative until they are received."""
        return bool(min(State(state, self.settings).num_tokens.tolist()) < 0)

    def is_untold(self, error: BaseException, num_calls: int) -> bool:
        """The peers know what has ended the half that sends, and each call's own errors; not what a signal's handler or PyTorch has raised
        while it was received."""
        if self._native is None or self.num_calls() == num_calls:  # another thread has destroyed the buffer, or the call has no number
            return super().is_untold(error, num_calls)
        return getattr(error, "known_in_call", 0) != num_calls + 1

    def destroy(self) -> None:
        if self._worker is not None and os.getpid() == self.process_id:
            self._worker.finish()
        if self._native is not None:
            self._native.destroy()
        super().destroy()
