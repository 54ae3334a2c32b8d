"""The topology of recorded machines equals tables written by hand. Damaged and unreachable files are noted, and the rest is read."""

import shutil

import machine_trees
import pytest

from deepep_moe.errors import EPError
from deepep_moe.topology import command, distance, nccl, place, read
from deepep_moe.topology.reader import format_cpulist

NO_NODES = "NUMA nodes are unknown: /sys/devices/system/node is missing or empty, as in some containers."

# For each machine: NUMA nodes (cores, CPUs); GPUs (bus id, node, nearest NICs, their distance); number of NICs; notes.
MACHINES = {
    "dgx_h100": (
        [(56, "0-55,112-167"), (56, "56-111,168-223")],
        [
            ("0000:1b:00.0", 0, "mlx5_0", "PXB"), ("0000:43:00.0", 0, "mlx5_3", "PXB"), ("0000:52:00.0", 0, "mlx5_4", "PXB"),
            ("0000:61:00.0", 0, "mlx5_5", "PXB"), ("0000:9d:00.0", 1, "mlx5_6", "PXB"), ("0000:c3:00.0", 1, "mlx5_9", "PXB"),
            ("0000:d1:00.0", 1, "mlx5_10", "PXB"), ("0000:df:00.0", 1, "mlx5_11", "PXB"),
        ],
        12, [],
    ),
    "efa": (
        [(48, "0-47,96-143"), (48, "48-95,144-191")],
        [
            ("0000:53:00.0", 0, "rdmap79s0 rdmap80s0 rdmap81s0 rdmap82s0", "PIX"),
            ("0000:64:00.0", 0, "rdmap96s0 rdmap97s0 rdmap98s0 rdmap99s0", "PIX"),
            ("0000:75:00.0", 0, "rdmap113s0 rdmap114s0 rdmap115s0 rdmap116s0", "PIX"),
            ("0000:86:00.0", 0, "rdmap130s0 rdmap131s0 rdmap132s0 rdmap133s0", "PIX"),
            ("0000:97:00.0", 1, "rdmap147s0 rdmap148s0 rdmap149s0 rdmap150s0", "PIX"),
            ("0000:a8:00.0", 1, "rdmap164s0 rdmap165s0 rdmap166s0 rdmap167s0", "PIX"),
            ("0000:b9:00.0", 1, "rdmap181s0 rdmap182s0 rdmap183s0 rdmap184s0", "PIX"),
            ("0000:ca:00.0", 1, "rdmap198s0 rdmap199s0 rdmap200s0 rdmap201s0", "PIX"),
        ],
        32, [],
    ),
    "without_sysfs": ([], [], 0, [NO_NODES]),
    "small_vm": ([(2, "0-1")], [], 0, []),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_equals_table(name, tmp_path):
    getattr(machine_trees, name)(tmp_path)
    host = read(tmp_path)
    nodes, gpus, num_nics, notes = MACHINES[name]
    assert [(len(node.cores), format_cpulist(node.cpus)) for node in host.nodes] == nodes
    near = [(gpu, host.nearest_nics(gpu)) for gpu in host.gpus]
    table = [(g.pci.bus_id, g.pci.node, " ".join(n.name for n in nics), distance(g.pci, nics[0].pci)) for g, nics in near]
    assert table == gpus and [gpu.index for gpu in host.gpus] == list(range(len(gpus)))
    assert len(host.nics) == num_nics and list(host.notes) == notes


def test_facts_of_devices(tmp_path):
    machine_trees.dgx_h100(tmp_path)
    host = read(tmp_path)
    assert host.nodes[0].cores[0] == (0, 112) and host.nodes[1].cores[-1] == (111, 223)
    gpu, nics = host.gpus[0], {nic.name: nic for nic in host.nics}
    assert (gpu.name, gpu.uuid) == ("NVIDIA H100 80GB HBM3", "GPU-0000:1b:00.0")
    (port,) = nics["mlx5_0"].ports
    assert (port.number, port.state, port.link_layer, port.rate_gbps) == (1, "ACTIVE", "InfiniBand", 400.0)
    assert nics["mlx5_0"].driver == "mlx5_core" and nics["mlx5_1"].active_ports == ()
    assert distance(nics["mlx5_1"].pci, nics["mlx5_2"].pci) == "PIX"  # two functions of one card
    assert distance(gpu.pci, nics["mlx5_3"].pci) == "NODE" and distance(gpu.pci, nics["mlx5_6"].pci) == "SYS"


@pytest.fixture
def azure(tmp_path):
    machine_trees.azure_h100(tmp_path)
    return tmp_path


def nic_of(host, name="mlx5_0"):
    return next(nic for nic in host.nics if nic.name == name)


def test_fewer_nics_than_gpus(azure):
    for name in ("mlx5_1", "mlx5_3"):
        (azure / f"sys/class/infiniband/{name}/ports/1/state").write_text("1: DOWN\n")
    host = read(azure)
    assert [host.nearest_nics(gpu)[0].name for gpu in host.gpus[:4]] == ["mlx5_0", "mlx5_0", "mlx5_2", "mlx5_2"]


def test_container_with_some_gpus(azure):
    """One has no device file, one no folder of the driver; the others keep CUDA's order. Without the driver GPUs have no name."""
    (azure / "dev/nvidia0").unlink()
    shutil.rmtree(azure / "proc/driver/nvidia/gpus/0003:00:00.0")
    host = read(azure)
    assert [(gpu.index, gpu.pci.bus_id) for gpu in host.gpus[:2]] == [(0, "0002:00:00.0"), (1, "0004:00:00.0")] and len(host.gpus) == 6
    shutil.rmtree(azure / "proc/driver")
    assert [gpu.name for gpu in read(azure).gpus] == ["NVIDIA GPU"] * 8


# ---- damaged files ----

GPU = "sys/bus/pci/devices/0001:00:00.0"  # of azure_h100, in NUMA node 0


@pytest.mark.parametrize(
    ("file", "text", "note"),
    [
        ("sys/devices/system/node/node0/cpulist", "0-x", "/sys/devices/system/node/node0/cpulist cannot be used: '0-x' is no list of CPUs"),
        (f"{GPU}/numa_node", "7", "The NUMA node of 0001:00:00.0 is unknown: its numa_node is 7"),
        (f"{GPU}/numa_node", "-1", "The NUMA node of 0001:00:00.0 is unknown: its numa_node is -1"),
        ("proc/self/status", "Name: python", "The CPUs of this process are unknown: /proc/self/status has no list of them."),
        ("sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "?", "thread_siblings_list cannot be used: '?' is no list of CPUs"),
    ],
)
def test_damaged_file_is_noted(file, text, note, azure):
    (azure / file).write_text(text)
    host = read(azure)
    assert any(note in each for each in host.notes), host.notes
    assert len(host.gpus) == 8 and len(host.nodes) == 2  # the rest is there
    assert command.text(host).count("Note: ") == len(host.notes)


@pytest.mark.parametrize("rate", ("fast", "1.2.3 Gb/sec\n"))
def test_damaged_nic(rate, azure):
    """A driver may have other files beside its ports."""
    ports = azure / "sys/class/infiniband/mlx5_0/ports"
    (ports / "README").mkdir()
    (ports / "1/rate").write_text(rate)
    (ports / "1/state").write_bytes(b"\xff")
    (ports / "1/link_layer").unlink()
    (ports / "1/link_layer").mkdir()  # reading it fails as the driver's refusal does
    host = read(azure)
    (port,) = nic_of(host).ports
    assert (port.number, port.rate_gbps, port.link_layer, port.state == "ACTIVE") == (1, 0.0, "", False)


def test_links_in_a_circle(azure):
    nic = azure / "sys/class/infiniband"
    for link in (azure / GPU, nic / "mlx5_0/device/driver", nic / "mlx5_1"):
        link.unlink()
        link.symlink_to(link)
    host = read(azure)
    assert nic_of(host).driver == "" and nic_of(host, "mlx5_1").ports == () and nic_of(host, "mlx5_1").pci.path == ()
    assert [each.node for each in place(host, 8)] == [None, 0, 0, 0, 1, 1, 1, 1], "the driver's folder still has the first GPU"


def test_offline_cpus_and_holes(tmp_path):
    """SMT is off, CPU 3 is offline, node 1 was unplugged, and node 3 has memory only."""
    tree = machine_trees.MachineTree(tmp_path, "0-7")
    tree.node(0, "0-2")
    tree.node(2, "4-7")
    tree.write("sys/devices/system/node/node3/cpulist", "")
    tree.gpu("pci0000:10/0000:10:01.0/0000:11:00.0", 0)
    tree.gpu("pci0000:20/0000:20:01.0/0000:21:00.0", 2)
    tree.gpu("pci0000:30/0000:30:01.0/0000:31:00.0", 3)
    host = read(tmp_path)
    assert [(each.node, each.cpus) for each in place(host, 3)] == [(0, (0, 1, 2)), (2, (4, 5, 6, 7)), (3, ())]
    assert place(host, 3)[2].notes == ("this process may use no CPU of NUMA node 3",)
    assert 'numaid="2"' in nccl.topology_xml(host) and "0000:31:00.0" not in nccl.topology_xml(host)


@pytest.mark.parametrize(
    ("masked", "nodes"),
    [
        ("sys/bus", {None}), ("sys/class", {0, 1}), ("sys/devices/system/node", {None}), ("sys/devices/system/cpu", {0, 1}),
        ("proc", {0, 1}), ("proc/driver", {0, 1}),
    ],
)  # fmt: skip
def test_masked_folders(masked, nodes, azure):
    """A container runtime mounts an empty folder over what it hides. Ranks whose GPU has an unknown node are not bound."""
    shutil.rmtree(azure / masked)
    (azure / masked).mkdir()
    host = read(azure)
    assert {rank.node for rank in place(host, 8)} == nodes and len(host.gpus) == 8
    assert command.text(host) and (host.allowed_cpus is None) == (masked == "proc")


def test_rdma_in_software(tmp_path):
    """Such a device is on no PCI bus. NCCL refuses a topology file with a bus id that is none."""
    machine_trees.small_vm(tmp_path)
    (tmp_path / "sys/class/infiniband/rxe0/ports/1").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/rxe0/ports/1/state").write_text("4: ACTIVE\n")
    host = read(tmp_path)
    assert [(nic.name, nic.pci.bus_id, nic.driver) for nic in host.nics] == [("rxe0", "rxe0", "")]
    with pytest.raises(EPError, match="no GPU and no NIC with a known NUMA node is found"):
        nccl.topology_xml(host)


# ---- the command ----


def test_page(azure, capsys):
    command.main([], azure)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["NUMA nodes: 2, GPUs: 8, RDMA NICs: 9", "CPUs of this process: 0-95"]
    assert "  GPU 0 at 0001:00:00.0: NVIDIA H100 80GB HBM3, nearest NIC: mlx5_0 (NODE)" in lines
    assert "mlx5_0    NODE  NODE  NODE  NODE  SYS   SYS   SYS   SYS" in lines
