"""Makes a backend over several nodes, whose symmetric memory lies in a world of `nvshmem_world`."""

import atexit
import contextlib
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from deepep_moe.errors import BackendUnavailableError
from deepep_moe.group import nvshmem_world
from deepep_moe.group.gpu_memory import RailMemory
from deepep_moe.group.rendezvous import Introduction, connect, first_reason
from deepep_moe.group.settings import Settings
from deepep_moe.worker import at_end_of_process

_HEAP_GRANULARITY = 2**21
_LEAST_HEAP_BYTES = 2**28
"""NVSHMEM does not start with less."""
_alive: "weakref.WeakSet[RailMemory]" = weakref.WeakSet()


@atexit.register
def _end_of_process() -> None:
    """Let puts arrive, which would end with the process. Freeing would wait for those that do not."""
    if not nvshmem_world.quiet():
        for memory in _alive:
            memory.leak()


_Backend = TypeVar("_Backend", bound=RailMemory)


def make(new: Callable[[], _Backend], settings: Settings, peers: list[Introduction], group: "dist.ProcessGroup | None") -> "_Backend | str":
    """Return the backend that `new` makes, or the reason why it cannot serve. The answer is the same on every rank. Collective."""
    backend = connect(new, settings, group)
    if isinstance(backend, str):
        return backend
    heap_bytes = max(_LEAST_HEAP_BYTES, -(-backend.rail_bytes // _HEAP_GRANULARITY) * _HEAP_GRANULARITY)
    failure: str | None = None
    try:
        hosts, device = [peer.host for peer in peers], torch.cuda.current_device()
        world = nvshmem_world.join(settings, group, hosts=hosts, device=device, heap_bytes=heap_bytes)
    except BackendUnavailableError as error:
        backend.destroy()
        return str(error)
    _alive.add(backend)
    at_end_of_process(_end_of_process)
    try:
        backend.attach(world)
    except BackendUnavailableError as error:
        backend.destroy()
        return str(error)
    except (RuntimeError, ValueError, AttributeError) as error:  # the last two: modules of different builds
        failure = str(error)
    reason = first_reason(failure, group, settings, "memory between nodes")
    if reason is not None:
        with contextlib.suppress(RuntimeError):
            backend.destroy()
    return reason or backend
