"""Completion of an asynchronous operation."""

from concurrent.futures import Future

import torch


class Event:
    """Says when the results of an asynchronous dispatch or combine may be read.

    On the CPU backends the operation runs on the buffer's own thread; `wait` blocks the caller and raises what the operation raised. On
    the GPU backends it runs on the stream of the call; `wait` makes the caller's current stream wait and returns at once.
    """

    def __init__(self, future: "Future[None] | None" = None, recorded: "torch.cuda.Event | None" = None):
        self._future = future
        self._recorded = recorded
        self.seen = False
        """Has `wait` returned or raised?"""

    def wait(self) -> None:
        """Return once the results may be used. Raises the operation's error, every time it is called."""
        if self._future is not None:
            try:
                self._future.result()
            finally:
                self.seen = True
        if self._recorded is not None:
            torch.cuda.current_stream().wait_event(self._recorded)

    def failure(self) -> BaseException | None:
        """The operation's error, once it is over."""
        return None if self._future is None else self._future.exception()

    def query(self) -> bool:
        """True when `wait` would not block."""
        return (self._future is None or self._future.done()) and (self._recorded is None or self._recorded.query())
