"""Which backend serves a buffer: by rule, the same on every rank, said once."""

import logging

import torch.distributed as dist

from deepep_moe.errors import BackendUnavailableError
from deepep_moe.exchange.backends.base import Backend
from deepep_moe.exchange.backends.collective import CollectiveBackend
from deepep_moe.exchange.backends.nvlink import NvlinkBackend
from deepep_moe.exchange.backends.shm import ShmBackend
from deepep_moe.group.reach import are_on_gpus, why_not_nvlink, why_not_shm
from deepep_moe.group.rendezvous import Introduction, connect
from deepep_moe.group.settings import NOT_BUILT, Settings

logger = logging.getLogger("deepep_moe")
BACKENDS = ("auto", "shm", "nvlink", "nvshmem", "collective")
_WHY_NOT_BUILT = "it is not built in this version; use backend='auto', or 'collective' for GPU tensors over NCCL"


def _why_not_one_node(settings: Settings) -> str | None:
    if settings.ranks_per_node == settings.num_ranks:
        return None
    return f"it serves one node, and ranks_per_node is {settings.ranks_per_node} for {settings.num_ranks} ranks"


def make_backend(name: str, settings: Settings, peers: list[Introduction], group: "dist.ProcessGroup | None") -> Backend:
    """The backend called `name`, or under "auto" the first that can serve. Collective.

    Raises BackendUnavailableError with the reason and the fix.
    """
    if name in NOT_BUILT:
        raise BackendUnavailableError(f"backend {name!r} cannot serve: {_WHY_NOT_BUILT}")
    on_gpus = are_on_gpus(peers)
    candidate = name if name != "auto" else "nvlink" if on_gpus else "shm"
    if candidate in ("shm", "nvlink"):
        made: Backend | str
        if candidate == "shm":
            num_channels = min(peer.num_threads for peer in peers)
            made = why_not_shm(peers) or connect(lambda: ShmBackend(settings, num_channels), settings, group)
        else:
            made = why_not_nvlink(peers) or _why_not_one_node(settings) or connect(lambda: NvlinkBackend(settings), settings, group)
        if not isinstance(made, str):
            return made
        if name != "auto":
            raise BackendUnavailableError(f"backend {name!r} cannot serve: {made}; backend='auto' takes one that can")
        if settings.rank == 0:
            level = logging.WARNING if on_gpus else logging.INFO  # there it costs much of the speed
            logger.log(level, "Buffer: backend %r cannot serve: %s; taking 'collective'", candidate, made)
    return CollectiveBackend(settings, group, [(peer.host, peer.process_id) for peer in peers])
