"""The doctor finds nothing wrong with a healthy machine, and each fault that is put into it."""

import dataclasses
import json

import pytest
from doctor_machine import GIB, Machine

from deepep_moe.doctor import gpus
from deepep_moe.doctor.environment import Ran
from deepep_moe.doctor.findings import ABSENT, FAULT, OK, WARNING
from deepep_moe.doctor.page import as_text, backends, examine, exit_code

HEALTHY = {"shm": "", "nvlink": "", "nvshmem": "", "collective": ""}


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def only(machine, check, state):
    """The one finding that is neither ok nor absent: all others of a healthy machine stay as they were."""
    findings = examine(machine.environment)
    (found,) = [finding for finding in findings if finding.state in (FAULT, WARNING)]
    assert (found.check, found.state) == (check, state), as_text(findings)
    assert exit_code(findings) == (state == FAULT) and found.advice
    return found, backends(findings)


def test_healthy_machine(machine):
    findings = examine(machine.environment)
    states = {finding.check: finding.state for finding in findings}
    assert len(states) == len(findings) > 24  # no name twice, as backends are judged by names
    assert [name for name, state in states.items() if state != OK] == ["transformer-engine", "fused kernels", "MPS"]
    assert states["MPS"] == ABSENT and backends(findings) == HEALTHY and exit_code(findings) == 0
    assert "2 x NVIDIA H100 80GB HBM3" in as_text(findings) and "2 x 400 Gb/sec (4X NDR)" in as_text(findings)


# ---- versions and builds ----


def test_nvshmem_of_another_minor_version(machine):
    machine.nvshmem["found"] = [3, 5, 1]
    found, serves = only(machine, "NVSHMEM", FAULT)
    assert found.text == "deepep_moe._nvshmem was built for NVSHMEM 3.4.5, and NVSHMEM 3.5.1 is loaded"
    assert found.advice == "install NVSHMEM 3.4, or build deepep_moe again for this one"
    assert serves == HEALTHY | {"nvshmem": "NVSHMEM"}


def test_nvshmem_that_does_not_load(machine):
    machine.nvshmem = {"error": "the module does not load: no libmlx5.so.1; install NVSHMEM again", "built": [], "found": []}
    found, _ = only(machine, "NVSHMEM", FAULT)
    assert (found.text, found.advice) == ("the module does not load: no libmlx5.so.1", "install NVSHMEM again")


def test_module_of_another_pytorch(machine):
    machine.features["autograd"] = "built for torch 2.11.0, this is 2.13.0+cu130; `python -m deepep_moe.build _torch` builds it"
    found, serves = only(machine, "calls in C++", FAULT)
    assert found.text == "deepep_moe._torch is built for torch 2.11.0, this is 2.13.0+cu130"
    assert found.advice == "python -m deepep_moe.build _torch" and serves == HEALTHY
    machine.features["autograd"] = "not built; `python -m deepep_moe.build _torch` builds it"
    found, _ = only(machine, "calls in C++", WARNING)
    assert found.text.startswith("deepep_moe._torch is not built")


@pytest.mark.parametrize("version", ("2.5.1+cu130", "2.16.0+cu130"))
def test_pytorch_out_of_range(machine, version):
    machine.torch["version"] = version
    found, _ = only(machine, "PyTorch", FAULT)
    assert found.text == f"version {version} is installed" and found.advice == "pip install 'torch>=2.6,<2.16'"


def test_driver_too_old(machine):
    machine.cuda["driver"] = [12, 4]
    found, serves = only(machine, "CUDA driver", FAULT)
    assert found.text == "the driver serves CUDA 12.4, and PyTorch 2.13.0+cu130 needs CUDA 13.0"
    assert found.advice == "update the NVIDIA driver to 580 or newer, or install a PyTorch for CUDA 12"
    assert serves["nvlink"] == "CUDA driver" and serves["shm"] == ""


def test_version_of_the_driver(machine):
    driver = {finding.check: finding for finding in examine(machine.environment)}["CUDA driver"]
    assert driver.text == "of unknown version, serves CUDA 13.0"
    for kind in ("UNIX Open Kernel Module for x86_64", "UNIX x86_64 Kernel Module"):
        machine.write("proc/driver/nvidia/version", f"NVRM version: NVIDIA {kind}  580.82.07  Release Build\nGCC version: 12.2.0")
        driver = {finding.check: finding for finding in examine(machine.environment)}["CUDA driver"]
        assert driver.text == "580.82.07, serves CUDA 13.0"


def test_import_that_takes_long(machine):
    machine.ran["import megatron.core"] = Ran(None, errors="no end within 20 s")
    found, _ = only(machine, "megatron-core", FAULT)
    assert found.text == "the import of megatron.core 0.16.1 was stopped: no end within 20 s"
    assert found.advice == "run the doctor again while the machine is idle"
    machine.ran = {"library.py": Ran(None, errors="no end within 20 s")}
    findings = {finding.check: finding for finding in examine(machine.environment)}
    assert findings["PyTorch"].text == "its import was stopped: no end within 20 s" and findings["PyTorch"].state == FAULT
    machine.ran = {"library.py": Ran(None, json.dumps({"torch": machine.torch}), "no end within 20 s")}
    found = {finding.check: finding for finding in examine(machine.environment)}["deepep_moe"]
    assert (found.text, found.state) == ("its import was stopped: no end within 20 s", FAULT)


def test_driver_of_an_older_minor_version_serves(machine):
    machine.torch["cuda"] = "13.2"
    assert exit_code(examine(machine.environment)) == 0


def test_pytorch_without_cuda_beside_gpus(machine):
    machine.torch |= {"version": "2.13.0+cpu", "cuda": None, "nccl": None}
    found, _ = only(machine, "CUDA driver", FAULT)
    assert found.text == "the driver serves CUDA 13.0, and PyTorch 2.13.0+cpu is built without CUDA"


def test_nccl_of_another_cuda(machine):
    machine.versions["nvidia-nccl-cu12"] = "2.27.3"
    found, _ = only(machine, "NCCL", WARNING)
    assert found.text == "nvidia-nccl-cu12 2.27.3 is installed, and PyTorch 2.13.0+cu130 is for CUDA 13"


def test_no_nvcc_but_sources(machine):
    machine.features["nvlink"] = False
    found, serves = only(machine, "GPU kernels", FAULT)
    assert found.text == "2 GPUs are here, and deepep_moe was built without nvcc, so it has no kernels for them"
    assert found.advice.startswith("install the CUDA toolkit 12 or newer") and serves["nvlink"] == "GPU kernels"
    machine.programs["nvcc"] = "/opt/cuda/bin/nvcc"
    assert only(machine, "GPU kernels", FAULT)[0].advice.startswith("nvcc is here now")
    machine.programs.clear()
    machine.variables["CUDA_HOME"] = "/opt/cuda"
    machine.write("opt/cuda/bin/nvcc", "")
    assert only(machine, "GPU kernels", FAULT)[0].advice.startswith("nvcc is here now")


def test_integration_that_does_not_fit_or_import(machine):
    machine.versions["deepspeed"] = "0.14.2"
    found, _ = only(machine, "deepspeed", FAULT)
    assert found.advice == "pip install 'deepspeed>=0.14.5,<0.20'"
    machine.versions["deepspeed"] = "0.19.8"
    machine.ran["import megatron.core"] = Ran(1, errors="Traceback\nImportError: no apex\n")
    found, _ = only(machine, "megatron-core", FAULT)
    assert found.text == "megatron.core 0.16.1 does not import: ImportError: no apex"


def fused_kernels(machine):
    return {finding.check: finding for finding in examine(machine.environment)}["fused kernels"]


def test_fused_kernels(machine):
    """Nothing needs apex or TransformerEngine, so what does not import is no fault."""
    assert fused_kernels(machine).text == "neither apex nor transformer-engine is installed; nothing needs them"
    machine.versions["transformer-engine"] = "2.20.2"
    found = fused_kernels(machine)
    expected = "apex not installed, transformer-engine 2.20.2; FusedAdam of transformer-engine imports"
    assert (found.state, found.text) == (OK, expected)
    machine.versions["apex"] = "0.1"
    machine.ran["amp_C"] = Ran(1, errors="ModuleNotFoundError: No module named 'amp_C'\n")
    found = fused_kernels(machine)
    assert (found.state, exit_code(examine(machine.environment))) == (OK, 0)
    assert found.text == (
        "apex 0.1, transformer-engine 2.20.2; FusedAdam of apex does not import: ModuleNotFoundError: No module named 'amp_C'; "
        "FusedAdam of transformer-engine imports; fused_weight_gradient_mlp_cuda imports"
    )


def test_broken_pytorch_is_a_finding(machine):
    machine.ran["library.py"] = Ran(1, errors="OSError: libtorch_cpu.so: cannot open shared object file\n")
    findings = examine(machine.environment)
    faults = [finding.text for finding in findings if finding.state == FAULT]
    assert faults == ["it does not import: OSError: libtorch_cpu.so: cannot open shared object file"]
    assert backends(findings)["shm"] == "PyTorch, deepep_moe"


# ---- GPUs ----


def test_no_peer_access(machine):
    machine.cuda |= {"reach": [], "atomics": []}
    found, serves = only(machine, "peer access", FAULT)
    assert found.text == "GPUs 0-1 cannot map each other's memory, so 'nvlink' cannot serve them"
    assert "ACS" in found.advice and serves["nvlink"] == "peer access"


def test_peer_access_without_nvlink(machine):
    machine.cuda["atomics"] = []
    found, _ = only(machine, "peer access", WARNING)
    assert found.text == "GPUs 0-1 reach each other without NVLink (their link has no atomics)"


def test_no_cuda_ipc(machine):
    machine.ran["ipc"] = Ran(0, '"cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE (1)"\n')
    found, serves = only(machine, "CUDA IPC", FAULT)
    expected = "a second process, on GPU 1, cannot use memory of GPU 0: cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE (1)"
    assert found.text == expected and "--ipc=host" in found.advice and serves["nvlink"] == "CUDA IPC"
    machine.ran["ipc"] = Ran(None, errors="no end within 15 s")
    assert only(machine, "CUDA IPC", FAULT)[0].text.endswith("cannot use memory of GPU 0: no end within 15 s")


def test_mps_without_enough_sms(machine):
    machine.write("tmp/nvidia-mps/control", "")
    assert exit_code(examine(machine.environment)) == 0
    machine.variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = "5"
    machine.gpus[1]["num_sms"] = 6
    found, _ = only(machine, "MPS", WARNING)
    assert found.text.startswith("MPS leaves a process 6 SMs of GPU 1, and a call takes up to 14 by default")
    assert "(it is 5)" in found.advice


def test_hidden_old_and_driverless_gpus(machine):
    machine.gpus[1] |= {"name": "Tesla V100", "capability": [7, 0]}
    found, _ = only(machine, "GPUs", FAULT)
    assert found.text == "GPU 1 (Tesla V100, 7.0) is older than compute capability 8.0"
    machine.write("sys/bus/pci/devices/0000:18:00.0/vendor", "0x10de")
    machine.write("sys/bus/pci/devices/0000:18:00.0/class", "0x030200")
    machine.ran["facts"] = Ran(1, errors="cuInit: CUDA_ERROR_NO_DEVICE (100)\n")
    found, _ = only(machine, "GPUs", FAULT)
    assert found.text == "PCI has 1 NVIDIA GPUs, and CUDA sees none: cuInit: CUDA_ERROR_NO_DEVICE (100)"
    machine.variables["CUDA_VISIBLE_DEVICES"] = ""
    found, _ = only(machine, "GPUs", WARNING)
    assert found.text == "CUDA_VISIBLE_DEVICES='' hides 1 GPUs"
    machine.ran["facts"] = Ran(1, errors="libcuda.so.1 does not load: no such file\n")
    found, _ = only(machine, "GPUs", FAULT)
    assert found.text == "PCI has 1 NVIDIA GPUs, and CUDA sees none: libcuda.so.1 does not load: no such file"


def test_clocks(machine):
    machine.smi = "0, Enabled, Not Active, Not Active\n1, Disabled, Not Active, Not Active\n"
    assert "persistence mode is off for GPU 1," in only(machine, "clocks", WARNING)[0].text
    machine.smi = "0, Enabled, Not Active, Active\n1, Enabled, Not Active, Not Active\n"
    assert only(machine, "clocks", WARNING)[0].text == "GPU 0 is slowed down by heat or power"
    machine.ran["nvidia-smi"] = Ran(None, errors="nvidia-smi does not start: No such file or directory")
    assert only(machine, "clocks", WARNING)[0].text.startswith("nvidia-smi does not say: nvidia-smi does not start")
    machine.ran["nvidia-smi"] = Ran(9, output="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")
    assert "does not say: NVIDIA-SMI has failed because" in only(machine, "clocks", WARNING)[0].text


def test_clocks_of_an_older_driver(machine):
    def older(command, timeout_s):
        if command[0] == "nvidia-smi" and "clocks_event_reasons" in command[1]:
            return Ran(2, output='Field "clocks_event_reasons.hw_slowdown" is not a valid field to query.\n')
        return machine._run(command, timeout_s)

    machine.smi = "0, Enabled, Active, Not Active\n1, Enabled, Not Active, Not Active\n"
    env = dataclasses.replace(machine.environment, run=older)
    assert gpus.clocks(env).text == "GPU 0 is slowed down by heat or power"


def test_variables_that_slow_down(machine):
    machine.variables |= {"NCCL_P2P_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": "0"}
    assert only(machine, "variables", WARNING)[0].text == "NCCL_P2P_DISABLE=1 is set and makes calls much slower"


# ---- the host ----


def test_full_shared_memory(machine):
    machine.space = (GIB // 16, 3 << 20)
    found, _ = only(machine, "/dev/shm", FAULT)
    assert found.text == "3 of 64 MiB are free, and NCCL and data loaders need more" and "--shm-size=8g" in found.advice
    machine.space = (GIB // 2, GIB // 2)
    assert only(machine, "/dev/shm", WARNING)[0].text.startswith("512 of 512 MiB are free")
    machine.space = None
    assert only(machine, "/dev/shm", FAULT)[0].text == "it is not there, and NCCL needs it"


def test_no_memory_files(machine):
    machine.ran["memory.py"] = Ran(1, errors="PermissionError: [Errno 13] Permission denied: '/proc/7/fd/3'\n")
    found, serves = only(machine, "memory files", FAULT)
    assert "Permission denied: '/proc/7/fd/3'" in found.text and serves == HEALTHY | {"shm": "memory files"}


LIMITS = "Max locked memory  {}  {}  bytes\nMax open files  {}  {}  files"


def test_low_locked_memory_and_no_capability(machine):
    machine.write("proc/self/limits", LIMITS.format(65536, 65536, 65536, 65536))
    assert exit_code(examine(machine.environment)) == 0  # CAP_IPC_LOCK lifts the limit
    machine.write("proc/self/status", "CapEff:\t00000000a80425fb")  # docker's default
    (machine.root / ".dockerenv").unlink()
    found, serves = only(machine, "locked memory", FAULT)
    assert found.text == "a process may lock 64 KiB, and RDMA devices need memory without a limit"
    assert "--ulimit memlock=-1" in found.advice and serves == HEALTHY | {"nvshmem": "locked memory"}


def test_missing_ipc_capability(machine):
    machine.write("proc/self/status", "CapEff:\t00000000a80425fb")
    found, serves = only(machine, "container", WARNING)
    assert found.text == "it lacks the capability CAP_IPC_LOCK; RDMA works as long as locked memory has no limit" and serves == HEALTHY
    machine.write("proc/self/limits", LIMITS.format(65536, 65536, 65536, 65536))
    findings = examine(machine.environment)
    (found,) = [finding for finding in findings if finding.check == "container"]
    assert found.text == "it has RDMA devices and lacks the capability CAP_IPC_LOCK, and locked memory has a limit"
    assert found.advice.startswith("docker: --cap-add=IPC_LOCK") and backends(findings)["nvshmem"] == "locked memory, container"


def test_container_without_its_devices(machine):
    (machine.root / "dev/infiniband/uverbs0").unlink()
    assert only(machine, "container", FAULT)[0].text == "it sees RDMA devices in /sys, and /dev/infiniband has no uverbs"


def test_few_open_files(machine):
    machine.write("proc/self/limits", LIMITS.format("unlimited", "unlimited", 1024, 4096))
    assert only(machine, "open files", WARNING)[0].text == "a process may have 1024; jobs of many ranks need 4096"


# ---- the network ----


def test_port_down(machine):
    machine.write("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN")
    found, serves = only(machine, "RDMA ports", FAULT)
    assert found.text == "mlx5_1:1 is DOWN; 1 of 2 ports are ACTIVE" and "NVSHMEM_HCA_LIST" in found.advice
    assert serves == HEALTHY | {"nvshmem": "RDMA ports"}


def test_ibgda_options_not_set(machine):
    machine.write("proc/driver/nvidia/params", 'EnableStreamMemOPs: 0\nRegistryDwords: "PeerMappingOverride=1;"')
    found, serves = only(machine, "IBGDA", WARNING)
    assert found.text.startswith("the driver option EnableStreamMemOPs is not set") and serves == HEALTHY
    (machine.root / "efa").mkdir()
    for nic in ("mlx5_0", "mlx5_1"):
        machine.write(f"sys/class/infiniband/{nic}/device/numa_node", "0")
        (machine.root / f"sys/class/infiniband/{nic}/device/driver").symlink_to(machine.root / "efa")
    states = {finding.check: finding for finding in examine(machine.environment)}
    assert states["IBGDA"].text == "needs NVIDIA's NICs (mlx5_core), and these have efa"


def test_no_way_from_gpu_to_nic(machine):
    (machine.root / "sys/module/nvidia_peermem/refcnt").unlink()
    (machine.root / "sys/module/nvidia_peermem").rmdir()
    machine.write("proc/sys/kernel/osrelease", "6.8.0-45-generic")
    found, serves = only(machine, "GPU memory at NICs", FAULT)
    assert found.advice == "modprobe nvidia_peermem (as root, on the host)" and serves == HEALTHY | {"nvshmem": "GPU memory at NICs"}
    machine.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build")
    assert exit_code(examine(machine.environment)) == 0  # DMA-BUF
    machine.write("proc/sys/kernel/osrelease", "5.4.0-1")
    assert only(machine, "GPU memory at NICs", FAULT)


def test_no_gdrcopy(machine):
    (machine.root / "dev/gdrdrv").unlink()
    assert only(machine, "GDRCopy", WARNING)[0].text.startswith("/dev/gdrdrv is not there")
