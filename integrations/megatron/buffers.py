"""The buffers that the MoE layers of Megatron-Core share."""

import contextlib
import weakref
from typing import Any

import torch
import torch.distributed as dist

import deepep_moe
from deepep_moe.errors import BufferDestroyedError, EPCapacityError
from deepep_moe.exchange.growing import GrowingBuffer
from deepep_moe.integrations.common.patches import Patches, Stock
from deepep_moe.integrations.common.registry import BufferRegistry
from deepep_moe.integrations.megatron.config_switches import is_ours
from deepep_moe.integrations.megatron.cuda_graphs import holds_calls
from deepep_moe.integrations.megatron.metrics import Metrics
from deepep_moe.integrations.megatron.options import Config, Options
from deepep_moe.integrations.megatron.recv_capacity import (
    HOW_TO_GO_ON,
    JUDGES,
    RecvCapacity,
    capacity_factor_of,
    is_judged_at_end,
    take_notes,
)  # fmt: skip

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
            if capacity.factor is not None:
                capacity.factor *= times

    def end_step(self, model: list[object], *, is_replay: bool = False) -> None:
        """Raise what GPUs report of this step, for which the host waits, and EPCapacityError for rows without room (recv_capacity.py).

        model: the parts of the model on this rank. is_replay: a CUDA graph may have replayed the step. Does not wait where there is room
        for every routing and no call is part of a CUDA graph. Collective over all ranks of the job where they agree.
        """
        if _is_capturing():
            return  # the replay's end looks
        capacities = [capacity for capacity in self._capacities if not capacity.has_runner]
        if is_replay or self._has_graphs or any(capacity.factor is not None for capacity in capacities):
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
            for buffer in self.buffers():
                buffer.check()
        # A rank may find notes without an agreement, of layers whose config is not that of the model.
        if (rank := take_notes(capacities, of_all_ranks=self._is_agreed(model))) is not None:
            error = EPCapacityError(f"MoE layers of rank {rank} received more rows than they have room for in this step", rank=rank)
            error.add_note(HOW_TO_GO_ON)
            raise error

    def _is_agreed(self, model: list[object]) -> bool:
        """Return whether the step of this model ends with an agreement: the same on all ranks, those without MoE layers too."""
        if not model or self.has_runner:
            return False
        from megatron.core import parallel_state
        from megatron.core.utils import get_model_config

        config = get_model_config(model[0])
        if not (hasattr(config, "moe_token_dispatcher_type") and is_ours(config)) or capacity_factor_of(config, self.options)[1] is None:
            return False
        return is_judged_at_end(config, parallel_state.get_expert_tensor_and_model_parallel_group())

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


def serve_step_ends(patches: Patches, buffers: LayerBuffers) -> None:
    """Let steps end with `buffers.end_step`: at the begin of `megatron.core.distributed.finalize_model_grads(model)`, and after each call
    of a `FullCudaGraphWrapper`, which may be a replay without a line of Python in it. Or let a PagedStashRunner look."""
    from megatron.core import distributed

    @patches.around(distributed, "finalize_model_grads")
    def judge(stock: Stock, model: list[object], *args: object, **kwargs: object) -> object:
        try:
            buffers.end_step(model)
        except EPCapacityError:
            for chunk in model:  # reductions of gradients may be under way, and the step is run again
                if hasattr(chunk, "finish_grad_sync"):
                    chunk.finish_grad_sync()
            raise
        return stock(model, *args, **kwargs)

    setattr(distributed.finalize_model_grads, JUDGES, True)
    with contextlib.suppress(ImportError):  # 0.13
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        @patches.around(FullCudaGraphWrapper, "__call__")
        def run(stock: Stock, *args: object, **kwargs: Any) -> object:
            result = stock(*args, **kwargs)
            model = kwargs["model"]  # a part of a model, or all that this rank has
            buffers.end_step(model if isinstance(model, list) else [model], is_replay=True)
            return result

    with contextlib.suppress(ImportError):  # before 0.19
        from megatron.core.transformer.moe.paged_stash import PagedStashRunner

        from deepep_moe.integrations.megatron.dispatcher import NativeTokenDispatcher

        @patches.around(PagedStashRunner, "__init__")
        def construct(stock: Stock, runner: PagedStashRunner, /, *args: object, **kwargs: object) -> None:
            stock(runner, *args, **kwargs)
            buffers.has_runner = True  # all ranks make one
            for layer in runner.moe_layers:
                if isinstance(layer.token_dispatcher, NativeTokenDispatcher):
                    layer.token_dispatcher.follow_runner()


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
