"""The parts of a machine that matter to ranks: NUMA nodes, GPUs, NICs, and the distances between them."""

from dataclasses import dataclass

DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Distances between two PCI devices, nearest first, in the words of `nvidia-smi topo`: one switch; several switches; the host bridge;
one NUMA node; between NUMA nodes, or unknown."""


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node. `cores` has one tuple for each core: the CPUs (SMT siblings) of that core."""

    index: int
    cores: tuple[tuple[int, ...], ...]

    @property
    def cpus(self) -> tuple[int, ...]:
        """Return the CPUs of the node, ascending."""
        return tuple(sorted(cpu for core in self.cores for cpu in core))


@dataclass(frozen=True)
class PciDevice:
    """A PCI device. `bus_id`: such as "0000:1b:00.0". `node`: its NUMA node, None = unknown. `path`: the bridges above it, from the host
    bridge (such as "pci0000:15") down, without the device itself."""

    bus_id: str
    node: int | None
    path: tuple[str, ...]


@dataclass(frozen=True)
class Gpu:
    """A GPU. `index` is its place in the order of bus ids."""

    index: int
    name: str
    uuid: str
    pci: PciDevice


@dataclass(frozen=True)
class Port:
    """A port of a NIC: `rate_gbps` in Gb/s (0 = unknown), `state` such as "ACTIVE", `link_layer` such as "InfiniBand"."""

    number: int
    state: str
    link_layer: str
    rate_gbps: float


@dataclass(frozen=True)
class Nic:
    """An RDMA device, such as mlx5_0."""

    name: str
    driver: str
    pci: PciDevice
    ports: tuple[Port, ...]

    @property
    def active_ports(self) -> tuple[Port, ...]:
        """Return the ports that can carry rows now."""
        return tuple(port for port in self.ports if port.state == "ACTIVE")


@dataclass(frozen=True)
class Topology:
    """A machine as `deepep_moe.topology.read` found it.

    `allowed_cpus` are the CPUs that this process may use (its affinity within its cgroup's cpuset; None = unknown). `notes` say what could
    not be read, one sentence each.
    """

    nodes: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    allowed_cpus: tuple[int, ...] | None
    notes: tuple[str, ...]

    @property
    def devices(self) -> "tuple[Gpu | Nic, ...]":
        """Return all GPUs, then all NICs."""
        return (*self.gpus, *self.nics)

    def node(self, index: int | None) -> NumaNode | None:
        """Return the NUMA node `index`, None where there is none."""
        return next((node for node in self.nodes if node.index == index), None)

    def allowed_cores(self, node: NumaNode) -> tuple[tuple[int, ...], ...]:
        """Return the cores of `node` that this process may use, without the CPUs that it may not."""
        if self.allowed_cpus is None:
            return node.cores
        allowed = set(self.allowed_cpus)
        kept = (tuple(cpu for cpu in core if cpu in allowed) for core in node.cores)
        return tuple(core for core in kept if core)

    def nearest_nics(self, gpu: Gpu) -> tuple[Nic, ...]:
        """Return the NICs that `gpu` should use: the fastest of those with an active port that are nearest to it.

        NICs in another NUMA node, or in an unknown one, are never near. GPUs that have the same NICs nearest, such as those of a virtual
        machine that shows NUMA nodes only, share them evenly in the order of bus ids.
        """
        nics = self._candidates(gpu)
        if not nics:
            return ()
        sharing = [other.index for other in self.gpus if self._candidates(other) == nics]
        first, last = (place * len(nics) // len(sharing) for place in (sharing.index(gpu.index), sharing.index(gpu.index) + 1))
        return nics[first : max(last, first + 1)]

    def _candidates(self, gpu: Gpu) -> tuple[Nic, ...]:
        usable = [(distance(gpu.pci, nic.pci), nic) for nic in self.nics if nic.active_ports]
        nearest = min((far for far, _ in usable), key=DISTANCES.index, default="SYS")
        nearest_nics = [nic for far, nic in usable if far == nearest != "SYS"]
        fastest = max(map(_rate, nearest_nics), default=0.0)
        return tuple(nic for nic in nearest_nics if _rate(nic) == fastest)


def _rate(nic: Nic) -> float:
    return max(port.rate_gbps for port in nic.active_ports)


def distance(one: PciDevice, other: PciDevice) -> str:
    """Return the distance of two devices, one of `DISTANCES`.

    A switch is two bridges on a path: its port upwards and one of its ports downwards. So two devices have one switch between them where
    they part below a bridge and at most one more is above each.
    """
    shared = 0
    while shared < min(len(one.path), len(other.path)) and one.path[shared] == other.path[shared]:
        shared += 1
    if shared == 0:
        return "NODE" if one.node is not None and one.node == other.node else "SYS"
    if shared == 1:
        return "PHB"
    return "PIX" if max(len(one.path), len(other.path)) - shared <= 1 else "PXB"
