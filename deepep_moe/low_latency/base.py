"""The methods of a backend of a `LowLatencyBuffer`."""

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepep_moe.errors import EPError
from deepep_moe.event import Event
from deepep_moe.group.rendezvous import Connectable
from deepep_moe.group.settings import Settings

if TYPE_CHECKING:
    from deepep_moe._torch import LowLatencyCalls

DESTROYED = "this LowLatencyBuffer was destroyed; create another"
FORKED = "this LowLatencyBuffer belongs to the process that created it, not to one forked from it; create another"
NOT_RECEIVED = (
    "the call before last was not received yet; call its hook(), or wait for its event, or where that is lost call finish_calls(), "
    "then make this call again"
)


class LowLatencyBackend(Connectable):
    """One way to move the rows. A call has two halves, sending and receiving."""

    name: str
    device: torch.device
    calls: "LowLatencyCalls | None" = None
    """The native object that makes calls with unchecked arguments; None on CPUs."""

    def __init__(self, settings: Settings, native: Any):
        self.settings = settings
        self.process_id = os.getpid()
        self._native = native
        self.workspace_bytes: int = native.workspace_bytes

    # ---- calls ----

    def open(self, statistics: Tensor) -> None:
        """Get ready for the calls of a buffer with these statistics."""
        raise NotImplementedError

    def run(self, operation: str, *arguments: object) -> Any:
        """Make a checked call, "dispatch" or "combine", with the arguments of that method of `_torch.LowLatencyCalls` but the last.
        Return what has the fields of its result."""
        raise NotImplementedError

    def event(self, output: Any) -> Event:
        """Return the event of a call with `async_op` or `return_hook`."""
        raise NotImplementedError

    # ---- the rest ----

    def num_calls(self) -> int:
        """Return the number of calls that this rank has sent or refused."""
        return int(self._native.num_calls)

    def stream(self) -> tuple[int, ...]:
        """Return the last arguments of native calls: on a GPU, the stream."""
        return ()

    def mask(self, rank: int, masked: bool) -> None:
        self._native.mask(rank, masked, *self.stream())

    def rejoin(self) -> None:
        self._native.rejoin(*self.stream())

    def refuse(self, reason: str) -> None:
        """Tell the peers, who are or will be in the same call, why this rank refuses its arguments."""
        self._native.refuse(reason, *self.stream())

    def is_untold(self, error: BaseException, num_calls: int) -> bool:
        """Return whether the peers are still to learn, by `refuse`, of an error that a call has raised, or its half that sends. `num_calls`
        is the number of calls before this one: while it stays, the call has no number, and nobody knows of it."""
        return self._native is not None and self.num_calls() == num_calls and not isinstance(error, EPError)

    def masks(self) -> int:
        """Return the masks: bit r says that rank r is masked."""
        return int(self._native.masks)

    def has_failed(self, state: Tensor) -> bool:
        """Has the dispatch of a handle, of which this is the memory, failed, as far as it has come?"""
        raise NotImplementedError

    def destroy(self) -> None:
        self._native = None

    def zeros(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # it outlives the mode that it is made in
            return torch.zeros(shape, dtype=dtype, device=self.device)
