"""Benchmark of a MoE layer with fp8 experts, router to combine, forward and backward, against bf16 and TransformerEngine.

Ours is `deepep_moe.nn.MoELayer` with `GroupedExperts`, sync-free, in bf16 and in fp8. In fp8 there are two ways: each forward quantizes
the weights; or the first micro-batch of a step quantizes them and the others use its copies (`is_first_microbatch`).

The baseline, if Megatron-Core and TransformerEngine are installed, is Megatron-Core's MoELayer with the blockwise fp8 recipe. It has the
dispatcher `alltoall`, fused permutes and router, and TEGroupedMLP. All take turns in one run, with random routers.

Times are of one forward and backward of the slowest rank: wall time of a chain of them, the host's part, and the sum over kernels.
Gradients are dropped after each pass, so none are accumulated. Nothing is timed if copies change a bit.
"""

import argparse
import contextlib
import importlib.util
from functools import partial
from typing import Any

import torch

from benchmarks.common.records import hardware_of, write_json
from benchmarks.common.workload import SCALE_BLOCK
from benchmarks.layers import fp8_layers, harness, megatron_steps
from benchmarks.layers.fp8_layers import BF16, EACH, SHARED, Layer
from benchmarks.layers.passes import MeasuredLayer, versions_of
from deepep_moe.errors import EPError
from deepep_moe.testing import run_ranks

LAYER = "fp8 layer"
_WARMUP = 2
_MIN_CHAIN = 4  # passes between two looks at the clock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = {"num_tokens": 4096, "hidden": 7168, "ffn_hidden": 2048, "num_topk": 8, "num_experts": 32, "micro_batches": 4, "repeats": 20}
    harness.add_arguments(parser, "1; ranks share the GPUs there are", **sizes)
    parser.set_defaults(device="cuda", num_ranks=1)


resolve = partial(harness.resolve, shares_gpus=True)


# ---- measurement ----


def _why_no_rivals(options: argparse.Namespace, num_ranks: int) -> str:
    """Return why there are no layers of Megatron-Core, or ""."""
    if options.device == "cpu":
        return "TransformerEngine needs a GPU"
    if num_ranks > torch.cuda.device_count():
        return "NCCL needs a GPU for each rank"
    if importlib.util.find_spec("megatron") is None:
        return "Megatron-Core is not installed"
    return "" if megatron_steps.te_version() else "TransformerEngine is not installed"


def measure(rank: int, num_ranks: int, options: argparse.Namespace) -> MeasuredLayer:
    """Do the work of one rank: build layers, compare results, and time them in turns. `link_bytes` of the result are the rows it sends.
    Raises EPError if copies of weights change results.
    """
    why_no_rivals, theirs = _why_no_rivals(options, num_ranks), {}
    with contextlib.ExitStack() as stack:
        if why_no_rivals:
            device, versions = harness.device_of(options), f"{versions_of('torch')}; {why_no_rivals}"
        else:
            from megatron_ranks import model_parallel

            device = stack.enter_context(model_parallel(options.device, ep=num_ranks, seed=1))
            versions = f"{versions_of('megatron-core')}; {megatron_steps.rivals()}"
            theirs = fp8_layers.make_rivals(options, rank, num_ranks, device)
        ours, num_rows = fp8_layers.make_layers(options, rank, num_ranks, device)
        hardware = hardware_of(device, num_ranks)
        measured = MeasuredLayer(ours[BF16].backend, hardware, versions, num_rows, {(LAYER, EACH): _compare(ours)})
        num_passes = options.micro_batches * -(-_MIN_CHAIN // options.micro_batches)  # the same for all: whole optimizer steps
        layers = {(LAYER, name): layer for name, layer in (ours | theirs).items()}
        for key, layer in layers.items() if device.type == "cuda" else ():
            layer.release()
            measured.peak_bytes[key] = megatron_steps.peak_bytes(layer, num_passes)
        time = partial(megatron_steps.time_step, device=device, num_passes=num_passes)
        measured.times = harness.in_turns(layers, time, _WARMUP, options.repeats)
        for key, layer in layers.items() if device.type == "cuda" else ():
            measured.kernel_us[key] = megatron_steps.kernel_us(layer, num_passes)
        return measured


def _compare(layers: dict[str, Layer]) -> dict[str, float]:
    """Return the relative distances (L2) of results in fp8 from those in bf16."""
    exact, each = layers[BF16].results(), layers[EACH].results()
    wrong: set[str] = set()
    for _ in range(3):  # the first one quantizes
        shared = layers[SHARED].results()
        wrong |= {name for name, value in each.items() if not torch.equal(value, shared[name])}
    if wrong:
        raise EPError(f"forwards that share copies of weights do not repeat the bits of those that quantize: {', '.join(sorted(wrong))}")
    return {name: float(torch.dist(value.float(), exact[name].float()) / exact[name].float().norm()) for name, value in each.items()}


# ---- report ----


def records_of(ranks: list[MeasuredLayer], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a record of each layer of ours in fp8 against each baseline: ours in bf16, and TransformerEngine's. Wall times are compared,
    host and kernel times stand beside."""
    bf16_bytes, fp8_bytes = 2 * options.hidden, options.hidden + 4 * -(-options.hidden // SCALE_BLOCK)
    baselines = [name for _, name in ranks[0].times if name not in (EACH, SHARED)]
    records = []
    for name in (EACH, SHARED):
        extra: dict[str, Any] = {"ffn_hidden": options.ffn_hidden, "differences": ranks[0].differences[LAYER, EACH]}
        extra["micro_batches"] = options.micro_batches if name == SHARED else None
        num_bytes = ranks[0].link_bytes * (fp8_bytes + bf16_bytes) * 2
        for baseline in baselines:
            what = f"{LAYER} {name}", "float8_e4m3fn", (LAYER, name), (LAYER, baseline)
            records.append(harness.record(ranks, options, *what, num_bytes, **extra))
    return records


def main(options: argparse.Namespace) -> None:
    """Print tables and write the records to `--json`."""
    ranks = run_ranks(measure, options.num_ranks, options, timeout_s=900, bind=options.bind)
    records = records_of(ranks, options)
    harness.show(ranks, records, options)
    write_json(options.json, records)
