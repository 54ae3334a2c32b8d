"""Chooses the stream of a call: the current one, or the communication stream of a DeepEP buffer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from deepep_moe.compat.deep_ep.events import EventHandle, EventOverlap, recorded_of


class CommStream:
    """Makes the communication stream of a buffer when it is first asked for. Calls on CPU tensors run at once, on no stream.

    A synchronous call runs on the current stream, once the previous event is reached. An asynchronous one runs on the communication stream:
    after the previous event, or without one after what the current stream has been given so far.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def get(self, device: "torch.device | None" = None) -> "torch.cuda.Stream":
        """Return the stream, of `device` or of the current one. Raises RuntimeError without a GPU."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def begin(self, x: object, previous_event: object, is_async: bool, also: object = None) -> "Call":
        """Let what follows run where the call on `x` runs, after the events `previous_event` and `also`. Raises TypeError for what is no
        event."""
        event = None if previous_event is None else recorded_of(previous_event)
        later = None if also is None else recorded_of(also)
        has_to_wait = is_async or event is not None or later is not None
        if not has_to_wait or not isinstance(x, Tensor) or not x.is_cuda:
            return Call(is_async)
        callers = stream = torch.cuda.current_stream(x.device)
        if is_async:
            stream = self.get(x.device)
            if event is None:
                stream.wait_stream(callers)
        for reached in (event, later):
            if reached is not None:
                stream.wait_event(reached)
        if not is_async:
            return Call(False)
        torch.cuda.set_stream(stream)
        return Call(True, callers, stream)


class Call:
    """A call that has begun. As a context manager it returns to the caller's stream if the block fails."""

    def __init__(self, is_async: bool, callers: "torch.cuda.Stream | None" = None, stream: "torch.cuda.Stream | None" = None) -> None:
        """callers, stream: of an asynchronous call on a GPU, the caller's stream and that of the call."""
        self._is_async, self._callers, self._stream = is_async, callers, stream

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None and self._callers is not None:
            torch.cuda.set_stream(self._callers)

    def end(self, inputs: "Iterable[Any]", outputs: "Iterable[Any]") -> EventOverlap:
        """Return to the caller's stream, and return the call's event. `inputs`, `outputs`: its tensors, whose memory both streams use."""
        if not self._is_async:
            return EventOverlap()
        event = EventHandle()
        if self._callers is not None and self._stream is not None:
            torch.cuda.set_stream(self._callers)
            for tensors, other_stream in ((inputs, self._stream), (outputs, self._callers)):
                for tensor in tensors:
                    if isinstance(tensor, Tensor):
                        tensor.record_stream(other_stream)
        return EventOverlap(event)
