"""Selects the backend of a low-latency buffer by a rule that gives the same result on every rank."""

from functools import partial

import torch.distributed as dist

from deepep_moe import _C
from deepep_moe.errors import BackendUnavailableError
from deepep_moe.group.reach import are_on_gpus, serve_on_gpus, why_not_one_node, why_not_shm
from deepep_moe.group.rendezvous import Introduction, connect
from deepep_moe.group.settings import Settings
from deepep_moe.low_latency.base import LowLatencyBackend
from deepep_moe.low_latency.nvlink import NvlinkLowLatencyBackend, NvshmemLowLatencyBackend
from deepep_moe.low_latency.shm import ShmLowLatencyBackend

BACKENDS = ("auto", "shm", "nvlink", "nvshmem")
_CLASSES = {"shm": ShmLowLatencyBackend, "nvlink": NvlinkLowLatencyBackend, "nvshmem": NvshmemLowLatencyBackend}


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
    of_gpus = "nvlink" if settings.num_nodes == 1 else "nvshmem"
    candidate = name if name != "auto" else of_gpus if has_gpu_tensors or are_on_gpus(peers) else "shm"
    outcome: LowLatencyBackend | str | None
    make, outcome = partial(_CLASSES[candidate], settings, mask_stalled), _why_too_many(peers, candidate)
    if candidate == "shm":
        outcome = outcome or why_not_shm(peers) or why_not_one_node(settings) or connect(make, settings, group)
    else:
        outcome = outcome or serve_on_gpus(candidate, make, settings, peers, group)
    if isinstance(outcome, str):
        advice = "use Buffer" if name == "auto" or _why_too_many(peers, name) else "use backend='auto', or Buffer"
        raise BackendUnavailableError(f"no low-latency backend can serve, backend={name!r}: {outcome}; {advice}, which has more backends")
    return outcome


def _why_too_many(peers: list[Introduction], name: str) -> str | None:
    most = _C.LOW_LATENCY_MAX_RANKS if name == "nvshmem" else _C.LOW_LATENCY_MAX_HOST_RANKS
    return f"low-latency buffers serve at most {most} ranks, this group has {len(peers)}" if len(peers) > most else None
