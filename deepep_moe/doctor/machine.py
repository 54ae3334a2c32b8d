"""The machine: its GPUs and who reaches whom; what a container may do; RDMA devices and the ways from GPUs to them
(docs/multi_node.md)."""

import itertools
import mmap
import os
import re

from deepep_moe.doctor.base import ABSENT, FAULT, OK, WARNING, Environment, check

_LEAST_CAPABILITY = [8, 0]  # docs/install.md
_IPC_LOCK = 14  # of linux/capability.h
_LEAST_DMABUF_KERNEL = (5, 12)
_REVERSE = "import mmap, os, sys\nwith mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0) as memory: memory[:5] = memory[:5][::-1]"


@check("GPUs", "torch")
def gpus(env: Environment) -> tuple[str, ...]:
    """PyTorch sees GPUs, and all are new enough. Its message says it where the driver is missing or too old."""
    if "cuda" not in env.facts:
        return FAULT, f"looking at them ended or held up the process: {env.facts['error']}", "see whether nvidia-smi works"
    cards, visible, error = len(env.machine.gpus), env.variables.get("CUDA_VISIBLE_DEVICES"), env.facts["cuda"]["error"]
    if not env.gpus and not cards:
        return ABSENT, error or "there is none"
    if not env.gpus and visible is not None and "No CUDA GPUs" in error:
        return WARNING, f"CUDA_VISIBLE_DEVICES={visible!r} hides {cards} GPUs", "unset it, or list the GPUs to use"
    if not env.gpus:
        advice = "install a PyTorch for CUDA; if nvidia-smi does not work, install or update the NVIDIA driver; in containers, --gpus all"
        return FAULT, f"the machine has {cards} NVIDIA GPUs, and PyTorch sees none: {error}", advice
    if old := [f"{index} ({gpu['name']})" for index, gpu in enumerate(env.gpus) if gpu["capability"] < _LEAST_CAPABILITY]:
        return FAULT, f"GPU {', '.join(old)} is older than compute capability 8.0", "hide it by CUDA_VISIBLE_DEVICES"
    names = [gpu["name"] for gpu in env.gpus]
    return OK, ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


@check("peer access", "GPUs")
def peer_access(env: Environment) -> tuple[str, ...]:
    """Every GPU can map the memory of every other one, over NVLink."""
    pairs = list(itertools.permutations(range(len(env.gpus)), 2))
    if not pairs:
        return ABSENT, "one GPU; it takes two"
    if cut := [f"{first}-{second}" for first, second in pairs if [first, second] not in env.facts["cuda"]["reach"]]:
        advice = "choose GPUs that can by CUDA_VISIBLE_DEVICES; in virtual machines switch off ACS and the IOMMU"
        return FAULT, f"GPUs {', '.join(cut[:4])} of {len(cut)} pairs cannot map each other's memory, so 'nvlink' cannot serve them", advice
    if slow := [f"{first}-{second}" for first, second in pairs if [first, second] not in env.facts["cuda"]["atomics"]]:
        advice = "LowLatencyBuffer refuses them and Buffer is slow; choose GPUs with NVLink between them"
        return WARNING, f"GPUs {', '.join(slow[:4])} of {len(slow)} pairs reach each other without NVLink (no atomics)", advice
    return OK, f"all {len(pairs)} pairs, over NVLink"


@check("memory files")
def memory_files(env: Environment) -> tuple[str, ...]:
    """A second process opens an anonymous memory file of this one through /proc: this is how `shm` shares memory."""
    fd = os.memfd_create("deepep_moe_doctor")
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as memory:
            memory[:5] = b"hello"
            ran = env.python("-c", _REVERSE, f"/proc/{os.getpid()}/fd/{fd}")
            is_there = memory[:5] == b"olleh"
    finally:
        os.close(fd)
    if ran.code != 0 or not is_there:
        advice = "mount /proc without hidepid, run all ranks as one user in one process namespace, and allow memfd_create in seccomp"
        return FAULT, f"a second process cannot use a memory file of the first: {ran.why()}", advice
    return OK, "a second process read and wrote one of the first (memfd, /proc)"


@check("RDMA", "NICs")
def rdma(env: Environment) -> tuple[str, ...]:
    """Ports are up, this process may open the devices and pin memory for them, and they reach the memory of GPUs: by nvidia_peermem, or by
    DMA-BUF with the open kernel modules."""
    ports = {f"{nic.name}:{port.number}": port for nic in env.machine.nics for port in nic.ports}
    limit = re.search(r"^Max locked memory\s+(\d+)", env.read("proc/self/limits"), flags=re.MULTILINE)
    capabilities = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", env.read("proc/self/status"), flags=re.MULTILINE)
    may_lock = bool(capabilities and int(capabilities[1], 16) >> _IPC_LOCK & 1)
    is_new = tuple(map(int, re.findall(r"\d+", env.read("proc/sys/kernel/osrelease"))[:2])) >= _LEAST_DMABUF_KERNEL
    has_dmabuf = is_new and "Open Kernel Module" in env.read("proc/driver/nvidia/version")
    faults: dict[str, str] = {}  # with what to do
    if down := [f"{name} is {port.state or 'in an unknown state'}" for name, port in ports.items() if port.state != "ACTIVE"]:
        advice = "look at cable, switch and subnet manager (ibstat), or leave the port out by NVSHMEM_HCA_LIST and NCCL_IB_HCA"
        faults[f"{', '.join(down)}; {len(ports) - len(down)} of {len(ports)} ports are ACTIVE"] = advice
    if not any((env.root / "dev/infiniband").glob("uverbs*")):
        faults["/sys has RDMA devices, and /dev/infiniband has no uverbs"] = "docker: --device=/dev/infiniband"
    if limit and not may_lock:
        advice = "ulimit -l unlimited (docker: --ulimit memlock=-1 --cap-add=IPC_LOCK; Slurm: LimitMEMLOCK=infinity for slurmd)"
        faults[f"a process may lock {int(limit[1]) // 1024} KiB, and RDMA devices need memory without a limit"] = advice
    if env.gpus and not has_dmabuf and not (env.root / "sys/module/nvidia_peermem").exists():
        faults["nvidia_peermem is not loaded, and there is no DMA-BUF"] = "modprobe nvidia_peermem (as root, on the host)"
    if faults:
        return FAULT, "; ".join(faults), "; ".join(faults.values())
    rates = [port.rate_gbps for port in ports.values()]
    return OK, ", ".join(f"{rates.count(rate)} x {rate:g} Gb/s" for rate in dict.fromkeys(rates))
