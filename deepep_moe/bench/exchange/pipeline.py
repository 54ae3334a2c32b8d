"""Benchmark of both hops of the backend `nvshmem`, on GPUs that ranks share: does the hop within the node run beside the one between?

Ranks are processes of this host, nodes are virtual. What leaves a node is paced: a put leaves when a network card of `--rate` GB/s would
have taken it and those before, divided by the ranks that share a GPU. A perfect pipeline takes as long as its slower hop. That is the
larger of the bytes that cross at their rate, and of the same call by the backend `nvlink` among all ranks, which is not paced. "ratio" is
the call's time over it. The exchange without pace stands beside.

The kernels of several processes run side by side under MPS only (`nvidia-cuda-mps-control -d`, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE); without
it they take turns, and no ratio says anything.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from deepep_moe import Buffer
from deepep_moe.bench.common.records import record, write_json
from deepep_moe.bench.common.timing import WARMUP, from_one_moment, slowest
from deepep_moe.bench.common.workload import Inputs, Shape, make_inputs
from deepep_moe.testing import run_ranks

_TIMEOUT_S = 30.0  # of a call; ranks that cannot run side by side wait for each other that long


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default in [("num-ranks", 4), ("ranks-per-node", 2), ("num-tokens", 4096), ("hidden", 7168), ("num-experts", 256)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--num-topk", type=int, default=8)
    parser.add_argument("--rate", type=float, default=50.0, help="GB/s of a network card; ranks of one GPU share it")
    parser.add_argument("--num-rail-sms", type=int, default=4, help="SMs of a rank that send to other nodes")
    parser.add_argument("--num-sms", type=int, default=None, help="SMs of a rank that send within the node")
    parser.add_argument("--repeats", type=int, default=15)


def main(options: argparse.Namespace) -> None:
    """Print one line per call and write all records to `--json`."""
    if not torch.cuda.is_available():
        raise SystemExit("both hops are kernels of a GPU, which PyTorch does not see here")
    records: list[dict[str, Any]] = run_ranks(measure, options.num_ranks, options, timeout_s=300, bind=options.bind)[0]
    for r in records:
        print(
            f"{r['op']:16} {r['us_median']:8.0f} us at {r['rate_gbps']:.1f} GB/s a rank, {r['pipeline_ratio']:.3f} x its slower hop (bytes "
            f"at that rate {r['rival_us']:.0f} us, nvlink {r['nvlink_us']:.0f} us); not paced {r['unpaced_us']:.0f} us; {r['hardware']}"
        )
    write_json(options.json, records)


def measure(rank: int, num_ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for dispatch and one for combine, of the slowest rank."""
    num_gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % num_gpus)
    device = torch.device("cuda", rank % num_gpus)
    shape = Shape(num_ranks, options.hidden, options.num_experts, options.num_topk, 1, options.ranks_per_node)
    inputs = make_inputs(shape, options.num_tokens, rank, device)
    rate = options.rate / -(-num_ranks // num_gpus)
    sizes = options.num_tokens, options.hidden, options.num_experts, options.num_topk
    alone = Buffer(None, *sizes, backend="nvlink", num_sms=options.num_sms, timeout_s=_TIMEOUT_S)
    nvlink_us = {op: _timed(call, options.repeats) for op, call in _calls(alone, inputs).items()}
    alone.destroy()
    nodes: dict[str, Any] = {"backend": "nvshmem", "ranks_per_node": options.ranks_per_node}
    buffer = Buffer(None, *sizes, num_sms=options.num_sms, timeout_s=_TIMEOUT_S, **nodes)
    tuning: Any = buffer.calls.backend.tuning  # type: ignore[attr-defined]
    tuning.num_rail_sms = options.num_rail_sms
    unpaced_us = {op: _timed(call, options.repeats) for op, call in _calls(buffer, inputs).items()}
    tuning.rail_gbps = rate
    num_bytes = _crossing_bytes(inputs, shape, rank)
    settings = {"backend": "nvshmem", "num_ranks": num_ranks, "dtype": "bfloat16", "layout": "rank"}
    settings |= {name: getattr(options, name) for name in ("num_tokens", "hidden", "num_topk", "num_experts")}
    records = []
    for op, call in _calls(buffer, inputs).items():
        times, at_rate = _timed(call, options.repeats), num_bytes / rate / 1e3
        slower_us = max(at_rate, statistics.median(nvlink_us[op]))
        more = {"ranks_per_node": options.ranks_per_node, "rate_gbps": rate, "pipeline_ratio": statistics.median(times) / slower_us}
        more |= {"nvlink_us": statistics.median(nvlink_us[op]), "unpaced_us": statistics.median(unpaced_us[op])}
        more |= {"num_rail_sms": options.num_rail_sms, "sms_of_a_rank": torch.cuda.get_device_properties(device).multi_processor_count}
        more["hardware"] = f"{num_ranks} ranks on {min(num_gpus, num_ranks)} x {torch.cuda.get_device_name(device)}"
        records.append(record(f"{op} paced", settings, times, num_bytes, baseline="bytes at the rate", baseline_times=[at_rate], **more))
    buffer.destroy()
    return records


def _calls(buffer: Buffer, inputs: Inputs) -> dict[str, Callable[[], Any]]:
    """Dispatch and combine of the rank layout. Collective: the combine needs the results of a dispatch."""
    dispatch = partial(buffer.dispatch, inputs.x, inputs.topk_idx, inputs.topk_weights, layout="rank")
    out = dispatch()
    return {"dispatch": dispatch, "combine": partial(buffer.combine, out.recv_x, out.handle)}


def _crossing_bytes(inputs: Inputs, shape: Shape, rank: int) -> int:
    """Return the bytes of rows that the busiest rank sends to other nodes."""
    assert shape.ranks_per_node is not None
    node = inputs.topk_idx // (shape.num_local_experts * shape.ranks_per_node)
    num_nodes = shape.num_ranks // shape.ranks_per_node
    others = sum(int((node == other).any(1).sum()) for other in range(num_nodes) if other != rank // shape.ranks_per_node)
    return int(slowest([float(others * shape.hidden * 2)])[0])


def _timed(call: Callable[[], Any], repeats: int) -> list[float]:
    """Return the times of the slowest rank, microseconds, from a moment at which the streams of all ranks reach the call."""
    return slowest([from_one_moment(call)[0] for _ in range(WARMUP + repeats)][WARMUP:])
