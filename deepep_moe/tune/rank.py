"""The work of one rank: time settings of one buffer, and make a profile of the fastest."""

import argparse
import gc
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

import deepep_moe
from deepep_moe import Buffer, config
from deepep_moe.exchange.backends.nvlink import NvlinkBackend
from deepep_moe.group.rendezvous import check_same, gather_objects
from deepep_moe.tune.intervals import Verdict
from deepep_moe.tune.operations import compare_bits, operations
from deepep_moe.tune.ranks import Rank
from deepep_moe.tune.records import command_line, commit, record
from deepep_moe.tune.search import SEARCH_SHARE, Meter, compare, search
from deepep_moe.tune.timing import Mark, slowest
from deepep_moe.tune.workload import Operation
from deepep_moe.tuning import Machine, Profile, Shape, Values

LEAST_GAIN = 0.005
"""A profile that gains less is not worth a file."""
NOTHING_FASTER = "nothing is faster than the default settings; no profile is written"
NOTHING_IN_TIME = "the time ended before all settings were tried, and none so far is faster than the default; give a longer --time-limit"
_DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True)
class Outcome:
    """The result of a run. `profile`: None if nothing is faster than the default; `text` then says so. `record`: the comparison with the
    default, as benchmarks write it, or None."""

    text: str
    profile: Profile | None
    record: dict[str, Any] | None = None


class TuneRank(Rank):
    """One rank of one run, with one buffer. Every method is collective."""

    def __init__(self, rank: int, num_ranks: int, device_idx: int, options: argparse.Namespace):
        super().__init__(rank, num_ranks, device_idx, options)
        self._elapsed_s = 0.0

    def run(self) -> Outcome:
        gc.collect()
        gc.freeze()  # collections stay short
        o = self.options
        buffer = self.new_buffer(o.num_tokens)
        backend = buffer.calls.backend
        assert isinstance(backend, NvlinkBackend)  # options name it
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
        told = gather_objects(machine, dist.group.WORLD, self.shape.num_ranks, "comparison of GPUs", config.timeout_s(), str)
        check_same([{"the GPU": rank_machine} for rank_machine in told], "tune ranks with equal GPUs and equal shares of them")

    def _calls(self, buffer: Buffer) -> list[Operation]:
        """Return the dispatch in the dtype that was asked for, and the combine, which has bf16 rows."""
        inputs = self.everyones_inputs(self.options.num_tokens)[self.rank]
        made = {(o.op, o.dtype): o for o in operations(buffer, self.shape, inputs, None) if o.layout == "expert"}
        return [made["dispatch", _DTYPES[self.options.dtype]], made["combine", "bfloat16"]]

    def _sample(self, backend: NvlinkBackend, calls: list[Operation], values: Values, count: int) -> list[float]:
        """Return `count` times of a dispatch and the combine after it, with `values`."""
        backend.use(values)

        def both(mark: Mark) -> Any:
            results = [operation.call() for operation in calls]
            mark()
            return results

        times = [self.timer.marks_once(both)[-1] for _ in range(1 + count)][1:]  # the first finds nothing in its caches
        *times, self._elapsed_s = slowest([*times, time.monotonic() - self.started])
        return times

    def _check_bits(self, backend: NvlinkBackend, calls: list[Operation], default: Values, best: Values) -> None:
        """Make sure that the results do not depend on the settings. Raises EPError."""
        results = []
        for values in (default, best):
            backend.use(values)
            out, combined = (operation.call() for operation in calls)
            results.append((out.recv_x.clone(), combined.clone()))
        for what, expected, found in zip(("recv_x", "combined_x"), *results, strict=True):
            compare_bits(f"{what} with {best}", found, expected, "that with the default settings")

    def _outcome(self, machine: Machine, best: Values, verdict: Verdict | None) -> Outcome:
        if verdict is None:
            return Outcome("there was no time to compare the best settings with the default; give a longer --time-limit", None)
        told = self._record(machine, best, verdict)
        if not verdict.is_faster or verdict.gain < LEAST_GAIN:
            return Outcome(f"nothing is faster than the default settings for sure ({best}: {verdict}); no profile is written", None, told)
        o = self.options
        source = (
            f"deepep-moe tune, {time.strftime('%Y-%m-%d')}, deepep_moe {deepep_moe.__version__} {commit() or ''}, torch "
            f"{torch.__version__}: dispatch in {o.dtype} and combine in bf16, {o.num_tokens} tokens, {o.num_experts} experts; {verdict}"
        )
        profile = Profile(machine, Shape.of(o.num_tokens, o.hidden, o.num_topk), best, round(verdict.gain, 4), source)
        return Outcome(f"faster: {best}: {verdict}", profile, told)

    def _record(self, machine: Machine, best: Values, verdict: Verdict) -> dict[str, Any]:
        settings = {**vars(self.options), "num_ranks": self.shape.num_ranks, "layout": "expert"}
        defaults, bests = zip(*verdict.pairs, strict=True)
        found = {"gain": verdict.gain, "gain_interval": [verdict.low, verdict.high], "tuned": asdict(best)}
        made = record("dispatch + combine tuned", settings, bests, 0, baseline="default settings", baseline_times=defaults, **found)
        return made | {"hardware": str(machine), "bytes_moved": None, "gbps": None, "command": command_line("deepep-moe")}


def tune(rank: int, num_ranks: int, options: argparse.Namespace, device_idx: int | None = None) -> Outcome:
    """Run one rank, in a process whose default group moves CPU tensors. `device_idx` is its GPU, by default the rank; ranks share those
    that there are."""
    index, num_gpus = rank if device_idx is None else device_idx, max(1, torch.cuda.device_count())
    options = argparse.Namespace(**vars(options) | {"limit_s": options.time_limit / len(options.num_ranks)})
    return TuneRank(rank, num_ranks, index % num_gpus, options).run()
