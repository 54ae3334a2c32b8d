"""Passes of a layer, their times and their differences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from benchmarks.common.records import nccl_version
from benchmarks.common.timing import Timer
from deepep_moe.tune.records import cpu_name

_FIRST_SEED = 1000  # of inputs, far from those of layers: rows that repeat a router's weights get probabilities of 1 and 0


def draw_inputs(rank: int, size: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x, which requires a gradient, and the output's gradient, both of `size`."""
    generator = torch.Generator().manual_seed(_FIRST_SEED + rank)
    x, cotangent = (torch.randn(size, generator=generator).to(device, dtype) for _ in range(2))
    return x.requires_grad_(), cotangent


class Step(Protocol):
    """The work that is repeated and timed."""

    num_passes: int
    """The passes that a forward and a backward make: one, but for those from a CUDA graph."""

    def clear(self) -> None: ...

    def forward(self) -> None: ...

    def backward(self) -> None: ...


def chain(step: Step, num_passes: int) -> None:
    """Make `num_passes` passes one after another, a multiple of `step.num_passes`. Each drops what the one before has left."""
    for _ in range(num_passes // step.num_passes):
        step.clear()
        step.forward()
        step.backward()


class Pass:
    """A forward and a backward that can be repeated. `leaves` are the tensors whose gradients are compared."""

    num_passes = 1

    def __init__(self, forward: Callable[[], Tensor], cotangent: Tensor, leaves: dict[str, Tensor]):
        self._forward, self._cotangent, self._leaves = forward, cotangent, leaves
        self._output: Tensor | None = None

    def forward(self) -> None:
        self._output = self._forward()

    def backward(self) -> None:
        assert self._output is not None
        self._output.backward(self._cotangent)

    def clear(self) -> None:
        """Drop the output and the gradients of the last run."""
        self._output = None
        for leaf in self._leaves.values():
            leaf.grad = None

    def release(self) -> None:
        """Do nothing, as nothing is kept from one pass to the next."""

    def results(self) -> dict[str, Tensor]:
        """Run once, and return the output and all gradients."""
        chain(self, 1)
        results = self.last_results()
        self.clear()
        return results | {name: torch.zeros_like(leaf) for name, leaf in self._leaves.items() if name not in results}

    def last_results(self) -> dict[str, Tensor]:
        """Return the output of the last run, and the gradients that it has made."""
        assert self._output is not None
        gradients = {name: leaf.grad for name, leaf in self._leaves.items() if leaf.grad is not None}
        return {"output": self._output.detach()} | gradients


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest distance, relative to the largest expected entry. It is NaN if either tensor has one."""
    scale = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny) if expected.numel() else torch.ones(())
    return float(((actual - expected).abs().max() / scale).item()) if expected.numel() else 0.0


def kind_of(name: str) -> str:
    """Return the kind of a result: "deepspeed_moe.experts.deepspeed_experts.3.up.weight" -> "experts"."""
    return name.removeprefix("deepspeed_moe.").split(".")[0]


def differences(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest difference by kind of result. NaN counts as the largest."""
    kinds: dict[str, float] = {}
    for name, value in actual.items():
        distance = difference(value.float(), expected[name].float())
        kinds[kind_of(name)] = max(kinds.get(kind_of(name), 0.0), distance) if distance == distance else distance
    return kinds


def time_of(timed: Any, timer: Timer) -> float:
    """Return the microseconds of a forward and backward of a pass. Collective."""
    timed.clear()
    us = timer.once(lambda: (timed.forward(), timed.backward()))
    timed.clear()
    return us


@dataclass
class MeasuredLayer:
    """The measurements of one rank."""

    backend: str
    hardware: str
    versions: str
    link_bytes: Any
    """Bytes that this rank must send in a dispatch; for DeepSpeed by mode."""
    differences: dict[str, dict[str, dict[str, float]]]
    """The largest differences of results by what is timed, who did it, and kind of result."""
    times: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """Times of forward and backward by what is timed and who does it: an entry per turn."""


def slowest(ranks: Sequence[MeasuredLayer]) -> dict[tuple[str, str], list[float]]:
    """Return the maximum over ranks in every turn, by what is timed and who does it."""
    return {key: list(map(max, zip(*(rank.times[key] for rank in ranks), strict=True))) for key in ranks[0].times}


def worst(ranks: Sequence[MeasuredLayer]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the differences, each the maximum over ranks. NaN counts as the largest."""
    return {
        what: {
            name: {kind: max((rank.differences[what][name][kind] for rank in ranks), key=lambda d: (d != d, d)) for kind in kinds}
            for name, kinds in names.items()
        }
        for what, names in ranks[0].differences.items()
    }


def beyond(ranks: Sequence[MeasuredLayer], tolerance: float) -> list[str]:
    """Return a line for each result that differs by more than `tolerance`, or is NaN."""
    return [
        f"{what}, {name}: {kind} differs by {value:.1e}"
        for what, names in worst(ranks).items()
        for name, kinds in names.items()
        for kind, value in kinds.items()
        if not value <= tolerance
    ]


def describe(package: str, device: torch.device, num_ranks: int) -> tuple[str, str]:
    """Return the hardware, and the versions of `package` and of what it runs on."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in dict.fromkeys((package, "torch")))
    if device.type == "cpu":
        return cpu_name(), versions
    gpus = f"{num_ranks} x {torch.cuda.get_device_name(device)}; {cpu_name()}"
    return gpus, f"{versions}, CUDA {torch.version.cuda}, NCCL {nccl_version()}"


class StepTimes(NamedTuple):
    """Microseconds of one forward and backward."""

    wall: float
    """A chain of them divided by its length, the device idle before and after."""
    host: float
    """Time until the host has enqueued them."""


def slowest_steps(ranks: Sequence[list[StepTimes]]) -> list[StepTimes]:
    """Return the slowest rank of every turn, by wall time."""
    return [max(turn, key=lambda times: times.wall) for turn in zip(*ranks, strict=True)]
