"""Choose the backend of a buffer and its tuned settings by rule, the same on every rank."""

import functools
import logging
from dataclasses import asdict
from functools import partial

import torch.distributed as dist

from deepep_moe.errors import BackendUnavailableError
from deepep_moe.exchange.backends.base import Backend
from deepep_moe.exchange.backends.collective import CollectiveBackend
from deepep_moe.exchange.backends.nvlink import NvlinkBackend, NvshmemBackend
from deepep_moe.exchange.backends.shm import ShmBackend
from deepep_moe.group.reach import are_on_gpus, serve_on_gpus, why_not_shm
from deepep_moe.group.rendezvous import Introduction, check_same, connect, gather_objects, hanging_up
from deepep_moe.group.settings import Settings
from deepep_moe.tuning import SETTINGS, Loaded, Profile, Shape, choose

logger = logging.getLogger("deepep_moe")
BACKENDS = ("auto", "shm", "nvlink", "nvshmem", "collective")
_OF_GPUS = {"nvlink": NvlinkBackend, "nvshmem": NvshmemBackend}


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
        outcome: Backend | str
        if candidate == "shm":
            num_channels = min(peer.num_threads for peer in peers)
            outcome = why_not_shm(peers) or connect(lambda: ShmBackend(settings, num_channels), settings, group)
        else:
            outcome = serve_on_gpus(candidate, partial(_OF_GPUS[candidate], settings), settings, peers, group)
        if not isinstance(outcome, str):
            return outcome
        if name != "auto":
            raise BackendUnavailableError(f"backend {name!r} cannot serve: {outcome}; backend='auto' takes one that can")
        if settings.rank == 0:
            level = logging.WARNING if on_gpus else logging.INFO  # on GPUs `collective` is much slower
            logger.log(level, "Buffer: backend %r cannot serve: %s; taking 'collective'", candidate, outcome)
    return CollectiveBackend(settings, group, peers)


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
            files = [str(file) for file in (loaded.files.user, loaded.files.from_variable) if file is not None]
            where = " and ".join(files) or "this rank has neither a home nor DEEPEP_MOE_PROFILE"
            check_same([values for _, values in messages], f"give every rank the same files of profiles ({where}; docs/tuning.md)")
    except BaseException:
        backend.destroy()
        raise
    if len(set(machines)) > 1:
        if settings.rank == 0 and any(None not in values.values() for _, values in messages):
            unlike = "; ".join(f"rank {rank}: {rank_machine}" for rank, rank_machine in enumerate(machines))
            _warn(f"ranks have unlike GPUs or shares of them, so none uses a profile ({unlike})")
        return None
    if settings.rank % settings.ranks_per_node == 0:  # the ranks of a host read the same files
        for text in loaded.damaged:
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


def _read(message: tuple[str, dict[str, object]]) -> tuple[str, dict[str, object]]:
    machine, values = message
    if type(machine) is not str or values.keys() != set(SETTINGS) or not all(v is None or type(v) is int for v in values.values()):
        raise ValueError("a machine and settings")
    return machine, {f"{name} of the profile": values[name] for name in SETTINGS}
