"""The buffers that the MoE layers of Megatron-Core share."""

import torch
import torch.distributed as dist

import deepep_moe
from deepep_moe.errors import BufferDestroyedError
from deepep_moe.integrations.common.elastic_buffer import ElasticBuffer
from deepep_moe.integrations.common.registry import BufferRegistry
from deepep_moe.integrations.megatron.options import Options

_OPTION = "num_max_tokens_per_rank of deepep_moe.integrations.megatron.enable(), the launcher's --num-max-tokens-per-rank,"


class LayerBuffers(BufferRegistry):
    """One buffer per (group, hidden, num_experts, num_topk, num_sms). Layers that agree in these share it: they run one after another.

    Buffers stay when the layers go. Ranks lose a model at different times, and the next model must find the same buffers on all of them.
    """

    def __init__(self, options: Options):
        super().__init__()
        self.options = options
        self._is_closed = False

    def ready(
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
        """Return the buffer for these numbers. The first call for them constructs it, so every rank of `group` must make it together.

        `num_sms` None stands for that of the options. Raises BufferDestroyedError after `close()`, and what `Buffer` raises.
        """
        if self._is_closed:
            raise BufferDestroyedError(
                "deepep_moe was disabled in this process; call deepep_moe.integrations.megatron.enable() and build the model again"
            )
        num_sms = self.options.num_sms if num_sms is None else num_sms

        def construct(bound: int) -> deepep_moe.Buffer:
            return deepep_moe.Buffer(group, bound, hidden, num_experts, num_topk, backend=self.options.backend, num_sms=num_sms)

        def construct_elastic() -> ElasticBuffer:
            return ElasticBuffer(group, num_tokens, device, construct, self.options.num_max_tokens_per_rank, _OPTION)

        return self.get((group, hidden, num_experts, num_topk, num_sms), construct_elastic)

    def close(self) -> None:
        """Destroy all buffers and refuse new ones. May be called any number of times."""
        self._is_closed = True
        self.destroy()
