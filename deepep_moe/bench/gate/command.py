"""Benchmark of the gate against the same computation in PyTorch operators; on a GPU also compiled, and against the routers of
Megatron-Core and Transformer Engine where they are installed."""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepep_moe import config, ops
from deepep_moe.bench.common.records import record, time_us, write_json
from deepep_moe.bench.gate import gpu as gate_gpu
from deepep_moe.bench.gate.baselines import Shape, torch_gate


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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--sweep", action="store_true", help="on a GPU: 128 to 32768 tokens, 64 to 512 experts, with and without groups")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")


def main(options: argparse.Namespace) -> None:
    """Prints one line per record and writes all of them to `--json`."""
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
    yield from run(**{name: getattr(options, name) for name in names}, dtype=getattr(torch, options.dtype))


def _run_on_gpu(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = torch.device("cuda", torch.cuda.current_device())
    one = Shape(*(getattr(options, name) for name in Shape._fields))
    for shape in gate_gpu.sweep(options.num_topk) if options.sweep else [one]:
        yield from gate_gpu.run(shape, getattr(torch, options.dtype), options.repeats, device)
