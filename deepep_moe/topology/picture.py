"""Draw a topology as text."""

from deepep_moe.topology.machine import Gpu, Nic, NumaNode, Topology, distance
from deepep_moe.topology.sysfs import format_cpulist

LEGEND = "NV# = # NVLinks, PIX = one PCIe switch, PXB = several, PHB = host bridge, NODE = NUMA node, SYS = between nodes or unknown"


def text(topology: Topology) -> str:
    """Return the picture: what each NUMA node has, then the distances from each GPU to every GPU and NIC, then the notes."""
    lines = _head(topology)
    for node in topology.nodes:
        lines += ["", *_of_node(topology, node)]
    elsewhere = [device for device in topology.devices if device.pci.node is None]
    if elsewhere:
        lines += ["", "NUMA node unknown", *_branches([_line(topology, device) for device in elsewhere])]
    if topology.gpus:
        lines += ["", *_matrix(topology), LEGEND]
    if topology.notes:
        lines += ["", *(f"Note: {note}" for note in topology.notes)]
    return "\n".join(lines)


def between(topology: Topology, one: Gpu, other: Gpu | Nic) -> str:
    """Return how a GPU is connected with another GPU or a NIC, such as "NV18" or "PXB"."""
    if isinstance(other, Gpu) and (count := topology.num_nvlinks(one, other)):
        return f"NV{count}"
    return distance(one.pci, other.pci)


def _head(topology: Topology) -> list[str]:
    cpu = topology.cpu
    allowed = "unknown" if topology.allowed_cpus is None else format_cpulist(topology.allowed_cpus)
    counts = f"NUMA nodes: {len(topology.nodes)}, GPUs: {len(topology.gpus)}, RDMA NICs: {len(topology.nics)}"
    return [" ".join(filter(None, (cpu.vendor, cpu.arch))) + f". {counts}", f"CPUs of this process: {allowed}"]


def _of_node(topology: Topology, node: NumaNode) -> list[str]:
    head = f"NUMA node {node.index}: {len(node.cores)} cores, CPUs {format_cpulist(node.cpus) or 'none'}"
    devices = [device for device in topology.devices if device.pci.node == node.index]
    return [head, *_branches([_line(topology, device) for device in devices])]


def _branches(lines: list[str]) -> list[str]:
    return [("└─ " if index == len(lines) - 1 else "├─ ") + line for index, line in enumerate(lines)]


def _line(topology: Topology, device: Gpu | Nic) -> str:
    if isinstance(device, Gpu):
        near = ", ".join(f"{nic.name} ({distance(device.pci, nic.pci)})" for nic in topology.nearest_nics(device))
        peers = "" if device.peers is None else f", reaches {len(device.peers)} GPUs"
        return f"GPU {device.index} at {device.pci.bus_id}: {device.name}{peers}, nearest NIC: {near or 'none'}"
    ports = [f"port {port.number} {port.link_layer or '?'} {port.rate_gbps:g} Gb/s {port.state or '?'}" for port in device.ports]
    return f"NIC {device.name} at {device.pci.bus_id}: {'; '.join(ports) or 'no port'}"


def _matrix(topology: Topology) -> list[str]:
    rows = [["", *(f"GPU{gpu.index}" for gpu in topology.gpus)]]
    for other in topology.devices:
        name = f"GPU{other.index}" if isinstance(other, Gpu) else other.name
        rows.append([name, *("X" if other is gpu else between(topology, gpu, other) for gpu in topology.gpus)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
