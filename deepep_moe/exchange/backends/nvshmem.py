"""Backend `nvshmem`: GPUs of several nodes. A row crosses once to each node of its experts, to the rank there that has its sender's index,
and from there on goes as with `nvlink`; a combine adds up in each node before its sums cross (docs/design/nvshmem.md)."""

import atexit
import contextlib
import weakref
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe import nvshmem_module
from deepep_moe.errors import BackendUnavailableError
from deepep_moe.exchange.backends.base import Mode
from deepep_moe.exchange.backends.nvlink import NvlinkBackend
from deepep_moe.group import nvshmem_world
from deepep_moe.group.rendezvous import Introduction, connect, gather_objects
from deepep_moe.group.settings import Settings

_HEAP_GRANULARITY = 2**21
_LEAST_HEAP_BYTES = 2**28
"""NVSHMEM does not start with less."""
_alive: "weakref.WeakSet[NvshmemBackend]" = weakref.WeakSet()


@atexit.register
def _end_of_process() -> None:
    """Let puts arrive, which would end with the process. Freeing would wait for those that do not."""
    if not nvshmem_world.quiet():
        for backend in _alive:
            backend.leak()


class NvshmemBackend(NvlinkBackend):
    """Implements `deepep_moe.exchange.backends.base.Backend`: the ranks of a node as `NvlinkBackend`, and what crosses through memory of
    NVSHMEM's symmetric heap."""

    name = "nvshmem"

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self.capabilities = replace(self.capabilities, can_fuse=False)
        self.rail_bytes: int = self._exchange.rail_bytes
        self.workspace_bytes += self.rail_bytes
        self._world: nvshmem_world.World | None = None
        self._address = 0
        _alive.add(self)

    def connect(self, addresses: list[bytes]) -> None:
        """Map the workspaces of the ranks of this node."""
        first = self.settings.node * self.settings.ranks_per_node
        super().connect(addresses[first : first + self.settings.ranks_per_node])

    def attach(self, world: nvshmem_world.World) -> None:
        """Let rows cross: allocate symmetric memory. Collective; raises BackendUnavailableError on all ranks alike."""
        self._address, self._world = world.allocate(self.rail_bytes), world
        s = self.settings
        rail = range(s.rank % s.ranks_per_node, s.num_ranks, s.ranks_per_node)
        module = nvshmem_module.load()
        assert not isinstance(module, str)  # the world has it
        self._exchange.attach_rail(module.rail_shim(), self._address, [world.pe_of[rank] for rank in rail])

    def native_calls(self, number: int, mode: Mode) -> Any:
        """Nothing in C++ makes calls over nodes."""
        return None

    def leak(self) -> None:
        """Never free what the GPU has of this, as that would wait for work that does not end."""
        if self._exchange is not None:
            self._exchange.leak()

    def destroy(self) -> None:
        """Free it once what this rank has put has arrived, or never where that takes longer than the deadline."""
        if self._world is not None and not nvshmem_world.quiet():
            self.leak()
        super().destroy()
        if self._world is not None:
            self._world.free(self._address)
            self._world = None


def make(settings: Settings, peers: list[Introduction], group: "dist.ProcessGroup | None") -> "NvshmemBackend | str":
    """Return the backend, or the reason why it cannot serve. The answer is the same on every rank. Collective."""
    made = connect(lambda: NvshmemBackend(settings), settings, group)
    if isinstance(made, str):
        return made
    heap_bytes = max(_LEAST_HEAP_BYTES, -(-made.rail_bytes // _HEAP_GRANULARITY) * _HEAP_GRANULARITY)
    failure: str | None = None
    try:
        hosts, device = [peer.host for peer in peers], torch.cuda.current_device()
        world = nvshmem_world.join(settings, group, hosts=hosts, device=device, heap_bytes=heap_bytes)
    except BackendUnavailableError as error:
        made.destroy()
        return str(error)
    try:
        made.attach(world)
    except BackendUnavailableError as error:
        made.destroy()
        return str(error)
    except RuntimeError as error:
        failure = str(error)
    reasons = gather_objects(failure, group, settings.num_ranks, "memory between nodes", settings.timeout_s, lambda told: told)
    told = [f"on rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
    if told:
        with contextlib.suppress(RuntimeError):
            made.destroy()
        return told[0]
    return made
