"""`Buffer.runtime`: what callers ask of DeepEP's native object beside the calls, which `Buffer` makes itself."""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deepep_moe.compat.deep_ep.buffer import Buffer
    from deepep_moe.compat.deep_ep.core import GrowingBuffers


class Runtime:
    """Answers questions about a buffer. It knows the nodes that calls have found: one until the first call."""

    def __init__(self, buffer: "Buffer", buffers: "GrowingBuffers") -> None:
        self._buffer: Buffer = weakref.proxy(buffer)  # weak, because the buffer keeps this object
        self._buffers = buffers

    def is_available(self) -> bool:
        """Return True: memory is made by the calls."""
        return True

    def is_internode_available(self) -> bool:
        """Return whether the group has several nodes."""
        return self.get_num_rdma_ranks() > 1

    def get_num_rdma_ranks(self) -> int:
        """Return the number of nodes."""
        return self._buffers.num_nodes

    def get_rdma_rank(self) -> int:
        """Return this rank's node."""
        return self._buffer.rank // self._ranks_per_node()

    def get_root_rdma_rank(self, is_global: bool) -> int:
        """Return the rank on the first node that has this rank's place: its number, or the number of its node."""
        return self._buffer.rank % self._ranks_per_node() if is_global else 0

    def get_local_device_id(self) -> int:
        """Return the index of the current GPU, -1 without one."""
        return torch.cuda.current_device() if torch.cuda.is_available() else -1

    def get_comm_stream(self) -> Any:
        """Return `Buffer.get_comm_stream()`."""
        return self._buffer.get_comm_stream()

    def get_local_buffer_tensor(self, dtype: torch.dtype, offset: int = 0, use_rdma_buffer: bool = False) -> Tensor:
        """Return `Buffer.get_local_buffer_tensor(...)`."""
        return self._buffer.get_local_buffer_tensor(dtype, None, offset, use_rdma_buffer)

    def _ranks_per_node(self) -> int:
        return self._buffer.group_size // self.get_num_rdma_ranks()
