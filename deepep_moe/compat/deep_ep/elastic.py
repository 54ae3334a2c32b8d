"""DeepEP's `ElasticBuffer` (version 2) and `EPBuffer` (version 2.5)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe.compat.deep_ep.core import GrowingBuffers
from deepep_moe.compat.deep_ep.elastic_calls import NUM_SENDERS, BufferOfGroup, domain_sizes
from deepep_moe.compat.deep_ep.elastic_handle import EPHandle
from deepep_moe.compat.deep_ep.events import EventHandle as EventHandle  # a name of DeepEP's module too
from deepep_moe.compat.deep_ep.events import EventOverlap
from deepep_moe.compat.deep_ep.graphs import outside_graphs
from deepep_moe.compat.deep_ep.refused import refuse, refused
from deepep_moe.exchange.expert_slots import ALIGNMENT, ExpertSlots

_Received = tuple[Any, Tensor | None, Tensor | None, EPHandle, EventOverlap]


@outside_graphs
class ElasticBuffer(BufferOfGroup):
    """The exchange of a group of ranks, with the arguments and results of DeepEP 2. Construction is collective.

    It serves GPUs, and CPU tensors for tests without one. Results are not differentiable, as DeepEP's are not. Rows come in the same order
    in every run, so `deterministic` changes nothing, and rows of padding are zero. docs/coming_from_deepep.md says what differs.

    Args:
        group: the process group, of any backend.
        num_bytes: kept for callers that read it. Memory is allocated in the first call and grows in later calls.
        num_max_tokens_per_rank: the most tokens that a rank dispatches, the same on every rank. With 0 the dispatch passes it, or the ranks
            agree on it.

    The other arguments choose among DeepEP's variants or configure networks; they have no effect here.

    Raises:
        NotImplementedError: `num_cpu_bytes`, for Engram.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        if num_cpu_bytes:
            refuse(f"ElasticBuffer(num_cpu_bytes={num_cpu_bytes})")
        super().__init__(group, num_bytes, (num_max_tokens_per_rank, hidden, num_topk), num_allocated_qps, allow_hybrid_mode)
        self.deterministic, self.allow_multiple_reduction = deterministic, allow_multiple_reduction
        self.prefer_overlap_with_compute, self.explicitly_destroy = prefer_overlap_with_compute, explicitly_destroy

    def dispatch(
        self,
        x: Any,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> _Received:
        """Send every token to the ranks of its experts. Collective.

        Args:
            x: [num_tokens, hidden] bf16, fp32 or fp16, or a pair of fp8 rows and scales. Scales are [num_tokens, hidden / 128] fp32, or
                [num_tokens, ceil(hidden / 512)] int32 of four biased exponents each.
            topk_idx, topk_weights: [num_tokens, num_topk] int64 or int32, -1 = no expert; and fp32. With a handle, pass only weights.
            cumulative_local_expert_recv_stats: [num_local_experts] int32. The tokens of each local expert are added to it.
            num_experts: experts of all ranks together; needed without a handle.

            num_max_tokens_per_rank: the same on every rank. None: the buffer's.
            num_sms: SMs that send rows. With 0 deepep_moe chooses.
            previous_event, previous_event_before_epilogue: the call begins after both events.
            async_with_compute_stream: run on the communication stream. The event returned marks the end of the call.
            handle: the handle of an earlier dispatch, whose routing is used again. Pass the same `do_expand` as in that dispatch.
            do_handle_copy: keep a copy of `topk_idx` in the handle. The caller may then change the original.

            do_cpu_sync: False: the host waits for nothing, and the results have the most rows that can arrive. These are num_ranks *
                num_max_tokens_per_rank; expanded, min(num_topk, num_local_experts) times as many and room for padding. Rows without a
                token are zero, with recv_topk_idx -1. None: True.
            do_expand: True: one row per (token, local expert), grouped by expert; zero rows pad each group to a multiple of
                `expert_alignment`. False: one row per (token, this rank). Rows are ordered by source rank, then token, in each group.
            use_tma_aligned_col_major_sf: scales are column-major, and each column begins at a multiple of 16 bytes.

        Returns:
            recv_x, or the pair of rows and scales; recv_topk_idx [num_rows, num_topk]; recv_topk_weights fp32 [num_rows, num_topk]; the
            handle; the event. In recv_topk_idx are local experts, and -1 for another rank's. Expanded, it is None, and recv_topk_weights
            is [num_rows]. Without weights that is None.

        Raises: as `deepep_moe.Buffer.dispatch`; ValueError if arguments are missing or contradict the handle.
        """
        most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        routing = topk_idx, topk_weights, num_experts, most, expert_alignment, do_cpu_sync, do_handle_copy
        return self._dispatch(  # type: ignore[return-value]  # not deferred
            x, routing, handle, cumulative_local_expert_recv_stats, use_tma_aligned_col_major_sf, do_expand, num_sms,
            (previous_event, previous_event_before_epilogue), async_with_compute_stream,
        )  # fmt: skip

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sum the rows of each token at its source. Collective.

        Args:
            x: [num_rows, hidden] bf16 (fp32 and fp16 too), rows as the dispatch of `handle` returned them.
            topk_weights: fp32 [num_rows, num_topk], expanded [num_rows], sent back with the rows. Rows are not weighted.
            bias: [num_tokens, hidden], dtype of `x`, or a pair of such tensors, added on the token's rank.
            num_sms: SMs that send rows. With 0 they are as many as in the dispatch.

        Returns the sums [num_tokens, hidden], the weights [num_tokens, num_topk] fp32 or None, and the event.

        Raises: as `deepep_moe.Buffer.combine`.
        """
        after = previous_event, previous_event_before_epilogue
        return self._combine(  # type: ignore[return-value]  # not deferred
            x, handle, topk_weights, bias, num_sms, after, async_with_compute_stream
        )


for _name in (
    "engram_write", "engram_fetch", "get_engram_storage_size_hint", "pp_set_config", "pp_send", "pp_recv", "get_pp_buffer_size_hint",
    "create_agrs_session", "destroy_agrs_session", "agrs_new_session", "agrs_set_config", "agrs_get_inplace_tensor",
    "get_agrs_num_max_session_bytes", "get_agrs_buffer_size_hint", "all_gather",
):  # fmt: skip
    setattr(ElasticBuffer, _name, refused("ElasticBuffer", _name))


class BufferAllocator:
    """A plan of the tensors of a region. They are on the device `meta` until an `EPBuffer` is made with the plan. That is a RuntimeError
    while a tensor has views or weak references, so take views afterwards."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def allocate(self, shape: "tuple[int, ...]", dtype: torch.dtype) -> Tensor:
        """Return a tensor of the plan. All ranks must plan the same tensors in the same order."""
        self._tensors.append(torch.empty(shape, dtype=dtype, device="meta"))
        return self._tensors[-1]

    def place(self, group: dist.ProcessGroup) -> ExpertSlots:
        """Give the tensors their memory: on a GPU where there is one. Collective.

        Raises:
            ValueError: the plan has no tensors, or some that have memory.
        """
        if not self._tensors or any(not tensor.is_meta for tensor in self._tensors):
            raise ValueError("the plan has no tensor, or another buffer has it already; allocate tensors of a new BufferAllocator")
        backend = "nvlink" if torch.cuda.is_available() else "collective"
        slots = ExpertSlots(group, sum(tensor.nbytes + ALIGNMENT for tensor in self._tensors), backend=backend)
        for tensor in self._tensors:
            torch.utils.swap_tensors(tensor, slots.empty(*tensor.shape, dtype=tensor.dtype))
        return slots


@outside_graphs
class EPBuffer(BufferOfGroup):
    """The exchange of a group of ranks, with the arguments and results of DeepEP 2.5: `ElasticBuffer` with `defer_epilogue`.

    lb_allocation_plan_or_num_bytes: a BufferAllocator, whose tensors hold copies of experts of other ranks.

    Raises:
        NotImplementedError: a number of bytes, or a group of several hosts.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: Any = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        plan = lb_allocation_plan_or_num_bytes
        if plan and not isinstance(plan, BufferAllocator):
            refuse("EPBuffer(lb_allocation_plan_or_num_bytes=<a number of bytes>)")
        super().__init__(group, num_bytes, (num_max_tokens_per_rank, hidden, num_topk), num_allocated_qps, allow_hybrid_mode)
        self.deterministic, self.allow_multiple_reduction = deterministic, allow_multiple_reduction
        self.prefer_overlap_with_compute, self.explicitly_destroy = prefer_overlap_with_compute, explicitly_destroy
        if plan and self.num_rdma_ranks > 1:
            refuse("EPBuffer(lb_allocation_plan_or_num_bytes=...) for several hosts")
        self._slots = plan.place(group) if plan else None

    def dispatch(
        self,
        x: Any,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> _Received | EventOverlap:
        """Send every token to the ranks of its experts, as `ElasticBuffer.dispatch`. Collective.

        defer_epilogue: return an event only. Its `current_stream_wait` returns recv_x, recv_topk_idx, recv_topk_weights and the handle. On
        a GPU rows fly meanwhile, and it enqueues the rest on the stream that is current then.

        Raises:
            ValueError: `do_handle_copy`. The handle refers to `topk_idx`, which must stay as it is.
        """
        if do_handle_copy:
            raise ValueError(
                "do_handle_copy is True; the handle refers to topk_idx itself: leave it out, and pass topk_idx.clone() instead"
            )
        most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        routing = topk_idx, topk_weights, num_experts, most, expert_alignment, do_cpu_sync, False
        return self._dispatch(
            x, routing, handle, cumulative_local_expert_recv_stats, use_tma_aligned_col_major_sf, do_expand, num_sms,
            (previous_event, None), async_with_compute_stream, defer_epilogue,
        )  # fmt: skip

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap] | EventOverlap:
        """Sum the rows of each token at its source, as `ElasticBuffer.combine`. Collective.

        defer_epilogue: return an event only, whose `current_stream_wait` returns the sums and the weights.
        """
        after = previous_event, None
        return self._combine(x, handle, topk_weights, bias, num_sms, after, async_with_compute_stream, defer_epilogue)

    def lb_get_theoretical_num_sms(self) -> int:
        """Return 24, the SMs that saturate NVLink in both calls; 12 do in the first."""
        return 2 * NUM_SENDERS

    def lb_prefetch_weights(
        self, redundant_expert_weights: Any, expert_weights: Any, redundancy_mapping: Tensor, num_sms: int = 0, previous_event: Any = None
    ) -> EventOverlap:
        """Copy experts of other ranks into tensors of the plan, as `deepep_moe.ExpertSlots.fetch` does. Collective."""
        return self._moved(ExpertSlots.fetch, redundant_expert_weights, expert_weights, redundancy_mapping, num_sms, previous_event)

    def lb_reduce_grads(
        self, redundant_expert_grads: Any, expert_grads: Any, redundancy_mapping: Tensor, num_sms: int = 0, previous_event: Any = None
    ) -> EventOverlap:
        """Add the gradients of copies to those at home, as `deepep_moe.ExpertSlots.return_gradients` does: ranks ascending, where DeepEP's
        order is open. Several tensors, bf16 and fp16 are taken too. Collective."""
        return self._moved(ExpertSlots.return_gradients, redundant_expert_grads, expert_grads, redundancy_mapping, num_sms, previous_event)

    def _moved(self, call: Callable[..., None], slots: Any, home: Any, copies: Tensor, num_sms: int, after: Any) -> EventOverlap:
        """Make a call of `ExpertSlots` on the communication stream, after the event `after`."""
        if self._slots is None:
            raise ValueError("this EPBuffer has no load-balancing region; give it lb_allocation_plan_or_num_bytes=BufferAllocator()")
        with self._stream.begin(copies, after, True) as begun:
            call(self._slots, copies, slots, home, num_sms=num_sms or None)
        moved = [tensor for tensors in (slots, home) for tensor in ([tensors] if isinstance(tensors, Tensor) else tensors)]
        return begun.end([copies, *moved], [])

    def destroy(self) -> None:
        """Free the memory, as that of an ElasticBuffer; tensors of the plan keep theirs."""
        super().destroy()
        if self._slots is not None:
            self._slots.destroy()


def get_physical_domain_size(group_or_buffer: Any) -> tuple[int, int]:
    """Return the number of hosts of a process group, and of ranks of each. Collective; not so for a buffer, which knows them."""
    if isinstance(group_or_buffer, BufferOfGroup):
        return group_or_buffer.get_physical_domain_size()
    return domain_sizes(GrowingBuffers(group_or_buffer))


def get_logical_domain_size(group_or_buffer: Any, allow_hybrid_mode: bool | None = None) -> tuple[int, int]:
    """Return the number of nodes of a process group or a buffer, over which sums are made in two steps, and of ranks of each. Collective as
    `get_physical_domain_size`, whose numbers these are."""
    return get_physical_domain_size(group_or_buffer)


# ---- `deep_ep.utils.envs` of version 2, without the start of processes and measurements of links, which tests use ----


def check_nvlink_connections(group: object) -> None:
    """Do nothing: a buffer looks itself whether its GPUs reach each other, and says which do not."""


def check_torch_deterministic() -> None:
    """Raise RuntimeError where PyTorch fills new tensors, which would run beside a call on the communication stream."""
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
        raise RuntimeError(
            "torch.utils.deterministic.fill_uninitialized_memory is True with deterministic algorithms; set it to False before calls of "
            "deep_ep"
        )
