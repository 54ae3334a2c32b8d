"""Backend `nvshmem`: GPUs of several nodes. A row crosses once to each node of its experts, to the rank with the sender's index there.
Within the node it travels as with `nvlink`. A combine adds rows in each node before the sums cross (docs/design/nvshmem.md)."""

from dataclasses import replace

from deepep_moe.exchange.backends.nvlink import NvlinkBackend
from deepep_moe.group import nvshmem_rail, nvshmem_world
from deepep_moe.group.settings import Settings


class NvshmemBackend(NvlinkBackend):
    """Ranks of a node exchange rows as in `NvlinkBackend`; rows between nodes go
    through NVSHMEM's symmetric heap."""

    name = "nvshmem"
    why_not_suspend = nvshmem_rail.WHY_NOT_SUSPEND

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self.capabilities = replace(self.capabilities, can_scale=False)
        self.rail = nvshmem_rail.Rail(settings, self._exchange)
        self.workspace_bytes += self.rail.num_bytes

    def attach(self, world: nvshmem_world.World) -> None:
        """Connect the nodes. Collective; raises BackendUnavailableError on all ranks alike."""
        self.rail.attach(world, "rail_shim")

    def destroy(self) -> None:
        """Free the memory once all puts of this rank have arrived. If they do not arrive before the deadline, the memory is never freed."""
        self.rail.settle()
        super().destroy()
        self.rail.free()
