"""Benchmark of the gate against the same computation in PyTorch operators; on a GPU also compiled, and against the routers of
Megatron-Core and Transformer Engine where they are installed."""

import argparse

import torch

from benchmarks.common.records import write_json
from benchmarks.common.report import number, show_table, spread_of
from benchmarks.gate import measure
from benchmarks.gate.baselines import Shape


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
    records = measure.run(shape, getattr(torch, options.dtype), options.repeats, device)
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
