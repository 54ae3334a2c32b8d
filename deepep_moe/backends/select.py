"""Which backend serves a group: by rule, the same on every rank, said once."""

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from deepep_moe import _C, config
from deepep_moe.backends.base import Backend, Settings
from deepep_moe.backends.checks import NOT_BUILT
from deepep_moe.backends.collective import CollectiveBackend
from deepep_moe.backends.low_latency import LowLatencyBackend, NvlinkLowLatencyBackend, ShmLowLatencyBackend
from deepep_moe.backends.messages import gather_objects
from deepep_moe.backends.nvlink import NvlinkBackend
from deepep_moe.backends.shm import ShmBackend
from deepep_moe.errors import BackendUnavailableError, EPMismatchError, EPPeerError

logger = logging.getLogger("deepep_moe")
_Connecting = TypeVar("_Connecting", ShmBackend, NvlinkBackend, ShmLowLatencyBackend, NvlinkLowLatencyBackend)
BACKENDS = ("auto", "shm", "nvlink", "nvshmem", "collective")
_WHY_NOT_BUILT = "it is not built in this version; use backend='auto', or 'collective' for GPU tensors over NCCL"


@dataclass
class Introduction:
    """What a rank tells the others before a buffer is made."""

    error: str | None  # its caller's mistake
    backend: str
    settings: dict[str, Any]
    host: str
    process_id: int
    num_threads: int
    group_backend: str
    has_gpu: bool


def host_id() -> str:
    """The same for processes that can share memory: one kernel, one namespace of process ids."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"


def join(group: "dist.ProcessGroup | None", what: str) -> "tuple[dist.ProcessGroup | None, int, int]":
    """The group to make a `what` for (None: this process alone), its size and this process's rank in it. Raises TypeError, ValueError."""
    if group is not None and group != dist.GroupMember.NON_GROUP_MEMBER and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is {group!r}; it must be a torch.distributed.ProcessGroup or None")
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None and config.world_size() > 1:
        raise ValueError(
            f"this process is one of WORLD_SIZE={config.world_size()}, but torch.distributed is not initialized; "
            f"call torch.distributed.init_process_group before creating a {what}"
        )
    num_ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    if rank < 0:
        raise ValueError(f"this process is not a member of the group; create the {what} on the group's ranks only")
    return group, num_ranks, rank


def introduce(
    settings: Settings, backend: str, num_threads: int, error: Exception | None, group: "dist.ProcessGroup | None"
) -> list[Introduction]:
    """Exchange introductions. Raises the caller's own error, EPPeerError for a peer's, EPMismatchError where settings differ."""
    common = {name: value for name, value in asdict(settings).items() if name not in ("rank", "timeout_s")}
    message = None if error is None else f"{type(error).__name__}: {error}"
    group_backend = "none" if group is None else str(dist.get_backend_config(group))
    own = Introduction(message, backend, common, host_id(), os.getpid(), num_threads, group_backend, torch.cuda.is_available())
    peers: list[Introduction] = gather_objects(own, group, settings.num_ranks, "construction of a Buffer", settings.timeout_s)
    if error is not None:
        raise error
    for rank, peer in enumerate(peers):
        if peer.error is not None:
            raise EPPeerError(f"rank {rank} could not create its Buffer: {peer.error}", rank=rank)
    for name in ("backend", *common):
        values = [peer.backend if name == "backend" else peer.settings[name] for peer in peers]
        if len(set(values)) > 1:
            told = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
            raise EPMismatchError(f"ranks disagree on {name} ({told}); create the Buffer with the same value on every rank")
    return peers


def why_not_shm(peers: list[Introduction]) -> str | None:
    """The reason the shm backend cannot serve these ranks, or None."""
    if len(peers) > _C.MAX_RANKS:
        return f"it serves at most {_C.MAX_RANKS} ranks, this group has {len(peers)}"
    hosts = {peer.host for peer in peers}
    if len(hosts) > 1:
        return f"its ranks must share one host and process namespace, this group spans {len(hosts)}: {sorted(hosts)}"
    if any(peer.group_backend != "none" and "cpu:" not in peer.group_backend for peer in peers):
        return f"it moves CPU tensors, and the group is for GPU tensors only ({peers[0].group_backend})"
    return None


def why_not_nvlink(peers: list[Introduction]) -> str | None:
    """The reason the nvlink backend cannot serve these ranks, or None."""
    if not hasattr(_C, "NvlinkExchange"):
        return "it was not compiled, as the build found no nvcc; install the CUDA toolkit and build again"
    if len(peers) > _C.MAX_GPU_RANKS:
        return f"it serves at most {_C.MAX_GPU_RANKS} ranks, this group has {len(peers)}"
    hosts = {peer.host for peer in peers}
    if len(hosts) > 1:
        return f"its ranks must share one host and process namespace, this group spans {len(hosts)}: {sorted(hosts)}"
    without = [rank for rank, peer in enumerate(peers) if not peer.has_gpu]
    return f"ranks {without} see no CUDA device" if without else None


def _make_connected(make: "Callable[[], _Connecting]", settings: Settings, group: "dist.ProcessGroup | None") -> "_Connecting | str":
    """The backend, with every rank's memory mapped, or the reason why some rank cannot reach another. The same on every rank."""
    failure: str | None = None
    backend: _Connecting | None = None
    address: Any = None
    try:
        backend = make()
        address = backend.address()
    except (OSError, RuntimeError) as error:
        failure = str(error)
    gathered = gather_objects((failure, address), group, settings.num_ranks, "sharing of workspaces", settings.timeout_s)
    if backend is not None and all(reason is None for reason, _ in gathered):
        try:
            backend.connect([address for _, address in gathered])
        except (OSError, RuntimeError, ValueError) as error:
            failure = str(error)
    reasons = gather_objects(failure, group, settings.num_ranks, "mapping of workspaces", settings.timeout_s)
    for rank, reason in enumerate(reasons):
        if reason is not None:
            return f"on rank {rank}: {reason}"
    assert backend is not None
    backend.seal()
    return backend


def make_backend(name: str, settings: Settings, peers: list[Introduction], group: "dist.ProcessGroup | None") -> Backend:
    """The backend called `name`, or under "auto" the first that can serve. Collective.

    Raises BackendUnavailableError with the reason and the fix.
    """
    if name in NOT_BUILT:
        raise BackendUnavailableError(f"backend {name!r} cannot serve: {_WHY_NOT_BUILT}")
    on_gpus = all(peer.has_gpu and "nccl" in peer.group_backend for peer in peers)
    candidate = name if name != "auto" else "nvlink" if on_gpus else "shm"
    if candidate in ("shm", "nvlink"):
        made: Backend | str
        if candidate == "shm":
            num_channels = min(peer.num_threads for peer in peers)
            made = why_not_shm(peers) or _make_connected(lambda: ShmBackend(settings, num_channels), settings, group)
        else:
            made = why_not_nvlink(peers) or _make_connected(lambda: NvlinkBackend(settings), settings, group)
        if not isinstance(made, str):
            return made
        if name != "auto":
            raise BackendUnavailableError(f"backend {name!r} cannot serve: {made}; backend='auto' takes one that can")
        if settings.rank == 0:
            level = logging.WARNING if on_gpus else logging.INFO  # there it costs much of the speed
            logger.log(level, "Buffer: backend %r cannot serve: %s; taking 'collective'", candidate, made)
    return CollectiveBackend(settings, group, [(peer.host, peer.process_id) for peer in peers])


def make_low_latency_backend(
    name: str, settings: Settings, peers: list[Introduction], group: "dist.ProcessGroup | None", mask_stalled: bool
) -> LowLatencyBackend:
    """The backend called `name`, or under "auto" the one for the group's tensors. Collective.

    Raises BackendUnavailableError with the reason and the fix.
    """
    on_gpus = all(peer.has_gpu and "nccl" in peer.group_backend for peer in peers)
    made: LowLatencyBackend | str
    if name == "nvlink" or (name == "auto" and on_gpus):
        made = why_not_nvlink(peers) or _make_connected(lambda: NvlinkLowLatencyBackend(settings, mask_stalled), settings, group)
    else:
        made = (
            _why_too_many(peers)
            or why_not_shm(peers)
            or _make_connected(lambda: ShmLowLatencyBackend(settings, mask_stalled), settings, group)
        )
    if isinstance(made, str):
        advice = "use Buffer" if name == "auto" or _why_too_many(peers) else "use backend='auto', or Buffer"
        raise BackendUnavailableError(f"no low-latency backend can serve, backend={name!r}: {made}; {advice}, which has more backends")
    return made


def _why_too_many(peers: list[Introduction]) -> str | None:
    if len(peers) > _C.LOW_LATENCY_MAX_RANKS:
        return f"low-latency buffers serve at most {_C.LOW_LATENCY_MAX_RANKS} ranks, this group has {len(peers)}"
    return None
