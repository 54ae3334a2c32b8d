"""Double-batch overlap: two micro-batches take turns, so that what one has sent flies while the other computes."""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from deepep_moe.arguments import check_is_tensor
from deepep_moe.low_latency.buffer import MAX_IN_FLIGHT, LowLatencyBuffer

T = TypeVar("T")


class Span(NamedTuple):
    """Work of micro-batch `batch` from `start` to `end`, in milliseconds since the first span of the timeline began."""

    name: str
    batch: int
    start: float
    end: float


class Timeline:
    """Records when work ran: by CUDA events on the current stream if `device` is a GPU, else by the clock.

    In a CUDA graph that is captured with it, the events are the graph's (PyTorch 2.8 or newer): `spans` tells of the last replay.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.batch = 0
        """The micro-batch of spans that begin now. `overlapped` sets it; where nothing overlaps, the code that records does."""
        self._is_gpu = torch.device(device).type == "cuda"
        self._marks: list[tuple[str, int, object, object]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record what runs inside as a span."""
        batch, start = self.batch, self._now()
        yield
        self._marks.append((name, batch, start, self._now()))

    def spans(self) -> list[Span]:
        """Return the spans in the order in which they ended. On a GPU this waits for it."""
        if self._is_gpu:
            torch.cuda.synchronize()
        if not self._marks:
            return []
        first = self._marks[0][2]
        origin = min(self._between(first, start) for _, _, start, _ in self._marks)  # an outer span ends after the inner ones
        times = [(self._between(first, start) - origin, self._between(first, end) - origin) for _, _, start, end in self._marks]
        return [Span(name, batch, *interval) for (name, batch, _, _), interval in zip(self._marks, times, strict=True)]

    def _now(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        make: Any = torch.cuda.Event
        event = make(enable_timing=True, **({"external": True} if torch.cuda.is_current_stream_capturing() else {}))
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        elapsed_ms: float = start.elapsed_time(end) if self._is_gpu else 1e3 * (end - start)
        return elapsed_ms


def routed_experts(
    buffer: LowLatencyBuffer,
    experts: Callable[..., Tensor],
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None = None,
    *,
    shared_expert: Callable[[Tensor], Tensor] | None = None,
    fp8: bool = False,
    scale_format: str = "fp32",
    wire: str | None = None,
    timeline: Timeline | None = None,
) -> Generator[None, None, Tensor]:
    """Send one micro-batch through the experts of all ranks. A generator for `overlapped`, which yields after its dispatch and its combine.

    Args:
        buffer: any number of layers and both micro-batches share it.
        experts: called as `experts(recv_x, num_recv_tokens_per_expert)`. With `fp8` they get `recv_x_scales` too. They return
            [num_local_experts, capacity, hidden] bf16, fp16 or fp32, contiguous. Rows behind an expert's count hold anything. The result
            may not be `buffer.combine_input()`, which the other micro-batch's combine may still read.
        x, topk_idx, topk_weights, fp8, scale_format: as for `LowLatencyBuffer.dispatch`. The number of tokens may differ, or be 0, on each
            rank and in each micro-batch.
        shared_expert: called as `shared_expert(x)` while the dispatch flies. Its result is added.
        wire: as for `LowLatencyBuffer.combine`.
        timeline: gets the spans "send dispatch", "shared expert", "receive dispatch", "experts", "send combine" and "receive combine".

    Returns:
        [num_tokens, hidden], dtype of the experts' outputs: the bits of dispatch, experts and combine without hooks.

    Raises: as `LowLatencyBuffer.dispatch` and `combine`; TypeError for a shared expert that returns no tensor.
    """

    def span(name: str) -> AbstractContextManager[None]:
        return nullcontext() if timeline is None else timeline.span(name)

    with span("send dispatch"):
        out = buffer.dispatch(x, topk_idx, topk_weights, fp8=fp8, scale_format=scale_format, return_hook=True)
    shared = None
    if shared_expert is not None:
        with span("shared expert"):
            shared = shared_expert(x)
        check_is_tensor("the output of the shared expert", shared)
    yield
    with span("receive dispatch"):
        assert out.hook is not None  # as calls with return_hook=True have one
        out.hook()
    with span("experts"):
        y = experts(out.recv_x, out.num_recv_tokens_per_expert, *([out.recv_x_scales] if fp8 else []))
    with span("send combine"):
        combined: tuple[Tensor, Callable[[], None]] = buffer.combine(y, out.handle, wire=wire, return_hook=True)
    yield
    with span("receive combine"):
        combined[1]()
    return combined[0] if shared is None else combined[0] + shared


def overlapped(*batches: Generator[object, None, T], timeline: Timeline | None = None) -> list[T]:
    """Run two micro-batches by turns, each until it yields, the first one first; return what they return.

    A micro-batch is a generator that yields whenever what it has sent is to fly. `routed_experts` is one. Others call it for any number of
    layers:

        def decode(x):
            for layer in layers:
                x = x + layer.attention(x)
                topk_idx, topk_weights, _ = layer.router(x)
                x = x + (yield from routed_experts(buffer, layer.experts, x, topk_idx, topk_weights))
            return x

        y0, y1 = overlapped(decode(x0), decode(x1))

    Every rank makes these calls in this order, a turn a line:

        attention 0, send dispatch 0                    |
        attention 1, send dispatch 1                    | dispatch 0 flies
        receive dispatch 0, experts 0, send combine 0   | dispatch 1
        receive dispatch 1, experts 1, send combine 1   | combine 0
        receive combine 0, attention 0 of the next layer, send dispatch 0   | combine 1
        ...

    Collective: the micro-batches must yield equally often on all ranks. Each has one call in flight at most, so with two of them the call
    before last has always been received. With one the generator runs alone, nothing overlaps, and the bits are the same.

    Args:
        batches: one or two generators, not started yet.
        timeline: is told whose turn it is.

    Raises:
        ValueError, TypeError: more than two or none; something else than a generator.
        Exception: a micro-batch has raised it. The other stays where it is, and ranks are no longer in the same call: destroy the buffer.
    """
    if not 1 <= len(batches) <= MAX_IN_FLIGHT:
        raise ValueError(f"{len(batches)} micro-batches were given; at least 1 and at most {MAX_IN_FLIGHT} can take turns in one buffer")
    for index, batch in enumerate(batches):
        if not isinstance(batch, Generator):
            raise TypeError(f"micro-batch {index} is a {type(batch).__name__}; it must be a generator, as routed_experts(...) returns")
    results: dict[int, T] = {}
    while len(results) < len(batches):
        for index, batch in enumerate(batches):
            if index in results:
                continue
            if timeline is not None:
                timeline.batch = index
            try:
                next(batch)
            except StopIteration as over:
                results[index] = over.value
    return [results[index] for index in range(len(batches))]
