"""Benchmark of DeepSpeed's MoE layer, forward and backward, with packed tokens through deepep_moe and with its own padded slots.

All kinds take turns in one run, on the same inputs, gate and experts:

- `exchange` is the layer with experts that cost nothing (rows return as they came). It includes the gate, the encoding, both all-to-alls
  and the decoding. `communication` is the same with routing that was computed before. `layer` has experts of two matrices.
- `exact` and `fast` are the modes of deepep_moe (see replace_moe_layers). `grouped` is the fast one with `grouped_experts`. `deepspeed` is
  the layer's own forward.

Results are compared first. Times are of the slowest rank, for one of `--num-layers` layers. These run forward one after another and then
backward, as in a model, so that the backward's thread is woken only once. On GPUs the time of the kernels alone comes from profiled runs.

The defaults on the CPU are 2 ranks, 4096 tokens, hidden 1024, top-2 of 16 experts, fp32 and bf16, a layer at a time. On GPUs they are all
GPUs, hidden 4096, top-2 and top-8 of 64 experts, bf16, 4 layers at a time.
"""

import argparse
import itertools
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.link import rows_to_others
from benchmarks.common.records import DTYPES, hardware_of, write_json
from benchmarks.layers import harness
from benchmarks.layers.megatron_steps import kernel_us, peak_bytes
from benchmarks.layers.passes import Key, MeasuredLayer, Pass, beyond, differences, draw_inputs, versions_of
from deepep_moe.ops.routing import is_token_in_rank
from deepep_moe.testing import run_ranks

DEEPSPEED = "deepspeed"
CAPACITY_FACTOR = 1.25  # of the gates: what exceeds it is dropped
LIMIT_S = 1800
"""Seconds that a shape may take."""
_WARMUP = 3
_PROFILED = 5  # runs that are profiled
_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"hidden": 1024, "ffn_hidden": 512, "num_experts": 16, "num_topk": [2], "dtype": ["fp32", "bf16"], "num_layers": 1},
    "cuda": {"hidden": 4096, "ffn_hidden": 2048, "num_experts": 64, "num_topk": [2, 8], "dtype": ["bf16"], "num_layers": 4},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = {"num_tokens": 4096, "hidden": None, "ffn_hidden": None, "num_experts": None, "num_layers": None, "repeats": 20}
    harness.add_arguments(parser, "all GPUs, on the CPU 2", **sizes)
    parser.add_argument("--num-topk", type=int, nargs="+")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), nargs="+")


def compare(passes: Mapping[Key, Pass]) -> dict[Key, dict[str, float]]:
    """Return the largest difference of each mode from DeepSpeed's results, by kind of result."""
    expected = {what: timed.results() for (what, kind), timed in passes.items() if kind == DEEPSPEED}
    compared = {(what, kind): timed for (what, kind), timed in passes.items() if kind != DEEPSPEED}
    return {(what, mode): differences(timed.results(), expected[what]) for (what, mode), timed in compared.items()}


def link_bytes(topk_idx: Tensor, num_local_experts: int, row_bytes: int) -> dict[str, int]:
    """Return the bytes of a dispatch of topk_idx [num_tokens, num_topk] over the link, by mode.

    Exact mode sends a row for each remote expert of a token, the others one for each remote rank.
    """
    elsewhere = (topk_idx >= 0) & (topk_idx // num_local_experts != dist.get_rank())
    fast = rows_to_others(is_token_in_rank(topk_idx, dist.get_world_size(), num_local_experts)) * row_bytes
    return {"exact": int(elsewhere.sum()) * row_bytes, "fast": fast, "grouped": fast}


def measure(rank: int, num_ranks: int, options: argparse.Namespace) -> MeasuredLayer:
    """Do the work of one rank for one top-k and dtype: build layers, compare results, and time them in turns."""
    from deepspeed_ranks import engine_ready

    from benchmarks.layers.deepspeed_layers import make_passes
    from deepep_moe.integrations.common.registry import all_buffers, destroy_all

    with engine_ready(options.device) as device:
        dtype = DTYPES[options.dtype]
        x, cotangent = draw_inputs(rank, (options.num_tokens, options.hidden), device, dtype)
        settings = {name: getattr(options, name) for name in ("hidden", "num_experts", "num_topk", "backend")}
        settings |= {"ep": num_ranks, "num_max_tokens_per_rank": options.num_tokens, "device": device, "dtype": dtype}
        torch.manual_seed(1)
        passes, topk_idx = make_passes(x, cotangent, options.ffn_hidden, settings | {"capacity_factor": CAPACITY_FACTOR})
        differences = compare(passes)
        for what, mode in differences:
            if what == "exchange":
                del differences[what, mode]["gate"]  # as all experts are the same, its gradient is only rounding
        sent = link_bytes(topk_idx, options.num_experts // num_ranks, options.hidden * x.element_size())
        hardware, versions = hardware_of(device, num_ranks), versions_of("deepspeed")
        buffer = all_buffers()[0]
        measured = MeasuredLayer(buffer.backend, hardware, versions, sent, differences)
        if device.type == "cuda":
            measured.peak_bytes = {key: peak_bytes(timed) for key, timed in passes.items() if key[0] == "layer"}
            measured.workspace_bytes = buffer.memory().held
        for timed in passes.values():
            timed.num_layers = options.num_layers
        measured.times = harness.in_turns(passes, harness.timer_of(device, options.num_layers), _WARMUP, options.repeats)
        if device.type == "cuda":
            torch.cuda.synchronize()
            dist.barrier()
            measured.kernel_us = {key: _kernel_us(timed) for key, timed in passes.items()}
        destroy_all()
        return measured


def _kernel_us(timed: Any) -> float:
    """Return the time of the kernels of one layer, the shortest of some runs, as kernels that wait for a late peer take longer."""
    runs = []
    for _ in range(_PROFILED):
        dist.barrier()
        runs.append(kernel_us(timed, 1) / timed.num_layers)
    return min(runs)


# ---- report ----


TOLERANCE = {"fp32": 1e-4, "bf16": 6e-2}
"""How much results may differ, relative to the largest entry, which is far less than the effect of a wrong row. DeepSpeed pads the rows of
the experts' matrix products, which regroups their sums. Gradients of the gate are differences of such sums."""


def records_of(ranks: list[MeasuredLayer], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a record per thing timed and mode."""
    first, records = ranks[0], []
    dtype = str(DTYPES[options.dtype]).removeprefix("torch.")
    for (what, mode), kinds in first.differences.items():
        extra: dict[str, Any] = {"capacity_factor": CAPACITY_FACTOR, "num_layers": options.num_layers}
        extra["workspace_bytes"] = first.workspace_bytes if mode == "exact" else None  # each mode has a buffer of its own
        extra |= {"ffn_hidden": options.ffn_hidden if what == "layer" else None, "differences": kinds}
        if first.kernel_us:
            fewest = (min(rank.kernel_us[what, kind] for rank in ranks) for kind in (mode, DEEPSPEED))  # of the rank that waits least
            extra["us_kernels"], extra["rival_us_kernels"] = fewest
        num_bytes = 4 * max(rank.link_bytes[mode] for rank in ranks)
        op = f"deepspeed {what} {mode} top-{options.num_topk} {options.dtype} forward+backward"
        records.append(harness.record(ranks, options, op, dtype, (what, mode), (what, DEEPSPEED), num_bytes, **extra))
    return records


def resolve(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the machine. Raises ValueError for options that do not fit."""
    harness.resolve(options, _DEFAULTS[options.device])


def main(options: argparse.Namespace) -> None:
    """Print a table per shape, and write the records to `--json`, as soon as a shape is measured. Exit with 1 if results disagree."""
    records: list[dict[str, Any]] = []
    wrong: list[str] = []
    for num_topk, dtype in itertools.product(options.num_topk, options.dtype):
        one = argparse.Namespace(**vars(options) | {"num_topk": num_topk, "dtype": dtype})
        ranks = run_ranks(measure, options.num_ranks, one, timeout_s=LIMIT_S, bind=options.bind)
        new_records = records_of(ranks, one)
        more = f"; {dtype}, capacity factor {CAPACITY_FACTOR:g}, layers at a time: {options.num_layers}"
        harness.show(ranks, new_records, one, more)
        records += new_records
        most = TOLERANCE[dtype]
        wrong += [f"top-{num_topk} {dtype}, {line}, more than rounding ({most:.1e})" for line in beyond(ranks, most)]
        write_json(options.json, records)
    if wrong:
        sys.exit("; ".join(wrong))
