"""Time a MoELayer as in a training step: wall time of a forward and backward, the host's part of it, and the kernels' part.

The layers are ours with grouped experts. The first is as the flag alone gives it, the next sync-free with room for every routing. On GPUs
that one is replayed from a CUDA graph too. If TransformerEngine is installed, its grouped experts run behind `alltoall` and `allgather`,
with its fused router and permutes. They run behind ours too. "Grouped products alone" are the experts' six products with known counts.
"""

import gc
import importlib
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.layers.passes import Pass, Step, StepTimes, chain

FLAG, SYNC_FREE, GRAPH = "deepep_moe, the flag alone", "deepep_moe, sync-free", "deepep_moe, sync-free, CUDA graph"
PRODUCTS = "grouped products alone"
TE_OURS, TE_ALLTOALL, TE_ALLGATHER = "deepep_moe, TE experts", "alltoall, TE experts and router", "allgather, TE experts and router"
_CHAIN = 5  # passes between two looks at the clock
_WARMUP = 3  # passes before a capture


def te_version() -> str | None:
    """Return the version of TransformerEngine, whose kernel permutes rows for Megatron-Core's dispatchers, or None."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ImportError:
        return None
    return metadata.version("transformer_engine_torch")


def rivals() -> str:
    """Say which experts there are to compare with."""
    version = te_version()
    return "TransformerEngine is not installed" if version is None else f"TransformerEngine {version}"


def by_expert(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give gradients of stacked experts, and of TransformerEngine's, the names that a SequentialMLP gives them."""
    named: dict[str, Tensor] = {}
    for name, value in results.items():
        first, _, last = name.partition("experts.linear_")
        layer, _, kind = last.partition(".")
        if first or not last:
            named[name] = value
        elif kind in ("weight", "bias"):
            named |= {f"experts.local_experts.{index}.linear_{layer}.{kind}": of_expert for index, of_expert in enumerate(value)}
        else:
            named[f"experts.local_experts.{kind.removeprefix('weight')}.linear_{layer}.weight"] = value
    return named


class Products(Step):
    """The six grouped products of SwiGLU experts with known counts."""

    def __init__(self, experts: Any, counts: Tensor, num_rows: int):
        from deepep_moe.ops import grouped_products

        self._ops = grouped_products
        self._w1, self._w2 = experts.linear_fc1.weight.detach(), experts.linear_fc2.weight.detach()
        self._x = self._w1.new_ones(num_rows, self._w1.shape[2])
        self._inner, self._middle = self._w1.new_ones(num_rows, self._w1.shape[1]), self._w1.new_ones(num_rows, self._w2.shape[2])
        self._groups = grouped_products.Groups(counts, len(self._w1), self._x)

    def forward(self) -> None:
        self._ops.multiply(self._x, self._w1, self._groups)
        self._ops.multiply(self._middle, self._w2, self._groups)

    def backward(self) -> None:
        self._ops.multiply_back(self._x, self._w2, self._groups)
        self._ops.weight_gradients(self._x, self._middle, self._groups)
        self._ops.multiply_back(self._inner, self._w1, self._groups)
        self._ops.weight_gradients(self._inner, self._x, self._groups)


def make_steps(like: Any, x: Tensor, cotangent: Tensor, *, seed: int, **sizes: Any) -> dict[str, Any]:
    """Return the passes by name. Layers have the weights of the layer `like`, whose experts are a SequentialMLP.

    Each has its own input and weights, because tensors shared with passes of the default stream cannot be captured into a CUDA graph.
    """
    from benchmarks.layers import megatron_layers

    ours = {FLAG: False, SYNC_FREE: True}
    layers = {name: megatron_layers.grouped_layer(like, seed=seed, is_sync_free=is_free, **sizes) for name, is_free in ours.items()}
    if x.is_cuda and te_version():
        dispatchers = {TE_ALLTOALL: "alltoall", TE_ALLGATHER: "allgather", TE_OURS: "deepep_moe"}
        layers |= {name: megatron_layers.te_layer(of, like, seed=seed, **sizes) for name, of in dispatchers.items()}
    steps: dict[str, Any] = {}
    for name, layer in layers.items():
        steps[name] = pass_of(layer, x.detach().clone().requires_grad_(), cotangent)
    counts: list[Tensor] = []
    hook = layers[FLAG].experts.register_forward_pre_hook(lambda module, arguments: counts.append(arguments[1].clone()))
    with torch.no_grad():
        layers[FLAG](x)
    hook.remove()
    steps[PRODUCTS] = Products(layers[FLAG].experts, counts[0], int(counts[0].sum()))
    return steps


def pass_of(layer: Any, x: Tensor, cotangent: Tensor) -> Pass:
    """Return the pass of a MoELayer with the input x."""
    return Pass(lambda: layer(x)[0], cotangent, {"input": x} | dict(layer.named_parameters()))


class Graphed(Step):
    """A forward and backward from one CUDA graph, which drops its gradients and makes new ones as an eager pass does.

    When the graph is made, no result of another pass may share a leaf with the step. The nodes that add up gradients would belong to that
    pass's stream, and those of the default stream cannot be captured.
    """

    def __init__(self, step: Step):
        stream = torch.cuda.Stream()
        step.clear()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            chain(step, _WARMUP)  # it allocates what a capture must not
        torch.cuda.current_stream().wait_stream(stream)
        step.clear()
        gc.collect()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Another thread, such as NCCL's watchdog, may ask for events meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            chain(step, 1)
        step.clear()

    def forward(self) -> None:
        self._graph.replay()


def time_step(step: Step, device: torch.device, num_passes: int = _CHAIN) -> StepTimes:
    """Time a chain of passes. Collective."""
    synchronize: Callable[[], Any] = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    synchronize()
    dist.barrier()
    begin = time.perf_counter()
    chain(step, num_passes)
    enqueued = time.perf_counter()
    synchronize()
    return StepTimes((time.perf_counter() - begin) * 1e6 / num_passes, (enqueued - begin) * 1e6 / num_passes)


def kernel_us(step: Step, num_passes: int = _CHAIN) -> float:
    """Return the microseconds that kernels take in one of a chain of passes, by PyTorch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        chain(step, num_passes)
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / num_passes


def peak_bytes(step: Step, num_passes: int = _CHAIN) -> int:
    """Return the memory of PyTorch that a chain of passes needs beyond the layer's parameters."""
    step.clear()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    chain(step, num_passes)
    torch.cuda.synchronize()
    step.clear()
    return torch.cuda.max_memory_allocated() - before
