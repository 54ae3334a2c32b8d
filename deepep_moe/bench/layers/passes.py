"""What the benchmarks of Megatron-Core's and DeepSpeed's layers share: passes, their times, their differences."""

import itertools
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe.bench.common.records import cpu_name

PARTS = ("forward", "backward", "forward+backward")
_LEAD_CYCLES = 2_000_000  # of the device, about a millisecond, while the host gets ahead of it


class Pass:
    """A forward and a backward that can be run again and again. `leaves`: the tensors whose gradients are looked at."""

    def __init__(self, forward: Callable[[], Tensor], cotangent: Tensor, leaves: dict[str, Tensor]):
        self._forward, self._cotangent, self._leaves = forward, cotangent, leaves
        self._output: Tensor | None = None

    def forward(self) -> None:
        self._output = self._forward()

    def backward(self) -> None:
        assert self._output is not None
        self._output.backward(self._cotangent)

    def clear(self) -> None:
        """Nothing is left of the last run."""
        self._output = None
        for leaf in self._leaves.values():
            leaf.grad = None

    def results(self) -> dict[str, Tensor]:
        """The output and all gradients of one run."""
        self.clear()
        self.forward()
        self.backward()
        assert self._output is not None
        gradients = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in self._leaves.items()}
        results = {"output": self._output.detach()} | gradients
        self.clear()
        return results


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest distance, relative to the largest expected entry. NaN where either has one."""
    scale = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny) if expected.numel() else torch.ones(())
    return float(((actual - expected).abs().max() / scale).item()) if expected.numel() else 0.0


class Clock:
    """Times of one pass in microseconds, begun by all ranks within a few."""

    def __init__(self, device: torch.device):
        self.is_gpu, self._token = device.type == "cuda", torch.zeros(1, device=device)

    def times(self, timed: Any) -> list[float]:
        """Forward, backward, both."""
        timed.clear()
        marks = self._on_gpu(timed) if self.is_gpu else self._on_cpu(timed)
        timed.clear()
        return [*marks, sum(marks)]

    def _on_gpu(self, timed: Any) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda._sleep(_LEAD_CYCLES)
        dist.all_reduce(self._token)  # behind the sleep: GPUs leave it together, however late their hosts were
        events[0].record()
        timed.forward()
        events[1].record()
        timed.backward()
        events[2].record()
        events[2].synchronize()
        return [1e3 * first.elapsed_time(second) for first, second in itertools.pairwise(events)]

    def _on_cpu(self, timed: Any) -> list[float]:
        dist.barrier()
        begin = time.perf_counter()
        timed.forward()
        middle = time.perf_counter()
        timed.backward()
        return [1e6 * (middle - begin), 1e6 * (time.perf_counter() - middle)]


class Timed(Protocol):
    """Of one rank."""

    times: dict[tuple[str, str], list[list[float]]]
    """By what is timed and who does it: an entry per turn, as `Clock.times` has them."""


def slowest(ranks: Sequence[Timed]) -> dict[tuple[str, str], dict[str, list[float]]]:
    """By what is timed and who does it, then by part: the maximum over ranks in every turn."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for key in ranks[0].times:
        turns = [list(map(max, zip(*turn, strict=True))) for turn in zip(*(rank.times[key] for rank in ranks), strict=True)]
        found[key] = {part: [turn[i] for turn in turns] for i, part in enumerate(PARTS)}
    return found


def describe(package: str, device: torch.device, num_ranks: int) -> tuple[str, str]:
    """Hardware, and versions of `package` and of what it runs on."""
    versions = f"{package} {metadata.version(package)}, torch {torch.__version__}"
    if device.type == "cpu":
        return cpu_name(), versions
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{num_ranks} x {torch.cuda.get_device_name(device)}; {cpu_name()}", f"{versions}, CUDA {torch.version.cuda}, NCCL {nccl}"


def check_ranks(device: str, num_ranks: int) -> None:
    """Raises ValueError where GPUs are asked for and too few are there."""
    if device == "cuda" and not 0 < num_ranks <= torch.cuda.device_count():
        raise ValueError(
            f"--device cuda needs a GPU for each of {max(1, num_ranks)} ranks, this machine has {torch.cuda.device_count()}; "
            "give --num-ranks, or --device cpu"
        )
