"""Which backend serves a low-latency buffer: by rule, the same on every rank."""

import torch.distributed as dist

from deepep_moe import _C
from deepep_moe.errors import BackendUnavailableError
from deepep_moe.group.reach import are_on_gpus, why_not_nvlink, why_not_shm
from deepep_moe.group.rendezvous import Introduction, connect
from deepep_moe.group.settings import Settings
from deepep_moe.low_latency.base import LowLatencyBackend
from deepep_moe.low_latency.nvlink import NvlinkLowLatencyBackend
from deepep_moe.low_latency.shm import ShmLowLatencyBackend

BACKENDS = ("auto", "shm", "nvlink")


def make_backend(
    name: str,
    settings: Settings,
    peers: list[Introduction],
    group: "dist.ProcessGroup | None",
    mask_stalled: bool,
    has_gpu_tensors: bool = False,
) -> LowLatencyBackend:
    """The backend called `name`, or under "auto" the one for the group's tensors. Collective.

    `has_gpu_tensors`: a process without a group was given some; other ranks say by their group where their tensors are.

    Raises BackendUnavailableError with the reason and the fix.
    """
    made: LowLatencyBackend | str
    if name == "nvlink" or (name == "auto" and (has_gpu_tensors or are_on_gpus(peers))):
        made = why_not_nvlink(peers) or connect(lambda: NvlinkLowLatencyBackend(settings, mask_stalled), settings, group)
    else:
        made = _why_too_many(peers) or why_not_shm(peers) or connect(lambda: ShmLowLatencyBackend(settings, mask_stalled), settings, group)
    if isinstance(made, str):
        advice = "use Buffer" if name == "auto" or _why_too_many(peers) else "use backend='auto', or Buffer"
        raise BackendUnavailableError(f"no low-latency backend can serve, backend={name!r}: {made}; {advice}, which has more backends")
    return made


def _why_too_many(peers: list[Introduction]) -> str | None:
    if len(peers) > _C.LOW_LATENCY_MAX_RANKS:
        return f"low-latency buffers serve at most {_C.LOW_LATENCY_MAX_RANKS} ranks, this group has {len(peers)}"
    return None
