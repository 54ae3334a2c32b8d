"""The default process group over another backend, for a while."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def default_group(backend: str) -> Iterator[None]:
    """A default process group over `backend` in place of the present one; none afterwards. Collective."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp(prefix="deepep_moe_") if rank == 0 else None]
    dist.broadcast_object_list(folder)
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"file://{folder[0]}/store", rank=rank, world_size=num_ranks)
    yield
    dist.destroy_process_group()
    if rank == 0:
        shutil.rmtree(str(folder[0]), ignore_errors=True)
