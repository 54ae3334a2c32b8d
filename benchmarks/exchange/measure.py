"""The work of one rank: check and then time every operation and its baselines."""

import statistics
from functools import partial

import torch

from benchmarks.common.link import link_rows, tokens_from_to
from benchmarks.common.ranks import BenchRank, Report
from benchmarks.common.records import spread
from benchmarks.common.report import Record
from benchmarks.common.verify import verify
from benchmarks.exchange.baselines import PLANNED, verify_baseline, words
from benchmarks.exchange.deep_ep import KINDS
from deepep_moe.tune.operations import operations
from deepep_moe.tune.workload import Inputs, Operation

Baselines = dict[tuple[str, str, str], tuple[list[float], list[float]]]
"""Times of an all-to-all by operation, dtype and layout: of its rows alone, and with the permutes that a layer needs."""


class ExchangeRank(BenchRank):
    """One rank of one run. Every method is collective."""

    def run(self) -> Report:
        self.say("no link" if self.link_gbps is None else f"link {self.link_gbps:.0f} GB/s")
        for num_tokens in self.options.num_tokens:
            self.report.records += self._measure(num_tokens)
        self.timer.synchronize()
        return self.report

    def _measure(self, num_tokens: int) -> list[Record]:
        """Time every operation that is right, at one size."""
        everyone = self.everyones_inputs(num_tokens)
        inputs = everyone[self.rank]
        baselines = self._time_baselines(everyone)
        if self.timer.is_gpu:
            torch.cuda.empty_cache()  # the baselines' rows take more memory than ours
        rows = link_rows(tokens_from_to(inputs.topk_idx, self.shape))
        buffer = self.new_buffer(num_tokens)
        self.say(f"{num_tokens} tokens, workspace {buffer.workspace_bytes / 2**20:.1f} MiB per rank")
        records = []
        for num_sms in self.options.num_sms_of[num_tokens]:
            where = f"{num_tokens} tokens, num_sms {num_sms}"
            for o in self.agreed(f"every operation, {where}", partial(operations, buffer, self.shape, inputs, num_sms)) or []:
                if self.agreed(f"{o.name}, {where}", partial(verify, o, everyone, self.shape, self.rank)):
                    records.append(self._time(o, num_tokens, rows, baselines, buffer.workspace_bytes))
        self.timer.synchronize()
        buffer.destroy()
        for name in dict.fromkeys(self.options.peer):
            records += self._measure_peer(name, inputs, rows, baselines)
        return records

    def _measure_peer(self, name: str, inputs: Inputs, rows: dict[str, int], baselines: Baselines) -> list[Record]:
        """Time every operation of another library that is right, at one size. What it raises is reported; where it raises on some ranks
        only, the others may wait for these until its own deadline."""
        num_tokens, records = len(inputs.x), []
        what = f"{name}, {num_tokens} tokens"
        if self.timer.is_gpu:
            torch.cuda.empty_cache()
        peer = self.agreed(what, partial(KINDS[name], name, self.shape, self.peers, num_tokens))
        if peer is None:
            return []
        self.say(f"{what}, version {peer.version}")
        for o in self.agreed(what, partial(peer.operations, inputs)) or []:
            time = partial(self._time, o, num_tokens, rows, baselines, None, peer.version)
            records.append(self.agreed(f"{o.name}, {num_tokens} tokens", time))
        self.timer.synchronize()
        self.agreed(f"the end of {what}", peer.destroy)
        return [entry for entry in records if entry is not None]

    def _time(
        self, o: Operation, num_tokens: int, rows: dict[str, int], baselines: Baselines, workspace_bytes: int | None,
        version: str | None = None,
    ) -> Record:  # fmt: skip
        iterations = self.options.iterations
        stream_us = self.timer.stream(o.call, iterations)
        call_us = self.timer.call(o.call, iterations) if self.timer.is_gpu else stream_us
        (median, p10, p90), (alone_us, permuted_us) = spread(call_us), baselines[o.op, o.dtype, o.layout]
        return self.record(
            o.op, num_tokens, o.dtype, o.layout, stream_us, rows[o.op] * o.row_bytes, backend=o.backend, version=version,
            baseline=f"{PLANNED[o.layout].name} ({self.transport}) with permutes", baseline_times=permuted_us, name=o.name,
            num_sms=o.num_sms, expert_alignment=self.options.expert_alignment if o.layout == "expert" else 1, call_us=median,
            call_us_p10=p10, call_us_p90=p90, rival_alone_us=statistics.median(alone_us),
            rival_permuted_us=statistics.median(permuted_us), workspace_bytes=workspace_bytes,
            ranks_per_node=self.options.ranks_per_node or self.shape.num_ranks, num_rail_sms=self.options.num_rail_sms,
        )  # fmt: skip

    def _time_baselines(self, everyone: list[Inputs]) -> Baselines:
        """Time the baseline of each operation, dtype and layout."""
        iterations, inputs, stream, times = self.options.iterations, everyone[self.rank], self.timer.stream, {}
        for layout, planned in PLANNED.items():
            for dtype, rows in (("float8_e4m3fn", words(inputs.x_fp8, inputs.x_scales)), ("bfloat16", words(inputs.x))):
                baseline = planned(rows, inputs, self.shape, self.group)
                alone = stream(baseline.exchange, iterations)
                times["dispatch", dtype, layout] = alone, stream(baseline.dispatch, iterations)
            arrived = verify_baseline(baseline, everyone, self.shape, self.rank)
            times["cached dispatch", dtype, layout] = alone, stream(baseline.cached_dispatch, iterations)
            back = stream(baseline.exchange_back, iterations)
            times["combine", dtype, layout] = back, stream(partial(baseline.combine, arrived), iterations)
        return times
