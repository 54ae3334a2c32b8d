"""Completion of an asynchronous operation."""

from concurrent.futures import Future


class Event:
    """Says when the results of an asynchronous dispatch or combine may be read.

    On the CPU backends the operation runs on the buffer's own thread; `wait` blocks the caller and raises what the operation raised.
    """

    def __init__(self, future: "Future[None] | None" = None):
        self._future = future

    def wait(self) -> None:
        """Return once the results are there. Raises the operation's error, every time it is called."""
        if self._future is not None:
            self._future.result()

    def query(self) -> bool:
        """True when `wait` would not block."""
        return self._future is None or self._future.done()
