"""Completion of an asynchronous operation."""

from concurrent.futures import Future
from typing import Any


class Event:
    """Says when the results of an asynchronous dispatch or combine may be read.

    On the CPU backends the operation runs on the buffer's own thread; `wait` blocks the caller and raises what the operation raised.
    """

    def __init__(self, future: "Future[None] | None" = None, keep_alive: tuple[Any, ...] = ()):
        self._future = future
        self._keep_alive = keep_alive  # inputs, until the operation has read them

    def wait(self) -> None:
        """Return once the results are there. Raises the operation's error, every time it is called."""
        if self._future is not None:
            self._future.result()
        self._keep_alive = ()

    def query(self) -> bool:
        """True when `wait` would not block."""
        return self._future is None or self._future.done()
