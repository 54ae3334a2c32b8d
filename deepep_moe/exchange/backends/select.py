"""Choose the backend of a buffer by rule, the same on every rank, and log it once."""

import logging

import torch.distributed as dist

from deepep_moe.errors import BackendUnavailableError
from deepep_moe.exchange.backends.base import Backend
from deepep_moe.exchange.backends.collective import CollectiveBackend
from deepep_moe.exchange.backends.nvlink import NvlinkBackend
from deepep_moe.exchange.backends.shm import ShmBackend
from deepep_moe.group.reach import are_on_gpus, check_torch, why_not_nvlink, why_not_nvshmem, why_not_one_node, why_not_shm
from deepep_moe.group.rendezvous import Introduction, connect
from deepep_moe.group.settings import Settings

logger = logging.getLogger("deepep_moe")
BACKENDS = ("auto", "shm", "nvlink", "nvshmem", "collective")


def _make(name: str, settings: Settings, peers: list[Introduction], group: "dist.ProcessGroup | None") -> Backend | str:
    """Return one of the backends of one kind of machine, or the reason why it cannot serve."""
    if name == "shm":
        num_channels = min(peer.num_threads for peer in peers)
        return why_not_shm(peers) or connect(lambda: ShmBackend(settings, num_channels), settings, group)
    if name == "nvshmem":
        from deepep_moe.exchange.backends.nvshmem import NvshmemBackend  # it loads what only several nodes need
        from deepep_moe.group import nvshmem_rail

        if (reason := why_not_nvshmem(peers, settings)) is None:
            check_torch(peers)
        return reason or nvshmem_rail.make(lambda: NvshmemBackend(settings), settings, peers, group)
    if (reason := why_not_one_node(settings) or why_not_nvlink(peers)) is None:
        check_torch(peers)
    return reason or connect(lambda: NvlinkBackend(settings), settings, group)


def make_backend(
    name: str, settings: Settings, peers: list[Introduction], group: "dist.ProcessGroup | None", has_gpu_tensors: bool = False
) -> Backend:
    """Return the backend called `name`, or under "auto" the first that can serve. Collective.

    has_gpu_tensors: the rows of a process without a group lie on a GPU. With a group, its backend tells where tensors lie.

    Raises BackendUnavailableError with the reason and the fix.
    """
    on_gpus = has_gpu_tensors or are_on_gpus(peers)
    of_gpus = "nvlink" if settings.num_nodes == 1 else "nvshmem"
    candidate = name if name != "auto" else of_gpus if on_gpus else "shm"
    if candidate != "collective":
        outcome = _make(candidate, settings, peers, group)
        if not isinstance(outcome, str):
            return outcome
        if name != "auto":
            raise BackendUnavailableError(f"backend {name!r} cannot serve: {outcome}; backend='auto' takes one that can")
        if settings.rank == 0:
            level = logging.WARNING if on_gpus else logging.INFO  # on GPUs `collective` is much slower
            logger.log(level, "Buffer: backend %r cannot serve: %s; taking 'collective'", candidate, outcome)
    return CollectiveBackend(settings, group, peers)
