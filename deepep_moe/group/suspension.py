"""Memory of buffers that the ranks give back together, and make again together."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch.distributed as dist

from deepep_moe.errors import BufferSuspendedError, EPError, describe
from deepep_moe.group.rendezvous import Connectable, check_same, connect, gather_objects, hanging_up, raise_first
from deepep_moe.group.settings import Settings

_PHASE = "suspension of a buffer"
SUSPENDED = "this buffer is suspended; call resume() on every rank before its next call"


class Memory(NamedTuple):
    """The exchange memory of this rank, in bytes."""

    held: int
    """Bytes that the rank has now."""
    suspended: int
    """Bytes that `suspend` has given back, and `resume` takes again."""

    def __add__(self, other: "Memory") -> "Memory":  # type: ignore[override]
        return Memory(self.held + other.held, self.suspended + other.suspended)


class Suspending:
    """Gives memory back for a while, and makes it again: part by part, in the order in which all ranks have made them."""

    _parts: Iterable[Any]

    def suspend(self) -> None:
        """Give the memory back until `resume`, as `deepep_moe.Buffer.suspend`. Collective.

        Memory of a buffer that later ones have replaced stays while handles refer to it."""
        for part in self._parts:
            part.suspend()

    def resume(self) -> None:
        """Make the memory again, as `deepep_moe.Buffer.resume`. Collective."""
        for part in self._parts:
            part.resume()

    def memory(self) -> Memory:
        """Return the bytes of exchange memory that this rank holds, and that `suspend` has given back. Not collective."""
        return sum((part.memory() for part in self._parts), Memory(0, 0))


def agree(backend: Connectable, settings: Settings, group: "dist.ProcessGroup | None", num_calls: int, error: BaseException | None) -> None:
    """Let all ranks agree to suspend. Collective. If one must not, nothing changes, and all ranks raise an error.

    `error`: why this rank must not suspend; it raises it, and its peers raise EPPeerError. Raises EPError if the backend cannot, and
    EPMismatchError if ranks have made different numbers of calls.
    """
    if backend.why_not_suspend:
        raise EPError(f"this buffer cannot be suspended: {backend.why_not_suspend}; destroy it, and make another when it is needed")
    with hanging_up(group):
        vote = num_calls, None if error is None else describe(error)
        votes = gather_objects(vote, group, settings.num_ranks, _PHASE, settings.timeout_s, list)
    raise_first(error, [reason for _, reason in votes], "could not suspend its Buffer")
    check_same([{"the number of calls made": number} for number, _ in votes], "call recover() on every rank, then suspend()")


def release(backend: Connectable, settings: Settings, group: "dist.ProcessGroup | None") -> Exception | None:
    """Unmap the memory of the peers, and wait until all ranks have done so; this rank's may then be freed. Collective. Return the failure
    that a GPU has reported of an earlier call."""
    failure: Exception | None = None
    with hanging_up(group):
        backend.disconnect()
        try:
            backend.check()
        except (EPError, ValueError) as error:
            failure = error
        gather_objects(None, group, settings.num_ranks, _PHASE, settings.timeout_s)
    return failure


def resume(backend: Connectable, settings: Settings, group: "dist.ProcessGroup | None") -> None:
    """Make the memory again and map that of the peers. Collective. If a rank cannot, no rank has memory, and all raise
    BufferSuspendedError."""

    def make() -> Connectable:
        backend.resume()
        return backend

    if isinstance(reason := connect(make, settings, group), str):
        raise BufferSuspendedError(f"the buffer is still suspended, {reason}; free memory there, then call resume() again on every rank")
