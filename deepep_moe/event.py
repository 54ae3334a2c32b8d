"""Completion of an asynchronous operation."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import torch

from deepep_moe import torch_module


class Recorded(Protocol):
    """A moment on a stream: `torch.cuda.Event`, or that of `deepep_moe._torch`."""

    def wait(self) -> None:
        """Let the current stream wait for it."""
        ...

    def query(self) -> bool:
        """Has it come?"""
        ...


class Event:
    """Says when the results of an asynchronous dispatch or combine may be read.

    On the CPU backends the operation runs on the buffer's own thread; `wait` blocks the caller and raises what the operation raised. On
    the GPU backends it runs on a stream of the buffer's own; `wait` makes the caller's current stream wait and returns at once. Of a
    call in two halves (`return_hook=True`) on a GPU, `wait` enqueues the second half on the caller's current stream.
    """

    def __init__(
        self,
        future: "Future[None] | None" = None,
        recorded: Recorded | None = None,
        second_half: Callable[[], None] | None = None,
        device: "torch.device | None" = None,
        is_captured: bool = False,
    ):
        self._future = future
        self._recorded = recorded
        self._second_half = second_half
        self._device = device
        self.is_captured = is_captured
        """Is the call part of a CUDA graph?"""
        self.seen = False
        """Has `wait` returned or raised?"""

    def wait(self) -> None:
        """Return once the results may be used. Raises the operation's error; a thread's, every time it is called."""
        second_half, self._second_half = self._second_half, None
        try:
            if self._future is not None:
                self._future.result()
            if second_half is not None:
                second_half()
        finally:
            self.seen = True
        if self._recorded is not None:
            if isinstance(self._recorded, torch.cuda.Event):  # whose `wait` knows the current device only
                torch.cuda.current_stream(self._recorded.device).wait_event(self._recorded)
            else:
                self._recorded.wait()

    def failure(self) -> BaseException | None:
        """The operation's error, once it is over."""
        if self._second_half is not None:
            self.wait()
            if self._device is not None:  # whoever waits for the results may do so on another stream
                self._recorded = torch_module.needed().Recorded(self._device)
        return None if self._future is None else self._future.exception()

    def query(self) -> bool:
        """True when `wait` would not block. While a CUDA graph is captured False, as CUDA lets nobody ask then what a GPU has done."""
        if self._recorded is not None and (torch.cuda.is_current_stream_capturing() or not self._recorded.query()):
            return False
        return self._future is None or self._future.done()

    @property
    def is_half(self) -> bool:
        """Is the second half of the call still to come?"""
        return self._second_half is not None

    def is_over(self) -> bool:
        """Has the operation ended? Of a call in two halves: not before `wait`."""
        return not self.is_half and self.query()
