"""Benchmark of the gate against the same computation in PyTorch operators; on a GPU also against the routers of Megatron-Core and
Transformer Engine where they are installed. On a GPU its kernels are timed alone, and its calls with the host's part.

Scores are sigmoids with a bias, as in DeepSeek-V3.
"""

import argparse
import importlib
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common.records import record, write_json
from benchmarks.common.report import number, show_table, spread_of
from benchmarks.common.timing import kernel_us, wall_us
from deepep_moe import config, ops
from deepep_moe.errors import BackendUnavailableError

SCALING = 2.5


class Shape(NamedTuple):
    """The sizes of one measurement, with the names of `deepep_moe.ops.gate`."""

    num_tokens: int
    num_experts: int
    num_topk: int
    num_groups: int
    topk_groups: int


Gate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits, expert_bias) -> (differentiable weights, indices or map): `[num_tokens, num_topk]`, or `[num_tokens, num_experts]` if dense."""


def ours(shape: Shape, dense: bool) -> Gate:
    options: dict[str, Any] = {"num_groups": shape.num_groups, "topk_groups": shape.topk_groups, "routed_scaling_factor": SCALING}

    def gate(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        if not dense:
            output = ops.gate(logits, shape.num_topk, expert_bias=bias, **options)
            return output.topk_weights, output.topk_idx
        full = ops.gate_full(logits, shape.num_topk, dense=True, expert_bias=bias, **options)
        return full.probs, full.routing_map  # type: ignore[return-value]

    return gate


# ---- baselines ----


def operators(shape: Shape, dense: bool) -> Gate:
    """Return what training frameworks do with PyTorch operators in fp32. Experts are counted too, as `ops.gate` does."""
    group_size = shape.num_experts // shape.num_groups

    def gate(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.float().sigmoid()
        selection = scores + bias
        if shape.topk_groups < shape.num_groups:
            group_scores = selection.view(len(logits), shape.num_groups, -1).topk(2, dim=2).values.sum(dim=2)
            chosen = group_scores.topk(shape.topk_groups, dim=1, sorted=False).indices
            excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, chosen, False)
            selection = selection.masked_fill(excluded.repeat_interleave(group_size, dim=1), -torch.inf)
        topk_idx = selection.topk(shape.num_topk, dim=1).indices
        topk_weights = scores.gather(1, topk_idx)
        topk_weights = topk_weights / (topk_weights.sum(dim=1, keepdim=True) + 1e-20) * SCALING
        torch.bincount(topk_idx.view(-1), minlength=shape.num_experts)
        if not dense:
            return topk_weights, topk_idx
        probs = torch.zeros_like(logits, dtype=topk_weights.dtype).scatter(1, topk_idx, topk_weights)
        return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, topk_idx, True)

    return gate


def _foreign(module: str, function: str, shape: Shape, dense: bool) -> Gate:
    """Return a router of another library. Both libraries take the same arguments and return the dense pair; lanes are picked from it.

    Raises BackendUnavailableError where the library cannot be imported.
    """
    try:
        route = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, OSError) as error:  # OSError: a library that the package links is missing
        raise BackendUnavailableError(f"{type(error).__name__}: {error}") from error
    groups = (shape.num_groups, shape.topk_groups) if shape.topk_groups < shape.num_groups else (None, None)

    def gate(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        probs, routing_map = route(
            logits, topk=shape.num_topk, use_pre_softmax=False, num_groups=groups[0], group_topk=groups[1], scaling_factor=SCALING,
            score_function="sigmoid", expert_bias=bias,
        )  # fmt: skip
        return (probs, routing_map) if dense else probs.topk(shape.num_topk, dim=1)

    return gate


transformer_engine = partial(_foreign, "transformer_engine.pytorch.router", "fused_topk_with_score_function")
"""Transformer Engine's fused router."""
BASELINES: dict[str, Callable[[Shape, bool], Gate]] = {
    "torch operators": operators,
    "Megatron-Core": partial(_foreign, "megatron.core.transformer.moe.moe_utils", "topk_routing_with_score_function"),
    "Transformer Engine": transformer_engine,
}
ON_CPU = {"torch operators": operators}


# ---- times ----

Times = tuple[list[float], float | None]


def times_on_gpu(call: Callable[[], Any], repeats: int) -> Times:
    """Return the times of the kernels, and the median wall time in microseconds from an idle GPU until the result is there."""

    def to_its_end() -> None:
        call()
        torch.cuda.synchronize()

    return kernel_us(call, repeats), statistics.median(wall_us(to_its_end, repeats, before=torch.cuda.synchronize))


def calls(gate: Gate, logits: Tensor, bias: Tensor, dense: bool) -> dict[str, Callable[[], Any]]:
    """Return the calls that are timed, by the name of the operation."""
    suffix, leaf = " dense" if dense else "", logits.detach().requires_grad_()
    weights = gate(leaf, bias)[0]
    grad = torch.randn_like(weights)
    return {
        f"gate{suffix}": lambda: gate(logits, bias),
        f"gate_backward{suffix}": lambda: torch.autograd.grad(weights, leaf, grad, retain_graph=True),
    }


def _bytes(op: str, logits: Tensor, num_topk: int) -> int:
    """Return the bytes of each input and output, counted once."""
    lanes, pair = len(logits) * num_topk * (8 + 4), logits.numel() * (4 + 1)
    if op.startswith("gate_backward"):
        return logits.nbytes + lanes  # it reads only the logits of the lanes
    return logits.nbytes + lanes + (pair if op.endswith("dense") else 0)


def run(shape: Shape, repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Return one record for each operation and baseline: on a GPU kernel times, and `us_called`, `rival_us_called` with the host's part.

    Operations: gate, gate_backward; "dense" with the pair of weights and map of all experts instead of lanes alone. On the CPU, whose
    threads are those that `DEEPEP_MOE_NUM_THREADS` allows, the baseline is that of PyTorch operators.
    """
    on_gpu = device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(config.num_threads())
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape.num_tokens, shape.num_experts, generator=generator).to(device)
    bias = (torch.randn(shape.num_experts, generator=generator) * 0.1).to(device)
    settings = {"backend": device.type, "num_ranks": 1, "dtype": "float32", **shape._asdict()}
    extra: dict[str, Any] = {"num_groups": shape.num_groups, "topk_groups": shape.topk_groups}
    extra |= {"hardware": torch.cuda.get_device_name(device)} if on_gpu else {"num_threads": config.num_threads()}
    time = times_on_gpu if on_gpu else lambda call, repeats: (wall_us(call, repeats), None)

    def times_of(make: Callable[[Shape, bool], Gate]) -> dict[str, Times]:
        of_both = [calls(make(shape, dense), logits, bias, dense) for dense in (False, True)]
        return {op: time(call, repeats) for of_one in of_both for op, call in of_one.items()}

    records, times = [], times_of(ours)
    for baseline, make in (BASELINES if on_gpu else ON_CPU).items():
        try:
            baseline_times = times_of(make)
        except BackendUnavailableError as error:
            print(f"not measured: {baseline} ({error})", file=sys.stderr, flush=True)
            continue
        for op, (kernel, called) in times.items():
            theirs, rival_called = baseline_times[op]
            how: dict[str, Any] = {"baseline_times": theirs, "us_called": called, "rival_us_called": rival_called}
            records.append(record(op, settings, kernel, _bytes(op, logits, shape.num_topk), baseline=baseline, **how, **extra))
    return records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = [("num-tokens", 4096), ("num-experts", 256), ("num-topk", 8), ("num-groups", 8), ("topk-groups", 4), ("repeats", 50)]
    for name, default in defaults:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")


def main(options: argparse.Namespace) -> None:
    """Print a line for each record and write all records to `--json`."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("the gate's kernels need a GPU, which PyTorch does not see here; use --device cpu")
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    shape = Shape(*(getattr(options, name) for name in Shape._fields))
    records = run(shape, options.repeats, device)
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
