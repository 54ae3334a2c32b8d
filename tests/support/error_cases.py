"""A small buffer with rows and a routing."""

import torch
import torch.distributed as dist
from exchange_cases import device_of
from torch.utils._pytree import tree_map_only

from deepep_moe import Buffer

BACKENDS = ("shm", "collective")
HIDDEN, NUM_EXPERTS, NUM_TOPK, MAX_TOKENS = 16, 4, 2, 8


def make_buffer(backend="shm", timeout_s=60.0, num_experts=NUM_EXPERTS, **settings):
    """Make a buffer on all ranks at once, so that a short deadline does not include the start of processes."""
    if dist.is_initialized():
        dist.barrier()
    return Buffer(None, MAX_TOKENS, HIDDEN, num_experts, NUM_TOPK, backend=backend, timeout_s=timeout_s, **settings)


def good_inputs(num_tokens=4):
    idx = torch.tensor([[0, 2], [1, 3], [3, 0], [2, -1]] * 4)[:num_tokens]
    return torch.randn(num_tokens, HIDDEN), idx, torch.rand(num_tokens, NUM_TOPK)


X, IDX, WEIGHTS = good_inputs()


def on_gpus(rank, backend="nvlink", **settings):
    """A buffer, and rows and a routing on the GPU of this rank."""
    device = device_of(backend, rank)
    return make_buffer(backend, **settings), torch.randn(4, HIDDEN, device=device), IDX.to(device)


# ---- tensors whose values are not those of their memory, but its negative (`is_neg()`) ----


def negative(tensor):
    """Return a tensor equal to `tensor`, in contiguous memory that holds the negative."""
    lazy = torch._neg_view(-tensor)
    assert lazy.is_neg() and lazy.is_contiguous() and torch.equal(lazy, tensor)
    return lazy


def imaginary(tensor):
    """Return a lazily negative tensor equal to `tensor`, with other strides. Programs get such tensors from complex ones."""
    lazy = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert lazy.is_neg() and torch.equal(lazy, tensor)
    return lazy


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as quantizing and distributed tensors are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*tree_map_only(cls, lambda wrapped: wrapped.inner, args), **(kwargs or {}))
