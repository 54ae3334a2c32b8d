"""Write a topology file for NCCL, and show settings of NCCL that help machines with several NICs (docs/topology.md). Nothing is set here.

The file has the form of those that images of cloud machines ship: NUMA nodes, in them PCI switches, in these GPUs and NICs. NCCL reads the
rest, such as CPUs, NVLinks and the rates of links, from the machine itself.
"""

import re
from pathlib import Path
from xml.etree import ElementTree

from deepep_moe import config
from deepep_moe.errors import EPError
from deepep_moe.topology.machine import Topology
from deepep_moe.topology.reader import is_bus_id

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

    Bus ids are those of `topology`. A device whose NUMA node is unknown is left out, and NCCL looks for it itself. Raises EPError where no
    device has a node: such a file would only hide what NCCL finds.
    """
    system = ElementTree.Element("system", version="1")
    with_cpus = (str(node.index) for node in topology.nodes if node.cpus)  # others are memory only
    elements = {number: ElementTree.SubElement(system, "cpu", numaid=number) for number in with_cpus}
    known = [device.pci for device in topology.devices if is_bus_id(device.pci.bus_id) and str(device.pci.node) in elements]
    if not known:
        raise EPError("no GPU and no NIC with a known NUMA node is found, so there is nothing to tell NCCL; leave NCCL_TOPO_FILE unset")
    for device in known:
        parent = elements[str(device.node)]
        for bus_id in (*switches(device.path), device.bus_id):
            if bus_id not in elements:
                elements[bus_id] = ElementTree.SubElement(parent, "pci", busid=bus_id)
            parent = elements[bus_id]
    ElementTree.indent(system)
    return ElementTree.tostring(system, encoding="unicode") + "\n"


def switches(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the switches on the path to a PCI device, as NCCL counts them. NCCL counts a switch by its upstream port; other ports and the
    root port of the CPU do not count."""
    return path[1:][-2::-2][::-1]


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
