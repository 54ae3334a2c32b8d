"""A small buffer with rows and a routing, for the tests of errors."""

import torch
import torch.distributed as dist

from deepep_moe import Buffer

BACKENDS = ("shm", "collective")
HIDDEN, NUM_EXPERTS, NUM_TOPK, MAX_TOKENS = 16, 4, 2, 8


def make_buffer(backend="shm", timeout_s=60.0, num_experts=NUM_EXPERTS):
    """Make a buffer on all ranks at once, so that a short deadline does not include the start of processes."""
    if dist.is_initialized():
        dist.barrier()
    return Buffer(None, MAX_TOKENS, HIDDEN, num_experts, NUM_TOPK, backend=backend, timeout_s=timeout_s)


def good_inputs(num_tokens=4):
    idx = torch.tensor([[0, 2], [1, 3], [3, 0], [2, -1]] * 4)[:num_tokens]
    return torch.randn(num_tokens, HIDDEN), idx, torch.rand(num_tokens, NUM_TOPK)


X, IDX, WEIGHTS = good_inputs()
