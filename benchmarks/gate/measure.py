"""Benchmark of the gate against the same computation in PyTorch operators; on a GPU also compiled, and against the routers of
Megatron-Core and Transformer Engine where they are installed. On a GPU its kernels are timed alone, and its calls with the host's part.
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as autograd_config
from torch import Tensor

from benchmarks.common.records import record, write_json
from benchmarks.common.report import number, show_table, spread_of
from benchmarks.common.timing import kernel_us, wall_us
from benchmarks.gate import baselines
from benchmarks.gate.baselines import Gate, Shape
from deepep_moe import config
from deepep_moe.errors import BackendUnavailableError

Times = tuple[list[float], float | None]


def times_on_gpu(call: Callable[[], Any], repeats: int) -> Times:
    """Return the times of the kernels, and the median wall time in microseconds from an idle GPU until the result is there."""

    def to_its_end() -> None:
        call()
        torch.cuda.synchronize()

    return kernel_us(call, repeats), statistics.median(wall_us(to_its_end, repeats, before=torch.cuda.synchronize))


def times_on_cpu(call: Callable[[], Any], repeats: int) -> Times:
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

        def times_of(gate: Gate, dense: bool = dense) -> dict[str, Times]:
            return {op: time(call, repeats) for op, call in calls(gate, logits, bias, dense).items()}

        times = times_of(baselines.ours(shape, dense))
        for baseline, make in (baselines.BASELINES if on_gpu else baselines.ON_CPU).items():
            try:
                gate = make(shape, dense)
            except BackendUnavailableError as error:
                _print_once(f"not measured: {baseline} ({error})")
                continue
            baseline_times = times_of(gate)
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = [("num-tokens", 4096), ("num-experts", 256), ("num-topk", 8), ("num-groups", 8), ("topk-groups", 4), ("repeats", 50)]
    for name, default in defaults:
        parser.add_argument(f"--{name}", type=int, default=default)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")


def main(options: argparse.Namespace) -> None:
    """Print a line for each record and write all records to `--json`."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("the gate's kernels need a GPU, which PyTorch does not see here; use --device cpu")
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    shape = Shape(*(getattr(options, name) for name in Shape._fields))
    records = run(shape, getattr(torch, options.dtype), options.repeats, device)
    show_table(_COLUMNS, records)
    print(records[0]["hardware"])
    write_json(options.json, records)


_COLUMNS = {
    "operation": lambda r: r["op"], "tokens": number("num_tokens", 0), "experts": number("num_experts", 0),
    "groups": number("num_groups", 0),
    "us": number("us_median"), "p10-p90": spread_of, "GB/s": number("gbps", 2), "baseline us": number("rival_us"),
    "speed-up": number("ratio", unit="x"), "as called us": number("us_called"), "baseline called": number("rival_us_called"),
    "baseline": lambda r: r["rival"],
}  # fmt: skip
