"""Tuned settings of a buffer: all ranks take the same profile, or the construction fails."""

import functools
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


def agree_on_profile(backend: Backend, settings: Settings, loaded: Loaded, group: "dist.ProcessGroup | None") -> Profile | None:
    """Let a GPU `backend` use the profile of this machine and shape, and return the profile. Collective if the backend is for GPUs.

    Ranks with unlike GPUs, or unlike shares of them, use no profile. If ranks on equal machines have different values, destroy the
    backend and raise EPMismatchError on all ranks; the message names them.
    """
    if not isinstance(backend, NvlinkBackend):
        return None  # CPUs have none of these settings
    try:
        with hanging_up(group):
            machine, shape = backend.machine, Shape.of(settings.num_max_tokens_per_rank, settings.hidden, settings.num_topk)
            chosen = choose(loaded, machine, shape)
            message = [str(machine), dict.fromkeys(SETTINGS) if chosen is None else asdict(chosen.profile.values)]
            messages = gather_objects(message, group, settings.num_ranks, "agreement on a profile", settings.timeout_s, _read)
        machines = [rank_machine for rank_machine, _ in messages]
        if len(set(machines)) == 1:
            check_same([values for _, values in messages], f"give every rank the same files of profiles ({_where(loaded)}; docs/tuning.md)")
    except BaseException:
        backend.destroy()
        raise
    if len(set(machines)) > 1:
        if settings.rank == 0 and any(None not in values.values() for _, values in messages):
            unlike = "; ".join(f"rank {rank}: {rank_machine}" for rank, rank_machine in enumerate(machines))
            _warn(f"ranks have unlike GPUs or shares of them, so none uses a profile ({unlike})")
        return None
    if settings.rank % settings.ranks_per_node == 0:  # the ranks of a host read the same files
        for text in (*loaded.damaged, *loaded.of_other_machines(machine)):
            _warn(text)
    if chosen is None:
        return None
    backend.use(chosen.profile.values)
    if settings.rank == 0:
        logger.info("Buffer: profile of %s for %s: %s", chosen.file, shape, chosen.profile.values)
    return chosen.profile


@functools.cache  # one warning is enough for this process, however many buffers a model has
def _warn(text: str) -> None:
    logger.warning("Buffer: %s", text)


def _read(message: Any) -> tuple[str, dict[str, Any]]:
    machine, values = message
    if type(machine) is not str or values.keys() != set(SETTINGS) or not all(v is None or type(v) is int for v in values.values()):
        raise ValueError("a machine and settings")
    return machine, {f"{name} of the profile": values[name] for name in SETTINGS}


def _where(loaded: Loaded) -> str:
    files = [str(file) for file in (loaded.files.user, loaded.files.from_variable) if file is not None]
    return " and ".join(files) or "this rank has neither a home nor DEEPEP_MOE_PROFILE"
