"""A GPU for each rank, and a default group over another backend while a run lasts."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist

from deepep_moe import config


@contextlib.contextmanager
def default_group(backend: str) -> Iterator[None]:
    """Replace the default process group by one over `backend`, and leave none at the end. Collective."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp(prefix="deepep_moe_") if rank == 0 else None]
    dist.broadcast_object_list(folder)
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"file://{folder[0]}/store", rank=rank, world_size=num_ranks)
    yield
    dist.destroy_process_group()
    if rank == 0:
        shutil.rmtree(str(folder[0]), ignore_errors=True)


def take_gpu(undo: contextlib.ExitStack, *, shares_gpus: bool = False) -> torch.device:
    """Make GPU r the device of the host's rank r, and the default group one over NCCL until `undo`. Collective.

    `shares_gpus`: ranks take turns on the GPUs. NCCL does not serve that, so the default group stays as it is.
    Over several hosts the default group must be one over NCCL already. Raises ValueError where ranks of a host outnumber its GPUs.
    """
    rank, num_ranks, num_gpus = config.local_rank(), config.local_world_size(), torch.cuda.device_count()
    if shares_gpus and num_gpus:
        torch.cuda.set_device(rank % num_gpus)
        return torch.device("cuda", rank % num_gpus)
    if num_ranks > num_gpus:
        raise ValueError(
            f"{num_ranks} ranks need a GPU each, but this process sees {num_gpus}; start fewer ranks, or make more GPUs visible"
        )
    torch.cuda.set_device(rank)
    if dist.get_backend() != "nccl":
        undo.enter_context(default_group("nccl"))
    return torch.device("cuda", rank)
