"""The buffers that the MoE layers of Megatron-Core share."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import deepep_moe
from deepep_moe.errors import BufferDestroyedError
from deepep_moe.exchange.growing import GrowingBuffer
from deepep_moe.integrations.common.registry import BufferRegistry
from deepep_moe.integrations.megatron.cuda_graphs import holds_calls
from deepep_moe.integrations.megatron.metrics import Metrics
from deepep_moe.integrations.megatron.options import Config, Options
from deepep_moe.integrations.megatron.over_budget import agree, excess_error, is_judged_at_end, take_notes
from deepep_moe.integrations.megatron.patches import Patches, Stock
from deepep_moe.integrations.megatron.recv_capacity import RecvCapacity, capacity_factor_of

_OPTION = "num_max_tokens_per_rank of deepep_moe.integrations.megatron.enable(), the launcher's --num-max-tokens-per-rank,"


class LayerBuffers(BufferRegistry):
    """One buffer per (group, hidden, num_experts, num_topk, num_sms). Layers that agree in these share it: they run one after another.

    Buffers stay when the layers go. Ranks lose a model at different times, and the next model must find the same buffers on all of them.
    They go with their group: when it is destroyed, or when Megatron-Core forgets it. A layer of that group that goes on gets a new one.
    """

    def __init__(self, options: Options):
        super().__init__()
        self.options = options
        self.metrics = Metrics() if options.metrics else None
        self.layers: weakref.WeakSet[Any] = weakref.WeakSet()  # layers that dispatch through them
        self.is_closed = False
        self._capacities: weakref.WeakSet[RecvCapacity] = weakref.WeakSet()  # the layers own them
        self.has_runner = False  # Megatron-Core's, of the job: on ranks without MoE layers too
        self._has_graphs = False  # True: there are graphs with calls, whose failures nobody sees

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
        allows_excess: bool = False,
    ) -> GrowingBuffer:
        """Return the buffer for these numbers. The first call for them constructs it, so every rank of `group` must make it together.

        `num_sms` None stands for that of the options. `is_bounded`: agree on a bound on tokens also where memory needs none.
        `allows_excess`: as `Buffer.allow_excess`; such a buffer is one of its own. Raises BufferDestroyedError after `close()`, ValueError
        where it would have to be constructed while a CUDA graph is captured, and what `Buffer` raises.
        """
        if self.is_closed:
            raise BufferDestroyedError(
                "deepep_moe was disabled in this process; call deepep_moe.integrations.megatron.enable() and build the model again"
            )
        num_sms = self.options.num_sms if num_sms is None else num_sms

        def construct(bound: int) -> deepep_moe.Buffer:
            options = self.options
            buffer = deepep_moe.Buffer(
                group, bound, hidden, num_experts, num_topk, backend=options.backend, num_sms=num_sms, max_sms=options.max_sms,
                ranks_per_node=options.ranks_per_node, sums=options.sums,
            )  # fmt: skip
            if allows_excess:
                buffer.allow_excess()
            return buffer

        def construct_growing() -> GrowingBuffer:
            if _is_capturing():
                raise ValueError(
                    "the first forward of a MoE layer is captured in a CUDA graph, but it has to construct a buffer; run a step without a "
                    "graph first (cuda_graph_warmup_steps of 1 or more)"
                )
            return GrowingBuffer(group, num_tokens, device, construct, self.options.num_max_tokens_per_rank, _OPTION, is_bounded=is_bounded)

        return self.get((group, hidden, num_experts, num_topk, num_sms, is_bounded, allows_excess), construct_growing)

    def recover(self) -> None:
        """Bring all buffers back into step. Copies of experts are made anew by the next forward."""
        self.end_copies()
        for buffer in self.buffers():
            buffer.recover()

    def capacity_for(self, config: Config) -> RecvCapacity | None:
        """Return the room for rows of a layer, or None where its host waits for their number."""
        is_sync_free, factor = capacity_factor_of(config, self.options)
        if not is_sync_free:
            return None
        capacity = RecvCapacity(factor)
        self._capacities.add(capacity)
        self._has_graphs = self._has_graphs or holds_calls(config)
        return capacity

    def grow_capacity(self, times: float) -> None:
        for capacity in self._capacities:
            capacity.grow(times)

    def note_runner(self) -> None:
        self.has_runner = True

    def end_step(self, model: list[object], *, is_ours: Callable[[Config], bool]) -> None:
        """Raise what GPUs report of this step, for which the host waits. Does nothing where there is room for every routing and no call is
        part of a CUDA graph. Collective over all ranks of the job where they agree on rows without room (over_budget.py)."""
        if _is_capturing():
            return  # `end_replay` looks
        if self._has_graphs or any(capacity.factor is not None and not capacity.has_runner for capacity in self._capacities):
            self.check_replay()
        self._judge(model, is_ours)

    def end_replay(self, model: object, *, is_ours: Callable[[Config], bool]) -> None:
        """End a step that a CUDA graph has replayed, as `end_step`. `model`: a part of a model, or all that this rank has."""
        self.check_replay()
        self._judge(model if isinstance(model, list) else [model], is_ours)

    def _judge(self, model: list[object], is_ours: Callable[[Config], bool]) -> None:
        capacities = [capacity for capacity in self._capacities if not capacity.has_runner]
        if self._is_agreed(model, is_ours):
            agree(capacities, _device_of_agreements())
        elif take_notes(capacities):  # for layers whose config is not that of the model
            raise excess_error(dist.get_rank())

    def _is_agreed(self, model: list[object], is_ours: Callable[[Config], bool]) -> bool:
        """Return whether the step of this model ends with an agreement: the same on all ranks, those without MoE layers too."""
        if not model or self.has_runner:
            return False
        from megatron.core import parallel_state
        from megatron.core.utils import get_model_config

        config = get_model_config(model[0])
        if not (hasattr(config, "moe_token_dispatcher_type") and is_ours(config)) or capacity_factor_of(config, self.options)[1] is None:
            return False
        return is_judged_at_end(config, parallel_state.get_expert_tensor_and_model_parallel_group())

    def check_replay(self) -> None:
        """Wait for the GPU, and raise what it reports of calls, those of a CUDA graph's replay too."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        for buffer in self.buffers():
            buffer.check()

    def close(self) -> None:
        """Destroy all buffers and refuse new ones. May be called any number of times."""
        self.is_closed = True
        self.destroy()


def serve_new_groups(patches: Patches, buffers: LayerBuffers) -> None:
    """Let `parallel_state.destroy_model_parallel` release the buffers of the groups that it forgets. It does not destroy them."""
    from megatron.core import parallel_state

    @patches.around(parallel_state, "destroy_model_parallel")
    def release(stock: Stock, *args: object, **kwargs: object) -> None:
        forgotten = parallel_state.get_expert_tensor_and_model_parallel_group(check_initialized=False)
        stock(*args, **kwargs)
        if forgotten is not None:
            buffers.release(lambda group: group is forgotten)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _device_of_agreements() -> torch.device:
    """Return the device whose tensors the default group reduces."""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")
