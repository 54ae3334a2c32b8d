"""What a cluster consists of, as far as it matters here: GPUs, NICs, drivers, versions, variables. Hosts are numbered, not named."""

import importlib.metadata
import os
import platform
import re
from pathlib import Path

import torch
from ranks import Rank, block

import deepep_moe
from deepep_moe.bench.common.records import commit, cpu_name
from deepep_moe.errors import EPError

VARIABLES = re.compile(r"^(NCCL|NVSHMEM|GLOO|UCX|FI|DEEPEP_MOE|CUDA_VISIBLE|CUDA_MPS|TORCH_NCCL)")
PACKAGES = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "megatron-core", "deepspeed")
_DRIVER_OPTIONS = ("EnableStreamMemOPs", "PeerMappingOverride")  # what NVSHMEM's IBGDA asks of the driver


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def nics(root: Path = Path("/")) -> list[str]:
    """Return the ports of RDMA NICs: name, driver, link layer, rate, state, NUMA node."""
    found = []
    for nic in sorted((root / "sys/class/infiniband").glob("*")):
        driver = (nic / "device/driver").resolve().name if (nic / "device/driver").exists() else "unknown driver"
        for port in sorted((nic / "ports").glob("*")):
            facts = [_read(port / name) for name in ("link_layer", "rate", "state")]
            numa = _read(nic / "device/numa_node")
            found.append(f"{nic.name} port {port.name}: {driver}, {', '.join(fact for fact in facts if fact)}, NUMA node {numa or '?'}")
    return found


def network_facts(root: Path = Path("/")) -> dict[str, str]:
    """Return what the paths from GPUs to NICs need, and whether it is there."""
    parameters = dict(re.findall(r"^(\w+): (.+)$", _read(root / "proc/driver/nvidia/params"), flags=re.MULTILINE))
    registry = parameters.get("RegistryDwords", "").strip('"')
    options = [f"{name}={parameters[name]}" for name in _DRIVER_OPTIONS if name in parameters]
    return {
        "GDRCopy": "gdrdrv is loaded" if (root / "dev/gdrdrv").exists() else "no /dev/gdrdrv",
        "nvidia_peermem": "loaded" if (root / "sys/module/nvidia_peermem").exists() else "not loaded",
        "driver options": ", ".join([*options, *([f"RegistryDwords={registry}"] if registry else [])]) or "none to be seen",
        "driver": next(iter(re.findall(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", _read(root / "proc/driver/nvidia/version"))), "none"),
    }


def versions() -> dict[str, str]:
    """Return what is installed."""
    found = {"deepep_moe": f"{deepep_moe.__version__}, commit {commit()}", "features": str(deepep_moe.features())}
    found |= {"python": platform.python_version(), "torch": torch.__version__, "CUDA of torch": str(torch.version.cuda)}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def of_this_host() -> dict[str, str]:
    """Return the facts of this host, in the order in which they are told."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    facts = {"kernel": platform.release(), "CPU": cpu_name(), "GPUs": "; ".join(gpus) or "none"}
    facts |= network_facts() | {"NICs": "; ".join(nics()) or "none in /sys/class/infiniband"} | versions()
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if VARIABLES.match(name)]
    return facts | {"variables": "; ".join(variables) or "none that matter"}


def told(hosts: list[list[int]], facts: list[dict[str, str]]) -> list[str]:
    """Return lines for hosts, given as their ranks. What is the same on all of them is told once."""
    lines = [f"host {index}: ranks {ranks[0]} to {ranks[-1]}" for index, ranks in enumerate(hosts)]
    lines += ["", "| | |", "|---|---|"]
    for name in dict.fromkeys(name for of_host in facts for name in of_host):
        values = [of_host.get(name, "not there") for of_host in facts]
        if len(set(values)) == 1:
            lines.append(f"| {name} | {values[0]} |")
        else:
            lines += [f"| {name}, host {index} | {value} |" for index, value in enumerate(values)]
    return lines


def _shape(r: Rank) -> str:
    """Say how ranks lie on nodes, or why there is no buffer: that is what this report is asked for. Collective."""
    try:
        buffer = r.new_buffer(1, 8, r.num_ranks, 1)
    except (EPError, ValueError) as error:
        return f"{r.num_ranks} ranks on {r.device.type}; a buffer cannot be made: {type(error).__name__}: {error}"
    shape = r.shape(buffer)
    buffer.destroy()
    return shape


def run(r: Rank) -> bool:
    """Print a block on rank 0. Collective."""
    everyone = r.gather((platform.node(), of_this_host()))
    names = list(dict.fromkeys(name for name, _ in everyone))
    hosts = [[rank for rank, (name, _) in enumerate(everyone) if name == host] for host in names]
    lines = [_shape(r), *told(hosts, [everyone[ranks[0]][1] for ranks in hosts])]
    if r.rank == 0:
        print(block("deepep_moe: environment", lines), flush=True)
    return True
