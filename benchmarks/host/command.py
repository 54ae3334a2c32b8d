"""Benchmark of the host's time in calls on one GPU: dispatch and combine with their backward, calls without gradient, the gate,
low-latency calls. Beside each stands the time of the smallest PyTorch operator on this host; beside the gate Transformer Engine's
router, beside DeepEP's calls on this library its own."""

import argparse
from typing import Any

import torch

from benchmarks import gate
from benchmarks.common.records import record, write_json
from benchmarks.common.report import number, show_table, spread_of
from benchmarks.host import drop_in, measure
from deepep_moe.errors import BackendUnavailableError

SMALLEST = "PyTorch operator (add of one element)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default in [("num-tokens", 128), ("hidden", 7168), ("num-experts", 32), ("num-topk", 8), ("repeats", 100)]:
        parser.add_argument(f"--{name}", type=int, default=default)


def main(options: argparse.Namespace) -> None:
    """Print one line per record and write all records to `--json`."""
    if not torch.cuda.is_available():
        raise SystemExit("the host's time is that of calls on a GPU, which PyTorch does not see here")
    shape = measure.Shape(*(getattr(options, name) for name in measure.Shape._fields))
    records = run(shape, options.repeats)
    columns = {"call": lambda r: r["op"], "us": number("us_median"), "p10-p90": spread_of, "baseline us": number("rival_us")}
    show_table(columns | {"baseline": lambda r: r["rival"]}, records)
    print(f"{records[0]['num_tokens']} tokens; {records[0]['hardware']}")
    write_json(options.json, records)


def run(shape: measure.Shape, repeats: int) -> list[dict[str, Any]]:
    """One record for each operation and baseline. Times are the host's, per call; no bytes are counted."""
    settings = {"backend": "nvlink", "num_ranks": 1, "dtype": "bfloat16", "layout": "expert", **shape._asdict()}
    records: list[dict[str, Any]] = []

    def add(op: str, times: list[float], baseline: str, baseline_times: list[float], **how: str) -> None:
        others: dict[str, Any] = {"baseline": baseline, "baseline_times": baseline_times, "hardware": torch.cuda.get_device_name()}
        records.append(record(op, settings | how, times, 0, **others))

    gate_shape = gate.Shape(shape.num_tokens, shape.num_experts, shape.num_topk, 1, 1)
    gates = {"host gate": False, "host gate dense": True}
    times = measure.exchange_us(shape, repeats) | {"host low-latency": measure.low_latency_us(shape, repeats)}
    times |= {op: measure.gate_us(gate.ours(gate_shape, dense), shape, repeats) for op, dense in gates.items()}
    smallest = measure.empty_operator_us(repeats)
    for op, us in times.items():
        add(op, us, SMALLEST, smallest)
    try:
        for op, dense in gates.items():
            add(op, times[op], "Transformer Engine", measure.gate_us(gate.transformer_engine(gate_shape, dense), shape, repeats))
    except BackendUnavailableError as error:
        print(f"not measured: Transformer Engine's router ({error})")
    for op, (theirs, ours) in drop_in.times(shape, repeats).items():
        add(op, theirs, drop_in.NATIVE, ours, layout=drop_in.layout_of(op))
    return records
