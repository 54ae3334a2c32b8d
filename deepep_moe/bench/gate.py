"""Benchmark of the CPU gate against the same computation in PyTorch operators."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepep_moe import config, ops
from deepep_moe.bench.records import record, time_us, write_json


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

    settings = {
        "backend": "cpu",
        "num_ranks": 1,
        "num_tokens": num_tokens,
        "num_topk": num_topk,
        "num_experts": num_experts,
        "dtype": str(dtype).removeprefix("torch."),
    }
    lanes_bytes = num_tokens * num_topk * (8 + 4)
    forward_times = time_us(ours, repeats), time_us(rival, repeats)
    logits.requires_grad_()
    backward_times = time_us(lambda: backward(ours), repeats), time_us(lambda: backward(rival), repeats)
    records = []
    for op, (times, rival_times), bytes_moved in (
        ("gate", forward_times, logits.nbytes + lanes_bytes),
        ("gate+backward", backward_times, 3 * logits.nbytes + 2 * lanes_bytes),
    ):
        threads = {"num_threads": config.num_threads(), "num_groups": num_groups, "topk_groups": topk_groups}
        records.append(record(op, settings, times, bytes_moved, rival="torch operators", rival_times=rival_times, **threads))
    return records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = [("num-tokens", 4096), ("num-experts", 256), ("num-topk", 8), ("num-groups", 8), ("topk-groups", 4), ("repeats", 50)]
    for name, default in defaults:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")


def main(options: argparse.Namespace) -> None:
    """Prints one line per record and writes all of them to `--json`."""
    names = ("num_tokens", "num_experts", "num_topk", "num_groups", "topk_groups", "repeats")
    records = run(**{name: getattr(options, name) for name in names}, dtype=getattr(torch, options.dtype))
    for r in records:
        print(f"{r['op']:14} {r['us_median']:9.0f} us (p10 {r['us_p10']:.0f}, p90 {r['us_p90']:.0f}), {r['gbps']:.2f} GB/s", end="")
        print(f"; {r['rival']} {r['rival_us']:.0f} us, {r['ratio']:.1f}x; {r['num_threads']} threads, {r['hardware']}")
    write_json(options.json, records)
