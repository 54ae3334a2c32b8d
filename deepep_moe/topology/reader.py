"""Read the topology of a machine from sysfs, procfs and, where it is there, NVML. CUDA is not touched: that would come before binding."""

import os
import platform
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepep_moe.topology import nvml as nvml_facts
from deepep_moe.topology.machine import Cpu, Gpu, Nic, NumaNode, PciDevice, Port, Topology
from deepep_moe.topology.sysfs import Tree, format_cpulist, is_bus_id, parse_cpulist

_NODES, _PCI, _INFINIBAND = "sys/devices/system/node", "sys/bus/pci/devices", "sys/class/infiniband"
_DRIVER = "proc/driver/nvidia/gpus"
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # vendor; base class of display controllers, which GPUs without a display have too


def read(root: str | Path = "/", nvml: Any = None) -> Topology:
    """Return the topology of the machine whose files are below `root`.

    Files that are missing or damaged raise nothing: `Topology.notes` says what is not known. `nvml` is the module pynvml or one like it;
    by default the package nvidia-ml-py is used where it is installed and `root` is "/". Without it, links between GPUs are unknown.
    """
    tree = Tree(Path(root))
    nodes = _nodes(tree)
    if nvml is None and Path(root) == Path("/"):
        nvml = nvml_facts.find()
    gpus = _gpus(tree, nodes)
    if nvml is not None:
        gpus = nvml_facts.with_links(gpus, nvml, tree)
    elif gpus:
        tree.note("NVLinks and peer access of the GPUs are unknown: install nvidia-ml-py.")
    nics = _nics(tree, nodes)
    allowed = _allowed(tree, "self")
    return Topology(_cpu(tree), nodes, gpus, nics, _bridges(tree, nodes, (*gpus, *nics)), allowed, tuple(tree.notes))


def allowed_cpus_of(process: int, root: str | Path = "/") -> tuple[int, ...] | None:
    """Return the CPUs that the process of this id may use, None where it is not to be seen."""
    return _allowed(Tree(Path(root)), str(process))


def _cpu(tree: Tree) -> Cpu:
    text = tree.text("proc/cpuinfo")
    facts = dict(reversed(re.findall(r"^(vendor_id|cpu family|model)\s*: (.+)$", text, flags=re.MULTILINE)))  # of the first processor
    numbers = {name: int(facts[name]) if re.fullmatch(r"\d{1,9}", facts.get(name, "")) else 0 for name in ("cpu family", "model")}
    return Cpu(platform.machine(), facts.get("vendor_id", "").strip(), numbers["cpu family"], numbers["model"])


def _allowed(tree: Tree, process: str) -> tuple[int, ...] | None:
    found = re.search(r"^Cpus_allowed_list:\s*(\S+)$", tree.text(f"proc/{process}/status"), flags=re.MULTILINE)
    if not found:
        tree.note("The CPUs of this process are unknown: /proc/self/status has no line Cpus_allowed_list.")
        return None
    try:
        return parse_cpulist(found[1])
    except ValueError as error:
        tree.note(f"The CPUs of this process are unknown: {error}.")
        return None


def _nodes(tree: Tree) -> tuple[NumaNode, ...]:
    numbers = sorted(int(name[4:]) for name in tree.names(_NODES, "node[0-9]*") if name[4:].isdecimal())
    if not numbers:
        tree.note("NUMA nodes are unknown: /sys/devices/system/node is missing or empty, as in some containers.")
    taken: set[int] = set()
    nodes = []
    for number in numbers:
        cpus = tree.cpulist(f"{_NODES}/node{number}/cpulist")
        if not tree.is_file(f"{_NODES}/node{number}/cpulist"):
            tree.note(f"The CPUs of NUMA node {number} are unknown: /{_NODES}/node{number}/cpulist cannot be read.")
        if again := tuple(cpu for cpu in cpus if cpu in taken):
            tree.note(f"CPUs {format_cpulist(again)} of NUMA node {number} are in a node before it too; only the first counts them.")
        nodes.append(NumaNode(number, _cores(tree, tuple(cpu for cpu in cpus if cpu not in taken))))
        taken.update(cpus)
    return tuple(nodes)


def _cores(tree: Tree, cpus: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Group `cpus` by core. A CPU whose siblings are unknown is a core of its own."""
    cores, left = [], dict.fromkeys(cpus)
    for cpu in cpus:
        if cpu in left:
            siblings = tree.cpulist(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            core = tuple(sibling for sibling in siblings if sibling in left) if cpu in siblings else (cpu,)
            cores.append(core)
            for sibling in core:
                del left[sibling]
    return tuple(cores)


def _device(tree: Tree, link: str, nodes: tuple[NumaNode, ...], name: str = "") -> PciDevice:
    """Read a device. One that is not on PCI, such as RDMA in software, has the bus id `name`."""
    path = tree.pci_path(link)
    bus_id = path[-1] if path else name or Path(link).name
    number = tree.integer(f"{link}/numa_node", -1)
    known, with_cpus = [node.index for node in nodes], [node.index for node in nodes if node.cores]
    if number < 0 and len(with_cpus) == 1:  # so the kernel tells that the machine has one node only
        node: int | None = with_cpus[0]
    else:
        node = number if number in known else None
        if nodes and node is None:
            tree.note(f"The NUMA node of {bus_id} is unknown: its numa_node is {number}, and the machine has {known}.")
    facts = (tree.text(f"{link}/{name}") for name in ("class", "current_link_speed", "current_link_width"))
    return PciDevice(bus_id, node, path[:-1], *facts)


def _gpus(tree: Tree, nodes: tuple[NumaNode, ...]) -> tuple[Gpu, ...]:
    in_sysfs = {bus_id for bus_id in tree.names(_PCI) if _is_gpu(tree, f"{_PCI}/{bus_id}")}
    bus_ids = sorted(in_sysfs | {name for name in tree.names(_DRIVER) if is_bus_id(name)})  # some containers hide the first
    given = [bus_id for bus_id in bus_ids if _is_given(tree, bus_id)]
    if len(given) < len(bus_ids):  # sysfs shows all GPUs of the machine, in containers too
        tree.note(f"{len(bus_ids) - len(given)} of the machine's {len(bus_ids)} GPUs are not given to this process; they are left out.")
    gpus = []
    for index, bus_id in enumerate(given):
        facts = _driver_facts(tree, bus_id)
        device = _device(tree, f"{_PCI}/{bus_id}", nodes)
        gpus.append(Gpu(index, facts.get("Model", "NVIDIA GPU"), facts.get("GPU UUID", ""), device))
    return tuple(gpus)


def _is_gpu(tree: Tree, link: str) -> bool:
    return tree.text(f"{link}/vendor") == _NVIDIA and tree.text(f"{link}/class").startswith(_DISPLAY)


def _driver_facts(tree: Tree, bus_id: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w ]+):\s*(.+)$", tree.text(f"{_DRIVER}/{bus_id}/information"), flags=re.MULTILINE))


def _is_given(tree: Tree, bus_id: str) -> bool:
    """A container has the driver's folder and the device file of its own GPUs only. Without a driver nobody can tell."""
    if not tree.names(_DRIVER):
        return True
    facts = _driver_facts(tree, bus_id)
    minor = facts.get("Device Minor", "")
    return bool(facts) and (not minor.isdecimal() or tree.exists(f"dev/nvidia{minor}"))


def _nics(tree: Tree, nodes: tuple[NumaNode, ...]) -> tuple[Nic, ...]:
    nics = []
    for name in tree.names(_INFINIBAND):
        link = f"{_INFINIBAND}/{name}"
        numbers = sorted(int(port) for port in tree.names(f"{link}/ports") if port.isdecimal())
        driver = os.path.realpath(tree.root / link / "device/driver") if tree.exists(f"{link}/device/driver") else ""
        nics.append(
            Nic(name, Path(driver).name, _device(tree, f"{link}/device", nodes, name), tuple(_port(tree, link, n) for n in numbers))
        )
    return tuple(sorted(nics, key=lambda nic: nic.pci.bus_id))


def _port(tree: Tree, link: str, number: int) -> Port:
    folder = f"{link}/ports/{number}"
    rate = re.match(r"(\d{1,6}(?:\.\d{1,6})?) Gb/sec", tree.text(f"{folder}/rate"))
    state = tree.text(f"{folder}/state").rpartition(":")[2].strip()  # such as "4: ACTIVE"
    return Port(number, state, tree.text(f"{folder}/link_layer"), float(rate[1]) if rate else 0.0, tree.text(f"{folder}/gids/0"))


def _bridges(tree: Tree, nodes: tuple[NumaNode, ...], devices: tuple[Gpu | Nic, ...]) -> tuple[PciDevice, ...]:
    names = {bridge for device in devices for bridge in device.pci.path[1:]}
    return tuple(replace(_device(tree, f"{_PCI}/{name}", nodes), bus_id=name) for name in sorted(names))
