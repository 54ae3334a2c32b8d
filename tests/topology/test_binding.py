"""Ranks of recorded machines get the places of tables written by hand; a launched rank runs on its CPUs."""

import ctypes
import os
import sys
from types import SimpleNamespace

import machine_trees
import pytest
from scripts import run_python

from deepep_moe import config, launch
from deepep_moe.testing import run_ranks
from deepep_moe.topology import bind, binding, place, read
from deepep_moe.topology.reader import format_cpulist

NVSHMEM = {"NVSHMEM_ENABLE_NIC_PE_MAPPING": "1"}


# Machine, ranks, CUDA_VISIBLE_DEVICES; then of each rank: GPU, NUMA node, CPUs, first NIC.
TABLES = [
    ("azure_h100", 8, None, [
        (0, 0, "0-11", "mlx5_0:1"), (1, 0, "12-23", "mlx5_1:1"), (2, 0, "24-35", "mlx5_2:1"), (3, 0, "36-47", "mlx5_3:1"),
        (4, 1, "48-59", "mlx5_4:1"), (5, 1, "60-71", "mlx5_5:1"), (6, 1, "72-83", "mlx5_6:1"), (7, 1, "84-95", "mlx5_7:1"),
    ]),
    ("dgx_h100", 3, "6,GPU-0000:1b,7", [
        (6, 1, "56-83,168-195", "mlx5_10:1"), (0, 0, "0-55,112-167", "mlx5_0:1"), (7, 1, "84-111,196-223", "mlx5_11:1"),
    ]),
    ("dgx_h100", 2, "4", [(4, 1, "56-83,168-195", "mlx5_6:1"), (4, 1, "84-111,196-223", "mlx5_6:1")]),
    ("one_node_hgx", 4, None, [
        (0, 0, "0-15,64-79", "rocep0:1"), (1, 0, "16-31,80-95", "rocep1:1"), (2, 0, "32-47,96-111", "rocep2:1"),
        (3, 0, "48-63,112-127", "rocep3:1"),
    ]),
    ("efa", 2, "3,4", [(3, 0, "0-47,96-143", "rdmap130s0:1"), (4, 1, "48-95,144-191", "rdmap147s0:1")]),
    ("without_sysfs", 2, None, [(None, None, "", ""), (None, None, "", "")]),
    ("small_vm", 2, None, [(None, 0, "0", ""), (None, 0, "1", "")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "num_ranks", "visible", "table"), TABLES)
def test_places_equal_table(name, num_ranks, visible, table, tmp_path):
    getattr(machine_trees, name)(tmp_path)
    places = place(read(tmp_path), num_ranks, visible)
    assert [(each.gpu, each.node, format_cpulist(each.cpus), (*each.nics, "")[0]) for each in places] == table
    assert [each.local_rank for each in places] == list(range(num_ranks))


@pytest.mark.parametrize(
    ("change", "num_ranks", "cpus", "note"),
    [
        ("Cpus_allowed_list:\t2-5,60", 4, ["2", "3", "4", "5"], ""),
        ("Cpus_allowed_list:\t2-3,60-61", 5, ["2-3", "2-3", "2-3", "2-3", "60-61"], "4 ranks share 2 cores of NUMA node 0; start at most"),
        ("Cpus_allowed_list:\t60-61", 4, ["", "", "", ""], "this process may use no CPU of NUMA node 0"),
    ],
)
def test_cpusets(change, num_ranks, cpus, note, tmp_path):
    machine_trees.azure_h100(tmp_path)
    (tmp_path / "proc/self/status").write_text(change)
    places = place(read(tmp_path), num_ranks)
    assert [format_cpulist(each.cpus) for each in places] == cpus
    assert [each.notes[0][: len(note)] for each in places if each.notes] == [note] * (4 if note else 0)


def test_ranks_without_gpus_are_spread(tmp_path):
    machine_trees.dgx_h100(tmp_path)
    places = place(read(tmp_path), 3, "")
    assert [(each.gpu, each.node, each.notes) for each in places] == [(None, 0, ()), (None, 0, ()), (None, 1, ())]


@pytest.mark.parametrize(
    ("file", "text", "visible", "note"),
    [
        ("numa_node", "-1", None, "the NUMA node of GPU 0 is unknown"),
        (None, None, "MIG-1", "CUDA_VISIBLE_DEVICES=MIG-1 names no whole GPU of this machine"),
        (None, None, "9", "CUDA_VISIBLE_DEVICES=9 names no whole GPU of this machine; give indices from 0 to 7"),
        ("information", "Model: \t NVIDIA L4", None, "the GPUs are of different kinds"),
    ],
)
def test_unknown_gpu_binds_nothing(file, text, visible, note, tmp_path):
    machine_trees.azure_h100(tmp_path)
    folders = {"numa_node": "sys/bus/pci/devices/0001:00:00.0", "information": "proc/driver/nvidia/gpus/0001:00:00.0"}
    if file:
        (tmp_path / folders[file] / file).write_text(text)
    first = place(read(tmp_path), 2, visible)[0]
    assert first.cpus == () and first.node is None and first.notes[0].startswith(note)


# ---- NICs ----


@pytest.mark.parametrize(
    ("name", "num_ranks", "visible", "variables", "reason"),
    [
        (
            "dgx_h100", 3, None,
            NVSHMEM | {"NVSHMEM_HCA_LIST": "mlx5_0:1,mlx5_3:1,mlx5_4:1", "NCCL_IB_HCA": "=mlx5_0:1,mlx5_3:1,mlx5_4:1"}, "",
        ),
        ("dgx_h100", 2, "6", NVSHMEM | {"NVSHMEM_HCA_PE_MAPPING": "mlx5_10:1:2", "NCCL_IB_HCA": "=mlx5_10:1"}, ""),
        (
            "dgx_h100", 4, "0,1", {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_3:1"},
            "NVSHMEM's NICs: ranks that share a NIC do not follow each other; NVSHMEM chooses",
        ),
        ("dgx_h100", 2, "", {}, "NICs: not every rank has a GPU and a NIC beside it; NVSHMEM and NCCL choose"),
        ("efa", 2, None, {}, "NICs: EFA's libfabric chooses them"),
    ],
)  # fmt: skip
def test_network_variables(name, num_ranks, visible, variables, reason, tmp_path):
    getattr(machine_trees, name)(tmp_path)
    machine = read(tmp_path)
    assert binding.network_variables(machine, place(machine, num_ranks, visible)) == (variables, reason)


def test_variables_that_are_set_stay(tmp_path, monkeypatch, bound_to):
    monkeypatch.setenv("NVSHMEM_HCA_LIST", "mlx5_7:1")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_6")
    machine_trees.azure_h100(tmp_path)
    bound = bind(0, 8, root=tmp_path)
    assert os.environ["NCCL_IB_HCA"] == "mlx5_6" and "NVSHMEM_ENABLE_NIC_PE_MAPPING" not in os.environ
    assert str(bound) == (
        "local rank 0 bound: CPUs 0-11; memory of NUMA node 0. left alone: NVSHMEM's NICs: NVSHMEM_HCA_LIST is set; NCCL_IB_HCA is set"
    )


# ---- bind ----


def test_failures_are_told(tmp_path, monkeypatch):
    machine_trees.dgx_h100(tmp_path)
    monkeypatch.setattr(binding, "_LIBNUMA", "libnone.so.1")

    def refuse(thread, cpus):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    bound = bind(1, 8, root=tmp_path)
    assert bound.left[0] == "CPUs 14-27,126-139: the kernel refused (Invalid argument)"
    assert bound.left[1].startswith("memory of NUMA node 0: libnone.so.1 is not installed; the kernel still prefers")
    assert os.environ["NVSHMEM_HCA_LIST"].startswith("mlx5_0:1,mlx5_3:1,")


def test_nothing_known_binds_nothing(tmp_path):
    before = os.sched_getaffinity(0)
    machine_trees.without_sysfs(tmp_path)
    assert str(bind(0, 1, root=tmp_path)) == "local rank 0 bound: nothing. left alone: the machine's NUMA nodes are unknown"
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("cpus", "of_parent", "num_ranks", "keeps"),
    [("12-23", "0-95", 8, True), ("0-95", "0-95", 1, False), ("0-11", "", 8, False)],
)
def test_share_that_another_launcher_gave(cpus, of_parent, num_ranks, keeps, tmp_path, bound_to):
    machine_trees.azure_h100(tmp_path)
    (tmp_path / "proc/self/status").write_text(f"Cpus_allowed_list:\t{cpus}\n")
    (tmp_path / f"proc/{os.getppid()}").mkdir()
    (tmp_path / f"proc/{os.getppid()}/status").write_text(f"Cpus_allowed_list:\t{of_parent}\n")
    bound = bind(0, num_ranks, root=tmp_path)
    assert bool(bound_to) is not keeps
    assert ("CPUs 12-23 are this rank's share already, by who started it" in bound.left) is keeps
    assert any(what.startswith("NCCL_IB_HCA=") for what in bound.done)


@pytest.mark.parametrize(
    ("variables", "left"),
    [
        ({"SLURM_LOCALID": "3", "SLURM_NTASKS": "8"}, "SLURM_NTASKS=8 and LOCAL_RANK is not set;"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "OMPI_COMM_WORLD_LOCAL_SIZE=2 and LOCAL_RANK is not set;"),
        ({"SLURM_LOCALID": "3", "SLURM_NTASKS": "8", "LOCAL_RANK": "0"}, None),
    ],
)
def test_processes_of_launchers_that_name_no_local_rank(variables, left, tmp_path, monkeypatch, bound_to):
    machine_trees.azure_h100(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    bound = bind(root=tmp_path)
    assert bool(bound.done) is (left is None) and (left is None or bound.left[0].startswith(left))


def test_bound_once(tmp_path, monkeypatch, bound_to):
    machine_trees.azure_h100(tmp_path)
    monkeypatch.setenv("DEEPEP_MOE_BOUND", str(os.getppid()))  # as a bound launcher hands on
    monkeypatch.setattr(config, "available_cpus", lambda: 96 if not bound_to else 12)
    assert config.num_threads(48) == 2
    assert bind(1, 8, root=tmp_path).done[0] == "CPUs 12-23"
    assert config.num_threads(48) == 8, "the CPUs are this rank's own"
    assert str(bind(1, 8, root=tmp_path)) == "local rank 1 bound: nothing. left alone: this process was bound before"
    assert bound_to == [tuple(range(12, 24))]


@pytest.mark.parametrize(
    ("available", "preferred", "reason"),
    [(-1, 0, "the kernel has no memory policies"), (0, 1, ""), (0, 0, "libnuma reports node 0 afterwards")],
)
def test_libnuma(available, preferred, reason, monkeypatch):
    asked = []
    numa = SimpleNamespace(
        numa_available=lambda: available, numa_set_preferred=lambda node: asked.append(node), numa_preferred=lambda: preferred
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: numa)
    why_not = binding.prefer_memory(1)
    assert why_not.startswith(reason) and bool(why_not) is bool(reason) and asked == ([] if available < 0 else [1])


BOUND = """
import os, threading
from deepep_moe.topology import bind
bind()
other = set()
thread = threading.Thread(target=lambda: other.update(os.sched_getaffinity(0)))
thread.start(), thread.join()
print(os.environ["LOCAL_RANK"], sorted(os.sched_getaffinity(0)), sorted(other))
"""


def affinity(rank, num_ranks):
    return tuple(sorted(os.sched_getaffinity(0)))


def test_ranks_of_this_host():
    own = [each.cpus for each in place(read(), 2, "")]
    if not all(own) or own[0] == own[1] or read().gpus:
        pytest.skip("needs two cores, known to sysfs, and no GPU")
    assert run_ranks(affinity, 2, bind=True) == own
    assert run_ranks(affinity, 2) == [affinity(0, 1)] * 2


def test_launched_ranks_are_bound(tmp_path):
    (tmp_path / "script.py").write_text(BOUND)
    cores = [core for node in read().nodes for core in read().allowed_cores(node)]
    if len(cores) < 2 or read().gpus:
        pytest.skip("needs two cores, known to sysfs, and no GPU")
    options = ["--standalone", "--nproc-per-node", "2", "--bind", "--redirects", "3", "--log-dir", str(tmp_path)]
    run_python("-m", "deepep_moe", "launch", *options, tmp_path / "script.py")
    seen = set()
    for rank, each in enumerate(place(read(), 2, "")):
        (out,), (error,) = (list(tmp_path.glob(f"*/attempt_0/{rank}/{name}.log")) for name in ("stdout", "stderr"))
        assert out.read_text() == f"{rank} {list(each.cpus)} {list(each.cpus)}\n"
        assert f"local rank {rank} bound: CPUs {format_cpulist(each.cpus)}" in error.read_text()
        assert each.cpus and not seen & set(each.cpus)
        seen |= set(each.cpus)


# ---- the commands ----


def test_command_is_wrapped(monkeypatch):
    """Options that follow the script are the script's."""
    monkeypatch.setenv("PYTHON_EXEC", "python")
    options = launch.bound(launch.parser().parse_args(["--bind", "-m", "pkg.a", "--bind"]))
    wrapped = "-m", "deepep_moe.topology.bound", "python", "-u", "-m", "pkg.a", "--bind"
    assert [options.training_script, *options.training_script_args] == [sys.executable, *wrapped]
    assert options.no_python and not options.module


def test_without_bind_it_is_torchrun(monkeypatch):
    ran = []
    monkeypatch.setattr(launch.run, "run", ran.append)
    launch.main(["--nproc-per-node", "2", __file__])
    assert (ran[0].training_script, ran[0].nproc_per_node, ran[0].no_python) == (__file__, "2", False)


def test_binding_twice_is_refused(capsys):
    if "--numa-binding" not in launch.parser().format_help():
        pytest.skip("this torchrun does not bind")
    with pytest.raises(SystemExit):
        launch.main(["--bind", "--numa-binding", "node", "-m", "a"])
    assert "--bind does not work with --numa-binding" in capsys.readouterr().err
