"""The buffers the MoE layers of one process share."""

import atexit
from dataclasses import dataclass

import torch
import torch.distributed as dist

import deepep_moe
from deepep_moe.errors import BufferDestroyedError
from deepep_moe.integrations.common.elastic_buffer import ElasticBuffer

_OPTION = "num_max_tokens_per_rank of deepep_moe.integrations.megatron.enable(), the launcher's --num-max-tokens-per-rank,"


@dataclass(frozen=True)
class Options:
    """What `enable()` was given."""

    num_max_tokens_per_rank: int | None = None
    backend: str = "auto"
    expert_alignment: int = 1
    gate: bool = True
    num_sms: int | None = None


class BufferRegistry:
    """One buffer per (group, hidden, num_experts, num_topk, num_sms). Layers that agree in these share it: they run one after another.

    Buffers stay when the layers go: ranks lose a model at different times, and the next one must find the same buffers on all of them.
    """

    def __init__(self, options: Options):
        self.options = options
        self._buffers: dict[tuple, ElasticBuffer] = {}
        self._closed = False
        atexit.register(self.destroy)

    def get(
        self,
        group: dist.ProcessGroup,
        num_tokens: int,
        hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        device: torch.device,
        num_sms: int | None = None,
    ) -> ElasticBuffer:
        """The buffer for these numbers, constructed by the first call, which every rank of `group` must make together. num_sms: None for
        that of the options.

        Raises BufferDestroyedError after `destroy()`, and what the construction of a Buffer raises.
        """
        if self._closed:
            raise BufferDestroyedError(
                "deepep_moe was disabled in this process; call deepep_moe.integrations.megatron.enable() and build the model again"
            )
        num_sms = self.options.num_sms if num_sms is None else num_sms
        key = (group, hidden, num_experts, num_topk, num_sms)
        if key not in self._buffers:

            def construct(bound: int) -> deepep_moe.Buffer:
                return deepep_moe.Buffer(group, bound, hidden, num_experts, num_topk, backend=self.options.backend, num_sms=num_sms)

            self._buffers[key] = ElasticBuffer(group, num_tokens, device, construct, self.options.num_max_tokens_per_rank, _OPTION)
        return self._buffers[key]

    def destroy(self) -> None:
        """Destroy all buffers and refuse new ones. Any number of calls."""
        atexit.unregister(self.destroy)
        self._closed = True
        while self._buffers:
            self._buffers.popitem()[1].destroy()
