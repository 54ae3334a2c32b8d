"""Time the gate: on a GPU its kernels alone and its calls with the host's part, on the CPU its calls."""

import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as autograd_config
from torch import Tensor

from benchmarks.common.records import record
from benchmarks.common.timing import kernel_us, wall_us
from benchmarks.gate import baselines
from benchmarks.gate.baselines import Gate, Shape
from deepep_moe import config
from deepep_moe.errors import BackendUnavailableError


def called_us(call: Callable[[], Any], repeats: int) -> float:
    """Return the median wall time in microseconds from an idle GPU until the result is there."""

    def run() -> None:
        call()
        torch.cuda.synchronize()

    return statistics.median(wall_us(run, repeats, before=torch.cuda.synchronize))


def times_on_gpu(call: Callable[[], Any], repeats: int) -> tuple[list[float], float | None]:
    """Return the times of the kernels, and the median with the host's part."""
    return kernel_us(call, repeats), called_us(call, repeats)


def times_on_cpu(call: Callable[[], Any], repeats: int) -> tuple[list[float], float | None]:
    return wall_us(call, repeats), None


def _backward(gate: Gate, logits: Tensor, bias: Tensor) -> Callable[[], Any]:
    leaf = logits.detach().requires_grad_()
    weights = gate(leaf, bias)[0]
    grad = torch.randn_like(weights)
    return lambda: torch.autograd.grad(weights, leaf, grad, retain_graph=True)


def calls(gate: Gate, logits: Tensor, bias: Tensor, dense: bool) -> dict[str, Callable[[], Any]]:
    """Return the calls that are timed, by the name of the operation."""
    suffix = " dense" if dense else ""
    return {f"gate{suffix}": lambda: gate(logits, bias), f"gate_backward{suffix}": _backward(gate, logits, bias)}


def _bytes(op: str, logits: Tensor, num_topk: int) -> int:
    """Return the bytes of each input and output, counted once."""
    lanes, pair = len(logits) * num_topk * (8 + 4), logits.numel() * (4 + 1)
    if op.startswith("gate_backward"):
        return logits.nbytes + lanes  # it reads only the logits of the lanes
    return logits.nbytes + lanes + (pair if op.endswith("dense") else 0)


def run(shape: Shape, dtype: torch.dtype, repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Return one record for each operation and baseline: on a GPU kernel times, and `us_called`, `rival_us_called` with the host's part.

    Operations: gate, gate_backward; "dense" with the pair of weights and map of all experts instead of lanes alone. On the CPU, whose
    threads are those that `DEEPEP_MOE_NUM_THREADS` allows, the baseline is that of PyTorch operators.
    """
    autograd_config.donated_buffer = False  # backwards are run again and again
    on_gpu = device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(config.num_threads())
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape.num_tokens, shape.num_experts, generator=generator).to(device, dtype)
    bias = (torch.randn(shape.num_experts, generator=generator) * 0.1).to(device)
    settings = {"backend": device.type, "num_ranks": 1, "dtype": str(dtype).removeprefix("torch."), **shape._asdict()}
    extra: dict[str, Any] = {"num_groups": shape.num_groups, "topk_groups": shape.topk_groups}
    extra |= {"hardware": torch.cuda.get_device_name(device)} if on_gpu else {"num_threads": config.num_threads()}
    time = times_on_gpu if on_gpu else times_on_cpu
    records = []
    for dense in (False, True):
        times = _times(time, baselines.ours(shape, dense), logits, bias, dense, repeats)
        for baseline, make in (baselines.BASELINES if on_gpu else baselines.ON_CPU).items():
            try:
                gate = make(shape, dense)
            except BackendUnavailableError as error:
                _print_once(f"not measured: {baseline} ({error})")
                continue
            baseline_times = _times(time, gate, logits, bias, dense, repeats)
            for op, (kernel, called) in times.items():
                called_too = {"us_called": called, "rival_us_called": baseline_times[op][1]}
                moved = _bytes(op, logits, shape.num_topk)
                records.append(
                    record(op, settings, kernel, moved, baseline=baseline, baseline_times=baseline_times[op][0], **called_too, **extra)
                )
    return records


@functools.cache
def _print_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _times(
    time: Callable[[Callable[[], Any], int], tuple[list[float], float | None]], gate: Gate, logits: Tensor, bias: Tensor, dense: bool,
    repeats: int,
) -> dict[str, tuple[list[float], float | None]]:  # fmt: skip
    return {op: time(call, repeats) for op, call in calls(gate, logits, bias, dense).items()}
