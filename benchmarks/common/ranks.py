"""The benchmarks of exchanges share their options, their ranks, which return records, and the end of a run."""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.link import link_gbps
from benchmarks.common.peers import check_peers
from benchmarks.common.records import hardware_of, record, write_json
from benchmarks.common.report import Record
from benchmarks.common.timing import Timer
from benchmarks.common.workload import Shape
from deepep_moe import Buffer, config
from deepep_moe.errors import BackendUnavailableError, EPError
from deepep_moe.exchange.backends.nvlink import NvlinkBackend
from deepep_moe.tune.ranks import TIMEOUT_S, Rank, add_ranks, resolve_ranks, start


@dataclass
class Report:
    """The records and failures of the ranks of one EP size."""

    records: list[Record] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Operations that raised or had wrong results, and so are not timed."""


class BenchRank(Rank):
    """One rank of one run. Every method is collective."""

    link_iterations: int | None = None
    """Copies that measure the rate of the link, by default as many as there are iterations."""

    @classmethod
    @torch.no_grad()
    def measure(cls, rank: int, num_ranks: int, options: argparse.Namespace, device_idx: int | None = None) -> Report:
        """Run one rank, in a process whose default group moves CPU tensors. `device_idx` is its GPU, by default the rank."""
        return cls(rank, num_ranks, rank if device_idx is None else device_idx, options).run()

    def run(self) -> Report:
        raise NotImplementedError

    def __init__(self, rank: int, num_ranks: int, device_idx: int, options: argparse.Namespace):
        super().__init__(rank, num_ranks, device_idx, options)
        sizes = num_ranks, options.hidden, options.num_experts, options.num_topk, options.expert_alignment
        self.shape = Shape(*sizes, getattr(options, "ranks_per_node", None))
        self.group: dist.ProcessGroup | None = dist.new_group(backend="nccl") if options.on_gpu else None
        self.timer = Timer(self.device, self.group)
        if not options.on_gpu:
            torch.set_num_threads(config.num_threads(num_ranks))  # baselines and memcpy use as many threads as we do
        self.peers: Any = dist.group.WORLD if self.group is None else self.group
        """The group of all ranks that other libraries take: NCCL's on GPUs, else the default group."""
        self.transport = "NCCL" if options.on_gpu else "gloo"
        """The library that moves the rows of the baselines."""
        self.link_gbps = link_gbps(self.timer, self.link_iterations or options.iterations)
        self.report = Report()

    def new_buffer(self, num_tokens: int) -> Buffer:
        o = self.options
        group = self.group if o.backend == "collective" else None
        sizes = num_tokens, o.hidden, o.num_experts, o.num_topk
        buffer = Buffer(group, *sizes, backend=o.backend, timeout_s=TIMEOUT_S, ranks_per_node=self.shape.ranks_per_node)
        backend = buffer.calls.backend
        if isinstance(backend, NvlinkBackend):
            backend.use(backend.fitted)  # records of two machines are not to differ by a user's profile
        if getattr(o, "num_rail_sms", None) is not None:
            buffer.calls.backend.tuning.num_rail_sms = o.num_rail_sms  # type: ignore[attr-defined]
        return buffer

    def agreed(self, what: str, attempt: Callable[[], Any]) -> Any:
        """Return what `attempt` returns on this rank, or None on all ranks where it raised on any of them; `report.failures` says why."""
        result, reason = None, None
        try:
            result = attempt()
        except Exception as error:  # whatever another library raises, such as a failed assertion
            reason = f"EP{self.shape.num_ranks}: {what}: rank {self.rank}: {type(error).__name__}: {error}"
        reasons: list[str | None] = [None] * self.shape.num_ranks
        dist.all_gather_object(reasons, reason)
        first = next((r for r in reasons if r is not None), None)
        if first is None:
            return result
        self.report.failures.append(first)
        self.say(f"not timed: {first}")
        return None

    def record(
        self, op: str, num_tokens: int, dtype: str, layout: str, times: Sequence[float], link_bytes: int, *,
        baseline: str | None, baseline_times: Sequence[float], backend: str | None = None, version: str | None = None, **extra: Any,
    ) -> Record:  # fmt: skip
        """Return the record of one operation. `backend` and `version` are those of another library, `link_bytes` are of the rank that sends
        most."""
        names = ("hidden", "num_topk", "num_experts")
        settings = {"num_ranks": self.shape.num_ranks, "num_tokens": num_tokens, "dtype": dtype, "layout": layout}
        settings |= {name: getattr(self.options, name) for name in names} | {"backend": backend or self.options.backend}
        percent = None if self.link_gbps is None else 100 * link_bytes / statistics.median(times) / 1e3 / self.link_gbps
        extra |= {"link_gbps": self.link_gbps, "percent_of_link": percent, "iterations": len(times)}
        extra["hardware"] = hardware_of(self.device, self.shape.num_ranks)
        entry = record(op, settings, times, link_bytes, baseline=baseline, baseline_times=baseline_times, **extra)
        return entry if version is None else entry | {"versions": entry["versions"] | {settings["backend"]: version}}


def add_sizes(parser: argparse.ArgumentParser, backends: tuple[str, ...], default_tokens: str, **sizes: int | None) -> None:
    """Add the options that the benchmarks share. The first of `backends` is the default. `sizes` are defaults of other options."""
    parser.add_argument("--backend", choices=backends, default=backends[0])
    add_ranks(parser)
    parser.add_argument("--num-tokens", type=int, nargs="+", help=f"per rank; default {default_tokens}")
    for name, default in {"num_experts": 256, "num_topk": 8, **sizes}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)


def resolve_sizes(options: argparse.Namespace, default_tokens: Sequence[int], most_topk: int) -> None:
    """Fill in ranks and tokens. Needs `options.on_gpu`. Raises EPError for what cannot run, ValueError for values that do not fit."""
    resolve_ranks(options)
    needed, num_gpus = 1 if options.launched else max(options.num_ranks), torch.cuda.device_count()
    if options.on_gpu and num_gpus < needed:
        raise BackendUnavailableError(
            f"backend {options.backend!r} needs a GPU for each of {needed} ranks, this machine has {num_gpus}; give --num-ranks, or "
            "--backend shm, which needs none"
        )
    options.num_tokens = sorted(set(options.num_tokens or default_tokens))
    for n in options.num_ranks:
        if n < 1 or options.num_experts % n:
            raise ValueError(f"--num-experts {options.num_experts} must be a multiple of --num-ranks {n}")
    if not 1 <= options.num_topk <= min(options.num_experts, most_topk):
        raise ValueError(f"--num-topk {options.num_topk} must be 1 to {most_topk}, and at most --num-experts {options.num_experts}")
    if min(options.num_tokens) < 1 or (options.iterations is not None and options.iterations < 1):
        raise ValueError("--num-tokens and --iterations must be at least 1")
    if options.peer and not options.on_gpu:
        raise ValueError(f"--peer {options.peer[0]} needs GPUs; give --backend nvlink")
    check_peers(options.peer)


def run(measure: Callable[..., Report], show: Callable[[list[Record]], None], options: argparse.Namespace) -> None:
    """Run `measure` on the ranks of each EP size, write the records to `--json`, and show them. Exit with what failed."""
    try:
        reports = start(measure, options)
    except (EPError, ValueError) as error:
        sys.exit(str(error))
    if config.launched_rank():
        return  # rank 0 reports
    records = [entry for report in reports for entry in report.records]
    write_json(options.json, records)
    if records:
        show(records)
    if failures := [failure for report in reports for failure in report.failures]:
        sys.exit("not timed, because it failed or its results are wrong:\n" + "\n".join(failures))
