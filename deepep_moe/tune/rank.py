"""The work of one rank: time settings of one buffer, and make a profile of the fastest."""

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import deepep_moe
from deepep_moe import Buffer, config
from deepep_moe.exchange.backends.nvlink import NvlinkBackend
from deepep_moe.group.rendezvous import check_same, gather_objects
from deepep_moe.tune.intervals import Verdict
from deepep_moe.tune.operations import compare_bits, operations
from deepep_moe.tune.ranks import TIMEOUT_S, Rank
from deepep_moe.tune.records import commit
from deepep_moe.tune.search import SEARCH_SHARE, Meter, compare, search
from deepep_moe.tune.timing import Timer, slowest
from deepep_moe.tune.workload import Operation, make_inputs
from deepep_moe.tuning import Machine, Profile, Shape, Values

LEAST_GAIN = 0.005
"""A profile that gains less is not worth a file."""
NOTHING_FASTER = "nothing is faster than the default settings; no profile is written"
NOTHING_IN_TIME = "the time ended before all settings were tried, and none so far is faster than the default; give a longer --time-limit"
_DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}


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
            meter = Meter(lambda values, count: self._sample(backend, calls, values, count), lambda: self._elapsed_s, o.limit_s, self.say)
            best = search(default, machine, meter)
            if best == default:
                self.timer.synchronize()
                return Outcome(NOTHING_IN_TIME if meter.is_over(SEARCH_SHARE) else NOTHING_FASTER, None)
            self._check_bits(backend, calls, default, best)
            outcome = self._outcome(machine, best, compare(default, best, meter))
            self.timer.synchronize()  # a rank that fails meets nobody there
            return outcome
        finally:
            buffer.destroy()

    def _check_alike(self, machine: str) -> None:
        """Raise EPMismatchError where ranks have unlike GPUs: no profile is for them, and each would try other settings."""
        machines = gather_objects(machine, dist.group.WORLD, self.shape.num_ranks, "comparison of GPUs", config.timeout_s(), str)
        check_same([{"the GPU": rank_machine} for rank_machine in machines], "tune ranks with equal GPUs and equal shares of them")

    def _calls(self, buffer: Buffer) -> list[Operation]:
        """Return the dispatch in the dtype that was asked for, and the combine, which has bf16 rows."""
        inputs = make_inputs(self.shape, self.options.num_tokens, self.rank, self.device)
        by_name = {(o.op, o.dtype): o for o in operations(buffer, self.shape, inputs, None) if o.layout == "expert"}
        return [by_name["dispatch", _DTYPES[self.options.dtype]], by_name["combine", "bfloat16"]]

    def _sample(self, backend: NvlinkBackend, calls: list[Operation], values: Values, count: int) -> list[float]:
        """Return `count` times of a dispatch and the combine after it, with `values`."""
        backend.use(values)

        def both() -> Any:
            return [operation.call() for operation in calls]

        times = [self.timer.once(both) for _ in range(1 + count)][1:]  # the first finds nothing in its caches
        *times, self._elapsed_s = slowest([*times, time.monotonic() - self.started])
        return times

    def _check_bits(self, backend: NvlinkBackend, calls: list[Operation], default: Values, best: Values) -> None:
        """Make sure that the results do not depend on the settings. Raises EPError."""
        results = []
        for values in (default, best):
            backend.use(values)
            out, combined = (operation.call() for operation in calls)
            results.append((out.recv_x.clone(), combined.clone()))
        for what, expected, actual in zip(("recv_x", "combined_x"), *results, strict=True):
            compare_bits(f"{what} with {best}", actual, expected, "that with the default settings")

    def _outcome(self, machine: Machine, best: Values, verdict: Verdict | None) -> Outcome:
        if verdict is None:
            return Outcome("there was no time to compare the best settings with the default; give a longer --time-limit", None)
        if not verdict.is_faster or verdict.gain < LEAST_GAIN:
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
    options = argparse.Namespace(**vars(options) | {"limit_s": options.time_limit / len(options.num_ranks)})
    return TuneRank(rank, num_ranks, index % num_gpus, options).run()
