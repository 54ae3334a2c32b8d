"""Dispatch and combine of DeepEP 2 and 2.5 on `deepep_moe.Buffer`: compact rows are its rank layout, expanded rows its expert layout."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe.compat.deep_ep.arguments import in_rows, one_bias, rows_and_scales
from deepep_moe.compat.deep_ep.core import GrowingBuffers
from deepep_moe.compat.deep_ep.elastic_handle import EPHandle
from deepep_moe.compat.deep_ep.events import EventOverlap, recorded_of
from deepep_moe.compat.deep_ep.streams import CommStream
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.handle import DispatchOutput
from deepep_moe.exchange.lanes import combine_with_lanes

_SCALE_BYTES = 4
_COLUMN_ALIGNMENT = 16  # bytes: bulk copies of a GPU want it


class DeferredResults(EventOverlap):
    """The event of a call whose last step waits for it: `current_stream_wait` makes that step, once, and returns the call's results."""

    __slots__ = ("_complete", "_results")

    def __init__(self, event: EventOverlap, complete: "Callable[[], Any]") -> None:
        super().__init__(event.event)
        self._complete: Callable[[], Any] | None = complete
        self._results: Any = None

    def current_stream_wait(self) -> Any:
        """Let the current stream wait for the call, and return what it would have returned without `defer_epilogue`, but for the event."""
        super().current_stream_wait()
        complete, self._complete = self._complete, None
        if complete is not None:
            self._results = complete()
        return self._results

    def wait(self) -> Any:
        """Do the same as `current_stream_wait`."""
        return self.current_stream_wait()


class Mode(NamedTuple):
    """How a call runs."""

    num_sms: int
    after: tuple[Any, ...]
    """Events that it begins after: the first as `CommStream.begin` has it."""
    is_async: bool
    is_deferred: bool = False


class Routing(NamedTuple):
    """What a caller says of where tokens go, and of the results."""

    topk_idx: Tensor | None
    topk_weights: Tensor | None
    num_experts: int | None
    num_max_tokens_per_rank: int
    """0: nobody has said it."""
    expert_alignment: int
    do_expand: bool
    do_cpu_sync: bool
    do_handle_copy: bool


class ElasticCalls:
    """The calls of one buffer."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.buffers = GrowingBuffers(group)
        self.stream = CommStream()

    def dispatch(
        self, x: Any, routing: Routing, handle: EPHandle | None, stats: Tensor | None, by_column: bool, mode: Mode
    ) -> tuple[Any, ...] | DeferredResults:
        """Return what DeepEP's dispatch does."""
        rows, scales = rows_and_scales(x)
        callers = self.stream.begin(rows, mode.after[0], mode.is_async)
        try:
            _follow(rows, mode.after[1:])
            if handle is None:
                out, handle = self._send(rows, in_rows(scales), routing, mode)
            else:
                out = _send_along(rows, in_rows(scales), routing, handle, mode)
            if stats is not None:
                stats.add_(out.num_recv_tokens_per_expert)
        except BaseException:
            self.stream.abort(callers)
            raise

        def received() -> tuple[Any, ...]:
            assert handle is not None
            recv_scales = out.recv_x_scales if out.recv_x_scales is None or not by_column else columns_of(out.recv_x_scales)
            recv_x = out.recv_x if recv_scales is None else (out.recv_x, recv_scales)
            return recv_x, out.recv_topk_idx, out.recv_topk_weights, handle

        given = rows, scales, routing.topk_idx, routing.topk_weights, stats
        made = out.recv_x, out.recv_x_scales, out.recv_topk_idx, out.recv_topk_weights, *handle.native.tensors
        if mode.is_deferred:
            return DeferredResults(self.stream.end(callers, mode.is_async, given, made), _after(out.hook, received))
        results = received()
        return *results, self.stream.end(callers, mode.is_async, given, (*made, *(results[0] if scales is not None else ())))

    def combine(
        self, x: Tensor, handle: EPHandle, topk_weights: Tensor | None, bias: Any, mode: Mode
    ) -> tuple[Tensor, Tensor | None, EventOverlap] | DeferredResults:
        """Return what DeepEP's combine does."""
        callers = self.stream.begin(x, mode.after[0], mode.is_async)
        senders, weights, hook = mode.num_sms or handle.num_sms or None, None, None
        try:
            _follow(x, mode.after[1:])
            added = one_bias(bias)
            if topk_weights is not None:
                combined, weights = combine_with_lanes(handle.buffer, x, handle.native, topk_weights.contiguous(), added, senders)
            elif mode.is_deferred:
                combined, hook = handle.buffer.combine(x, handle.native, bias=added, num_sms=senders, return_hook=True)
            else:
                combined = handle.buffer.combine(x, handle.native, bias=added, num_sms=senders)
        except BaseException:
            self.stream.abort(callers)
            raise
        given = x, topk_weights, *(bias if isinstance(bias, (tuple, list)) else (bias,)), *handle.native.tensors
        event = self.stream.end(callers, mode.is_async, given, (combined, weights))
        if mode.is_deferred:
            return DeferredResults(event, _after(hook, lambda: (combined, weights)))
        return combined, weights, event

    def _send(self, rows: Tensor, scales: Tensor | None, routing: Routing, mode: Mode) -> tuple[DispatchOutput, EPHandle]:
        topk_idx, num_experts, most = routing.topk_idx, routing.num_experts, routing.num_max_tokens_per_rank
        if topk_idx is None or num_experts is None:
            raise ValueError("topk_idx and num_experts are needed without a handle; give both, or the handle of an earlier dispatch")
        bound = None if routing.do_cpu_sync else _most_rows(routing, topk_idx.shape[-1], self.buffers.num_ranks)

        def send(buffer: Buffer) -> DispatchOutput:
            return buffer.dispatch(
                rows, topk_idx, routing.topk_weights, x_scales=scales, layout="expert" if routing.do_expand else "rank",
                expert_alignment=routing.expert_alignment, num_recv_rows=bound, num_sms=mode.num_sms or None, return_hook=mode.is_deferred,
            )  # fmt: skip

        buffer, out = self.buffers.dispatch(rows, num_experts, topk_idx.shape[-1], send, most)
        kept = topk_idx.clone() if routing.do_handle_copy else topk_idx
        return out, EPHandle(
            self.group, buffer, out.handle, kept, num_max_tokens_per_rank=most, num_sms=mode.num_sms, do_cpu_sync=routing.do_cpu_sync
        )


def _send_along(rows: Tensor, scales: Tensor | None, routing: Routing, handle: EPHandle, mode: Mode) -> DispatchOutput:
    if not isinstance(handle, EPHandle):
        raise TypeError(f"handle is a {type(handle).__name__}; it must be the EPHandle that a dispatch returned")
    refuse = handle.buffer.refuse
    if routing.topk_idx is not None:
        raise refuse(ValueError("topk_idx and handle were both given; a handle repeats the routing of its own dispatch"))
    if routing.do_expand != handle.do_expand:
        raise refuse(
            ValueError(
                f"do_expand is {routing.do_expand}, and the handle's dispatch had {handle.do_expand}; pass do_expand=handle.do_expand"
            )
        )
    num_sms = mode.num_sms or handle.num_sms or None
    return handle.buffer.dispatch(
        rows, None, routing.topk_weights, x_scales=scales, handle=handle.native, num_sms=num_sms, return_hook=mode.is_deferred
    )


def _most_rows(routing: Routing, num_topk: int, num_ranks: int) -> int:
    """Return the rows that come at most, of a call whose host does not wait to learn how many come."""
    most, num_experts = routing.num_max_tokens_per_rank, routing.num_experts
    if most < 1:
        raise ValueError(
            f"do_cpu_sync is False and num_max_tokens_per_rank is {most}; give num_max_tokens_per_rank to the call or to the buffer, the "
            "same on every rank"
        )
    if not routing.do_expand:
        return num_ranks * most
    assert num_experts is not None  # checked
    num_local_experts, alignment = num_experts // num_ranks, routing.expert_alignment
    num_rows = num_ranks * most * min(num_topk, num_local_experts) + num_local_experts * (alignment - 1)
    return num_rows // alignment * alignment


def columns_of(scales: Tensor) -> Tensor:
    """Return `scales` [num_rows, num_columns] fp32 with each column in one piece that begins at a multiple of 16 bytes."""
    num_rows, num_columns = scales.shape
    unit = _COLUMN_ALIGNMENT // _SCALE_BYTES
    columns = scales.new_empty(num_columns, -(-num_rows // unit) * unit)[:, :num_rows]
    return columns.copy_(scales.t()).t()


def _follow(x: Tensor, events: tuple[Any, ...]) -> None:
    """Let the stream of a call wait for more events."""
    for event in events:
        recorded = recorded_of(event)
        if recorded is not None and x.is_cuda:
            torch.cuda.current_stream(x.device).wait_event(recorded)


def _after(hook: Callable[[], None] | None, results: Callable[[], Any]) -> Callable[[], Any]:
    def complete() -> Any:
        if hook is not None:
            hook()
        return results()

    return complete
