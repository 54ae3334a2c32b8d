"""The topology file for NCCL has the nesting and the attributes of shipped ones; settings are explained and only set where asked for."""

from xml.etree import ElementTree

import machine_trees
import pytest

from deepep_moe import launch
from deepep_moe.errors import EPError
from deepep_moe.topology import bind, nccl, read
from deepep_moe.topology.command import main


def nesting(element):
    """The bus ids below an element, each with those below it."""
    return {child.get("busid"): nesting(child) for child in element}


def nodes_of(name, root):
    getattr(machine_trees, name)(root)
    system = ElementTree.fromstring(nccl.topology_xml(read(root)))
    assert system.tag == "system" and system.attrib == {"version": "1"}
    assert {element.tag for element in system.iter()} == {"system", "cpu", "pci"}
    return list(system)


def test_virtual_machine(tmp_path):
    first, second = nodes_of("azure_h100", tmp_path)
    assert (first.attrib, second.attrib, first[0].attrib) == ({"numaid": "0"}, {"numaid": "1"}, {"busid": "0001:00:00.0"})
    assert nesting(second) == {f"{start + n:04x}:00:00.0": {} for start in (5, 0x105) for n in range(4)}


def test_switches_are_nested(tmp_path):
    first, second = nodes_of("dgx_h100", tmp_path)
    nested = nesting(first)
    assert nested["0000:16:00.0"] == {"0000:19:00.0": {"0000:1b:00.0": {}}, "0000:18:00.0": {}}
    assert nested["0000:29:00.0"] == {} and len(nested) == 6 and set(nesting(second)) >= {"0000:98:00.0", "0000:da:00.0"}


@pytest.mark.parametrize("name", ["without_sysfs", "small_vm"])
def test_nothing_to_tell(name, tmp_path):
    getattr(machine_trees, name)(tmp_path)
    with pytest.raises(EPError, match="no GPU and no NIC with a known NUMA node is found"):
        nccl.topology_xml(read(tmp_path))
    with pytest.raises(SystemExit, match="cannot write .*topo.xml: no GPU and no NIC"):
        main(["nccl", "--output", str(tmp_path / "topo.xml")], tmp_path)
    assert not (tmp_path / "topo.xml").exists()


def test_command_writes_and_explains(tmp_path, capsys, monkeypatch):
    machine_trees.dgx_h100(tmp_path)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("# of the image\nNCCL_IB_QPS_PER_CONNECTION = 2\nnonsense\n")
    monkeypatch.setenv("NCCL_PXN_DISABLE", "0")
    main(["nccl", "--output", str(tmp_path / "topo.xml")], tmp_path)
    assert (tmp_path / "topo.xml").read_text() == nccl.topology_xml(read(tmp_path))
    printed = capsys.readouterr().out
    assert f"NCCL_TOPO_FILE={tmp_path}/topo.xml  # now: not set" in printed
    assert f"NCCL_IB_QPS_PER_CONNECTION=4  # now: 2 ({tmp_path}/etc/nccl.conf)" in printed
    assert "NCCL_PXN_DISABLE=1  # now: 0 (environment)" in printed
    assert "NCCL_MIN_NCHANNELS=32  # now: not set" in printed
    file = tmp_path / "opt/microsoft/ndv5-topo.xml"  # as Azure's images bring
    file.parent.mkdir(parents=True)
    file.write_text("<system/>")
    report = nccl.report(tmp_path)
    assert f"NCCL_TOPO_FILE={file} " in report and f"The machine's image brings {file}; prefer it to a file made here." in report


def test_launcher_sets_what_nobody_set(tmp_path, capsys, monkeypatch):
    (tmp_path / "nccl.conf").write_text("NCCL_PXN_DISABLE=0\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "nccl.conf"))
    monkeypatch.setenv("NCCL_MIN_NCHANNELS", "16")
    line = "NCCL settings: NCCL_IGNORE_CPU_AFFINITY=1 NCCL_P2P_NET_CHUNKSIZE=524288 NCCL_IB_QPS_PER_CONNECTION=4\n"
    ran = []
    monkeypatch.setattr(launch.run, "run", ran.append)
    for options, expected in (([], ""), (["--nccl-settings"], line), (["--nccl-settings"], "NCCL settings: all are set already\n")):
        launch.main([*options, "-m", "a"])
        assert capsys.readouterr().err == expected
    assert len(ran) == 3


def test_binding_leaves_what_the_file_sets(tmp_path, bound_to):
    machine_trees.azure_h100(tmp_path)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("NCCL_IB_HCA=mlx5\n")
    bound = bind(0, 8, root=tmp_path)
    assert f"NCCL_IB_HCA is set in {tmp_path}/etc/nccl.conf" in bound.left and "NCCL_IB_HCA" not in " ".join(bound.done)
