"""The buffers that the MoE layers of Megatron-Core share."""

from typing import Any

import torch
import torch.distributed as dist

import deepep_moe
from deepep_moe.errors import BufferDestroyedError
from deepep_moe.exchange.elastic import ElasticBuffer
from deepep_moe.integrations.common.registry import BufferRegistry
from deepep_moe.integrations.megatron.metrics import Metrics
from deepep_moe.integrations.megatron.options import Options
from deepep_moe.integrations.megatron.recv_capacity import RecvCapacity, capacity_factor_of

_OPTION = "num_max_tokens_per_rank of deepep_moe.integrations.megatron.enable(), the launcher's --num-max-tokens-per-rank,"


class LayerBuffers(BufferRegistry):
    """One buffer per (group, hidden, num_experts, num_topk, num_sms). Layers that agree in these share it: they run one after another.

    Buffers stay when the layers go. Ranks lose a model at different times, and the next model must find the same buffers on all of them.
    """

    def __init__(self, options: Options):
        super().__init__()
        self.options = options
        self.metrics = Metrics() if options.metrics else None
        self._is_closed = False
        self._capacities: list[RecvCapacity] = []

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
        is_bounded: bool = False,
    ) -> ElasticBuffer:
        """Return the buffer for these numbers. The first call for them constructs it, so every rank of `group` must make it together.

        `num_sms` None stands for that of the options. `is_bounded`: agree on a bound on tokens also where memory needs none. Raises
        BufferDestroyedError after `close()`, and what `Buffer` raises.
        """
        if self._is_closed:
            raise BufferDestroyedError(
                "deepep_moe was disabled in this process; call deepep_moe.integrations.megatron.enable() and build the model again"
            )
        num_sms = self.options.num_sms if num_sms is None else num_sms

        def construct(bound: int) -> deepep_moe.Buffer:
            options = self.options
            return deepep_moe.Buffer(
                group, bound, hidden, num_experts, num_topk, backend=options.backend, num_sms=num_sms, max_sms=options.max_sms,
                ranks_per_node=options.ranks_per_node,
            )  # fmt: skip

        def construct_elastic() -> ElasticBuffer:
            return ElasticBuffer(group, num_tokens, device, construct, self.options.num_max_tokens_per_rank, _OPTION, is_bounded=is_bounded)

        return self.get((group, hidden, num_experts, num_topk, num_sms, is_bounded), construct_elastic)

    def capacity_for(self, config: Any) -> RecvCapacity | None:
        """Return the room for rows of a layer, or None where its host waits for their number."""
        is_sync_free, factor = capacity_factor_of(config, self.options)
        if not is_sync_free:
            return None
        self._capacities.append(RecvCapacity(factor))
        return self._capacities[-1]

    def grow_capacity(self, times: float) -> None:
        for capacity in self._capacities:
            capacity.grow(times)

    def check_capacity(self) -> None:
        """Raise what GPUs report of this step, for which the host waits. Does nothing where there is room for every routing."""
        if all(capacity.factor is None for capacity in self._capacities):
            return
        if torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()
        for buffer in self.buffers():
            buffer.check()

    def close(self) -> None:
        """Destroy all buffers and refuse new ones. May be called any number of times."""
        self._is_closed = True
        self.destroy()
