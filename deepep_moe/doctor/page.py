"""All checks in their order, and the page and the JSON that they make."""

import dataclasses
import textwrap
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deepep_moe.doctor import build, exchange_test, gpus, host, network, profiles, versions
from deepep_moe.doctor.environment import Environment
from deepep_moe.doctor.findings import FAULT, OK, WARNING, Finding, fault

Check = Callable[[Environment], Finding | list[Finding]]
CHECKS: tuple[Check, ...] = (
    versions.python, versions.torch, build.library, versions.driver, versions.nvidia_packages, versions.nvshmem, build.gpu_kernels,
    build.torch_module, versions.integrations, versions.fused_kernels,
    gpus.gpus, gpus.peer_access, gpus.ipc, gpus.mps, gpus.clocks, gpus.variables, profiles.profiles,
    host.shared_memory, host.memory_files, host.open_files, host.locked_memory, host.container,
    network.rdma, network.gpu_memory, network.ibgda, network.gdrcopy,
)  # fmt: skip
TESTS: tuple[Check, ...] = (exchange_test.shm, exchange_test.nvlink)
# A backend serves where all of these are ok or have a warning.
BACKENDS = {
    "shm": ("PyTorch", "deepep_moe", "memory files"),
    "nvlink": ("PyTorch", "deepep_moe", "GPUs", "GPU kernels", "CUDA driver", "CUDA IPC"),
    "nvshmem": (
        "PyTorch",
        "deepep_moe",
        "GPUs",
        "GPU kernels",
        "CUDA driver",
        "CUDA IPC",
        "NVSHMEM",
        "RDMA ports",
        "locked memory",
        "GPU memory at NICs",
    ),
    "collective": ("PyTorch", "deepep_moe"),
}
_PARTS = {"nvlink": ("peer access",), "nvshmem": ("peer access", "container")}  # where they are a fault, it does not serve; absent is fine
_WIDTH = 110


def examine(env: Environment, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """Make all checks at once and return their findings in this order. A check that fails is a fault of its own, so the others count."""
    checks = tuple(checks)
    with ThreadPoolExecutor(len(checks)) as pool:  # what takes time is programs that they run: one that hangs holds up no other
        return [finding for findings in pool.map(lambda check: _make(env, check), checks) for finding in findings]


def _make(env: Environment, check: Check) -> list[Finding]:
    try:
        found = check(env)
    except Exception as error:
        name = f"{check.__module__.rpartition('.')[2]}.{check.__name__}"
        found = fault(name, f"the check itself failed: {type(error).__name__}: {error}", "file an issue with this page")
    return found if isinstance(found, list) else [found]


def backends(findings: list[Finding]) -> dict[str, str]:
    """Return for each backend "" where it can serve here, else the checks that it fails."""
    state = {finding.check: finding.state for finding in findings}
    reasons = {}
    for name, needs in BACKENDS.items():
        failed = [need for need in needs if state.get(need) not in (OK, WARNING)]
        failed += [part for part in _PARTS.get(name, ()) if state.get(part) == FAULT]
        reasons[name] = ", ".join(failed)
    return reasons


def exit_code(findings: list[Finding]) -> int:
    """Return 1 where there is a fault, else 0."""
    return int(any(finding.state == FAULT for finding in findings))


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """Return the page for `--json`: `backends` by name ("" or what fails), `findings` in order, and `faults`, their number."""
    faults = sum(finding.state == FAULT for finding in findings)
    return {"backends": backends(findings), "faults": faults, "findings": [dataclasses.asdict(finding) for finding in findings]}


def as_text(findings: list[Finding]) -> str:
    """Return the page: a line for each check, with what to do below it, then which backend can serve."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        head = f"{finding.state:<8}  {finding.check:<{width}}  "
        lines += _folded(head, finding.text)
        if finding.advice:
            lines += _folded(" " * len(head), f"-> {finding.advice}")
    lines.append("")
    for name, reason in backends(findings).items():
        lines += _folded(f"backend {name:<10}  ", f"cannot serve here: {reason}" if reason else "can serve here")
    count = {state: sum(finding.state == state for finding in findings) for state in (FAULT, WARNING)}
    return "\n".join([*lines, "", f"faults: {count[FAULT]}, warnings: {count[WARNING]}"])


def _folded(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, len(head) + _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False, break_on_hyphens=False
    )
