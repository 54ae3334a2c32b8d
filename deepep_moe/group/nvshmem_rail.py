"""Gets the symmetric memory of a backend over several nodes, and gives it back. It lies in a world of `nvshmem_world`."""

import atexit
import contextlib
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from deepep_moe import nvshmem_module
from deepep_moe.errors import BackendUnavailableError
from deepep_moe.group import nvshmem_world
from deepep_moe.group.gpu_memory import RailMemory
from deepep_moe.group.rendezvous import Introduction, connect, first_reason
from deepep_moe.group.settings import Settings
from deepep_moe.worker import at_end_of_process

_HEAP_GRANULARITY = 2**21
_LEAST_HEAP_BYTES = 2**28
"""NVSHMEM does not start with less."""
_alive: "weakref.WeakSet[Rail]" = weakref.WeakSet()


@atexit.register
def _end_of_process() -> None:
    """Let puts arrive, which would end with the process. Freeing would wait for those that do not."""
    if not nvshmem_world.quiet():
        for rail in _alive:
            rail.leak()


class Rail:
    """The symmetric memory of one backend."""

    def __init__(self, settings: Settings, native: Any, shim: str, *, maps_node: bool = False):
        """`native`: the owner of the kernels, with `rail_bytes`, `attach_rail` and `leak`. `shim`: the function of `_nvshmem` that returns
        the kernels. `maps_node`: they read the memory of all ranks of the node."""
        self.num_bytes: int = native.rail_bytes
        self._settings, self._native, self._shim, self._maps_node = settings, native, shim, maps_node
        self._world: nvshmem_world.World | None = None
        self._address = 0
        _alive.add(self)

    def attach(self, world: nvshmem_world.World) -> None:
        """Let rows cross: allocate symmetric memory. Collective; raises BackendUnavailableError on all ranks alike, RuntimeError on those
        where the others' memory is not mapped."""
        self._address, self._world = world.allocate(self.num_bytes), world
        at_end_of_process(_end_of_process)
        s = self._settings
        ranks = range(s.rank % s.ranks_per_node, s.num_ranks, s.ranks_per_node)
        module = nvshmem_module.load()
        assert not isinstance(module, str)  # the world has it
        memory = self._of_node(world) if self._maps_node else self._address
        self._native.attach_rail(getattr(module, self._shim)(), memory, [world.pe_of[rank] for rank in ranks])

    def _of_node(self, world: nvshmem_world.World) -> list[int]:
        """Return the addresses at which the memory of each rank of this node is mapped."""
        module = nvshmem_module.load()
        if world.num_hosts > 1 and not module.orders_network_writes(torch.cuda.current_device()):  # type: ignore[union-attr]
            raise RuntimeError(
                "this GPU may see what a network card writes to it in another order than it was written (CUDA's attribute "
                "GPUDirectRDMAWritesOrdering is None), which low-latency calls rely on; use Buffer, which asks NVSHMEM to flush"
            )
        first = self._settings.node * self._settings.ranks_per_node
        ranks = range(first, first + self._settings.ranks_per_node)
        mapped = [self._address if rank == self._settings.rank else world.mapped(self._address, rank) for rank in ranks]
        if lost := [rank for rank, address in zip(ranks, mapped, strict=True) if address == 0]:
            raise RuntimeError(
                f"NVSHMEM has not mapped the memory of rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))} of the same node, "
                "which low-latency calls read; unset NVSHMEM_DISABLE_P2P, and look whether all GPUs of the node are linked by NVLink"
            )
        return mapped

    def leak(self) -> None:
        """Never free the GPU memory of this object: freeing would wait for work that does not end."""
        if self._native is not None:
            self._native.leak()

    def settle(self) -> None:
        """Wait until all puts of this rank have arrived. If they take longer than the deadline, leak the memory."""
        if self._world is not None and not nvshmem_world.quiet():
            self.leak()
        self._native = None

    def free(self) -> None:
        """Free the symmetric memory. Call it after `settle`, and after the kernels' own memory is freed."""
        if self._world is not None:
            self._world.free(self._address)
            self._world = None


_Backend = TypeVar("_Backend", bound=RailMemory)


def make(new: Callable[[], _Backend], settings: Settings, peers: list[Introduction], group: "dist.ProcessGroup | None") -> "_Backend | str":
    """Return the backend that `new` makes, or the reason why it cannot serve. The answer is the same on every rank. Collective."""
    backend = connect(new, settings, group)
    if isinstance(backend, str):
        return backend
    heap_bytes = max(_LEAST_HEAP_BYTES, -(-backend.rail.num_bytes // _HEAP_GRANULARITY) * _HEAP_GRANULARITY)
    failure: str | None = None
    try:
        hosts, device = [peer.host for peer in peers], torch.cuda.current_device()
        world = nvshmem_world.join(settings, group, hosts=hosts, device=device, heap_bytes=heap_bytes)
    except BackendUnavailableError as error:
        backend.destroy()
        return str(error)
    try:
        backend.rail.attach(world)
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
