"""Time of the host per eager call, by its own clock around a chain of calls that the device keeps up with.

One process, one GPU, a group of one rank: what the host does is the same with peers, and nobody waits for them. A dispatch that waits for
its counts waits for the device too, so few tokens are dispatched.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common import workload
from benchmarks.common.timing import wall_us
from deepep_moe import Buffer, LowLatencyBuffer
from deepep_moe.event import Event

CHAIN = 16  # calls between two looks at the clock


class Shape(NamedTuple):
    num_tokens: int
    hidden: int
    num_experts: int
    num_topk: int


def inputs_of(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return random rows in bf16, and a uniform random routing: x, topk_idx, topk_weights."""
    inputs = workload.make_inputs(workload.Shape(1, shape.hidden, shape.num_experts, shape.num_topk, 1), shape.num_tokens, 0, device)
    return inputs.x, inputs.topk_idx, inputs.topk_weights


def chain_us(calls: Callable[..., Any], repeats: int, before: Callable[[], Any] | None = None, length: int = CHAIN) -> list[float]:
    """Return microseconds per call of `repeats` chains; `calls` makes `length` calls. The device is idle when a chain begins."""
    arguments: list[Any] = []
    outputs: list[Any] = []

    def prepare() -> None:
        outputs.clear()
        arguments.clear()
        arguments.extend([before()] if before is not None else [])
        torch.cuda.synchronize()

    return [us / length for us in wall_us(lambda: outputs.append(calls(*arguments)), repeats, prepare)]


def times_of(call: Callable[[], Any], repeats: int) -> list[float]:
    """Return microseconds per call of chains of the same call."""
    return chain_us(lambda: [call() for _ in range(CHAIN)], repeats)


def _to_its_end(call: Callable[..., Any], **how: bool) -> None:
    """Make an asynchronous call, or one in two halves, and wait for its event or call its hook."""
    output = call(**how)
    end = output[-1] or output[-2]
    (end.wait if isinstance(end, Event) else end)()


def empty_operator_us(repeats: int) -> list[float]:
    """The least that any operator costs: one that returns its argument, called from Python with a gradient wanted of nothing."""
    x = torch.zeros(1, device="cuda")
    return times_of(lambda: x.add(x), repeats)


def exchange_us(shape: Shape, repeats: int) -> dict[str, list[float]]:
    """Times of `Buffer`, by the name of the operation."""
    x, idx, weights = inputs_of(shape, torch.device("cuda"))
    buffer = Buffer(None, *shape, backend="nvlink")
    out = buffer.dispatch(x, idx, weights)
    row_weights = out.recv_topk_weights
    leaf, leaf_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()

    def layer(x: Tensor) -> Tensor:
        out = buffer.dispatch(x, idx, leaf_weights)
        return buffer.combine(out.recv_x, out.handle, out.recv_topk_weights)

    def chain(length: int) -> Tensor:
        y: Tensor = leaf
        for _ in range(length):
            y = layer(y)
        return y

    grad = torch.randn_like(x)

    def backward(y: Tensor) -> None:
        y.backward(grad)

    times = {
        "host layer forward": chain_us(lambda: chain(CHAIN), repeats),
        "host layer backward": chain_us(backward, repeats, before=lambda: chain(CHAIN)),
        "host layer backward alone": chain_us(backward, repeats, before=lambda: chain(1), length=1),
    }
    calls = {
        "dispatch bounded": partial(buffer.dispatch, x, idx, weights, num_recv_rows=len(out.recv_x)),
        "dispatch cached": partial(buffer.dispatch, x, handle=out.handle),
        "combine": partial(buffer.combine, out.recv_x, out.handle, row_weights),
    }
    with torch.no_grad():
        times["host dispatch"] = times_of(lambda: buffer.dispatch(x, idx, weights), repeats)
        for op, call in calls.items():
            times[f"host {op}"] = times_of(call, repeats)
            times[f"host {op}, async"] = times_of(partial(_to_its_end, call, async_op=True), repeats)
            times[f"host {op}, hook"] = times_of(partial(_to_its_end, call, return_hook=True), repeats)
    buffer.destroy()
    return times


def low_latency_us(shape: Shape, repeats: int) -> list[float]:
    """A low-latency dispatch and its combine."""
    x, idx, weights = inputs_of(shape, torch.device("cuda"))
    buffer = LowLatencyBuffer(None, *shape, backend="nvlink")

    def both() -> Tensor:
        out = buffer.dispatch(x, idx, weights)
        return buffer.combine(out.recv_x, out.handle)

    with torch.no_grad():
        times = times_of(both, repeats)
    buffer.destroy()
    return times


def gate_us(gate: Callable[[Tensor, Tensor], Any], shape: Shape, repeats: int) -> list[float]:
    """A gate with gradient, forward alone."""
    logits = torch.randn(shape.num_tokens, shape.num_experts, device="cuda", requires_grad=True)
    bias = torch.zeros(shape.num_experts, device="cuda")
    return times_of(lambda: gate(logits, bias), repeats)
