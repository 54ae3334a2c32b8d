"""Files of sysfs and procfs of some machines, written from public descriptions of them, as `deepep_moe.topology` reads them."""

import os
from pathlib import Path

from deepep_moe.topology.reader import parse_cpulist

BRIDGE, GPU, INFINIBAND_NIC, ETHERNET_NIC = "0x060400", "0x030200", "0x020700", "0x020000"


class MachineTree:
    """A root folder that is filled file by file."""

    def __init__(self, root: Path, allowed: str):
        self.root, self.num_gpus = root, 0
        self.write("proc/self/status", f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}\n")

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def link(self, path: str, target: str) -> None:
        """Make `path` a relative link to `target`, as sysfs does; both count from the root."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).symlink_to(os.path.relpath(target, Path(path).parent))

    def node(self, index: int, cpus: str, siblings: int = 0) -> None:
        """A NUMA node. Hyper-threads lie `siblings` apart; 0 = the machine has none."""
        self.write(f"sys/devices/system/node/node{index}/cpulist", cpus)
        everyone = parse_cpulist(cpus)
        for cpu in everyone:
            core = {cpu} | ({cpu - siblings, cpu + siblings} & set(everyone) if siblings else set())
            self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", ",".join(map(str, sorted(core))))

    def pci(self, path: str, pci_class: str, vendor: str, numa: int) -> str:
        """A device at the end of `path`, such as "pci0000:15/0000:15:01.0", and the bridges above it. Returns its folder."""
        parts = path.split("/")
        first = next(index for index, part in enumerate(parts) if part.startswith("pci"))
        for end in range(first + 2, len(parts) + 1):
            folder, bus_id, is_last = "sys/devices/" + "/".join(parts[:end]), parts[end - 1], end == len(parts)
            if not (self.root / folder / "class").exists():
                facts = {"class": pci_class if is_last else BRIDGE, "vendor": vendor if is_last else "0x1000", "numa_node": numa}
                for name, value in facts.items():
                    self.write(f"{folder}/{name}", value)
                self.link(f"sys/bus/pci/devices/{bus_id}", folder)
        return f"sys/devices/{path}"

    def gpu(self, path: str, numa: int, name: str = "NVIDIA H100 80GB HBM3") -> None:
        folder = self.pci(path, GPU, "0x10de", numa)
        bus_id = folder.rpartition("/")[2]
        minor = self.num_gpus
        facts = {"Model": name, "IRQ": "18", "GPU UUID": f"GPU-{bus_id}", "Device Minor": str(minor)}
        self.write(f"proc/driver/nvidia/gpus/{bus_id}/information", "\n".join(f"{fact}: \t {value}" for fact, value in facts.items()))
        self.write(f"dev/nvidia{minor}", "")
        self.num_gpus += 1

    def nic(self, name: str, path: str, numa: int, *, driver: str = "mlx5_core", layer: str = "InfiniBand",
            rate: str = "400 Gb/sec (4X NDR)", state: str = "4: ACTIVE") -> None:  # fmt: skip
        vendor = "0x1d0f" if driver == "efa" else "0x15b3"
        folder = self.pci(path, INFINIBAND_NIC if layer == "InfiniBand" else ETHERNET_NIC, vendor, numa)
        self.link(f"{folder}/infiniband/{name}/device", folder)
        self.link(f"sys/class/infiniband/{name}", f"{folder}/infiniband/{name}")
        if not (self.root / folder / "driver").is_symlink():
            (self.root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
            self.link(f"{folder}/driver", f"sys/bus/pci/drivers/{driver}")
        port = f"{folder}/infiniband/{name}/ports/1"
        for file, text in {"link_layer": layer, "rate": rate, "state": state}.items():
            self.write(f"{port}/{file}", text)


def dgx_h100(root: Path) -> None:
    """Two sockets of 56 cores with hyper-threads. Each GPU shares an outer switch with a NIC; two more NICs of two ports serve storage."""
    tree = MachineTree(root, "0-223")
    tree.node(0, "0-55,112-167", 112)
    tree.node(1, "56-111,168-223", 112)
    pairs = [  # host bridge, bus of the outer switch, buses of NIC and GPU, number of the NIC
        (0x15, 0x16, 0x18, 0x1B, 0), (0x3D, 0x3E, 0x40, 0x43, 3), (0x4C, 0x4D, 0x4F, 0x52, 4), (0x5B, 0x5C, 0x5E, 0x61, 5),
        (0x97, 0x98, 0x9A, 0x9D, 6), (0xBD, 0xBE, 0xC0, 0xC3, 9), (0xCB, 0xCC, 0xCE, 0xD1, 10), (0xD9, 0xDA, 0xDC, 0xDF, 11),
    ]  # fmt: skip
    for place, (host, switch, nic, gpu, number) in enumerate(pairs):
        above = f"pci0000:{host:02x}/0000:{host:02x}:01.0/0000:{switch:02x}:00.0"
        tree.nic(f"mlx5_{number}", f"{above}/0000:{switch + 1:02x}:00.0/0000:{nic:02x}:00.0", place // 4)
        inner = f"{above}/0000:{switch + 1:02x}:01.0/0000:{nic + 1:02x}:00.0/0000:{nic + 2:02x}:00.0"
        tree.gpu(f"{inner}/0000:{gpu:02x}:00.0", place // 4)
    for bus, host, first, numa in ((0x29, 0x26, 1, 0), (0xAA, 0xA7, 7, 1)):
        for function in (0, 1):
            path = f"pci0000:{host:02x}/0000:{host:02x}:01.0/0000:{bus:02x}:00.{function}"
            tree.nic(f"mlx5_{first + function}", path, numa, layer="Ethernet", state="1: DOWN", rate="40 Gb/sec (4X QDR)")


def azure_h100(root: Path) -> None:
    """An ND H100 v5 virtual machine: every device has a PCI domain of its own, so only NUMA nodes say what is near. One Ethernet NIC."""
    tree = MachineTree(root, "0-95")
    tree.node(0, "0-47")
    tree.node(1, "48-95")
    for place in range(8):
        bus = "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00"
        tree.gpu(f"{bus}/gpu-{place}/pci{place + 1:04x}:00/{place + 1:04x}:00:00.0", place // 4)
        tree.nic(f"mlx5_{place}", f"{bus}/nic-{place}/pci{place + 0x101:04x}:00/{place + 0x101:04x}:00:00.0", place // 4)
    tree.nic("mlx5_an0", f"{bus}/eth/pcif5d1:00/f5d1:00:02.0", 0, layer="Ethernet", rate="100 Gb/sec (4X EDR)")


def one_node_hgx(root: Path) -> None:
    """8 GPUs in a machine of one socket and one NUMA node, whose devices have no node of their own. A switch holds two of each."""
    tree = MachineTree(root, "0-127")
    tree.node(0, "0-127", 64)
    for switch in range(4):
        base = 0x10 + 0x20 * switch
        above = f"pci0000:{base:02x}/0000:{base:02x}:01.1/0000:{base + 1:02x}:00.0"
        for place in range(2):
            down = 2 * place
            tree.gpu(f"{above}/0000:{base + 2:02x}:{down:02x}.0/0000:{base + 3 + place:02x}:00.0", -1)
            nic = f"{above}/0000:{base + 2:02x}:{down + 1:02x}.0/0000:{base + 5 + place:02x}:00.0"
            tree.nic(f"rocep{2 * switch + place}", nic, -1, layer="Ethernet")


def efa(root: Path) -> None:
    """A p5.48xlarge virtual machine: 8 GPUs, and beside each 4 EFA devices of 100 Gb/s on the same switch."""
    tree = MachineTree(root, "0-191")
    tree.node(0, "0-47,96-143", 96)
    tree.node(1, "48-95,144-191", 96)
    for place, gpu in enumerate((0x53, 0x64, 0x75, 0x86, 0x97, 0xA8, 0xB9, 0xCA)):
        above = f"pci0000:{gpu - 12:02x}/0000:{gpu - 12:02x}:01.0/0000:{gpu - 11:02x}:00.0"
        tree.gpu(f"{above}/0000:{gpu - 10:02x}:04.0/0000:{gpu:02x}:00.0", place // 4)
        for number in range(4):
            path = f"{above}/0000:{gpu - 10:02x}:{number:02x}.0/0000:{gpu - 4 + number:02x}:00.0"
            rate = "100 Gb/sec (4X EDR)"
            tree.nic(f"rdmap{gpu - 4 + number}s0", path, place // 4, driver="efa", layer="Unspecified", rate=rate)


def without_sysfs(root: Path) -> None:
    """A container that has /proc only."""
    MachineTree(root, "0-15")


def small_vm(root: Path) -> None:
    """The virtual machine of 2 CPUs that runs the tests of every day: one node, no GPU, no RDMA device."""
    tree = MachineTree(root, "0-1")
    tree.node(0, "0-1")
    for slot, pci_class in enumerate(("0x060000", "0xffff00", "0x018000", "0x020000")):
        tree.pci(f"pci0000:00/0000:00:{slot:02x}.0", pci_class, "0x1af4", -1)
