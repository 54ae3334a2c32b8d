"""Write a topology file for NCCL, and show settings of NCCL that help machines with several NICs (docs/topology.md). Nothing is set here.

The file has the form of those that images of cloud machines ship: NUMA nodes with their CPUs, in them PCI switches, in these GPUs and NICs.
NCCL reads the rest, such as NVLinks and rates of NICs, from the machine itself.
"""

import re
from pathlib import Path
from xml.etree import ElementTree

from deepep_moe import config
from deepep_moe.errors import EPError
from deepep_moe.topology.machine import Cpu, NumaNode, PciDevice, Topology
from deepep_moe.topology.sysfs import is_bus_id

_ARCHITECTURES = {"aarch64": "arm64", "ppc64le": "ppc64"}  # NCCL's names; others have one name
_SHIPPED = "opt/microsoft"  # where Azure's images keep topology files
SETTINGS = {
    "NCCL_IGNORE_CPU_AFFINITY": "1",
    "NCCL_MIN_NCHANNELS": "32",
    "NCCL_P2P_NET_CHUNKSIZE": "524288",
    "NCCL_IB_QPS_PER_CONNECTION": "4",
    "NCCL_PXN_DISABLE": "1",
}
"""Values that a public article advises for NCCL 2.24 and newer on two H100 machines with 8 NICs each. We have not timed them."""


def topology_xml(topology: Topology) -> str:
    """Return NCCL's topology file for the machine.

    Bus ids are those of `topology`; CPUs are masks as the kernel writes them. A device whose NUMA node is unknown is left out, and NCCL
    looks for it itself. Raises EPError where no device has a node: such a file would only hide what NCCL finds.
    """
    on_pci = [device.pci for device in topology.devices if is_bus_id(device.pci.bus_id)]
    known = [pci for pci in on_pci if (node := topology.node(pci.node)) and node.cpus]
    if not known:
        raise EPError("no GPU and no NIC with a known NUMA node is found, so there is nothing to tell NCCL; leave NCCL_TOPO_FILE unset")
    system = ElementTree.Element("system", version="1")
    nodes = [node for node in topology.nodes if node.cpus]  # others are memory only
    cpus = {node.index: ElementTree.SubElement(system, "cpu", _cpu_attributes(node, topology.cpu)) for node in nodes}
    facts = {device.bus_id: device for device in (*topology.bridges, *known)}
    elements: dict[str, ElementTree.Element] = {}
    for device in known:
        parent = cpus[device.node or 0]
        for bus_id in (*switches(device.path), device.bus_id):
            if bus_id not in elements:
                elements[bus_id] = ElementTree.SubElement(parent, "pci", _pci_attributes(facts[bus_id]))
            parent = elements[bus_id]
    ElementTree.indent(system)
    return ElementTree.tostring(system, encoding="unicode") + "\n"


def _pci_attributes(device: PciDevice) -> dict[str, str]:
    facts = {"busid": device.bus_id, "class": device.pci_class, "link_speed": device.link_speed, "link_width": device.link_width}
    return {name: value for name, value in facts.items() if value}


def switches(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the switches on the path to a PCI device, as NCCL counts them. NCCL counts a switch by its upstream port; other ports and the
    root port of the CPU do not count."""
    return path[1:][-2::-2][::-1]


def _cpu_attributes(node: NumaNode, cpu: Cpu) -> dict[str, str]:
    facts = {"numaid": str(node.index), "affinity": cpu_mask(node.cpus), "arch": _ARCHITECTURES.get(cpu.arch, cpu.arch)}
    if cpu.vendor:
        facts |= {"vendor": cpu.vendor, "familyid": str(cpu.family), "modelid": str(cpu.model)}
    return facts


def cpu_mask(cpus: tuple[int, ...]) -> str:
    """Return CPUs as a mask of groups of 32 bits, the highest first: (0, 32) is "00000001,00000001"."""
    bits = sum(1 << cpu for cpu in cpus)
    groups = [f"{bits >> 32 * group & 0xFFFFFFFF:08x}" for group in range(max(bits.bit_length() + 31, 32) // 32)]
    return ",".join(reversed(groups))


def configured(root: Path) -> dict[str, tuple[str, str]]:
    """Return the variables that files set for NCCL: the value and the file of each. NCCL prefers the environment to them."""
    path = config.variables(["NCCL_CONF_FILE"]).get("NCCL_CONF_FILE")
    file = Path(path) if path else root / "etc/nccl.conf"
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (re.match(r"\s*(NCCL_\w+)\s*=\s*(.*?)\s*$", line) for line in lines)
    return {match[1]: (match[2], str(file)) for match in pairs if match}


def missing(root: Path) -> dict[str, str]:
    """Return the advised values of those `SETTINGS` that neither the environment nor NCCL's file sets."""
    already_set = configured(root).keys() | config.variables(SETTINGS).keys()
    return {name: value for name, value in SETTINGS.items() if name not in already_set}


def report(root: Path, topology_file: Path | None = None) -> str:
    """Return the settings as text, with what sets each already. `topology_file` is the one just written."""
    shipped = sorted((root / _SHIPPED).glob("**/*topo*.xml"))
    files = [topology_file.resolve()] if topology_file else shipped
    settings = {"NCCL_TOPO_FILE": str(files[0]) if files else "FILE"} | SETTINGS
    now = {name: f"{value} ({file})" for name, (value, file) in configured(root).items()}
    now |= {name: f"{value} (environment)" for name, value in config.variables(settings).items()}
    lines = [f"{name}={value}  # now: {now.get(name, 'not set')}" for name, value in settings.items()]
    if shipped:
        lines.append(f"The machine's image brings {', '.join(map(str, shipped))}; prefer it to a file made here.")
    return "\n".join(["Settings of NCCL for several nodes. Nothing is set; docs/topology.md says what each does and costs.", *lines])
