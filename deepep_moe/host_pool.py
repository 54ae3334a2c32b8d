"""Memory of results in CPU tensors, used again: fresh pages cost more than what is written to them (csrc/runtime/host_pool.h)."""

import torch
from torch import Tensor

from deepep_moe import _C


class HostPool:
    """Tensors whose memory comes back with their last reference."""

    def __init__(self) -> None:
        self._pool = _C.HostPool()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor. Raises MemoryError where there is no memory for it."""
        strides, num_elements = [0] * len(shape), 1
        for axis in reversed(range(len(shape))):
            strides[axis] = num_elements
            num_elements *= shape[axis]
        num_bytes = num_elements * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        try:
            block = self._pool.allocate(num_bytes)
        except MemoryError:
            raise MemoryError(f"no memory for {num_bytes} bytes of {list(shape)} {str(dtype).removeprefix('torch.')}") from None
        # A tensor of its own on the block's storage, not a view: autograd forbids changing an operator's output in place if it is one.
        return torch.empty(0, dtype=dtype, device="cpu").set_(
            torch.frombuffer(block, dtype=torch.uint8).untyped_storage(), 0, shape, strides
        )

    def trim(self) -> None:
        """Give what is not in use back to the operating system."""
        self._pool.trim()
