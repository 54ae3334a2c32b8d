"""Show which NUMA nodes, GPUs and NICs this machine has, and how near they are to each other. `nccl` shows settings of NCCL instead."""

import sys
from pathlib import Path

from deepep_moe.command import Parser
from deepep_moe.errors import EPError
from deepep_moe.topology import nccl
from deepep_moe.topology.machine import Gpu, Nic, Topology, distance
from deepep_moe.topology.reader import format_cpulist, read

LEGEND = "PIX = one PCIe switch, PXB = several, PHB = host bridge, NODE = NUMA node, SYS = between nodes or unknown"


def main(arguments: list[str], root: Path = Path("/")) -> None:
    """Run the command with `arguments`, those after its name. `root` is the folder that holds sys and proc."""
    parser = Parser("deepep-moe topology", description=__doc__)
    parser.add_argument("command", nargs="?", choices=("nccl",), metavar="nccl", help="show settings of NCCL for several nodes")
    parser.add_argument("--output", type=Path, metavar="FILE", help="with nccl: write a topology file for NCCL")
    options = parser.parse_args(arguments)
    if options.output and not options.command:
        parser.error("--output FILE goes with nccl: deepep-moe topology nccl --output FILE")
    topology = read(root)
    if options.command != "nccl":
        print(text(topology))
        return
    if options.output:
        try:
            options.output.write_text(nccl.topology_xml(topology))
        except (EPError, OSError) as error:
            sys.exit(f"cannot write {options.output}: {error}")
    print(nccl.report(root, options.output))


def text(topology: Topology) -> str:
    """Return the page: what each NUMA node has, then the distances from each GPU to every GPU and NIC, then the notes."""
    allowed = topology.allowed_cpus
    lines = [f"NUMA nodes: {len(topology.nodes)}, GPUs: {len(topology.gpus)}, RDMA NICs: {len(topology.nics)}"]
    lines.append(f"CPUs of this process: {'unknown' if allowed is None else format_cpulist(allowed)}")
    heads: dict[int | None, str] = {
        node.index: f"{node.index}: {len(node.cores)} cores, CPUs {format_cpulist(node.cpus) or 'none'}" for node in topology.nodes
    }
    for index, head in (heads | {None: "unknown"}).items():
        devices = [_line(topology, device) for device in topology.devices if device.pci.node == index]
        if devices or index is not None:
            lines += ["", f"NUMA node {head}", *(f"  {line}" for line in devices)]
    if topology.gpus:
        lines += ["", *_matrix(topology), LEGEND]
    if topology.notes:
        lines += ["", *(f"Note: {note}" for note in topology.notes)]
    return "\n".join(lines)


def _line(topology: Topology, device: Gpu | Nic) -> str:
    if isinstance(device, Gpu):
        near = ", ".join(f"{nic.name} ({distance(device.pci, nic.pci)})" for nic in topology.nearest_nics(device))
        return f"GPU {device.index} at {device.pci.bus_id}: {device.name}, nearest NIC: {near or 'none'}"
    ports = [f"port {port.number} {port.link_layer or '?'} {port.rate_gbps:g} Gb/s {port.state or '?'}" for port in device.ports]
    return f"NIC {device.name} at {device.pci.bus_id}: {'; '.join(ports) or 'no port'}"


def _matrix(topology: Topology) -> list[str]:
    rows = [["", *(f"GPU{gpu.index}" for gpu in topology.gpus)]]
    for other in topology.devices:
        name = f"GPU{other.index}" if isinstance(other, Gpu) else other.name
        rows.append([name, *("X" if other is gpu else distance(gpu.pci, other.pci) for gpu in topology.gpus)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
