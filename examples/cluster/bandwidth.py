"""Times of dispatch and combine on all ranks, beside what a plain copy to the next node reaches."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from ranks import Rank, block
from torch import Tensor

from deepep_moe import Buffer
from deepep_moe.ops import gate, nodes_per_token, quantize_fp8

WARMUP = 3
_COPY_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}


@dataclass(frozen=True)
class Inputs:
    """One rank's tokens, and how many rows of them cross between nodes."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    nodes_per_token: float
    network_rows: int


def make_inputs(r: Rank, buffer: Buffer) -> Inputs:
    """Let the gate choose: every node is a group, of which a token may choose `--topk-groups`."""
    o, per_node = r.options, buffer.ranks_per_node
    num_nodes = r.num_ranks // per_node
    generator = torch.Generator().manual_seed(r.rank)
    groups = {"num_groups": num_nodes, "topk_groups": min(o.topk_groups, num_nodes)}
    choice = gate(torch.randn(o.num_tokens, buffer.num_experts, generator=generator), o.num_topk, **groups)
    nodes = nodes_per_token(choice.topk_idx, buffer.num_experts, num_nodes)
    has_own_node = (choice.topk_idx // (buffer.num_experts // num_nodes) == r.rank // per_node).any(1)
    x = torch.randn(o.num_tokens, o.hidden, generator=generator).to(torch.bfloat16)
    tensors = (tensor.to(r.device) for tensor in (x, choice.topk_idx, choice.topk_weights))
    return Inputs(*tensors, float(nodes.double().mean()), int(nodes.sum() - has_own_node.sum()))


def time_us(r: Rank, call: Callable[[], object]) -> float:
    """Return the median time of `call` on the slowest rank, from a barrier to the end on the device. Collective."""
    times = []
    for _ in range(WARMUP + r.options.iterations):
        _synchronize(r)
        dist.barrier(device_ids=[r.device.index] if r.device.type == "cuda" else None)
        _synchronize(r)
        begin = time.perf_counter()
        result = call()
        _synchronize(r)
        times.append((time.perf_counter() - begin) * 1e6)
        del result
    slowest = torch.tensor(times[WARMUP:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def _synchronize(r: Rank) -> None:
    if r.device.type == "cuda":
        torch.cuda.synchronize(r.device)


def copy_gbps(r: Rank, per_node: int) -> float:
    """Return the rate at which all ranks send to the rank of their index on the next node at once. Collective."""
    sent = torch.zeros(_COPY_BYTES[r.device.type], dtype=torch.uint8, device=r.device)
    landed = torch.empty_like(sent)
    after, before = (r.rank + per_node) % r.num_ranks, (r.rank - per_node) % r.num_ranks

    def copy() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, landed, before)]):
            work.wait()

    return sent.numel() / time_us(r, copy) / 1e3


def calls(r: Rank, buffer: Buffer, inputs: Inputs) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the timed calls by name, each with the bytes of a row. Collective."""
    hidden = r.options.hidden
    out = buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, layout="expert")
    x_fp8, x_scales = quantize_fp8(inputs.x)
    fp8 = {"x_scales": x_scales, "layout": "expert"}
    return {
        "dispatch fp8": (lambda: buffer.dispatch(x_fp8, inputs.topk_idx, inputs.topk_weights, **fp8), hidden + 4 * x_scales.shape[1]),
        "dispatch bf16": (lambda: buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, layout="expert"), 2 * hidden),
        "combine bf16": (lambda: buffer.combine(out.recv_x, out.handle, out.recv_topk_weights), 2 * hidden),
    }


def run(r: Rank) -> bool:
    """Time all calls and print a block on rank 0. Collective."""
    o = r.options
    num_experts = r.num_ranks * max(1, 256 // r.num_ranks)
    buffer = r.new_buffer(o.num_tokens, o.hidden, num_experts, o.num_topk)
    inputs = make_inputs(r, buffer)
    rows = max(r.gather(inputs.network_rows))
    size = f"{o.num_tokens} tokens a rank, hidden {o.hidden}, top-{o.num_topk} of {num_experts} experts"
    per_token = statistics.mean(r.gather(inputs.nodes_per_token))
    lines = [r.shape(buffer), f"{size}, {per_token:.2f} nodes per token", ""]
    if r.num_ranks > buffer.ranks_per_node:
        lines += [f"plain copy to the next node, all ranks at once: {copy_gbps(r, buffer.ranks_per_node):.2f} GB/s a rank", ""]
    lines += ["| call | us | MB between nodes ¹ | GB/s |", "|---|---|---|---|"]
    for name, (call, row_bytes) in calls(r, buffer, inputs).items():
        us, network = time_us(r, call), rows * row_bytes
        lines.append(f"| {name} | {us:.0f} | {network / 1e6:.2f} | {network / us / 1e3:.2f} |")
    lines += [
        "",
        "¹ of the rank that sends most in a dispatch: a row for each (token, remote node). Times: median, slowest rank, host included.",
    ]
    buffer.destroy()
    if r.rank == 0:
        print(block("deepep_moe: bandwidth", lines), flush=True)
    return True
