"""The doctor finds nothing wrong with a healthy machine, and each fault that is put into it."""

import json
import shutil

import pytest
from doctor_machine import Machine

from deepep_moe.doctor import software
from deepep_moe.doctor.base import ABSENT, FAULT, OK, WARNING, Ran
from deepep_moe.doctor.page import TESTS, as_text, backends, examine, num_faults

HEALTHY = {"shm": "", "nvlink": "", "nvshmem": "", "collective": ""}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    machine = Machine(tmp_path)
    machine.versions = {"megatron-core": "0.16.1", "deepspeed": "0.19.8"}
    monkeypatch.setattr(software, "version_of", lambda name: machine.versions.get(name))
    return machine


def only(machine, check, state):
    """The one finding that is neither ok nor absent: all others of a healthy machine stay as they were."""
    findings = examine(machine.environment)
    (fault,) = [finding for finding in findings if finding.state in (FAULT, WARNING)]
    assert (fault.check, fault.state) == (check, state), as_text(findings)
    assert num_faults(findings) == (state == FAULT) and fault.advice
    return fault, backends(findings)


def finding(machine, check):
    return {each.check: each for each in examine(machine.environment)}[check]


def test_healthy_machine(machine):
    findings = examine(machine.environment)
    states = {finding.check: finding.state for finding in findings}
    assert len(states) == len(findings)  # no name twice, as backends are judged by names
    assert [name for name, state in states.items() if state != OK] == ["transformer-engine", "apex"]
    assert backends(findings) == HEALTHY and num_faults(findings) == 0
    assert "2 x NVIDIA H100 80GB HBM3" in as_text(findings) and "8 x 400 Gb/s" in as_text(findings)


def change(path, value):
    """Return what sets a fact of a machine, such as "torch.version"."""

    def put(machine):
        name, _, key = path.partition(".")
        if key:
            getattr(machine, name)[key] = value
        else:
            setattr(machine, name, value)

    return put


def ran(word, *how):
    return lambda machine: machine.ran.update({word: Ran(*how)})


def file(path, text):
    return lambda machine: machine.write(path, text)


def all_of(*puts):
    return lambda machine: [put(machine) for put in puts]


without_capability = file("proc/self/status", "CapEff:\t00000000a80425fb")  # docker's default
locked_memory = file("proc/self/limits", "Max locked memory  65536  65536  bytes")
no_peermem = all_of(
    lambda machine: shutil.rmtree(machine.root / "sys/module/nvidia_peermem"), file("proc/sys/kernel/osrelease", "6.8.0-45")
)
open_modules = file("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build")
no_gpus = all_of(change("cuda.gpus", []), change("cuda.error", "The NVIDIA driver on your system is too old (found version 12040)."))
hidden_gpus = all_of(change("variables.CUDA_VISIBLE_DEVICES", ""), change("cuda.gpus", []))

# The change to the machine, the one finding, a part of its text or advice, and the backends that cannot serve.
FAULTS = [
    (change("nvshmem", "deepep_moe._nvshmem was built for NVSHMEM 3.4; install NVSHMEM 3.4"), "NVSHMEM", FAULT, "NVSHMEM 3.4", "nvshmem"),
    (change("features.autograd", "built for torch 2.11.0; run this"), "GPU kernels", FAULT, "is built for torch 2.11.0", "nvlink nvshmem"),
    (change("torch.version", "2.5.1+cu130"), "PyTorch", FAULT, "pip install 'torch>=2.6,<2.16'", "shm nvlink nvshmem collective"),
    (change("features.nvlink", False), "GPU kernels", FAULT, "install the CUDA toolkit 12 or newer", "nvlink nvshmem"),
    (change("versions.deepspeed", "0.14.2"), "deepspeed", FAULT, "pip install 'deepspeed>=0.14.5,<0.20'", ""),
    (ran("import megatron.core", 1, "", "Traceback\nImportError: no apex\n"), "megatron-core", FAULT, "ImportError: no apex", ""),
    (
        all_of(change("versions.apex", "0.1"), ran("amp_C", 1, "", "ModuleNotFoundError: No module named 'amp_C'\n")),
        "apex", WARNING, "No module named 'amp_C'", "",
    ),
    (change("cuda.reach", []), "peer access", FAULT, "GPUs 0-1, 1-0 of 2 pairs cannot map", "nvlink nvshmem"),
    (change("cuda.atomics", []), "peer access", WARNING, "reach each other without NVLink", ""),
    (change("cuda.gpus", [{"name": "V100", "capability": [7, 0]}]), "GPUs", FAULT, "0 (V100) is older", "nvlink nvshmem"),
    (no_gpus, "GPUs", FAULT, "8 NVIDIA GPUs, and PyTorch sees none: The NVIDIA driver", "nvlink nvshmem"),
    (ran("/fd/", 1, "", "PermissionError: Permission denied: '/proc/7/fd/3'\n"), "memory files", FAULT, "Permission denied", "shm"),
    (all_of(locked_memory, without_capability), "RDMA", FAULT, "a process may lock 64 KiB", "nvshmem"),
    (lambda machine: (machine.root / "dev/infiniband/uverbs0").unlink(), "RDMA", FAULT, "no uverbs", "nvshmem"),
    (
        file("sys/class/infiniband/rocep1/ports/1/state", "1: DOWN"),
        "RDMA", FAULT, "rocep1:1 is DOWN; 7 of 8 ports are ACTIVE", "nvshmem",
    ),
    (no_peermem, "RDMA", FAULT, "modprobe nvidia_peermem", "nvshmem"),
    (all_of(no_peermem, open_modules, file("proc/sys/kernel/osrelease", "5.4.0-1")), "RDMA", FAULT, "modprobe nvidia_peermem", "nvshmem"),
]  # fmt: skip


@pytest.mark.parametrize(
    "put", (locked_memory, all_of(no_peermem, open_modules), change("versions.apex", "0.1")),
    ids=("CAP_IPC_LOCK lifts the limit", "DMA-BUF", "a fused kernel that imports"),
)  # fmt: skip
def test_no_fault(put, machine):
    put(machine)
    findings = examine(machine.environment)
    assert num_faults(findings) == 0 and backends(findings) == HEALTHY
    page = as_text(findings)
    assert "can serve here" in page and page.endswith("faults: 0, warnings: 0")
    assert all(each.state in (OK, ABSENT) for each in findings), as_text(findings)


@pytest.mark.parametrize(("put", "check", "state", "words", "failing"), FAULTS)
def test_fault(put, check, state, words, failing, machine):
    put(machine)
    fault, serves = only(machine, check, state)
    assert words in f"{fault.text} {fault.advice}"
    assert {name for name, reason in serves.items() if reason} == set(failing.split())
    assert all(check in reason.split(", ") for reason in serves.values() if reason)


def test_two_faults_of_one_check(machine):
    all_of(locked_memory, without_capability, no_peermem)(machine)
    fault, _ = only(machine, "RDMA", FAULT)
    assert "may lock 64 KiB" in fault.text and "nvidia_peermem is not loaded" in fault.text
    assert "ulimit -l unlimited" in fault.advice and "modprobe nvidia_peermem" in fault.advice


def test_hidden_gpus(machine):
    all_of(hidden_gpus, change("cuda.error", "No CUDA GPUs are available"))(machine)
    assert only(machine, "GPUs", WARNING)[0].text == "CUDA_VISIBLE_DEVICES='' hides 8 GPUs"


def test_pytorch_that_does_not_import(machine):
    machine.ran["facts.py"] = Ran(1, errors="OSError: libtorch_cpu.so: cannot open shared object file\n")
    findings = examine(machine.environment)
    assert [finding.check for finding in findings if finding.state == FAULT] == ["PyTorch"]
    assert backends(findings)["shm"] == "PyTorch, deepep_moe"
    machine.ran["facts.py"] = Ran(1, json.dumps({"torch": machine.torch, "cuda": machine.cuda}), "ImportError: undefined symbol\n")
    assert finding(machine, "deepep_moe").state == FAULT and finding(machine, "PyTorch").state == OK
    facts = {"torch": machine.torch, "cuda": machine.cuda, "features": machine.features}
    machine.ran["facts.py"] = Ran(-11, json.dumps(facts))
    assert only(machine, "NVSHMEM", FAULT)[0].text.startswith("loading it ended the process")


@pytest.mark.parametrize("name", ["LOG", "TIMEOUT_S", "NUM_THREADS", "PROFILE"])
def test_settings_that_buffers_refuse(machine, monkeypatch, name):
    monkeypatch.setenv(f"DEEPEP_MOE_{name}", "soon")
    fault, served = only(machine, "deepep_moe", FAULT)
    assert f"DEEPEP_MOE_{name}='soon'" in fault.text and served["shm"] == "deepep_moe"


@pytest.mark.parametrize(
    ("code", "errors", "words"),
    [(None, "no end within 120 s", "no end within 120 s"), (-11, "", "ended with code -11")],
    ids=("hang", "crash"),
)
def test_cuda_that_ends_or_hangs_the_process(code, errors, words, machine):
    machine.ran["facts.py"] = Ran(code, json.dumps({"torch": machine.torch}) + "\n", errors)
    fault, serves = only(machine, "GPUs", FAULT)
    assert words in fault.text and "nvidia-smi" in fault.advice and "{" not in fault.text
    assert serves["nvlink"] and serves["nvshmem"]
    assert finding(machine, "deepep_moe").text.startswith("not looked at")


@pytest.mark.parametrize(
    ("ran", "words"),
    [
        (Ran(1, errors="results differ from deepep_moe.reference: torch.float32 rank on rank 1\n"), "results differ from"),
        (Ran(1, errors="RankFailedError: rank 1 failed"), "2 ranks failed: RankFailedError: rank 1 failed"),
    ],
)
def test_exchange_that_goes_wrong(machine, ran, words):
    machine.ran["deepep_moe.doctor.selftest"] = ran
    findings = examine(machine.environment) + examine(machine.environment, TESTS)
    assert words in findings[-1].text and findings[-1].state == FAULT
    assert backends(findings)["nvlink"] == "test of nvlink" and backends(findings)["shm"] == "test of shm"
    machine.cuda["gpus"] = []
    assert examine(machine.environment, TESTS)[-1].state == ABSENT
