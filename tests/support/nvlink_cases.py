"""A small buffer of the nvlink backend, with rows and a routing."""

import contextlib

import torch
import torch.distributed as dist
from exchange_cases import device_of

from deepep_moe import Buffer

IDX = [[0, 2], [1, 3], [3, 0], [2, -1]]


def make_buffer(rank, timeout_s=60.0, num_experts=4, backend="nvlink", **settings):
    """Make a buffer on all ranks at once, so that a short deadline does not include the start of processes."""
    device = device_of(backend, rank)
    dist.barrier()
    buffer = Buffer(None, 8, 16, num_experts, 2, backend=backend, timeout_s=timeout_s, **settings)
    return buffer, torch.randn(4, 16, device=device), torch.tensor(IDX, device=device)


class Unchecked:
    """A communicator whose failures nobody looks at before the next call, as in a CUDA graph."""

    def __init__(self, communicator):
        self.communicator = communicator

    def __getattr__(self, name):
        return getattr(self.communicator, name)

    def check(self):
        pass


@contextlib.contextmanager
def unchecked(buffer):
    """Nobody looks at failures of the calls made meanwhile."""
    backend = buffer.calls.backend
    communicator = backend._exchange
    backend._exchange = Unchecked(communicator)
    yield communicator
    backend._exchange = communicator
