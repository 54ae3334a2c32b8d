"""RDMA devices, and what the ways from GPUs to them need (docs/multi_node.md)."""

import re

from deepep_moe.doctor.environment import Environment
from deepep_moe.doctor.findings import Finding, absent, fault, ok, warning

_NO_NIC = "no RDMA device in /sys/class/infiniband; only GPUs of several hosts need one"
_LEAST_DMABUF_KERNEL = (5, 12)


def _ports(env: Environment) -> dict[str, tuple[str, str]]:
    """Return state and rate of each port, by "NIC:port"."""
    folders = sorted((env.root / "sys/class/infiniband").glob("*/ports/*"))
    names = {f"{folder.parents[1].name}:{folder.name}": str(folder.relative_to(env.root)) for folder in folders}
    return {name: (env.read(f"{folder}/state").rpartition(": ")[2], env.read(f"{folder}/rate")) for name, folder in names.items()}


def rdma(env: Environment) -> Finding:
    """All ports of RDMA devices are up."""
    ports = _ports(env)
    if not ports:
        return absent("RDMA ports", _NO_NIC)
    down = [f"{name} is {state or 'in an unknown state'}" for name, (state, _) in ports.items() if state != "ACTIVE"]
    if down:
        text = f"{', '.join(down)}; {len(ports) - len(down)} of {len(ports)} ports are ACTIVE"
        advice = "look at cable, switch and subnet manager (ibstat), or leave the port out by NVSHMEM_HCA_LIST and NCCL_IB_HCA"
        return fault("RDMA ports", text, advice)
    rates = [rate for _, rate in ports.values()]
    return ok("RDMA ports", ", ".join(f"{rates.count(rate)} x {rate or 'unknown rate'}" for rate in dict.fromkeys(rates)))


def gpu_memory(env: Environment) -> Finding:
    """NICs can reach the memory of GPUs: by nvidia_peermem, or by DMA-BUF with the open kernel modules."""
    if not _ports(env) or not env.cuda.gpus:
        return absent("GPU memory at NICs", _NO_NIC if not _ports(env) else "CUDA sees no GPU")
    if env.exists("sys/module/nvidia_peermem"):
        return ok("GPU memory at NICs", "nvidia_peermem is loaded")
    release = env.read("proc/sys/kernel/osrelease")
    kernel = tuple(map(int, re.findall(r"\d+", release)[:2]))
    if kernel >= _LEAST_DMABUF_KERNEL and "Open Kernel Module" in env.read("proc/driver/nvidia/version"):
        return ok("GPU memory at NICs", f"DMA-BUF (kernel {release}, open kernel modules of NVIDIA)")
    return fault(
        "GPU memory at NICs", "nvidia_peermem is not loaded, and there is no DMA-BUF", "modprobe nvidia_peermem (as root, on the host)"
    )


def ibgda(env: Environment) -> Finding:
    """The driver lets GPUs ring NICs (IBGDA)."""
    if not _ports(env) or not env.cuda.gpus:
        return absent("IBGDA", _NO_NIC if not _ports(env) else "CUDA sees no GPU")
    drivers = {link.resolve().name for link in (env.root / "sys/class/infiniband").glob("*/device/driver")}
    if drivers and "mlx5_core" not in drivers:
        return absent("IBGDA", f"needs NVIDIA's NICs (mlx5_core), and these have {', '.join(sorted(drivers))}")
    parameters = env.read("proc/driver/nvidia/params")
    options = {"EnableStreamMemOPs": r"^EnableStreamMemOPs: 1", "PeerMappingOverride": r"PeerMappingOverride=1"}
    missing = [name for name, pattern in options.items() if not re.search(pattern, parameters, flags=re.MULTILINE)]
    if missing:
        return warning(
            "IBGDA",
            f"the driver option {' and '.join(missing)} is not set, so the CPU helps with each put, which is slower",
            'options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;" in /etc/modprobe.d, then reboot',
        )
    return ok("IBGDA", "EnableStreamMemOPs and PeerMappingOverride are set")


def gdrcopy(env: Environment) -> Finding:
    """GDRCopy is there, which NVSHMEM's proxy threads use for signals."""
    if not _ports(env) or not env.cuda.gpus:
        return absent("GDRCopy", _NO_NIC if not _ports(env) else "CUDA sees no GPU")
    if not env.exists("dev/gdrdrv"):
        return warning(
            "GDRCopy",
            "/dev/gdrdrv is not there; where IBGDA does not serve, receivers flush, which is slower",
            "install GDRCopy's kernel module",
        )
    return ok("GDRCopy", "gdrdrv is loaded")
