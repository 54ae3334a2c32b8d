"""Benchmark of the gate against the same computation in PyTorch operators; on a GPU also compiled, and against the routers of
Megatron-Core and Transformer Engine where they are installed."""

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gate import cpu, gpu
from benchmarks.gate.baselines import Shape
from deepep_moe.tune.records import write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = [("num-tokens", 4096), ("num-experts", 256), ("num-topk", 8), ("num-groups", 8), ("topk-groups", 4), ("repeats", 50)]
    for name, default in defaults:
        parser.add_argument(f"--{name}", type=int, default=default)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--sweep", action="store_true", help="on a GPU: 128 to 32768 tokens, 64 to 512 experts, with and without groups")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")


def main(options: argparse.Namespace) -> None:
    """Print one line per record and write all records to `--json`."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("the gate's kernels need a GPU, which PyTorch does not see here; use --device cpu")
    run_all = _run_on_gpu if options.device == "cuda" else _run_on_cpu
    records = []
    for r in run_all(options):
        print(f"{r['op']:19} {r['us_median']:9.1f} us (p10 {r['us_p10']:.1f}, p90 {r['us_p90']:.1f}), {r['gbps']:.2f} GB/s", end="")
        print(f"; {r['rival']} {r['rival_us']:.1f} us, {r['ratio']:.1f}x", end="")
        if "us_called" in r:
            print(f"; as called {r['us_called']:.1f} and {r['rival_us_called']:.1f} us", end="")
        print(f"; {r['num_tokens']} tokens, {r['num_experts']} experts in {r['num_groups']} groups; {r['hardware']}", flush=True)
        records.append(r)
    write_json(options.json, records)


def _run_on_cpu(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    names = ("num_tokens", "num_experts", "num_topk", "num_groups", "topk_groups", "repeats")
    yield from cpu.run(**{name: getattr(options, name) for name in names}, dtype=getattr(torch, options.dtype))


def _run_on_gpu(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = torch.device("cuda", torch.cuda.current_device())
    one = Shape(*(getattr(options, name) for name in Shape._fields))
    for shape in gpu.sweep(options.num_topk) if options.sweep else [one]:
        yield from gpu.run(shape, getattr(torch, options.dtype), options.repeats, device)
