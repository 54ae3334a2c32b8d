"""The buffers behind a DeepEP buffer: DeepEP's constructor names no sizes, so they are made at the first call that shows some."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe import config
from deepep_moe.device import is_gpu
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.elastic import ElasticBuffer
from deepep_moe.group.rendezvous import gather_objects, host_id

_Result = TypeVar("_Result")
_OPTION = "num_max_tokens_per_rank of the DeepEP buffer"


class GrowingBuffers:
    """One growing `Buffer` for each (hidden, num_experts, num_topk, device) that calls have had, over one group.

    The first call for new sizes makes a buffer, so all ranks make it together. The ranks agree there on the tokens of a rank, and again
    where a rank has more. Other calls do not talk over the process group. The backend is `nvlink` for tensors on GPUs and `shm` for those
    on the CPU, also where the group is gloo; `nvshmem` and `collective` where there are several nodes.
    """

    def __init__(self, group: dist.ProcessGroup, num_max_tokens_per_rank: int | None = None, ranks_per_node: int | None = None) -> None:
        self.group = group
        self.num_ranks = dist.get_world_size(group)
        self._num_max_tokens, self._ranks_per_node = num_max_tokens_per_rank, ranks_per_node
        self._num_hosts: int | None = None
        self._buffers: dict[tuple[int, int, int, torch.device], ElasticBuffer] = {}

    def dispatch(
        self, x: Tensor, num_experts: int, num_topk: int, send: Callable[[Buffer], _Result], num_least_tokens: int = 0
    ) -> tuple[Buffer, _Result]:
        """Return the buffer for `x` [num_tokens, hidden] and `send(buffer)`, which makes one dispatch. Collective.

        `num_least_tokens`: the same on every rank; a buffer with less room is replaced first. Raises what the construction of a Buffer and
        its dispatch raise.
        """
        if x.dim() != 2:
            raise ValueError(f"x has shape {list(x.shape)}; it must be [num_tokens, hidden]")
        key = (x.shape[1], num_experts, num_topk, x.device)
        elastic = self._buffers.get(key)
        if elastic is None:
            elastic = self._buffers[key] = self._make(key, max(x.shape[0], num_least_tokens))
        elif elastic.num_max_tokens < num_least_tokens and self._num_max_tokens is None:
            elastic.grow(num_least_tokens)
        return elastic.dispatch(x.shape[0], send)

    def backend_name(self, device: torch.device) -> str:
        """Return the backend that serves tensors on `device`. Collective the first time."""
        if self._num_hosts is None:
            told = gather_objects(host_id(), self.group, self.num_ranks, "hosts of a DeepEP buffer", config.timeout_s(), str)
            self._num_hosts = len(set(told))
        if is_gpu(device):
            return "nvlink" if self.num_nodes == 1 else "nvshmem"
        return "shm" if self._num_hosts == 1 else "collective"

    @property
    def num_nodes(self) -> int:
        """Nodes of the group, as far as that is known: hosts from the first call on, or those that the caller made of ranks."""
        if self._ranks_per_node:
            return self.num_ranks // self._ranks_per_node
        return self._num_hosts or 1

    def destroy(self) -> None:
        """Destroy all buffers. Not collective."""
        while self._buffers:
            self._buffers.popitem()[1].destroy()

    def _make(self, key: tuple[int, int, int, torch.device], num_tokens: int) -> ElasticBuffer:
        hidden, num_experts, num_topk, device = key
        backend, group, ranks_per_node = self.backend_name(device), self.group, self._ranks_per_node

        def construct(bound: int) -> Buffer:
            return Buffer(group, bound, hidden, num_experts, num_topk, backend=backend, ranks_per_node=ranks_per_node)

        return ElasticBuffer(self.group, num_tokens, device, construct, self._num_max_tokens, _OPTION, is_bounded=is_gpu(device))
