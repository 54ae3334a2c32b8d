"""Dispatch and combine of DeepEP 2 and 2.5 on `deepep_moe.Buffer`: compact rows are its rank layout, expanded rows its expert layout."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe import config
from deepep_moe.arguments import as_int
from deepep_moe.compat.deep_ep.arguments import as_given, checked_routing, combine_arguments, detached, in_rows, rows_and_scales
from deepep_moe.compat.deep_ep.core import GrowingBuffers, members_of
from deepep_moe.compat.deep_ep.elastic_handle import EPHandle
from deepep_moe.compat.deep_ep.events import EventHandle, EventOverlap
from deepep_moe.compat.deep_ep.graphs import outside_graphs
from deepep_moe.compat.deep_ep.streams import CommStream
from deepep_moe.compat.deep_ep.widths import combine_along, dispatch_along
from deepep_moe.exchange.handle import DispatchOutput
from deepep_moe.group.suspension import Suspending

NUM_SENDERS = 12  # SMs that saturate NVLink, as `deepep_moe.Buffer` uses where nobody says otherwise
_SIZE_UNIT = 2**21  # DeepEP's sizes are multiples of it
_NUM_QPS = 65  # queue pairs that DeepEP allocates where nobody says otherwise
_COLUMN_ALIGNMENT = 4  # scales of 4 bytes: bulk copies of a GPU want multiples of 16

Routing = tuple[Tensor | None, Tensor | None, int | None, int, int | None, bool | None, bool]
"""topk_idx, topk_weights, num_experts, num_max_tokens_per_rank (0: not set), expert_alignment, do_cpu_sync, do_handle_copy."""


@outside_graphs
class BufferOfGroup(Suspending):
    """The common part of the buffers of both versions."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int | None, sizes: tuple[int, int, int], num_qps: int, is_hybrid: bool) -> None:
        """sizes: most tokens of a rank, hidden, top-k."""
        self.group, self.rank_idx, self.num_ranks = members_of(group, type(self).__name__)
        self._buffers = GrowingBuffers(group, sums=config.sums())
        self._parts = (self._buffers,)
        self._stream = CommStream()
        names = "num_max_tokens_per_rank", "hidden", "num_topk"
        self.num_max_tokens_per_rank, hidden, num_topk = (as_int(name, size) for name, size in zip(names, sizes, strict=True))
        hint = self.get_buffer_size_hint(group, self.num_max_tokens_per_rank, hidden, num_topk)
        self.num_bytes = hint if num_bytes is None else num_bytes
        self.num_allocated_qps = num_qps or _NUM_QPS
        self.allow_hybrid_mode = is_hybrid
        self.num_rdma_ranks, self.num_nvlink_ranks = domain_sizes(self._buffers)
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Return bytes, a multiple of 2 MiB, for rows of `hidden` bf16 columns and their top-k from every rank. They serve as `num_bytes`
        only: a buffer's own memory follows the sizes of its calls."""
        row_bytes = 2 * hidden + 8 * num_topk
        return -(-dist.get_world_size(group) * num_max_tokens_per_rank * row_bytes // _SIZE_UNIT) * _SIZE_UNIT

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
    ) -> int:
        """Return 12, the SMs that saturate NVLink with any routing: more of them send no faster."""
        return NUM_SENDERS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return the queue pairs that DeepEP would take for `num_sms` SMs, for callers that pass them on. Calls here use none."""
        return min(16 * num_sms + 1 if self.allow_hybrid_mode else min(num_sms, 9), self.num_allocated_qps)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return the number of hosts, and of ranks of each."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return the number of nodes, over which sums are made in two steps, and of ranks of each."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    @staticmethod
    def capture() -> EventHandle:
        """Return a point on the current stream, for `previous_event`, which takes an EventOverlap too."""
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """Return the stream of asynchronous calls: a torch.cuda.Stream, or without a GPU a torch.cpu.Stream, on which nothing waits."""
        return self._stream.get() if torch.cuda.is_available() else torch.cpu.Stream()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Wait until every rank is here and its GPU has done what it was given before. The host waits, whatever the arguments say."""
        self._buffers.check_alive()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        dist.barrier(self.group)

    def destroy(self) -> None:
        """Free the memory. Not collective; may be repeated, and needs no `explicitly_destroy`. Nothing may be called later."""
        self._buffers.destroy()

    def _dispatch(
        self, x: Any, routing: Routing, handle: EPHandle | None, stats: Tensor | None, by_column: bool, do_expand: bool, num_sms: int,
        after: tuple[Any, Any], is_async: bool, is_deferred: bool = False,
    ) -> tuple[Any, ...] | EventOverlap:  # fmt: skip
        """Return what DeepEP's dispatch does. It begins after the events `after`, as `CommStream.begin` takes them."""
        buffers = self._buffers
        buffers.check_alive()
        try:
            senders = as_int("num_sms", num_sms)
            rows, scales = rows_and_scales(x)
            call = self._stream.begin(rows, after[0], is_async, after[1])
        except (TypeError, ValueError) as error:
            raise (handle.buffer if isinstance(handle, EPHandle) else buffers).refuse(error) from None
        with call:
            sent = None if scales is None else in_rows(scales, rows)
            if handle is None:
                out, handle = self._send(rows, sent, routing, do_expand, senders, is_deferred)
            else:
                topk_idx, topk_weights, *_ = routing
                buffer, weights = buffers.checked(handle, EPHandle).buffer, None if topk_weights is None else detached(topk_weights)
                if do_expand != handle.do_expand:
                    message = f"do_expand is {do_expand}, and the handle's dispatch had {handle.do_expand}; pass do_expand=handle.do_expand"
                    raise buffer.refuse(ValueError(message))
                senders = senders or handle.num_sms
                out = dispatch_along(buffer, rows, sent, handle.native, weights, senders or None, topk_idx, return_hook=is_deferred)
            if stats is not None:
                stats.add_(out.num_recv_tokens_per_expert)
        if not (is_async or is_deferred):
            recv_x = out.recv_x if scales is None else _with_scales(out, scales, by_column)
            return recv_x, out.recv_topk_idx, out.recv_topk_weights, handle, EventOverlap()
        inputs = rows, scales, *routing[:2], stats
        outputs = out.recv_x, out.recv_x_scales, out.recv_topk_idx, out.recv_topk_weights, *handle.native.tensors
        if is_deferred:
            return _deferred(call.end(inputs, outputs), out.hook, _results, out, handle, scales, by_column)
        received = _results(out, handle, scales, by_column)
        return *received, call.end(inputs, (*outputs, *(received[0] if scales is not None else ())))

    def _combine(
        self, x: Tensor, handle: EPHandle, topk_weights: Tensor | None, bias: Any, num_sms: int, after: tuple[Any, Any], is_async: bool,
        is_deferred: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap] | EventOverlap:  # fmt: skip
        """Return what DeepEP's combine does."""
        self._buffers.check_alive()
        buffer = self._buffers.checked(handle, EPHandle).buffer
        back, hook = None, None
        try:
            senders = as_int("num_sms", num_sms) or handle.num_sms or None
            call = self._stream.begin(x, after[0], is_async, after[1])
        except (TypeError, ValueError) as error:
            raise buffer.refuse(error) from None
        with call:
            rows, weights, added = buffer.calls.refuse_on_failure(combine_arguments, x, topk_weights, bias)
            if is_deferred and weights is None and rows.shape[-1:] == (buffer.hidden,):
                combined, hook = buffer.combine(rows, handle.native, bias=added, num_sms=senders, return_hook=True)
            else:
                combined, back = combine_along(buffer, rows, handle.native, weights, added, senders)
        if not (is_async or is_deferred):
            return combined, back, EventOverlap()
        inputs = x, topk_weights, *(bias if isinstance(bias, (tuple, list)) else (bias,)), *handle.native.tensors
        event = call.end(inputs, (combined, back))
        return _deferred(event, hook, lambda: (combined, back)) if is_deferred else (combined, back, event)

    def _send(
        self, rows: Tensor, scales: Tensor | None, routing: Routing, do_expand: bool, num_sms: int, is_deferred: bool
    ) -> tuple[DispatchOutput, EPHandle]:
        topk_idx, topk_weights, num_experts, num_max_tokens, alignment, do_cpu_sync, do_handle_copy = routing
        buffers, layout = self._buffers, "expert" if do_expand else "rank"
        try:
            buffers.check_layout(layout, "pass do_expand=True")
            if topk_idx is None or num_experts is None:
                raise ValueError("topk_idx and num_experts are needed without a handle; give both, or the handle of an earlier dispatch")
            num_topk, num_experts = checked_routing(topk_idx).shape[1], as_int("num_experts", num_experts)
            most, alignment = as_int("num_max_tokens_per_rank", num_max_tokens), as_int("expert_alignment", alignment or 1)
            waits, bound = do_cpu_sync is None or do_cpu_sync, None
            if not waits:
                bound = _most_rows(most, num_topk, num_experts // buffers.num_ranks if do_expand else None, alignment, buffers.num_ranks)
        except (TypeError, ValueError) as error:
            raise buffers.refuse(error) from None
        buffer, out = buffers.dispatch(
            rows, topk_idx, None if topk_weights is None else detached(topk_weights), num_experts, most, x_scales=scales, layout=layout,
            expert_alignment=alignment, num_recv_rows=bound, num_sms=num_sms or None, return_hook=is_deferred,
        )  # fmt: skip
        kept = None if do_handle_copy else topk_idx
        return out, EPHandle(self.group, buffer, out.handle, kept, topk_idx.dtype, bool(do_expand), most, num_sms, waits)


def domain_sizes(buffers: GrowingBuffers) -> tuple[int, int]:
    """Return the number of hosts of a group, and of ranks of each. Collective; `buffers` have made no call yet."""
    buffers.meet()
    return buffers.num_nodes, buffers.num_ranks // buffers.num_nodes


def _deferred(event: EventOverlap, hook: Callable[[], None] | None, results: Callable[..., Any], *args: Any) -> EventOverlap:
    """Let the next wait for the event make the second half of its call, which is `hook`, and return `results(*args)`."""

    def complete() -> Any:
        if hook is not None:
            hook()
        return results(*args)

    event.complete = complete
    return event


def _results(out: DispatchOutput, handle: EPHandle, x_scales: Tensor | None, by_column: bool) -> tuple[Any, ...]:
    """Return recv_x, recv_topk_idx, recv_topk_weights and the handle."""
    recv_x = out.recv_x if x_scales is None else _with_scales(out, x_scales, by_column)
    return recv_x, out.recv_topk_idx, out.recv_topk_weights, handle


def _with_scales(out: DispatchOutput, x_scales: Tensor, by_column: bool) -> Any:
    """Return recv_x and its scales, in the format of `x_scales` that were sent."""
    scales = as_given(out.recv_x_scales, x_scales)
    return out.recv_x, scales if scales is None or not by_column else columns_of(scales)


def _most_rows(num_max_tokens: int, num_topk: int, num_local_experts: int | None, alignment: int, num_ranks: int) -> int:
    """Return the rows that come at most, of a call whose host does not wait to learn how many come. num_local_experts: None for compact
    rows."""
    if num_max_tokens < 1:
        raise ValueError(
            f"do_cpu_sync is False and num_max_tokens_per_rank is {num_max_tokens}; give num_max_tokens_per_rank to the call or to the "
            "buffer, the same on every rank"
        )
    if num_local_experts is None:
        return num_ranks * num_max_tokens
    num_rows = num_ranks * num_max_tokens * min(num_topk, num_local_experts) + num_local_experts * (alignment - 1)
    return num_rows // alignment * alignment


def columns_of(scales: Tensor) -> Tensor:
    """Return `scales` [num_rows, num_columns] fp32 or int32 with each column in one piece that begins at a multiple of 16 bytes."""
    num_rows, num_columns = scales.shape
    columns = scales.new_empty(num_columns, -(-num_rows // _COLUMN_ALIGNMENT) * _COLUMN_ALIGNMENT)[:, :num_rows]
    return columns.copy_(scales.t()).t()
