"""The topology of recorded machines equals tables written by hand; damaged files cost what they say, and a note."""

import json
import shutil
import subprocess
import sys

import machine_trees
import pytest

from deepep_moe.topology import distance, picture, read
from deepep_moe.topology.__main__ import main
from deepep_moe.topology.sysfs import format_cpulist, parse_cpulist

NO_NODES = "NUMA nodes are unknown: /sys/devices/system/node is missing or empty, as in some containers."

# Of each machine: NUMA nodes (cores, CPUs); GPUs (bus id, node, nearest NICs, their distance); number of NICs; notes.
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
    "azure_h100": (
        [(48, "0-47"), (48, "48-95")],
        [
            ("0001:00:00.0", 0, "mlx5_0", "NODE"), ("0002:00:00.0", 0, "mlx5_1", "NODE"), ("0003:00:00.0", 0, "mlx5_2", "NODE"),
            ("0004:00:00.0", 0, "mlx5_3", "NODE"), ("0005:00:00.0", 1, "mlx5_4", "NODE"), ("0006:00:00.0", 1, "mlx5_5", "NODE"),
            ("0007:00:00.0", 1, "mlx5_6", "NODE"), ("0008:00:00.0", 1, "mlx5_7", "NODE"),
        ],
        9, [],
    ),
    "one_node_hgx": (
        [(64, "0-127")],
        [
            ("0000:13:00.0", 0, "rocep0", "PIX"), ("0000:14:00.0", 0, "rocep1", "PIX"), ("0000:33:00.0", 0, "rocep2", "PIX"),
            ("0000:34:00.0", 0, "rocep3", "PIX"), ("0000:53:00.0", 0, "rocep4", "PIX"), ("0000:54:00.0", 0, "rocep5", "PIX"),
            ("0000:73:00.0", 0, "rocep6", "PIX"), ("0000:74:00.0", 0, "rocep7", "PIX"),
        ],
        8, [],
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


def machine(name, root):
    getattr(machine_trees, name)(root)
    return read(root)


@pytest.mark.parametrize("name", MACHINES)
def test_equals_table(name, tmp_path):
    found = machine(name, tmp_path)
    nodes, gpus, num_nics, notes = MACHINES[name]
    assert [(len(node.cores), format_cpulist(node.cpus)) for node in found.nodes] == nodes
    near = [(gpu, found.nearest_nics(gpu)) for gpu in found.gpus]
    table = [(g.pci.bus_id, g.pci.node, " ".join(n.name for n in nics), distance(g.pci, nics[0].pci)) for g, nics in near]
    assert table == gpus and [gpu.index for gpu in found.gpus] == list(range(len(gpus)))
    assert len(found.nics) == num_nics and list(found.notes) == notes
    assert json.loads(json.dumps(found.to_dict()))["notes"] == notes


def test_facts_of_devices(tmp_path):
    found = machine("dgx_h100", tmp_path)
    assert (found.cpu.vendor, found.cpu.family, found.cpu.model) == ("GenuineIntel", 6, 143)
    assert found.nodes[0].cores[0] == (0, 112) and found.nodes[1].cores[-1] == (111, 223)
    gpu, nics = found.gpus[0], {nic.name: nic for nic in found.nics}
    assert (gpu.name, gpu.uuid) == ("NVIDIA H100 80GB HBM3", "GPU-0000:1b:00.0")
    assert (gpu.pci.pci_class, gpu.pci.link_speed, gpu.pci.link_width) == ("0x030200", "32.0 GT/s PCIe", "16")
    (port,) = nics["mlx5_0"].ports
    assert (port.number, port.state, port.link_layer, port.rate_gbps) == (1, "ACTIVE", "InfiniBand", 400.0)
    assert nics["mlx5_0"].driver == "mlx5_core" and nics["mlx5_1"].active_ports == ()
    assert distance(nics["mlx5_1"].pci, nics["mlx5_2"].pci) == "PIX"  # two functions of one card
    assert distance(gpu.pci, nics["mlx5_3"].pci) == "NODE" and distance(gpu.pci, nics["mlx5_6"].pci) == "SYS"
    assert {bridge.pci_class for bridge in found.bridges} == {"0x060400"}


def test_cpuset_and_siblings(tmp_path):
    machine_trees.dgx_h100(tmp_path)
    (tmp_path / "proc/self/status").write_text("Cpus_allowed_list:\t0-3,113,60\n")
    found = read(tmp_path)
    assert found.allowed_cpus == (0, 1, 2, 3, 60, 113)
    assert found.allowed_cores(found.nodes[0]) == ((0,), (1, 113), (2,), (3,)) and found.allowed_cores(found.nodes[1]) == ((60,),)


def test_fewer_nics_than_gpus(tmp_path):
    machine_trees.azure_h100(tmp_path)
    for name in ("mlx5_1", "mlx5_3"):
        (tmp_path / f"sys/class/infiniband/{name}/ports/1/state").write_text("1: DOWN\n")
    found = read(tmp_path)
    assert [found.nearest_nics(gpu)[0].name for gpu in found.gpus[:4]] == ["mlx5_0", "mlx5_0", "mlx5_2", "mlx5_2"]


def test_container_with_some_gpus(tmp_path):
    """One has no device file, one no folder of the driver; the others keep CUDA's order."""
    machine_trees.azure_h100(tmp_path)
    (tmp_path / "dev/nvidia0").unlink()
    shutil.rmtree(tmp_path / "proc/driver/nvidia/gpus/0003:00:00.0")
    found = read(tmp_path)
    assert [(gpu.index, gpu.pci.bus_id) for gpu in found.gpus[:2]] == [(0, "0002:00:00.0"), (1, "0004:00:00.0")] and len(found.gpus) == 6


def test_without_driver(tmp_path):
    machine_trees.azure_h100(tmp_path)
    shutil.rmtree(tmp_path / "proc/driver")
    assert [gpu.name for gpu in read(tmp_path).gpus] == ["NVIDIA GPU"] * 8


# ---- damaged files ----


@pytest.mark.parametrize(
    ("file", "text", "note"),
    [
        ("sys/devices/system/node/node0/cpulist", "0-x", "/sys/devices/system/node/node0/cpulist cannot be used: '0-x' is no list of CPUs"),
        ("sys/bus/pci/devices/0001:00:00.0/numa_node", "one", "The NUMA node of 0001:00:00.0 is unknown: its numa_node is one"),
        ("sys/bus/pci/devices/0001:00:00.0/numa_node", "7", "The NUMA node of 0001:00:00.0 is unknown: its numa_node is 7"),
        ("sys/bus/pci/devices/0001:00:00.0/numa_node", "-1", "The NUMA node of 0001:00:00.0 is unknown: its numa_node is -1"),
        ("proc/self/status", "Name: python", "The CPUs of this process are unknown: /proc/self/status has no list of them."),
        ("sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "?", "thread_siblings_list cannot be used: '?' is no list of CPUs"),
    ],
)
def test_damaged_file_is_noted(file, text, note, tmp_path):
    machine_trees.azure_h100(tmp_path)
    (tmp_path / file).write_text(text)
    found = read(tmp_path)
    assert any(note in told for told in found.notes), found.notes
    assert len(found.gpus) == 8 and len(found.nodes) == 2  # the rest is there
    assert picture.text(found).count("Note: ") == len(found.notes)


def test_damaged_nic(tmp_path):
    machine_trees.azure_h100(tmp_path)
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    (port / "rate").write_text("fast")
    (port / "state").write_bytes(b"\xff")
    (port / "link_layer").unlink()
    (port / "link_layer").mkdir()  # reading it fails as the driver's refusal does
    found = read(tmp_path)
    (port,) = next(nic for nic in found.nics if nic.name == "mlx5_0").ports
    assert (port.rate_gbps, port.link_layer, port.state == "ACTIVE") == (0.0, "", False)


def test_links_that_go_round(tmp_path):
    machine_trees.small_vm(tmp_path)
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/mlx5_0").symlink_to("mlx5_0")
    (nic,) = read(tmp_path).nics
    assert nic.ports == () and nic.pci.path == ()


def test_empty_root(tmp_path):
    found = read(tmp_path / "nowhere")
    assert (found.nodes, found.gpus, found.nics, found.allowed_cpus) == ((), (), (), None) and len(found.notes) == 2


def test_cpulists():
    assert parse_cpulist("0-2,5\n") == (0, 1, 2, 5) and parse_cpulist("") == ()
    assert format_cpulist((0, 1, 2, 5)) == "0-2,5" and format_cpulist(()) == ""


# ---- the command ----


def test_picture(tmp_path, capsys):
    machine_trees.azure_h100(tmp_path)
    main(["--root", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("NUMA nodes: 2, GPUs: 8, RDMA NICs: 9") and lines[1] == "CPUs of this process: 0-95"
    assert lines[3:5] == [
        "NUMA node 0: 48 cores, CPUs 0-47",
        "├─ GPU 0 at 0001:00:00.0: NVIDIA H100 80GB HBM3, nearest NIC: mlx5_0 (NODE)",
    ]
    assert "└─ NIC mlx5_7 at 0108:00:00.0: port 1 InfiniBand 400 Gb/s ACTIVE" in lines
    assert "mlx5_0    NODE  NODE  NODE  NODE  SYS   SYS   SYS   SYS" in lines


def test_json(tmp_path, capsys):
    machine_trees.small_vm(tmp_path)
    main(["--root", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["nodes"] == [{"index": 0, "cores": [[0], [1]]}] and found["allowed_cpus"] == [0, 1]


def test_this_machine():
    result = subprocess.run([sys.executable, "-m", "deepep_moe.topology", "--json"], capture_output=True, text=True, check=True)
    found, here = json.loads(result.stdout), read()
    assert found["allowed_cpus"] == list(here.allowed_cpus or ()) and len(found["gpus"]) == len(here.gpus)
