"""DeepEP's events: points on a GPU's stream that other streams wait for. If no GPU is in use, waits return at once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class EventHandle:
    """A point on the current stream, recorded when this object is made. If no GPU is in use, waits for it return at once."""

    __slots__ = ("recorded",)

    def __init__(self) -> None:
        self.recorded: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():
            self.recorded = torch.cuda.Event()
            self.recorded.record()

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the point. The host goes on."""
        if self.recorded is not None:
            torch.cuda.current_stream(self.recorded.device).wait_event(self.recorded)

    def wait(self) -> None:
        """Do the same as `current_stream_wait`."""
        self.current_stream_wait()


class EventOverlap:
    """An `EventHandle`, or None if the call was synchronous, and the tensors that callers hold until the event.

    As a context manager, it makes the current stream wait at the end of the block, so that work enqueued in the block overlaps the call.
    `with event(release_handle=True)` also drops the handle there.
    """

    __slots__ = ("_releases_handle", "_results", "complete", "event", "extra_tensors", "hook_after_wait")

    def __init__(self, event: "EventHandle | None" = None, extra_tensors: "tuple[Tensor, ...] | None" = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], object] | None = None
        self.complete: Callable[[], Any] | None = None
        """The last step of a deferred call, which returns the call's results."""
        self._releases_handle, self._results = False, None

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Make the current stream wait for the event, then make the last step of a deferred call and call the registered hook, each once.
        Without an event it does not wait, as the call is on the stream already. release_handle: drop the event afterwards.

        Returns the results of a deferred call: what it would have returned without `defer_epilogue`, except for the event. Else None."""
        if self.event is not None:
            self.event.current_stream_wait()
        complete, self.complete = self.complete, None
        if complete is not None:
            self._results = complete()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None
        return self._results

    def wait(self, release_handle: bool = False) -> Any:
        """Do the same as `current_stream_wait`."""
        return self.current_stream_wait(release_handle)

    def register_hook_after_wait(self, hook_after_wait: Callable[[], object]) -> None:
        """Let the next `current_stream_wait` call `hook_after_wait` after its wait.

        Raises:
            ValueError: a hook is registered already.
        """
        if self.hook_after_wait is not None:
            raise ValueError("this EventOverlap has a hook already, which its next current_stream_wait() calls; register one")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> "EventOverlap":
        """Return this object, whose next block ends with `current_stream_wait(release_handle)`."""
        self._releases_handle = release_handle
        return self

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, *_: object) -> None:
        releases, self._releases_handle = self._releases_handle, False
        self.current_stream_wait(releases)


def recorded_of(event: object) -> "torch.cuda.Event | None":
    """Return the event of CUDA in a caller's `previous_event`: an EventOverlap, an EventHandle, an event of PyTorch, or None.

    Raises TypeError for anything else.
    """
    if isinstance(event, EventOverlap):
        event = event.event
    if isinstance(event, EventHandle):
        return event.recorded
    if event is None or isinstance(event, torch.cuda.Event):
        return event
    raise TypeError(
        f"previous_event is a {type(event).__name__}; it must be an EventOverlap, an EventHandle or None: pass Buffer.capture()"
    )
