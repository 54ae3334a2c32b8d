"""The ranks of the tuner: what they share with those of benchmarks, how they start, and how one finds a profile."""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import deepep_moe
from deepep_moe import Buffer, config
from deepep_moe.errors import EPError
from deepep_moe.exchange.backends.nvlink import NvlinkBackend
from deepep_moe.group.rendezvous import check_same, gather_objects
from deepep_moe.testing import run_ranks
from deepep_moe.tune.records import commit
from deepep_moe.tune.search import Meter, Verdict, compare, search
from deepep_moe.tune.timing import Timer, slowest
from deepep_moe.tuning import Machine, Profile, Shape, Values

NUM_RANKS = (2, 4)
TIMEOUT_S = 30.0  # how long a call waits for a peer
LEAST_GAIN = 0.005
"""A profile that gains less is not worth a file."""
NOTHING_FASTER = "no setting that was tried in this time is faster than the default; no profile is written"


class Rank:
    """One rank of one run, on the GPU `device_idx` or on the CPU, as `options.on_gpu` says. Every method is collective."""

    def __init__(self, rank: int, num_ranks: int, device_idx: int, options: argparse.Namespace):
        self.options, self.rank, self.num_ranks, self.started = options, rank, num_ranks, time.monotonic()
        self.device = torch.device("cuda", device_idx) if options.on_gpu else torch.device("cpu")
        if options.on_gpu:
            torch.cuda.set_device(self.device)
        gc.collect()
        gc.freeze()  # collections stay short

    def say(self, text: str) -> None:
        """Print progress on rank 0."""
        if self.rank == 0:
            print(f"[{time.monotonic() - self.started:6.1f} s] EP{self.num_ranks}: {text}", file=sys.stderr, flush=True)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the option that takes several EP sizes."""
    parser.add_argument("--num-ranks", type=int, nargs="+", help="EP sizes, one run each; default 2 and 4, as far as there are GPUs")


def resolve_ranks(options: argparse.Namespace) -> None:
    """Set `options.num_ranks`, the EP sizes, and `options.launched`, whether a launcher started this rank. Needs `options.on_gpu`.

    Raises ValueError for sizes that contradict the launcher.
    """
    options.launched = config.launched_rank() is not None
    if options.launched:
        world = config.world_size()
        if options.num_ranks not in (None, [world]):
            raise ValueError(f"--num-ranks {options.num_ranks} under a launcher that started {world} ranks; leave --num-ranks out")
        options.num_ranks = [world]
    elif options.num_ranks is None:
        options.num_ranks = [n for n in NUM_RANKS if n <= torch.cuda.device_count()] or [2] if options.on_gpu else [2]


def start(measure: Callable[..., object], options: argparse.Namespace) -> list[Any]:
    """Run `measure(rank, num_ranks, options, device_idx)` on every rank, once for each EP size.

    Returns what it returns on rank 0 of each EP size; under a launcher, what it returns on this rank.
    """
    if not options.launched:
        return [
            run_ranks(measure, num_ranks, options, timeout_s=max(900, getattr(options, "time_limit", 0) + 300), bind=options.bind)[0]
            for num_ranks in options.num_ranks
        ]
    dist.init_process_group("gloo")
    try:
        return [measure(dist.get_rank(), dist.get_world_size(), options, config.local_rank())]
    finally:
        dist.destroy_process_group()


# ---- the tuner's ----


@dataclass(frozen=True)
class Outcome:
    """The result of a run. `profile`: None if nothing is faster than the default; `text` then says so."""

    text: str
    profile: Profile | None


class TuneRank(Rank):
    """One rank of one run, with one buffer. Every method is collective."""

    def __init__(self, rank: int, num_ranks: int, device_idx: int, options: argparse.Namespace):
        super().__init__(rank, num_ranks, device_idx, options)
        self.timer, self._elapsed_s = Timer(self.device), 0.0

    def new_buffer(self) -> Buffer:
        o = self.options
        return Buffer(None, o.num_tokens, o.hidden, o.num_experts, o.num_topk, backend="nvlink", timeout_s=TIMEOUT_S)

    def run(self) -> Outcome:
        o = self.options
        buffer = self.new_buffer()
        backend = buffer.calls.backend
        assert isinstance(backend, NvlinkBackend)  # it was asked for
        default, machine = backend.fitted, backend.machine
        self.say(f"{machine}; {Shape.of(o.num_tokens, o.hidden, o.num_topk)}; default: {default}")
        try:
            self._check_alike(str(machine))
            calls = self._calls(buffer)
            limit_s = o.time_limit / len(o.num_ranks)
            meter = Meter(partial(self._sample, backend, calls), lambda: self._elapsed_s > limit_s, self.say)
            best, outcome = search(default, machine, meter), Outcome(NOTHING_FASTER, None)
            if best != default:
                self._check_bits(backend, calls, default, best)
                outcome = self._outcome(machine, best, compare(default, best, meter))
            self.timer.synchronize()  # a rank that fails meets nobody there
            return outcome
        finally:
            buffer.destroy()

    def _check_alike(self, machine: str) -> None:
        """Raise EPMismatchError where ranks have unlike GPUs: no profile is for them, and each would try other settings."""
        machines = gather_objects(machine, dist.group.WORLD, self.num_ranks, "comparison of GPUs", config.timeout_s(), str)
        check_same([{"the GPU": rank_machine} for rank_machine in machines], "tune ranks with equal GPUs and equal shares of them")

    def _calls(self, buffer: Buffer) -> list[Callable[[], Any]]:
        """Return the dispatch in the dtype that was asked for, and the combine, which has bf16 rows: random, with a uniform routing."""
        o = self.options
        generator = torch.Generator(self.device).manual_seed(1000 + self.rank)

        def random(columns: int) -> Tensor:
            return torch.rand(o.num_tokens, columns, generator=generator, device=self.device)

        topk_idx, weights = random(o.num_experts).topk(o.num_topk, dim=1).indices, random(o.num_topk)
        x = torch.randn(o.num_tokens, o.hidden, generator=generator, device=self.device, dtype=torch.bfloat16)
        send = partial(buffer.dispatch, topk_idx=topk_idx, topk_weights=weights, expert_alignment=o.expert_alignment)
        out = send(x)
        is_fp8 = o.dtype == "fp8"
        dispatch = partial(send, x.to(torch.float8_e4m3fn), x_scales=random(-(-o.hidden // 128))) if is_fp8 else partial(send, x)
        return [dispatch, partial(buffer.combine, out.recv_x, out.handle, out.recv_topk_weights)]

    def _sample(self, backend: NvlinkBackend, calls: list[Callable[[], Any]], values: Values, count: int) -> list[float]:
        """Return `count` times of a dispatch and the combine after it, with `values`."""
        backend.use(values)

        def both() -> Any:
            return [call() for call in calls]

        times = [self.timer.once(both) for _ in range(1 + count)][1:]  # the first finds nothing in its caches
        *times, self._elapsed_s = slowest([*times, time.monotonic() - self.started])
        return times

    def _check_bits(self, backend: NvlinkBackend, calls: list[Callable[[], Any]], default: Values, best: Values) -> None:
        """Make sure that the results do not depend on the settings. Raises EPError."""
        results = []
        for values in (default, best):
            backend.use(values)
            out, combined = (call() for call in calls)
            results.append((out.recv_x.clone(), combined.clone()))
        for what, expected, actual in zip(("recv_x", "combined_x"), *results, strict=True):
            if not torch.equal(actual.view(torch.uint8), expected.view(torch.uint8)):
                raise EPError(f"{what} with {best} differs from that with the default settings")

    def _outcome(self, machine: Machine, best: Values, verdict: Verdict) -> Outcome:
        if verdict.low <= 0 or verdict.gain < LEAST_GAIN:
            return Outcome(f"nothing is faster than the default settings for sure ({best}: {verdict}); no profile is written", None)
        o = self.options
        source = (
            f"deepep-moe tune, {time.strftime('%Y-%m-%d')}, deepep_moe {deepep_moe.__version__} {commit() or ''}, torch "
            f"{torch.__version__}: dispatch in {o.dtype} and combine in bf16, {o.num_tokens} tokens, {o.num_experts} experts; {verdict}"
        )
        profile = Profile(machine, Shape.of(o.num_tokens, o.hidden, o.num_topk), best, round(verdict.gain, 4), source)
        return Outcome(f"faster: {best}: {verdict}", profile)


def tune(rank: int, num_ranks: int, options: argparse.Namespace, device_idx: int | None = None) -> Outcome:
    """Run one rank, in a process whose default group moves CPU tensors. `device_idx` is its GPU, by default the rank; ranks share those
    that there are."""
    index, num_gpus = rank if device_idx is None else device_idx, max(1, torch.cuda.device_count())
    return TuneRank(rank, num_ranks, index % num_gpus, options).run()
