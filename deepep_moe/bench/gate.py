"""Benchmark of the CPU gate against the same computation in PyTorch operators: `python -m deepep_moe.bench.gate --help`."""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepep_moe import config, ops


def torch_gate(
    logits: Tensor, num_topk: int, num_groups: int, topk_groups: int, expert_bias: Tensor, routed_scaling_factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The rival: what training frameworks do with PyTorch operators in fp32, with the outputs of `ops.gate`."""
    num_tokens, num_experts = logits.shape
    scores = logits.float().sigmoid()
    selection = scores + expert_bias
    if topk_groups < num_groups:
        group_scores = selection.view(num_tokens, num_groups, -1).topk(2, dim=2).values.sum(dim=2)
        chosen = group_scores.topk(topk_groups, dim=1, sorted=False).indices
        excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, chosen, False)
        selection = selection.masked_fill(excluded.repeat_interleave(num_experts // num_groups, dim=1), -torch.inf)
    topk_idx = selection.topk(num_topk, dim=1).indices
    topk_weights = scores.gather(1, topk_idx)
    topk_weights = topk_weights / (topk_weights.sum(dim=1, keepdim=True) + 1e-20) * routed_scaling_factor
    return topk_idx, topk_weights, torch.bincount(topk_idx.view(-1), minlength=num_experts)


def time_us(run: Callable[[], Any], repeats: int) -> list[float]:
    """Ascending wall times of `repeats` calls in microseconds, after three unmeasured ones."""
    times = []
    for i in range(repeats + 3):
        start = time.perf_counter()
        run()
        if i >= 3:
            times.append((time.perf_counter() - start) * 1e6)
    return sorted(times)


def run(
    num_tokens: int = 4096,
    num_experts: int = 256,
    num_topk: int = 8,
    num_groups: int = 8,
    topk_groups: int = 4,
    *,
    dtype: torch.dtype = torch.float32,
    repeats: int = 50,
) -> list[dict[str, Any]]:
    """Times the forward and the forward with backward of `ops.gate` and of `torch_gate`, sigmoid scores with bias.

    Both use the threads that `DEEPEP_MOE_NUM_THREADS` allows. `bytes_moved` counts each input and output once.

    Returns:
        One record per operation; times in microseconds, `ratio` is the rival's median time over ours.
    """
    torch.set_num_threads(config.num_threads())
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_tokens, num_experts, generator=generator).to(dtype)
    bias = torch.randn(num_experts, generator=generator) * 0.1
    grad = torch.randn(num_tokens, num_topk, generator=generator)

    def ours() -> Tensor:
        return ops.gate(logits, num_topk, num_groups=num_groups, topk_groups=topk_groups, expert_bias=bias, routed_scaling_factor=2.5)[1]

    def rival() -> Tensor:
        return torch_gate(logits, num_topk, num_groups, topk_groups, bias, 2.5)[1]

    def backward(gate: Callable[[], Tensor]) -> None:
        logits.grad = None
        gate().backward(grad)

    settings = {"num_tokens": num_tokens, "num_topk": num_topk, "num_experts": num_experts, "dtype": str(dtype).removeprefix("torch.")}
    lanes_bytes = num_tokens * num_topk * (8 + 4)
    forward_times = time_us(ours, repeats), time_us(rival, repeats)
    logits.requires_grad_()
    backward_times = time_us(lambda: backward(ours), repeats), time_us(lambda: backward(rival), repeats)
    return [
        _record("gate", settings, *forward_times, logits.nbytes + lanes_bytes),
        _record("gate+backward", settings, *backward_times, 3 * logits.nbytes + 2 * lanes_bytes),
    ]


def _record(op: str, settings: dict[str, Any], times: list[float], rival_times: list[float], bytes_moved: int) -> dict[str, Any]:
    median, rival_median = statistics.median(times), statistics.median(rival_times)
    return {
        "op": op,
        "backend": "cpu",
        "num_ranks": 1,
        "hidden": None,
        "layout": None,
        **settings,
        "us_median": median,
        "us_p10": times[len(times) // 10],
        "us_p90": times[len(times) * 9 // 10],
        "bytes_moved": bytes_moved,
        "gbps": bytes_moved / median / 1e3,
        "rival": "torch operators",
        "rival_us": rival_median,
        "ratio": rival_median / median,
        "hardware": f"{platform.machine()} {_cpu_name()}, {config.num_threads()} threads",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "command": f"DEEPEP_MOE_NUM_THREADS={config.num_threads()} python -m deepep_moe.bench.gate {' '.join(sys.argv[1:])}",
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main(argv: list[str] | None = None) -> None:
    """Command line; prints one line per record and writes all of them to `--json`."""
    parser = argparse.ArgumentParser(prog="python -m deepep_moe.bench.gate", description=__doc__)
    for name, default in (
        ("num-tokens", 4096),
        ("num-experts", 256),
        ("num-topk", 8),
        ("num-groups", 8),
        ("topk-groups", 4),
        ("repeats", 50),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--json", type=Path, help="file to write the records to")
    options = vars(parser.parse_args(argv))
    json_file = options.pop("json")
    records = run(**{**options, "dtype": getattr(torch, options["dtype"])})
    for r in records:
        print(f"{r['op']:14} {r['us_median']:9.0f} us (p10 {r['us_p10']:.0f}, p90 {r['us_p90']:.0f}), {r['gbps']:.2f} GB/s", end="")
        print(f"; {r['rival']} {r['rival_us']:.0f} us, {r['ratio']:.1f}x; {r['hardware']}")
    if json_file:
        json_file.write_text(json.dumps(records, indent=2) + "\n")


if __name__ == "__main__":
    main()
