"""Passes of a layer, their times and their differences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor

_FIRST_SEED = 1000  # of inputs, far from those of layers: rows that repeat a router's weights get probabilities of 1 and 0


def draw_inputs(rank: int, size: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x, which requires a gradient, and the output's gradient, both of `size`."""
    generator = torch.Generator().manual_seed(_FIRST_SEED + rank)
    x, cotangent = (torch.randn(size, generator=generator).to(device, dtype) for _ in range(2))
    return x.requires_grad_(), cotangent


class Step:
    """The work that is repeated and timed. Steps override what there is to do."""

    def clear(self) -> None:
        """Drop what the run before has left."""

    def forward(self) -> None: ...

    def backward(self) -> None: ...


def chain(step: Step, num_passes: int) -> None:
    """Make `num_passes` passes one after another. Each drops what the one before has left."""
    for _ in range(num_passes):
        step.clear()
        step.forward()
        step.backward()


class Pass(Step):
    """A forward and a backward that can be repeated. `leaves` are the tensors whose gradients are compared."""

    def __init__(self, forward: Callable[[], Tensor], cotangent: Tensor, leaves: dict[str, Tensor]):
        self._forward, self._cotangent, self._leaves = forward, cotangent, leaves
        self._output: Tensor | None = None

    def forward(self) -> None:
        self._output = self._forward()

    def backward(self) -> None:
        assert self._output is not None
        self._output.backward(self._cotangent)

    def clear(self) -> None:
        self._output = None
        for leaf in self._leaves.values():
            leaf.grad = None

    def results(self) -> dict[str, Tensor]:
        """Run once, and return the output and all gradients."""
        chain(self, 1)
        assert self._output is not None
        output = self._output.detach()
        gradients = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in self._leaves.items()}
        self.clear()
        return {"output": output} | gradients


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest distance, relative to the largest expected entry. It is NaN if either tensor has one."""
    scale = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny) if expected.numel() else torch.ones(())
    return float(((actual - expected).abs().max() / scale).item()) if expected.numel() else 0.0


def differences(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest difference by kind of result: "experts" of "deepspeed_moe.experts.3.weight". NaN counts as the largest."""
    kinds: dict[str, float] = {}
    for name, value in actual.items():
        kind, distance = name.removeprefix("deepspeed_moe.").split(".")[0], difference(value.float(), expected[name].float())
        kinds[kind] = max(kinds.get(kind, 0.0), distance) if distance == distance else distance
    return kinds


class StepTimes(NamedTuple):
    """Microseconds of one forward and backward. `host`: until the host has enqueued them, None where that is not timed."""

    wall: float
    host: float | None = None


Key = tuple[str, str]
"""Says what is timed, and who does it."""


@dataclass
class MeasuredLayer:
    """The measurements of one rank."""

    backend: str
    hardware: str
    versions: str
    link_bytes: Any
    """Bytes that this rank must send in a dispatch; for DeepSpeed by mode."""
    differences: dict[Key, dict[str, float]]
    """The largest differences by kind of result."""
    times: dict[Key, list[StepTimes]] = field(default_factory=dict)
    """Times of forward and backward: an entry per turn."""
    kernel_us: dict[Key, float] = field(default_factory=dict)
    """Time in kernels of a forward and a backward, without gaps; empty on CPUs."""
    peak_bytes: dict[Key, int] = field(default_factory=dict)
    """Memory of PyTorch beyond the layer's parameters."""
    workspace_bytes: int | None = None
    """Memory of our buffer, which layers share."""


def slowest(ranks: Sequence[MeasuredLayer], key: Key) -> list[StepTimes]:
    """Return the slowest rank of every turn, by wall time."""
    return [max(turn, key=lambda times: times.wall) for turn in zip(*(rank.times[key] for rank in ranks), strict=True)]


def worst(ranks: Sequence[MeasuredLayer]) -> dict[Key, dict[str, float]]:
    """Return the differences, each the maximum over ranks. NaN counts as the largest."""
    return {
        key: {kind: max((rank.differences[key][kind] for rank in ranks), key=lambda d: (d != d, d)) for kind in kinds}
        for key, kinds in ranks[0].differences.items()
    }


def beyond(ranks: Sequence[MeasuredLayer], tolerance: float) -> list[str]:
    """Return a line for each result that differs by more than `tolerance`, or is NaN."""
    return [
        f"{what}, {name}: {kind} differs by {value:.1e}"
        for (what, name), kinds in worst(ranks).items()
        for kind, value in kinds.items()
        if not value <= tolerance
    ]


def versions_of(package: str) -> str:
    return ", ".join(f"{name} {metadata.version(name)}" for name in dict.fromkeys((package, "torch")))
