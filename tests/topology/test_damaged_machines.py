"""Machines whose files are damaged, odd or out of reach: what is unknown is said, the rest is read, and nothing is raised."""

import platform
import shutil

import machine_trees
import pytest

from deepep_moe.errors import EPError
from deepep_moe.topology import nccl, place, read
from deepep_moe.topology.picture import text

NODE = "sys/devices/system/node"
GPU = "sys/bus/pci/devices/0001:00:00.0"  # of azure_h100, in NUMA node 0


@pytest.fixture
def azure(tmp_path):
    machine_trees.azure_h100(tmp_path)
    return tmp_path


def test_links_in_a_circle(azure):
    (azure / GPU).unlink()
    (azure / GPU).symlink_to(azure / GPU)
    nic = azure / "sys/class/infiniband/mlx5_0/device/driver"
    nic.unlink()
    nic.symlink_to(nic)
    found = read(azure)
    assert next(nic.driver for nic in found.nics if nic.name == "mlx5_0") == ""
    assert [own.node for own in place(found, 8)] == [None, 0, 0, 0, 1, 1, 1, 1], "the driver's folder still has the first GPU"


def test_numbers_that_are_none(azure):
    """POWER names its model, and a driver may have other files beside its ports."""
    (azure / "proc/cpuinfo").write_text("model\t\t: 8335-GTW\n")
    ports = azure / "sys/class/infiniband/mlx5_0/ports"
    (ports / "1/rate").write_text("1.2.3 Gb/sec\n")
    (ports / "README").mkdir()
    found = read(azure)
    nic = next(nic for nic in found.nics if nic.name == "mlx5_0")
    assert found.cpu.model == 0 and [(port.number, port.rate_gbps) for port in nic.ports] == [(1, 0.0)]


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
