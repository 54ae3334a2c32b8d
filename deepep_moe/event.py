"""Completion of an asynchronous operation."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import torch

from deepep_moe import torch_module


class Recorded(Protocol):
    """A point on a stream: `torch.cuda.Event`, or the event of `deepep_moe._torch`."""

    def wait(self) -> None:
        """Let the current stream wait for it."""
        ...

    def query(self) -> bool:
        """Return whether the stream has reached it."""
        ...


class Event:
    """The end of an asynchronous dispatch or combine, after which its results may be read.

    On CPU backends the operation runs on the buffer's thread; `wait` blocks the caller and raises the operation's error. On GPU backends
    it runs on the buffer's stream; `wait` makes the caller's current stream wait and returns at once. If a GPU call has two halves
    (`return_hook=True`), `wait` enqueues the second half on the caller's current stream.
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
        """True if the call is part of a CUDA graph."""
        self.seen = False
        """True once `wait` has returned or raised."""

    def wait(self) -> None:
        """Return once the results may be used. Raises: the operation's error; on CPU backends in each call of `wait`."""
        second_half, self._second_half = self._second_half, None
        try:
            if self._future is not None:
                self._future.result()
            if second_half is not None:
                second_half()
        finally:
            self.seen = True
        if self._recorded is not None:
            if isinstance(self._recorded, torch.cuda.Event):  # its own `wait` uses the current device only
                torch.cuda.current_stream(self._recorded.device).wait_event(self._recorded)
            else:
                self._recorded.wait()

    def then(self, function: Callable[[], None]) -> "Event":
        """Return an event whose first `wait` waits for this one, and then calls `function`."""

        def finish() -> None:
            self.wait()
            function()

        return Event(self._future, self._recorded, finish, self._device, self.is_captured)

    def failure(self) -> BaseException | None:
        """Wait for the operation, and return its error or None."""
        if self._second_half is not None:
            self.wait()
            if self._device is not None:  # the caller may wait for the results on another stream
                self._recorded = torch_module.needed().Recorded(self._device)
        return None if self._future is None else self._future.exception()

    def query(self) -> bool:
        """Return whether `wait` would not block. False during the capture of a CUDA graph, when CUDA allows no queries."""
        if self._recorded is not None and (torch.cuda.is_current_stream_capturing() or not self._recorded.query()):
            return False
        return self._future is None or self._future.done()

    @property
    def is_enqueued(self) -> bool:
        """Return whether all of the call is on the stream of a GPU, so that the host has nothing to finish."""
        return self._future is None and self._second_half is None

    @property
    def is_half(self) -> bool:
        """Return whether the second half of the call is still to be made."""
        return self._second_half is not None

    def is_over(self) -> bool:
        """Return whether the operation has ended. A call in two halves does not end before `wait`."""
        return not self.is_half and self.query()
