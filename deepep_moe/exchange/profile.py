"""Tuned settings of a buffer: all ranks take the same profile, or none has a buffer."""

import logging
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from deepep_moe.exchange.backends.base import Backend
from deepep_moe.exchange.backends.nvlink import NvlinkBackend
from deepep_moe.group.rendezvous import check_same, gather_objects, hanging_up
from deepep_moe.group.settings import Settings
from deepep_moe.tuning import SETTINGS, Loaded, Profile, Shape, choose

logger = logging.getLogger("deepep_moe")
_warned: set[str] = set()
"""Warnings of this process: one is enough, however many buffers a model has."""


def agree_on_profile(backend: Backend, settings: Settings, loaded: Loaded, group: "dist.ProcessGroup | None") -> Profile | None:
    """Have a GPU `backend` use the profile of this machine and shape, and return that. Collective where the backend is one of GPUs.

    Raises EPMismatchError on all ranks, naming them, where they have found different values. The backend is destroyed then.
    """
    if not isinstance(backend, NvlinkBackend):
        return None  # CPUs have none of these settings
    machine, shape = backend.machine, Shape.of(settings.num_max_tokens_per_rank, settings.hidden, settings.num_topk)
    found = choose(loaded, machine, shape)
    own = dict.fromkeys(SETTINGS) if found is None else asdict(found.profile.values)
    try:
        with hanging_up(group):
            told = gather_objects(own, group, settings.num_ranks, "agreement on a profile", settings.timeout_s, _read)
        check_same(told, f"give every rank the same files of profiles ({_where(loaded)}; docs/tuning.md)")
    except BaseException:
        backend.destroy()
        raise
    if settings.rank % settings.ranks_per_node == 0:  # the ranks of a host read the same files
        for text in (*loaded.damaged, *loaded.of_other_machines(machine)):
            if text not in _warned:
                _warned.add(text)
                logger.warning("Buffer: %s", text)
    if found is None:
        return None
    backend.use(found.profile.values)
    if settings.rank == 0:
        logger.info("Buffer: profile of %s for %s: %s", found.file, shape, found.profile.values)
    return found.profile


def _read(told: Any) -> dict[str, Any]:
    if told.keys() != set(SETTINGS) or not all(value is None or type(value) is int for value in told.values()):
        raise ValueError("settings")
    return {f"{name} of the profile": told[name] for name in SETTINGS}


def _where(loaded: Loaded) -> str:
    files = [str(file) for file in (loaded.files.user, loaded.files.given) if file is not None]
    return " and ".join(files) or "this rank has neither a home nor DEEPEP_MOE_PROFILE"
