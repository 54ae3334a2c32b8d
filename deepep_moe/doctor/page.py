"""Say whether this machine can run each backend and each integration, and what to do where not.

Exit code: 0 without a fault, 1 with one, 2 for wrong arguments.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from deepep_moe.command import Parser
from deepep_moe.doctor import machine, software
from deepep_moe.doctor.base import ABSENT, FAULT, OK, WARNING, Check, Environment, Finding, check

CHECKS: tuple[Check, ...] = (
    software.torch, software.library, software.nvshmem, software.gpu_kernels, *software.INTEGRATIONS,
    machine.gpus, machine.peer_access, machine.memory_files, machine.rdma,
)  # fmt: skip
_LIBRARY = ("PyTorch", "deepep_moe")
_NVLINK = (*_LIBRARY, "GPUs", "GPU kernels", "peer access", "test of nvlink")
BACKENDS = {  # a backend serves if none of these is a fault, and all but `_MAY_BE_ABSENT` were checked
    "shm": (*_LIBRARY, "memory files", "test of shm"),
    "nvlink": _NVLINK,
    "nvshmem": (*_NVLINK, "NVSHMEM", "RDMA"),
    "collective": _LIBRARY,
}
_MAY_BE_ABSENT = ("peer access", "test of shm", "test of nvlink")  # one GPU has no peer, and tests run when asked for
_MOST_GPUS = 8
_TEST_S = 100.0


def examine(env: Environment, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Make all checks at once and return their findings in this order."""
    with ThreadPoolExecutor(len(checks)) as pool:  # checks wait for programs that they run: one that hangs delays no other
        return list(pool.map(lambda check: check(env), checks))


@check("test of shm", "features")
def exchange_over_shm(env: Environment) -> tuple[str, ...]:
    """Two ranks on CPUs exchange rows over shared memory."""
    return _exchange(env, "shm", 2)


@check("test of nvlink", "features", "GPUs")
def exchange_over_nvlink(env: Environment) -> tuple[str, ...]:
    """A rank on each GPU of this host exchanges rows over NVLink."""
    if not env.facts["features"]["nvlink"]:
        return ABSENT, "no kernels for GPUs"
    return _exchange(env, "nvlink", min(len(env.gpus), _MOST_GPUS))


TESTS: tuple[Check, ...] = (exchange_over_shm, exchange_over_nvlink)


def _exchange(env: Environment, backend: str, num_ranks: int) -> tuple[str, ...]:
    program = f"from deepep_moe.doctor.selftest import main; main({backend!r}, {num_ranks})"
    ran = env.python("-c", program, timeout_s=_TEST_S)
    if ran.code != 0:
        return FAULT, f"{num_ranks} ranks failed: {ran.why()}", "mend what the lines above report; else file an issue with this page"
    return OK, f"{num_ranks} ranks, the reference's bits"


def backends(findings: list[Finding]) -> dict[str, str]:
    """Return for each backend "" where it can serve here, else the checks that it fails."""
    bad = {finding.check for finding in findings if finding.state == FAULT}
    bad |= {finding.check for finding in findings if finding.state == ABSENT and finding.check not in _MAY_BE_ABSENT}
    return {name: ", ".join(need for need in needs if need in bad) for name, needs in BACKENDS.items()}


def num_faults(findings: list[Finding]) -> int:
    return sum(finding.state == FAULT for finding in findings)


def as_text(findings: list[Finding]) -> str:
    """Return the page: a line for each check, with what to do below it, then which backend can serve."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        head = f"{finding.state:<8}  {finding.check:<{width}}  "
        lines.append(head + finding.text)
        if finding.advice:
            lines.append(f"{' ' * len(head)}-> {finding.advice}")
    lines.append("")
    for name, reason in backends(findings).items():
        lines.append(f"backend {name:<10}  {f'cannot serve here: {reason}' if reason else 'can serve here'}")
    warnings = sum(finding.state == WARNING for finding in findings)
    return "\n".join([*lines, "", f"faults: {num_faults(findings)}, warnings: {warnings}"])


def main(arguments: list[str]) -> int:
    parser = Parser("deepep-moe doctor", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--test", action="store_true", help="also exchange rows between ranks, and compare their bits (up to 4 minutes)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the page")
    options = parser.parse_args(arguments)
    env = Environment()
    findings = examine(env, CHECKS) + (examine(env, TESTS) if options.test else [])
    if options.json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"backends": backends(findings), "faults": num_faults(findings), "findings": listed}, indent=2))
    else:
        print(as_text(findings))
    return int(num_faults(findings) > 0)
