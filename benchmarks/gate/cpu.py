"""Time the gate on the CPU against the same computation in PyTorch operators."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.timing import wall_us
from benchmarks.gate.baselines import torch_gate
from deepep_moe import config, ops
from deepep_moe.tune.records import record


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
    """Time the forward and the forward with backward of `ops.gate` and of `torch_gate`, sigmoid scores with bias.

    Both use the threads that `DEEPEP_MOE_NUM_THREADS` allows. `bytes_moved` counts each input and output once.

    Returns:
        One record per operation; times in microseconds, `ratio` is the baseline's median time over ours.
    """
    torch.set_num_threads(config.num_threads())
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_tokens, num_experts, generator=generator).to(dtype)
    bias = torch.randn(num_experts, generator=generator) * 0.1
    grad = torch.randn(num_tokens, num_topk, generator=generator)

    def ours() -> Tensor:
        return ops.gate(logits, num_topk, num_groups=num_groups, topk_groups=topk_groups, expert_bias=bias, routed_scaling_factor=2.5)[1]

    def baseline() -> Tensor:
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
    forward_times = wall_us(ours, repeats), wall_us(baseline, repeats)
    logits.requires_grad_()
    backward_times = wall_us(lambda: backward(ours), repeats), wall_us(lambda: backward(baseline), repeats)
    records = []
    for op, (times, baseline_times), bytes_moved in (
        ("gate", forward_times, logits.nbytes + lanes_bytes),
        ("gate+backward", backward_times, 3 * logits.nbytes + 2 * lanes_bytes),
    ):
        threads = {"num_threads": config.num_threads(), "num_groups": num_groups, "topk_groups": topk_groups}
        records.append(record(op, settings, times, bytes_moved, baseline="torch operators", baseline_times=baseline_times, **threads))
    return records
