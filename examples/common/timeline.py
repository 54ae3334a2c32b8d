"""Show what a GPU, or the training thread of a CPU, does in a step: what runs side by side, and how much of the exchange is hidden."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
_COLOURS = {"dispatch": "#3b7d4f", "combine": "#9b2d30", "all-to-all": "#7d5fa0", "products": "#1f5fa8", "other": "#b9c0c7"}
_EXCHANGE = ("dispatch", "combine", "all-to-all")
_PRODUCTS = ("gemm", "nvjet", "cutlass", "flash", "fmha", "cudnn")
# Autograd functions and operators of a CPU. The backward of combine is a dispatch, and the other way round.
_ON_CPU = {"_Dispatch": "dispatch", "_CombineBackward": "dispatch", "_Combine": "combine", "_DispatchBackward": "combine"}
_ON_CPU |= dict.fromkeys(("_AllToAll", "_AllToAllBackward"), "all-to-all")
_ON_CPU |= dict.fromkeys(("aten::mm", "aten::bmm", "aten::addmm", "aten::scaled_dot_product_attention"), "products")


@dataclass(frozen=True)
class Kernel:
    """A kernel of this rank's GPU, or an operator on a CPU. Times are in milliseconds from the first one."""

    name: str
    stream: int
    start: float
    end: float

    @property
    def kind(self) -> str:
        """A key of _COLOURS."""
        if self.name in _ON_CPU:
            return _ON_CPU[self.name]
        for word in ("dispatch", "combine"):
            if f"::{word}<" in self.name and "deepep_moe" in self.name:
                return word
        if "ncclDevKernel_SendRecv" in self.name:
            return "all-to-all"
        return "products" if any(word in self.name for word in _PRODUCTS) else "other"

    @property
    def is_exchange(self) -> bool:
        return self.kind in _EXCHANGE


@dataclass(frozen=True)
class Timeline:
    """Steps in a row, seen by PyTorch's profiler."""

    kernels: list[Kernel]
    num_steps: int
    num_waits: int
    """Calls that make the host wait for the GPU, in a forward and backward."""
    device: str = "cuda"

    @property
    def busy(self) -> float:
        """The part of the time, from the first kernel to the last, in which some kernel runs."""
        return _length(_union(self.kernels)) / max(kernel.end for kernel in self.kernels)

    @property
    def exchange_ms(self) -> float:
        """Return the time per step in which at least one kernel of the exchange runs."""
        return _length(_union(kernel for kernel in self.kernels if kernel.is_exchange)) / self.num_steps

    def hidden(self, kinds: Collection[str] = _EXCHANGE) -> float:
        """The part of the exchange, or of these kinds of its kernels, beside which a kernel of something else runs."""
        exchange = _union(kernel for kernel in self.kernels if kernel.kind in kinds)
        others = _union(kernel for kernel in self.kernels if not kernel.is_exchange)
        both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in exchange for b in others)
        return both / _length(exchange) if exchange else 0.0

    def figures(self) -> dict[str, float]:
        if self.device == "cpu":
            return {"exchange_ms": self.exchange_ms}
        figures = {"gpu_busy": self.busy, "exchange_ms": self.exchange_ms, "exchange_hidden": self.hidden(), "host_waits": self.num_waits}
        return figures | {f"{kind}_hidden": self.hidden([kind]) for kind in ("dispatch", "combine")}

    def __str__(self) -> str:
        if self.device == "cpu":
            part = self.exchange_ms * self.num_steps / max(kernel.end for kernel in self.kernels)
            return f"exchange {self.exchange_ms:.2f} ms a step, {part:.0%} of it"
        return (
            f"the GPU is busy {self.busy:.1%} of a step; exchange {self.exchange_ms:.2f} ms a step, {self.hidden():.0%} of it beside other "
            f"kernels; the host waits {self.num_waits} times in forward and backward"
        )


def _union(kernels: Iterable[Kernel]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if merged and kernel.start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], kernel.end)
        else:
            merged.append((kernel.start, kernel.end))
    return merged


def _length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def record_cpu(step: Callable[[], object], num_steps: int = 2) -> Timeline:
    """Run `num_steps` whole steps, and return what the thread that has most to do did. Collective if they are."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(num_steps):
            step()
    by_thread: dict[int, list[Any]] = {}
    for event in _events(profile):
        by_thread.setdefault(event.start_thread_id(), []).append(event)
    events = sorted(max(by_thread.values(), key=len), key=lambda event: event.start_ns())
    begin = events[0].start_ns()
    seen = [Kernel(event.name(), 0, (event.start_ns() - begin) / 1e6, (event.end_ns() - begin) / 1e6) for event in events]
    named: list[Kernel] = []
    for kernel in (kernel for kernel in seen if kernel.name in _ON_CPU):
        if not named or kernel.start >= named[-1].end:  # what it calls itself is inside
            named.append(kernel)
    others = [Kernel("other", 0, *gap) for gap in _without(_union(seen), [(kernel.start, kernel.end) for kernel in named])]
    return Timeline(named + others, num_steps, 0, "cpu")


def _without(intervals: list[tuple[float, float]], holes: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return `intervals` without `holes`, both in order."""
    left = []
    for start, end in intervals:
        for hole in (hole for hole in holes if start <= hole[0] < end):
            left.append((start, hole[0]))
            start = hole[1]
        left.append((start, end))
    return [(start, end) for start, end in left if end > start]


def record(step: Callable[[], object], forward_backward: Callable[[], object], num_steps: int = 2) -> Timeline:
    """Profile one step more than `num_steps` on a GPU, then one forward and backward. Collective if these are.

    The first step is left out: the GPU was idle before it. All steps have the same kernels, so it is the first share of them.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(1 + num_steps):
            step()
        torch.cuda.synchronize()
    events = [event for event in _events(profile) if event.device_type() == torch.autograd.DeviceType.CUDA and _is_kernel(event)]
    events = sorted(events, key=lambda event: event.start_ns())[len(events) // (1 + num_steps) :]
    begin = events[0].start_ns()
    kernels = [
        Kernel(event.name(), event.device_resource_id(), *((at - begin) / 1e6 for at in (event.start_ns(), event.end_ns())))
        for event in events
    ]
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        forward_backward()
    waits = [event.name() for event in _events(profile) if event.name() in _WAITS]
    return Timeline(kernels, num_steps, len(waits))


def _events(profile: torch.profiler.profile) -> list[Any]:
    return profile.profiler.kineto_results.events()


def _is_kernel(event: Any) -> bool:
    """Ranges of the host that PyTorch repeats on the GPU's side are none."""
    return not event.name().startswith(("Optimizer.", "ProfilerStep"))


def plot(timelines: dict[str, Timeline], path: Path) -> None:
    """Draw one step of each run, by its name, with a row for each stream. All rows have the same scale of time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    rows = [(name, stream) for name, seen in timelines.items() for stream in sorted({kernel.stream for kernel in seen.kernels})]
    ends = {name: max(kernel.end for kernel in seen.kernels) / seen.num_steps for name, seen in timelines.items()}
    figure, axes = plt.subplots(figsize=(11, 1.8 + 0.7 * len(rows)), dpi=150, layout="constrained")
    kinds = {kernel.kind for seen in timelines.values() for kernel in seen.kernels}
    colours = {kind: colour for kind, colour in _COLOURS.items() if kind in kinds}
    for row, (name, stream) in enumerate(rows):
        shown = [kernel for kernel in timelines[name].kernels if kernel.stream == stream and kernel.start < ends[name]]
        for kind in reversed(colours):  # the exchange over the others
            bars = [(k.start, min(k.end, ends[name]) - k.start) for k in shown if k.kind == kind]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=colours[kind], linewidth=0)
    labels = [name if timelines[name].device == "cpu" else f"{name}, stream {stream}" for name, stream in rows]
    axes.set(yticks=range(len(rows)), yticklabels=labels, xlim=(0, max(ends.values())), xlabel="time from the start of the step, ms")
    axes.invert_yaxis()
    axes.set_title("\n".join(f"{name}: {seen}" for name, seen in timelines.items()), loc="left", fontsize=9)
    handles = [Patch(color=colour, label=kind) for kind, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path)
    plt.close(figure)
