"""Describe the hosts of a cluster: the doctor's lines, CPU, NICs and variables. Hosts are numbered, not named."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from ranks import Rank, block

import deepep_moe
from deepep_moe import config, topology
from deepep_moe.errors import EPError
from deepep_moe.tune.records import commit, cpu_name

VARIABLES = re.compile(r"^(NCCL|NVSHMEM|GLOO|UCX|FI|DEEPEP_MOE|CUDA_VISIBLE|CUDA_MPS|TORCH_NCCL)")
_DOCTOR_S = 300.0  # more than the doctor gives what it starts


def checks() -> dict[str, str]:
    """Return what the doctor says of this host: each check, and the backends that can serve here.

    Raises RuntimeError with its last line where it does not run.
    """
    command = [sys.executable, "-m", "deepep_moe", "doctor", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOCTOR_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(command[1:])} did not end within {_DOCTOR_S:g} s; run it by hand on this host") from error
    if done.returncode not in (0, 1):  # 1: there are faults
        why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"{' '.join(command[1:])} ended with code {done.returncode}: {why}; run it by hand on this host")
    page = json.loads(done.stdout)
    findings = {finding["check"]: finding for finding in page["findings"]}
    serving = ", ".join(name for name, reason in page["backends"].items() if not reason) or "none"
    return {"backends": serving} | {name: _words(finding) for name, finding in findings.items()}


def _words(finding: dict[str, str]) -> str:
    return finding["text"] if finding["state"] == "ok" else f"{finding['state']}: {finding['text']}"


def nics(root: Path = Path("/")) -> str:
    """Return name, driver, link layers and NUMA node of each RDMA device; the doctor has rates and states."""
    lines = []
    for nic in topology.read(root).nics:
        layers = "/".join(dict.fromkeys(port.link_layer for port in nic.ports)) or "no port"
        node = "unknown" if nic.pci.node is None else nic.pci.node
        lines.append(f"{nic.name}: {nic.driver or 'unknown driver'}, {layers}, NUMA node {node}")
    return "; ".join(lines) or "none"


def driver(root: Path = Path("/")) -> str:
    """Return what the driver of NVIDIA's GPUs says of its version."""
    try:
        return (root / "proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return "none"


def of_this_host() -> dict[str, str]:
    """Return the facts of this host, in the order of the report."""
    facts = {"commit": commit() or "none", "features": str(deepep_moe.features()), "Python": platform.python_version()}
    facts |= {"kernel": platform.release(), "NVIDIA driver": driver(), "CPU": cpu_name()}
    try:
        facts |= checks()
    except RuntimeError as error:  # what the other hosts say is still told
        facts["doctor"] = str(error)
    facts["NICs"] = nics()
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if VARIABLES.match(name)]
    return facts | {"environment": "; ".join(variables) or "none that matter"}


def report_lines(hosts: list[list[int]], facts: list[dict[str, str]]) -> list[str]:
    """Return the lines of a report on `hosts`, each a list of ranks. Facts that all hosts share are listed once."""
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
    """Print a block on rank 0. The first rank that a launcher started on a host looks at it. Collective."""
    everyone = r.gather((platform.node(), of_this_host() if config.local_rank() == 0 else {}))
    names = list(dict.fromkeys(name for name, _ in everyone))
    hosts = [[rank for rank, (name, _) in enumerate(everyone) if name == host] for host in names]
    lines = [_shape(r), *report_lines(hosts, [next(filter(None, (everyone[rank][1] for rank in ranks))) for ranks in hosts])]
    if r.rank == 0:
        print(block("deepep_moe: environment", lines), flush=True)
    return True
