"""Read the topology of a machine from sysfs and procfs. CUDA is not touched: that would come before binding."""

import os
import re
from pathlib import Path

from deepep_moe.topology.machine import Gpu, Nic, NumaNode, PciDevice, Port, Topology

_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_NODES, _PCI, _INFINIBAND = "sys/devices/system/node", "sys/bus/pci/devices", "sys/class/infiniband"
_DRIVER = "proc/driver/nvidia/gpus"
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # vendor; base class of display controllers, which GPUs without a display have too


def is_bus_id(name: str) -> bool:
    """Return whether `name` is that of a PCI device, such as "0000:1b:00.0"."""
    return bool(_BUS_ID.fullmatch(name))


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Return the CPUs of a list such as "0-3,8,10-11", ascending. Raises ValueError where `text` is no such list."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def format_cpulist(cpus: tuple[int, ...]) -> str:
    """Return CPUs, ascending, as "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


class Tree:
    """The files below `root`. `notes` collects what is not known, one sentence each."""

    def __init__(self, root: Path):
        self.root = root
        self.notes: list[str] = []

    def text(self, path: str) -> str:
        """Return the text of the file, "" where it cannot be read. Drivers may refuse a file that is there."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder, none where it cannot be read."""
        try:
            return sorted(os.listdir(self.root / folder))
        except OSError:
            return []

    def cpulist(self, path: str) -> tuple[int, ...]:
        """Return the list of CPUs in a file; none, and a note, where the file is damaged."""
        text = self.text(path)
        try:
            return parse_cpulist(text)
        except ValueError:
            self.notes.append(f"/{path} cannot be used: {text!r} is no list of CPUs such as 0-3,8.")
            return ()

    def pci_path(self, link: str) -> tuple[str, ...]:
        """Return the bridges above the device that `link` leads to and the device, from the host bridge down; () where it leads nowhere."""
        parts = Path(os.path.realpath(self.root / link)).parts
        hosts = [index for index, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)]
        return parts[hosts[-1] :] if hosts and all(map(is_bus_id, parts[hosts[-1] + 1 :])) else ()


def read(root: str | Path = "/") -> Topology:
    """Return the topology of the machine whose files are below `root`.

    Where files are missing or damaged, `Topology.notes` says what is not known.
    """
    tree = Tree(Path(root))
    nodes = _nodes(tree)
    gpus, nics = _gpus(tree, nodes), _nics(tree, nodes)
    allowed = allowed_cpus_of("self", root)
    if allowed is None:
        tree.notes.append("The CPUs of this process are unknown: /proc/self/status has no list of them.")
    return Topology(nodes, gpus, nics, allowed, tuple(dict.fromkeys(tree.notes)))


def allowed_cpus_of(process: int | str, root: str | Path = "/") -> tuple[int, ...] | None:
    """Return the CPUs that the process of this id may use, None where it is not to be seen."""
    match = re.search(r"^Cpus_allowed_list:\s*([\d,-]+)$", Tree(Path(root)).text(f"proc/{process}/status"), flags=re.MULTILINE)
    return parse_cpulist(match[1]) if match else None


def _nodes(tree: Tree) -> tuple[NumaNode, ...]:
    numbers = sorted(int(name[4:]) for name in tree.names(_NODES) if re.fullmatch(r"node\d+", name))
    if not numbers:
        tree.notes.append("NUMA nodes are unknown: /sys/devices/system/node is missing or empty, as in some containers.")
    return tuple(NumaNode(number, _cores(tree, tree.cpulist(f"{_NODES}/node{number}/cpulist"))) for number in numbers)


def _cores(tree: Tree, cpus: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Group `cpus` by core. A CPU whose siblings are unknown is a core of its own."""
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in cpus:
        siblings = tree.cpulist(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings or (cpu,), []).append(cpu)
    return tuple(map(tuple, cores.values()))


def _device(tree: Tree, link: str, name: str, nodes: tuple[NumaNode, ...]) -> PciDevice:
    """Read a device. One that is not on PCI, such as RDMA in software, has the bus id `name`."""
    path = tree.pci_path(link)
    bus_id = path[-1] if path else name
    number = tree.text(f"{link}/numa_node")
    node = next((node.index for node in nodes if str(node.index) == number), None)
    with_cpus = [node.index for node in nodes if node.cores]
    if number in ("", "-1") and len(with_cpus) == 1:  # so the kernel tells that the machine has one node only
        node = with_cpus[0]
    elif nodes and node is None:
        tree.notes.append(f"The NUMA node of {bus_id} is unknown: its numa_node is {number or 'missing'}.")
    return PciDevice(bus_id, node, path[:-1])


def _gpus(tree: Tree, nodes: tuple[NumaNode, ...]) -> tuple[Gpu, ...]:
    """Return the GPUs that this process may use. A container has the driver's folder or the device file of its own GPUs only; without a
    driver nobody can tell, and all GPUs on PCI are returned."""
    of_driver = {bus_id: tree.text(f"{_DRIVER}/{bus_id}/information") for bus_id in filter(is_bus_id, tree.names(_DRIVER))}
    on_pci = {bus_id: "" for bus_id in tree.names(_PCI) if _is_gpu(tree, f"{_PCI}/{bus_id}")}
    gpus: list[Gpu] = []
    for bus_id, text in (of_driver or on_pci).items():
        facts = dict(re.findall(r"^([\w ]+):\s*(.+)$", text, flags=re.MULTILINE))
        if "Device Minor" not in facts or os.path.exists(tree.root / f"dev/nvidia{facts['Device Minor']}"):
            device = _device(tree, f"{_PCI}/{bus_id}", bus_id, nodes)
            gpus.append(Gpu(len(gpus), facts.get("Model", "NVIDIA GPU"), facts.get("GPU UUID", ""), device))
    return tuple(gpus)


def _is_gpu(tree: Tree, link: str) -> bool:
    return tree.text(f"{link}/vendor") == _NVIDIA and tree.text(f"{link}/class").startswith(_DISPLAY)


def _nics(tree: Tree, nodes: tuple[NumaNode, ...]) -> tuple[Nic, ...]:
    nics = []
    for name in tree.names(_INFINIBAND):
        link = f"{_INFINIBAND}/{name}"
        driver = tree.root / link / "device/driver"
        device = _device(tree, f"{link}/device", name, nodes)
        ports = tuple(_port(tree, f"{link}/ports/{number}", int(number)) for number in tree.names(f"{link}/ports") if number.isdecimal())
        nics.append(Nic(name, driver.resolve().name if os.path.exists(driver) else "", device, ports))
    return tuple(sorted(nics, key=lambda nic: nic.pci.bus_id))


def _port(tree: Tree, folder: str, number: int) -> Port:
    rate = re.match(r"\d+(\.\d+)?(?= Gb/sec)", tree.text(f"{folder}/rate"))
    state = tree.text(f"{folder}/state").rpartition(":")[2].strip()  # such as "4: ACTIVE"
    return Port(number, state, tree.text(f"{folder}/link_layer"), float(rate[0]) if rate else 0.0)
