"""Workspaces in GPU memory, which the ranks of one host share as file descriptors."""

import array
import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from deepep_moe import _C, nvshmem_module
from deepep_moe.group.rendezvous import Connectable
from deepep_moe.group.settings import Settings

if TYPE_CHECKING:
    from deepep_moe.group.nvshmem_world import World  # only several nodes load it

_BETWEEN_LOOKS_S = 0.05  # between looks at peers that have sent nothing


class Mailbox:
    """A socket for the descriptors of the peers. Its name is abstract: it needs no file, and ends with the socket."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(_BETWEEN_LOOKS_S)
        self.address = b"\0deepep_moe-" + os.urandom(16)
        self._socket.bind(self.address)

    @contextlib.contextmanager
    def swap(self, make: Callable[[], int], addresses: Sequence[bytes], first_rank: int, timeout_s: float) -> Iterator[list[int]]:
        """Send the descriptor that `make` returns to all peers. Yield those of all ranks in the order of `addresses`, and close them then.

        Raises RuntimeError with a peer that has failed or ended, or sends nothing within the time. It is rank `first_rank` + its index.
        """
        deadline, descriptors = time.monotonic() + timeout_s, dict[bytes, int]()
        try:
            own_descriptor = descriptors[self.address] = make()
            for address in addresses:
                if address != self.address:
                    with contextlib.suppress(ConnectionRefusedError):  # the peer is gone: first the others get what they wait for
                        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [own_descriptor]))]
                        self._socket.sendmsg([b"\0"], rights, 0, address)  # does not wait: a queue holds 10 messages
            while len(descriptors) < len(addresses):
                gone = [address for address in addresses if address not in descriptors and not _is_there(address)]
                while len(descriptors) < len(addresses) and self._receive(descriptors, addresses):  # a gone peer may have sent before
                    pass
                lost = [address for address in gone if address not in descriptors]
                if lost or time.monotonic() > deadline:
                    culprit = next(address for address in lost or addresses if address not in descriptors)
                    why = "failed or ended before it sent" if lost else f"did not send within {timeout_s:g} s"
                    raise RuntimeError(f"rank {first_rank + addresses.index(culprit)} {why} the descriptor of its workspace")
            yield [descriptors[address] for address in addresses]
        finally:
            self._socket.close()
            for descriptor in descriptors.values():
                os.close(descriptor)

    def _receive(self, descriptors: dict[bytes, int], addresses: Sequence[bytes]) -> bool:
        """Add a message to `descriptors`, by its sender. Return False if none comes for a while."""
        try:
            _, rights, flags, sender = self._socket.recvmsg(1, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC)  # room for one descriptor
        except TimeoutError:
            return False
        if flags & socket.MSG_CTRUNC and not rights:
            raise OSError(errno.EMFILE, "no room for a peer's descriptor (ulimit -n)")
        for _, _, content in rights:
            descriptor = array.array("i", content)[0]
            if sender in addresses and sender not in descriptors:
                descriptors[sender] = descriptor
            else:
                os.close(descriptor)
        return True


def _is_there(address: bytes) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(address) != errno.ECONNREFUSED


class GpuMemory(Connectable):
    """The workspace of the backends for GPUs."""

    settings: Settings
    workspace_bytes: int
    _native: "_C.NvlinkExchange | _C.NvlinkLowLatency"
    """The owner of the workspace."""
    _mailbox: Mailbox

    def address(self) -> tuple[bytes, bytes]:
        """Return where this rank takes the descriptors of its peers, and what they must know of its workspace."""
        self._mailbox = Mailbox()
        return self._mailbox.address, self._native.handle()

    def connect(self, addresses: list[object]) -> None:
        """Map the workspaces of the ranks of this node. Raises OSError or RuntimeError if a GPU cannot reach another."""
        s = self.settings
        first = s.node * s.ranks_per_node
        boxes, handles = zip(*addresses[first : first + s.ranks_per_node], strict=True)
        with self._mailbox.swap(self._native.share, boxes, first, s.timeout_s) as descriptors:
            self._native.connect(handles, descriptors)

    def disconnect(self) -> None:
        self._native.disconnect()

    def free(self) -> int:
        self._native.free()
        return self.workspace_bytes

    def resume(self) -> None:
        self._native.resume()


class RailMemory(GpuMemory):
    """The workspace of the backends over several nodes: rows cross through NVSHMEM's symmetric heap."""

    why_not_suspend = nvshmem_module.WHY_NOT_SUSPEND
    world: "World | None" = None
    _address = 0

    def add_rail(self, *, maps_node: bool = False) -> None:
        """Get ready for `nvshmem_rail.make`, which allocates the symmetric memory. `maps_node`: the kernels read the memory of all ranks of
        the node."""
        self._maps_node = maps_node
        self.rail_bytes: int = self._native.rail_bytes
        self.workspace_bytes += self.rail_bytes

    def attach(self, world: "World") -> None:
        """Let rows cross: allocate symmetric memory. Collective; raises BackendUnavailableError on all ranks alike, RuntimeError on those
        where the others' memory is not mapped."""
        self._address, self.world = world.allocate(self.rail_bytes), world
        s = self.settings
        ranks = range(s.rank % s.ranks_per_node, s.num_ranks, s.ranks_per_node)
        memory = self._of_node(world) if self._maps_node else [self._address]
        self._native.attach_rail(world.module.rail_shim(), memory, [world.pe_of[rank] for rank in ranks])

    def _of_node(self, world: "World") -> list[int]:
        """Return the addresses at which the memory of each rank of this node is mapped."""
        if world.num_hosts > 1 and not world.module.orders_network_writes(torch.cuda.current_device()):
            raise RuntimeError(
                "this GPU may see what a network card writes to it in another order than it was written (CUDA's attribute "
                "GPUDirectRDMAWritesOrdering is None), which low-latency calls rely on; use Buffer, which asks NVSHMEM to flush"
            )
        s = self.settings
        ranks = range(s.node * s.ranks_per_node, (s.node + 1) * s.ranks_per_node)
        mapped = [self._address if rank == s.rank else world.module.mapped(self._address, world.pe_of[rank]) for rank in ranks]
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

    def destroy(self) -> None:
        """Free the memory once all puts of this rank have arrived. If they do not arrive before the deadline, the memory is never freed."""
        world, self.world = self.world, None
        if world is not None and not world.quiet():
            self.leak()
        super().destroy()
        if world is not None:
            world.free(self._address)
