"""The host: shared memory, limits, what a container may do."""

import re

from deepep_moe.doctor.environment import Environment
from deepep_moe.doctor.findings import Finding, absent, fault, ok, warning

_MIB = 1 << 20
_LEAST_FREE, _ENOUGH_FREE = 64 * _MIB, 1024 * _MIB  # of /dev/shm: NCCL takes 10 MiB or more for each pair of ranks
_LEAST_FILES = 4096
_IPC_LOCK = 14  # of linux/capability.h
_IN_CONTAINER = ("run/.containerenv", ".dockerenv")


def shared_memory(env: Environment) -> Finding:
    """/dev/shm has room. NCCL and data loaders use it, this library does not."""
    space = env.space(env.root / "dev/shm")
    if space is None:
        return fault("/dev/shm", "it is not there, and NCCL needs it", "mount it: mount -t tmpfs -o size=8g shm /dev/shm")
    total, free = (size / _MIB for size in space)
    text = f"{free:.0f} of {total:.0f} MiB are free"
    if space[1] < _LEAST_FREE:
        return fault(
            "/dev/shm", f"{text}, and NCCL and data loaders need more", "delete what dead processes left there, or docker: --shm-size=8g"
        )
    if space[1] < _ENOUGH_FREE:
        return warning("/dev/shm", f"{text}; NCCL on 8 GPUs and data loaders may need more", "docker: --shm-size=8g")
    return ok("/dev/shm", text)


def memory_files(env: Environment) -> Finding:
    """A second process opens an anonymous memory file of the first: this is how `shm` shares memory."""
    ran = env.child("memory", timeout_s=20)
    if ran.code != 0:
        return fault(
            "memory files",
            f"a second process cannot open a memory file of the first: {ran.why()}",
            "mount /proc without hidepid, run all ranks as one user in one process namespace, and allow memfd_create in seccomp",
        )
    return ok("memory files", "a second process read and wrote one of the first (memfd, /proc)")


def _limit(env: Environment, name: str) -> tuple[int | None, str]:
    """Return the soft limit, None for none, and its text."""
    found = re.search(rf"^{name}\s+(\S+)\s+(\S+)", env.read("proc/self/limits"), flags=re.MULTILINE)
    if found is None:
        return None, "unknown"
    return (None, found[1]) if found[1] == "unlimited" else (int(found[1]), found[1])


def open_files(env: Environment) -> Finding:
    limit, text = _limit(env, "Max open files")
    if text == "unknown":
        return absent("open files", "/proc/self/limits does not say")
    if limit is not None and limit < _LEAST_FILES:
        return warning(
            "open files",
            f"a process may have {limit}; jobs of many ranks need {_LEAST_FILES}",
            "ulimit -n 65536 (docker: --ulimit nofile=65536)",
        )
    return ok("open files", f"a process may have {text}")


def _has_nics(env: Environment) -> bool:
    return any((env.root / "sys/class/infiniband").glob("*"))


def locked_memory(env: Environment) -> Finding:
    """A process may pin what RDMA devices read and write."""
    limit, text = _limit(env, "Max locked memory")
    if text == "unknown":
        return absent("locked memory", "/proc/self/limits does not say")
    if limit is None:
        return ok("locked memory", "without a limit")
    if not _has_nics(env):
        return ok("locked memory", f"{limit // 1024} KiB; there is no RDMA device that needs more")
    if _may_lock(env):
        return ok("locked memory", f"{limit // 1024} KiB, which CAP_IPC_LOCK lifts")
    return fault(
        "locked memory",
        f"a process may lock {limit // 1024} KiB, and RDMA devices need memory without a limit",
        "ulimit -l unlimited (docker: --ulimit memlock=-1; Slurm: LimitMEMLOCK=infinity for slurmd)",
    )


def _capabilities(env: Environment) -> int | None:
    found = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", env.read("proc/self/status"), flags=re.MULTILINE)
    return int(found[1], 16) if found else None


def _may_lock(env: Environment) -> bool:
    return bool((_capabilities(env) or 0) >> _IPC_LOCK & 1)


def container(env: Environment) -> Finding:
    """A container has what RDMA needs: CAP_IPC_LOCK and the devices."""
    if not any(map(env.exists, _IN_CONTAINER)):
        return absent("container", "no sign of one")
    if not _has_nics(env):
        return ok("container", "there is no RDMA device, so it needs no capability")
    if _capabilities(env) is not None and not _may_lock(env):
        advice = "docker: --cap-add=IPC_LOCK; Kubernetes: securityContext.capabilities.add: [IPC_LOCK]"
        if _limit(env, "Max locked memory")[1] == "unlimited":
            return warning("container", "it lacks the capability CAP_IPC_LOCK; RDMA works as long as locked memory has no limit", advice)
        return fault("container", "it has RDMA devices and lacks the capability CAP_IPC_LOCK, and locked memory has a limit", advice)
    if not any((env.root / "dev/infiniband").glob("uverbs*")):
        return fault("container", "it sees RDMA devices in /sys, and /dev/infiniband has no uverbs", "docker: --device=/dev/infiniband")
    return ok("container", "has CAP_IPC_LOCK and /dev/infiniband")
