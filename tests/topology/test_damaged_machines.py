"""Machines whose files are damaged, odd or out of reach: what is unknown is said, the rest is read, and nothing is raised or waited for."""

import json
import os
import platform
import shutil
from xml.etree import ElementTree

import machine_trees
import pytest

from deepep_moe.errors import EPError
from deepep_moe.topology import nccl, place, read
from deepep_moe.topology.nvml import short_bus_id
from deepep_moe.topology.picture import text

NODE = "sys/devices/system/node"
GPU = "sys/bus/pci/devices/0001:00:00.0"  # of azure_h100, in NUMA node 0


@pytest.fixture
def azure(tmp_path):
    machine_trees.azure_h100(tmp_path)
    return tmp_path


def test_pipe_and_device_in_place_of_a_file(azure):
    """Who reads a pipe waits for a writer; /dev/zero has no end."""
    for node, put in ((0, os.mkfifo), (1, lambda path: os.symlink("/dev/zero", path))):
        (azure / NODE / f"node{node}/cpulist").unlink()
        put(azure / NODE / f"node{node}/cpulist")
    found = read(azure)
    assert [node.cores for node in found.nodes] == [(), ()]
    for node in (0, 1):
        assert f"The CPUs of NUMA node {node} are unknown: /{NODE}/node{node}/cpulist cannot be read." in found.notes
    assert place(found, 8)[0].cpus == ()


def test_links_in_a_circle(azure):
    (azure / GPU).unlink()
    (azure / GPU).symlink_to(azure / GPU)
    nic = azure / "sys/class/infiniband/mlx5_0/device/driver"
    nic.unlink()
    nic.symlink_to(nic)
    found = read(azure)
    assert next(nic.driver for nic in found.nics if nic.name == "mlx5_0") == ""
    assert [own.node for own in place(found, 8)] == [None, 0, 0, 0, 1, 1, 1, 1], "the driver's folder still has the first GPU"


def test_huge_numbers(azure):
    (azure / "proc/cpuinfo").write_text(f"vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t: {'9' * 5000}\n")
    (azure / "proc/driver/nvidia/gpus/0001:00:00.0/information").write_text(f"Model: \t H100\nDevice Minor: \t {'9' * 5000}\n")
    (azure / "sys/class/infiniband/mlx5_0/ports/1/rate").write_text(f"{'9' * 500} Gb/sec (4X NDR)\n")
    (azure / f"{GPU}/numa_node").write_text("9" * 500)
    found = read(azure)
    assert (found.cpu.family, found.cpu.model) == (6, 0) and len(found.gpus) == 7, "a GPU without its device file is left out"
    assert next(nic for nic in found.nics if nic.name == "mlx5_0").ports[0].rate_gbps == 0
    json.dumps(found.to_dict(), allow_nan=False)


def test_folder_that_may_not_be_entered(azure, monkeypatch):
    """Root may enter all, so the refusal is made up where the kernel would make it."""
    stat = os.stat

    def refuse(path, *args, **kwargs):
        if "infiniband/mlx5_0" in os.fspath(path) or "nvidia0" in os.fspath(path):
            raise PermissionError(13, "Permission denied")
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refuse)
    found = read(azure)
    monkeypatch.undo()
    assert len(found.gpus) == 7 and len(found.nics) == 9


def test_offline_cpus_and_holes(tmp_path):
    """SMT is off, CPU 3 is offline, node 1 was unplugged, and node 3 has memory only."""
    tree = machine_trees.MachineTree(tmp_path, machine_trees.AMD, "0-7")
    tree.node(0, "0-2")
    tree.node(2, "4-7")
    tree.write(f"{NODE}/node3/cpulist", "")
    tree.gpu("pci0000:10/0000:10:01.0/0000:11:00.0", 0)
    tree.gpu("pci0000:20/0000:20:01.0/0000:21:00.0", 2)
    tree.gpu("pci0000:30/0000:30:01.0/0000:31:00.0", 3)
    found = read(tmp_path)
    assert [(own.node, own.cpus) for own in place(found, 3)] == [(0, (0, 1, 2)), (2, (4, 5, 6, 7)), (3, ())]
    assert place(found, 3)[2].notes == ("this process may use no CPU of NUMA node 3",)
    assert 'numaid="2"' in nccl.topology_xml(found) and "0000:31:00.0" not in nccl.topology_xml(found)


def test_siblings_that_contradict_each_other(tmp_path):
    tree = machine_trees.MachineTree(tmp_path, machine_trees.AMD, "0-3")
    tree.node(0, "0-3")
    for cpu, siblings in enumerate(("0-1", "1-2", "2-3", "9")):
        tree.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
    assert read(tmp_path).nodes[0].cores == ((0, 1), (2, 3))


@pytest.mark.timeout(60)
def test_many_cpus(tmp_path):
    """Time that grew with the square of the CPUs would be minutes."""
    machine_trees.small_vm(tmp_path)
    (tmp_path / NODE / "node0/cpulist").write_text("0-65535")
    (tmp_path / "sys/devices/system/cpu/cpu0/topology/thread_siblings_list").write_text("0,65535")
    cores = read(tmp_path).nodes[0].cores
    assert len(cores) == 65535 and cores[0] == (0, 65535)
    (tmp_path / NODE / "node1").mkdir()
    (tmp_path / NODE / "node1/cpulist").write_text("0-65535")
    found = read(tmp_path)
    assert found.nodes[1].cores == () and found.notes[0].startswith("CPUs 0-65535 of NUMA node 1 are in a node before it too")


def test_control_characters_and_a_bridge_with_a_wrong_link(tmp_path):
    machine_trees.dgx_h100(tmp_path)
    (tmp_path / "sys/bus/pci/devices/0000:1b:00.0/current_link_speed").write_text("32\x1b[31m\x00 GT/s")
    bridge = tmp_path / "sys/bus/pci/devices/0000:16:00.0"
    target = os.readlink(tmp_path / "sys/bus/pci/devices/0000:3e:00.0")
    bridge.unlink()
    bridge.symlink_to(target)
    root = ElementTree.fromstring(nccl.topology_xml(read(tmp_path)))
    (gpu,) = root.findall(".//pci[@busid='0000:1b:00.0']")
    assert gpu.get("link_speed") == "32?[31m? GT/s" and root.find(".//pci[@busid='0000:16:00.0']//pci[@busid='0000:1b:00.0']") is gpu


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
    found = read(azure)
    assert {rank.node for rank in place(found, 8)} == nodes and len(found.gpus) == 8
    assert text(found) and (found.allowed_cpus is None) == (masked == "proc")


def test_rdma_in_software(tmp_path):
    """Such a device is on no PCI bus. NCCL refuses a topology file with a bus id that is none."""
    machine_trees.small_vm(tmp_path)
    (tmp_path / "sys/class/infiniband/rxe0/ports/1").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/rxe0/ports/1/state").write_text("4: ACTIVE\n")
    found = read(tmp_path)
    assert [(nic.name, nic.pci.bus_id, nic.driver) for nic in found.nics] == [("rxe0", "rxe0", "")]
    with pytest.raises(EPError, match="no GPU and no NIC with a known NUMA node is found"):
        nccl.topology_xml(found)


def test_names_that_nccl_has_for_processors(azure, monkeypatch):
    for name, expected in (("aarch64", "arm64"), ("x86_64", "x86_64")):
        monkeypatch.setattr(platform, "machine", lambda name=name: name)
        assert f'arch="{expected}"' in nccl.topology_xml(read(azure))


# ---- NVML ----


def nvml(**calls):
    found = machine_trees.fake_nvml({f"000{place}:00:00.0": {"0000:99:00.0": 18} for place in range(1, 9)})
    vars(found).update(calls)
    return found


def fail(*args):
    raise machine_trees.NvmlError("Insufficient Permissions")


def test_gpu_that_nvml_refuses(azure):
    by_index = nvml().nvmlDeviceGetHandleByIndex
    found = read(azure, nvml(nvmlDeviceGetHandleByIndex=lambda index: by_index(index) if index else fail()))
    assert [gpu.pci.bus_id for gpu in found.gpus] == [f"000{place}:00:00.0" for place in range(2, 9)] and found.gpus[0].index == 0


def test_peers_that_nvml_does_not_tell(azure):
    found = read(azure, nvml(nvmlDeviceGetP2PStatus=fail))
    assert found.gpus[0].peers is None and found.num_nvlinks(*found.gpus[:2]) == 18


def test_bus_ids_of_nvml():
    assert short_bus_id(b"00000000:1B:00.0") == "0000:1b:00.0" and short_bus_id("FFFFFFFF:FF:FF.F") == "ffffffff:ff:ff.f"
    assert short_bus_id("") == "" and short_bus_id(b"\xff") == "�"
