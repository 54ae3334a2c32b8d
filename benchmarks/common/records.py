"""The records that benchmarks write: times, settings, hardware, versions and the command."""

import ctypes
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import deepep_moe
from deepep_moe.tune.records import commit, cpu_name

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The dtypes of options `--dtype`."""
SETTINGS = ("backend", "num_ranks", "num_tokens", "hidden", "num_topk", "num_experts", "dtype", "layout")


def hardware_of(device: torch.device, num_ranks: int) -> str:
    """Return what ranks run on: GPUs with their software, and the CPU."""
    if device.type == "cpu":
        return cpu_name()
    return f"{num_ranks} x {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, NCCL {_nccl_version()}; {cpu_name()}"


def _nccl_version() -> str:
    """Return the version of the NCCL that is loaded. `torch.cuda.nccl.version()` gives that of PyTorch's build."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW).ncclGetVersion(ctypes.byref(number))
    except OSError:  # it is not loaded by that name, such as where PyTorch has it in itself
        return ".".join(map(str, torch.cuda.nccl.version()))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def spread(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the 10th and 90th percentiles."""
    ordered = sorted(times)
    return statistics.median(ordered), ordered[len(ordered) // 10], ordered[len(ordered) * 9 // 10]


def record(
    op: str, settings: dict[str, Any], times: Sequence[float], bytes_moved: int, *, baseline: str | None, baseline_times: Sequence[float],
    **extra: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return one measurement in the form that all benchmarks of the project share.

    Times are microseconds. `gbps` is bytes_moved, the bytes of one rank, over the median. `rival` is the baseline and `ratio` is
    rival_us / us_median: how many times faster than the baseline the call is, or None without times of a baseline. Settings that do not
    apply are None. `extra` may name other `hardware` than the CPU.
    """
    (median, p10, p90), baseline_us = spread(times), statistics.median(baseline_times) if baseline_times else None
    return {
        "op": op,
        **{name: settings.get(name) for name in SETTINGS},
        "us_median": median,
        "us_p10": p10,
        "us_p90": p90,
        "bytes_moved": bytes_moved,
        "gbps": bytes_moved / median / 1e3,
        "rival": baseline,
        "rival_us": baseline_us,
        "ratio": None if baseline_us is None else baseline_us / median,
        "hardware": cpu_name(),
        **extra,
        "versions": {
            "deepep_moe": deepep_moe.__version__,
            "commit": commit(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "command": command_line(),
    }


def command_line() -> str:
    """Return the command that repeats this measurement, without the file that results went to."""
    pairs = zip(["", *sys.argv[1:]], sys.argv[1:], strict=False)
    kept = [argument for before, argument in pairs if before != "--json" and argument.split("=")[0] != "--json"]
    return f"python benchmarks/run.py {shlex.join(kept)}".rstrip()


def write_json(path: Path | None, records: list[dict[str, Any]]) -> None:
    """Write the records to `path`, if one was given, a line for each."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")  # a line for each record
        print(f"wrote {len(records)} records to {path}")
