"""Backend `nvshmem` of low latency: GPUs of several nodes. A row crosses once to each node of its experts, to the rank there that has its
sender's index; from there on it goes as with `nvlink` (docs/design/low_latency_nodes.md)."""

from deepep_moe.group import nvshmem_rail, nvshmem_world
from deepep_moe.group.settings import Settings
from deepep_moe.low_latency.nvlink import NvlinkLowLatencyBackend


class NvshmemLowLatencyBackend(NvlinkLowLatencyBackend):
    """Serves the ranks of a node as `NvlinkLowLatencyBackend` does. Rows cross between nodes through NVSHMEM's symmetric heap."""

    name = "nvshmem"
    why_not_suspend = nvshmem_rail.WHY_NOT_SUSPEND

    def __init__(self, settings: Settings, mask_stalled: bool):
        super().__init__(settings, mask_stalled)
        self.rail = nvshmem_rail.Rail(settings, self._native)
        self.workspace_bytes += self.rail.num_bytes

    def attach(self, world: nvshmem_world.World) -> None:
        """Let rows cross. Collective; raises BackendUnavailableError on all ranks alike."""
        self.rail.attach(world, "low_latency_rail_shim", maps_node=True)

    def destroy(self) -> None:
        """Free it once what this rank has put has arrived, or never where that takes longer than the deadline."""
        self.rail.settle()
        super().destroy()
        self.rail.free()
