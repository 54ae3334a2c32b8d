"""Benchmark of low-latency calls over nodes: how long kernels hold SMs in each half of a call, where the network's time is not theirs.

Ranks are processes of this host that share its GPUs, nodes are virtual. Kernels post what they would put, and one behind them puts it as
network cards of `--network-gbps` would. With 0 kernels put themselves, which over NVLink is a copy by the warp that puts, and whole calls
are timed as well: kernels that wait leave no room for one that plays a network.

The half that receives is called once all rows have arrived. The ranks take turns to be timed, behind the others, so that a rank neither
waits for one nor shares the GPU's memory with it. "kernel" is the time of a half's kernels by PyTorch's profiler, "wall" that of a whole
call from a moment at which the streams of all ranks reach it, "host" that of the thread that makes it. Times are of the slowest rank of
each round. Dispatch and combine are checked to the bit first.

The kernels of several processes run side by side under MPS only (`nvidia-cuda-mps-control -d`, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE); the
same calls of the backend `nvlink`, all ranks one node, are timed in the same run.
"""

import argparse
import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from deepep_moe import LowLatencyBuffer
from deepep_moe.bench.common.records import record, write_json
from deepep_moe.bench.common.timing import SLEEP_CYCLES, WARMUP, from_one_moment, slowest
from deepep_moe.bench.common.workload import Inputs, Shape, make_inputs
from deepep_moe.bench.low_latency.operations import LowLatencyOperation, operations, verify
from deepep_moe.testing import run_ranks

_TIMEOUT_S = 10.0  # of a call; ranks that cannot run side by side wait for each other that long
_NETWORK = "rail_deliver"  # the kernel that plays it
_MARK = "sin_kernel"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default in [("num-ranks", 4), ("ranks-per-node", 2), ("num-tokens", 128), ("hidden", 7168), ("num-experts", 256)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--num-topk", type=int, default=8)
    parser.add_argument("--network-gbps", type=float, default=50.0, help="GB/s of the network card of a rank; 0: kernels put themselves")
    parser.add_argument("--repeats", type=int, default=30, help="times of each rank")


def main(options: argparse.Namespace) -> None:
    """Print one line per call and half, and write all records to `--json`."""
    if not torch.cuda.is_available():
        raise SystemExit("these calls are kernels of a GPU, which PyTorch does not see here")
    records: list[dict[str, Any]] = run_ranks(measure, options.num_ranks, options, timeout_s=300, bind=options.bind)[0]
    for r in records:
        kernels = " + ".join(f"{name} {us:.1f}" for name, us in r["kernels_us"].items())
        print(f"{r['name']:34} {r['half']:8} {r['us_median']:7.1f} us, host {r['us_host']:6.1f} us  {kernels}")
    print(records[0]["hardware"])
    write_json(options.json, records)


def measure(rank: int, num_ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Records of the calls over nodes, then of those of one node, of the slowest rank."""
    num_gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % num_gpus)
    device = torch.device("cuda", rank % num_gpus)
    hardware = f"{num_ranks} ranks on {min(num_gpus, num_ranks)} x {torch.cuda.get_device_name(device)}"
    records = []
    for backend, per_node in (("nvshmem", options.ranks_per_node), ("nvlink", num_ranks)):
        shape = Shape(num_ranks, options.hidden, options.num_experts, options.num_topk, 1, per_node)
        everyone = [make_inputs(shape, options.num_tokens, source, device) for source in range(num_ranks)]
        sizes = options.num_tokens, options.hidden, options.num_experts, options.num_topk
        buffer = LowLatencyBuffer(None, *sizes, backend=backend, ranks_per_node=per_node, timeout_s=_TIMEOUT_S)
        gate = Gate(rank, num_ranks, device)
        calls = operations(buffer, shape, everyone, rank)
        for operation in calls:
            verify(operation)
        torch.cuda.synchronize()
        buffer.check()
        dist.barrier()
        if backend == "nvshmem" and options.network_gbps > 0:
            backend_of_call: Any = buffer._backend
            backend_of_call._native.play_network(options.network_gbps)
        for operation in calls:
            records += _records(buffer, gate, operation, shape, everyone[rank], options, hardware)
        gate.buffer.destroy()
        buffer.destroy()
    return records


def _records(
    buffer: LowLatencyBuffer,
    gate: "Gate",
    operation: LowLatencyOperation,
    shape: Shape,
    mine: Inputs,
    options: argparse.Namespace,
    hardware: str,
) -> list[dict[str, Any]]:
    backend = buffer.backend
    kernels, spans, host_us = _halves(gate, operation, options.repeats)
    settings = {"backend": backend, "num_ranks": shape.num_ranks, "dtype": operation.dtype, "layout": "expert"}
    settings |= {name: getattr(options, name) for name in ("num_tokens", "hidden", "num_topk", "num_experts")}
    assert shape.ranks_per_node is not None
    nodes = f"{shape.num_ranks // shape.ranks_per_node}x{shape.ranks_per_node}"
    more: dict[str, Any] = {"name": f"low-latency {operation.name}, {backend} {nodes}"}
    more |= {"ranks_per_node": shape.ranks_per_node, "hardware": hardware, "wire": operation.wire}
    more |= {"network_gbps": options.network_gbps if backend == "nvshmem" else None}
    more |= {"sms_of_a_rank": torch.cuda.get_device_properties(mine.x.device).multi_processor_count}
    made = []
    for half, times in kernels.items():
        extra = {
            "half": half,
            "us_host": statistics.median(host_us[half]),
            "kernels_us": {k: statistics.median(v) for k, v in times.items()},
        }
        made.append(record(operation.op, settings, spans[half], 0, baseline=None, baseline_times=[], **more, **extra))
    if options.network_gbps > 0:
        return made
    wall_us, whole_host_us = _whole(operation, options.repeats)
    extra = {"half": "whole", "us_host": statistics.median(whole_host_us), "kernels_us": {}}
    made.append(record(operation.op, settings, wall_us, 0, baseline=None, baseline_times=[], **more, **extra))
    return made


_ByHalf = dict[str, list[float]]


class Gate:
    """What all streams pass within a few microseconds of each other, however far apart their hosts are: a call of one token."""

    def __init__(self, rank: int, num_ranks: int, device: torch.device):
        self.rank, self.num_ranks = rank, num_ranks
        self.buffer = LowLatencyBuffer(None, 1, 128, num_ranks, num_ranks, backend="nvlink", timeout_s=_TIMEOUT_S)
        self._x = torch.zeros(1, 128, dtype=torch.bfloat16, device=device)
        self._everyone = torch.arange(num_ranks, device=device)[None]
        self._mark = torch.zeros(1, device=device)

    def open(self, last: int) -> None:
        """Collective. Rank `last` follows when the others have done what comes next. Returns well before the stream has passed."""
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(SLEEP_CYCLES)
        self.buffer.dispatch(self._x, self._everyone)
        if self.rank == last:
            torch.cuda._sleep(SLEEP_CYCLES // 2)
        self.mark()

    def own(self, of_turns: list[float]) -> list[float]:
        """Return what belongs to turns in which this rank was last."""
        return of_turns[self.rank :: self.num_ranks]

    def mark(self) -> None:
        """Begin or end what is timed, with a kernel of PyTorch."""
        self._mark.sin_()


def _halves(gate: Gate, operation: LowLatencyOperation, repeats: int) -> tuple[dict[str, _ByHalf], _ByHalf, _ByHalf]:
    """Return by half the times of each kernel, from the start of the first to the end of the last, both of the slowest rank of each round,
    and of the host; all microseconds."""
    host_us: dict[str, list[float]] = {"send": [], "receive": []}
    for turn in range(WARMUP):
        operation.check(_in_halves(gate, turn, operation, {"send": [], "receive": []}))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for turn in range(repeats * gate.num_ranks):
            _in_halves(gate, turn, operation, host_us)
    kernels, spans = by_half(profile.events() or ())
    longest = {half: {name: slowest(gate.own(us)) for name, us in of_half.items()} for half, of_half in kernels.items()}
    return longest, {half: slowest(gate.own(us)) for half, us in spans.items()}, host_us


def by_half(events: Iterable[Any]) -> tuple[dict[str, _ByHalf], _ByHalf]:
    """Return by half the times of each of our kernels, and the spans from the start of the first to the end of the last: a kernel may start
    while the one before it still runs. `events`: of the profiler, in which marking kernels begin and end each half; the network's is none
    of it."""
    kernels: dict[str, _ByHalf] = {"send": defaultdict(list), "receive": defaultdict(list)}
    spans: _ByHalf = {"send": [], "receive": []}
    num_marks, begin, end = 0, math.inf, 0.0
    for event in sorted(events, key=lambda event: event.time_range.start):
        half = "send" if num_marks % 4 < 2 else "receive"
        if _MARK in event.name:
            if num_marks % 2 != 0:
                spans[half].append(end - begin)
            num_marks, begin, end = num_marks + 1, math.inf, 0.0
        elif num_marks % 2 != 0 and (name := _short(event.name)) not in ("", _NETWORK):
            kernels[half][name].append(event.time_range.elapsed_us())
            begin, end = min(begin, event.time_range.start), max(end, event.time_range.end)
    return kernels, spans


def _short(name: str) -> str:
    """The name of one of our kernels, of which some have none but their symbol; else nothing."""
    told = re.search(r"(?:::|\d)((?:low_latency|rail)_[a-z]+)(?:<|I|\(|E)", name)
    return told[1] if told else ""


def _in_halves(gate: Gate, turn: int, operation: LowLatencyOperation, host_us: dict[str, list[float]]) -> Any:
    """All ranks send, all rows arrive, all ranks receive; one rank after the others, by turns. Returns the result."""
    assert operation.send is not None
    gate.open(turn % gate.num_ranks)
    began = time.perf_counter()
    result, hook = operation.send()
    host_us["send"].append(1e6 * (time.perf_counter() - began))
    gate.mark()
    gate.open(turn % gate.num_ranks)
    began = time.perf_counter()
    hook()
    host_us["receive"].append(1e6 * (time.perf_counter() - began))
    gate.mark()
    torch.cuda.synchronize()
    return result


def _whole(operation: LowLatencyOperation, repeats: int) -> tuple[list[float], list[float]]:
    """Return the times of whole calls of the slowest rank, and of its host, microseconds."""
    times = [from_one_moment(operation.call) for _ in range(WARMUP + repeats)][WARMUP:]
    return slowest([wall for wall, _ in times]), [host for _, host in times]
