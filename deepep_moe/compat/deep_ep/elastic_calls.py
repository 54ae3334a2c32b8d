"""Dispatch and combine of DeepEP 2 and 2.5 on `deepep_moe.Buffer`: compact rows are its rank layout, expanded rows its expert layout."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from deepep_moe import config
from deepep_moe.arguments import as_int
from deepep_moe.compat.deep_ep.arguments import as_given, checked_routing, combine_arguments, detached, in_rows, rows_and_scales
from deepep_moe.compat.deep_ep.core import GrowingBuffers
from deepep_moe.compat.deep_ep.elastic_handle import EPHandle
from deepep_moe.compat.deep_ep.events import EventOverlap
from deepep_moe.compat.deep_ep.streams import CommStream
from deepep_moe.compat.deep_ep.widths import combine_along, dispatch_along
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.handle import DispatchOutput

_SCALE_BYTES = 4
_COLUMN_ALIGNMENT = 16  # bytes: bulk copies of a GPU want it


class DeferredResults(EventOverlap):
    """The event of a call whose last step waits for it: `current_stream_wait` makes that step, once, and returns the call's results."""

    __slots__ = ("_complete", "_results")

    def __init__(self, event: EventOverlap, complete: "Callable[[], Any]") -> None:
        super().__init__(event.event)
        self._complete: Callable[[], Any] | None = complete
        self._results: Any = None

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Let the current stream wait for the call, and return what it would have returned without `defer_epilogue`, but for the event."""
        if self.event is not None:
            self.event.current_stream_wait()
        complete, self._complete = self._complete, None
        if complete is not None:
            self._results = complete()
        super().current_stream_wait(release_handle)
        return self._results


class Mode(NamedTuple):
    """The mode of a call."""

    num_sms: int
    after: tuple[Any, Any]
    """The call begins after these events, as `CommStream.begin` takes them."""
    is_async: bool
    is_deferred: bool = False

    def in_ints(self) -> "Mode":
        """Return the same with plain numbers. Raises TypeError for what is none."""
        return self if type(self.num_sms) is int else self._replace(num_sms=as_int("num_sms", self.num_sms))


class Routing(NamedTuple):
    """The routing that a caller passes, and the form of the results."""

    topk_idx: Tensor | None
    topk_weights: Tensor | None
    num_experts: int | None
    num_max_tokens_per_rank: int
    """0: not set."""
    expert_alignment: int
    do_expand: bool
    do_cpu_sync: bool
    do_handle_copy: bool

    def in_ints(self) -> "Routing":
        """Return the same with plain numbers. Raises TypeError for what is none."""
        if type(self.num_max_tokens_per_rank) is type(self.expert_alignment) is int and type(self.num_experts) in (int, type(None)):
            return self  # `_replace` takes a microsecond
        return self._replace(
            num_experts=None if self.num_experts is None else as_int("num_experts", self.num_experts),
            num_max_tokens_per_rank=as_int("num_max_tokens_per_rank", self.num_max_tokens_per_rank),
            expert_alignment=as_int("expert_alignment", self.expert_alignment),
        )


class ElasticCalls:
    """The calls of one buffer."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.buffers = GrowingBuffers(group, sums=config.sums())
        self.stream = CommStream()

    def dispatch(
        self, x: Any, routing: Routing, handle: EPHandle | None, stats: Tensor | None, by_column: bool, mode: Mode
    ) -> tuple[Any, ...] | DeferredResults:
        """Return what DeepEP's dispatch does."""
        self.buffers.check_alive()
        try:
            routing, mode = routing.in_ints(), mode.in_ints()
            rows, scales = rows_and_scales(x)
            callers = self.stream.begin(rows, mode.after[0], mode.is_async, mode.after[1])
        except (TypeError, ValueError) as error:
            raise (handle.buffer if isinstance(handle, EPHandle) else self.buffers).refuse(error) from None
        try:
            if handle is None:
                out, handle = self._send(rows, in_rows(scales, rows), routing, mode)
            else:
                out = self._send_along(rows, in_rows(scales, rows), routing, handle, mode)
            if stats is not None:
                stats.add_(out.num_recv_tokens_per_expert)
        except BaseException:
            self.stream.abort(callers)
            raise
        if not (mode.is_async or mode.is_deferred):
            return *_results(out, handle, scales, by_column), EventOverlap()
        inputs = rows, scales, routing.topk_idx, routing.topk_weights, stats
        outputs = out.recv_x, out.recv_x_scales, out.recv_topk_idx, out.recv_topk_weights, *handle.native.tensors
        if mode.is_deferred:
            event = self.stream.end(callers, mode.is_async, inputs, outputs)
            return DeferredResults(event, _after(out.hook, partial(_results, out, handle, scales, by_column)))
        results = _results(out, handle, scales, by_column)
        return *results, self.stream.end(callers, mode.is_async, inputs, (*outputs, *(results[0] if scales is not None else ())))

    def combine(
        self, x: Tensor, handle: EPHandle, topk_weights: Tensor | None, bias: Any, mode: Mode
    ) -> tuple[Tensor, Tensor | None, EventOverlap] | DeferredResults:
        """Return what DeepEP's combine does."""
        self.buffers.check_alive()
        buffer = self._checked(handle).buffer
        back, hook = None, None
        try:
            senders = mode.in_ints().num_sms or handle.num_sms or None
            callers = self.stream.begin(x, mode.after[0], mode.is_async, mode.after[1])
        except (TypeError, ValueError) as error:
            raise buffer.refuse(error) from None
        try:
            rows, weights, added = buffer.calls.refuse_on_failure(combine_arguments, x, topk_weights, bias)
            if mode.is_deferred and weights is None and rows.shape[-1:] == (buffer.hidden,):
                combined, hook = buffer.combine(rows, handle.native, bias=added, num_sms=senders, return_hook=True)
            else:
                combined, back = combine_along(buffer, rows, handle.native, weights, added, senders)
        except BaseException:
            self.stream.abort(callers)
            raise
        if not (mode.is_async or mode.is_deferred):
            return combined, back, EventOverlap()
        inputs = x, topk_weights, *(bias if isinstance(bias, (tuple, list)) else (bias,)), *handle.native.tensors
        event = self.stream.end(callers, mode.is_async, inputs, (combined, back))
        if mode.is_deferred:
            return DeferredResults(event, _after(hook, lambda: (combined, back)))
        return combined, back, event

    def _send(self, rows: Tensor, scales: Tensor | None, routing: Routing, mode: Mode) -> tuple[DispatchOutput, EPHandle]:
        most, buffers = routing.num_max_tokens_per_rank, self.buffers
        layout = "expert" if routing.do_expand else "rank"
        try:
            buffers.check_layout(layout, "pass do_expand=True")
            topk_idx, topk_weights, num_experts = _lanes_of(routing)
            bound = None if routing.do_cpu_sync else _most_rows(routing, topk_idx.shape[1], num_experts, buffers.num_ranks)
        except (TypeError, ValueError) as error:
            raise buffers.refuse(error) from None

        def send(buffer: Buffer) -> DispatchOutput:
            return buffer.dispatch(
                rows, topk_idx, topk_weights, x_scales=scales, layout=layout,
                expert_alignment=routing.expert_alignment, num_recv_rows=bound, num_sms=mode.num_sms or None, return_hook=mode.is_deferred,
            )  # fmt: skip

        buffer, out = buffers.dispatch(rows, num_experts, topk_idx.shape[1], send, most)
        kept = None if routing.do_handle_copy else topk_idx
        return out, EPHandle(self.group, buffer, out.handle, kept, topk_idx.dtype, most, mode.num_sms, routing.do_cpu_sync)

    def _send_along(self, rows: Tensor, scales: Tensor | None, routing: Routing, handle: EPHandle, mode: Mode) -> DispatchOutput:
        buffer = self._checked(handle).buffer
        if routing.topk_idx is not None:
            raise buffer.refuse(ValueError("topk_idx and handle were both given; a handle repeats the routing of its own dispatch"))
        if routing.do_expand != handle.do_expand:
            message = f"do_expand is {routing.do_expand}, and the handle's dispatch had {handle.do_expand}; pass do_expand=handle.do_expand"
            raise buffer.refuse(ValueError(message))
        weights, num_sms = routing.topk_weights, mode.num_sms or handle.num_sms or None
        return dispatch_along(
            buffer, rows, scales, handle.native, None if weights is None else detached(weights), num_sms, return_hook=mode.is_deferred
        )

    def _checked(self, handle: object) -> EPHandle:
        if not isinstance(handle, EPHandle):
            message = f"handle is a {type(handle).__name__}; it must be the EPHandle that a dispatch returned"
            raise self.buffers.refuse(TypeError(message))
        return handle


def _lanes_of(routing: Routing) -> tuple[Tensor, Tensor | None, int]:
    """Return topk_idx, topk_weights and the number of experts. Raises TypeError or ValueError where something is missing or wrong."""
    if routing.topk_idx is None or routing.num_experts is None:
        raise ValueError("topk_idx and num_experts are needed without a handle; give both, or the handle of an earlier dispatch")
    weights = routing.topk_weights
    return checked_routing(routing.topk_idx), None if weights is None else detached(weights), routing.num_experts


def _results(out: DispatchOutput, handle: EPHandle, x_scales: Tensor | None, by_column: bool) -> tuple[Any, ...]:
    """Return recv_x, recv_topk_idx, recv_topk_weights and the handle."""
    scales = as_given(out.recv_x_scales, x_scales)
    if scales is None:
        return out.recv_x, out.recv_topk_idx, out.recv_topk_weights, handle
    return (out.recv_x, columns_of(scales) if by_column else scales), out.recv_topk_idx, out.recv_topk_weights, handle


def _most_rows(routing: Routing, num_topk: int, num_experts: int, num_ranks: int) -> int:
    """Return the rows that come at most, of a call whose host does not wait to learn how many come."""
    most = routing.num_max_tokens_per_rank
    if most < 1:
        raise ValueError(
            f"do_cpu_sync is False and num_max_tokens_per_rank is {most}; give num_max_tokens_per_rank to the call or to the buffer, the "
            "same on every rank"
        )
    if not routing.do_expand:
        return num_ranks * most
    num_local_experts, alignment = num_experts // num_ranks, routing.expert_alignment
    num_rows = num_ranks * most * min(num_topk, num_local_experts) + num_local_experts * (alignment - 1)
    return num_rows // alignment * alignment


def columns_of(scales: Tensor) -> Tensor:
    """Return `scales` [num_rows, num_columns] fp32 or int32 with each column in one piece that begins at a multiple of 16 bytes."""
    num_rows, num_columns = scales.shape
    unit = _COLUMN_ALIGNMENT // _SCALE_BYTES
    columns = scales.new_empty(num_columns, -(-num_rows // unit) * unit)[:, :num_rows]
    return columns.copy_(scales.t()).t()


def _after(hook: Callable[[], None] | None, results: Callable[[], Any]) -> Callable[[], Any]:
    def complete() -> Any:
        if hook is not None:
            hook()
        return results()

    return complete
