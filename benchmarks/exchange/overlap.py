"""Measure how much of an exchange hides behind GEMMs: `python benchmarks/run.py overlap --backend nvlink`.

An exchange runs in two halves (`return_hook=True`). Equal GEMMs run between them, about 1.5 times as long as the second half alone. The
exchange alone and the GEMMs alone are timed as well. One run uses copy engines (num_sms=0), which leave every SM to the GEMMs between the
halves; another uses the default number of SMs.

Results are checked first. Times are the begin and end of each half and of the GEMMs on the stream, on the slowest rank. The start of a
dispatch includes the host's wait for the counts. If the stream is empty by then, the GEMMs include the launch of the first one.
"""

import argparse
from functools import partial

import torch

from benchmarks.common.link import link_rows, tokens_from_to
from benchmarks.common.ranks import BenchRank, Report, add_sizes, resolve_sizes, run
from benchmarks.common.report import Record, number, show_head, show_table, sms_of, spread_of
from benchmarks.exchange.beside_gemms import NUM_SMS, OPS, BesideGemms, Schedule, figures_of

TOKENS = {"cuda": 4096, "cpu": 512}
GEMM = {"cuda": (4096, 2048, 2048), "cpu": (32, 32, 32)}
"""Rows, columns and depth of a GEMM."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, ("nvlink", "shm"), str(TOKENS["cuda"]), hidden=7168, expert_alignment=128, iterations=30)
    parser.set_defaults(peer=[])


def resolve(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the machine. Raises EPError for what cannot run, ValueError for values that do not fit."""
    options.on_gpu = options.backend == "nvlink"
    device = "cuda" if options.on_gpu else "cpu"
    options.gemm = GEMM[device]
    resolve_sizes(options, [TOKENS[device]], options.num_experts)


class OverlapRank(BenchRank):
    """One rank of one run. Every method is collective."""

    def run(self) -> Report:
        for num_tokens in self.options.num_tokens:
            self.report.records += self._overlap(num_tokens)
        self.timer.synchronize()
        return self.report

    def _overlap(self, num_tokens: int) -> list[Record]:
        """Time every exchange that is right, with GEMMs between its halves."""
        if self.timer.is_gpu:
            torch.cuda.empty_cache()
        everyone, buffer, found = self.everyones_inputs(num_tokens), self.new_buffer(num_tokens), []
        make = partial(BesideGemms, self.timer, buffer, self.shape, everyone, self.rank, self.options)
        beside = self.agreed(f"an exchange beside GEMMs, {num_tokens} tokens", make)
        for op in OPS if beside is not None else ():
            for num_sms in NUM_SMS.get(self.options.backend, (None,)):
                what = f"{op} beside GEMMs, {num_tokens} tokens, num_sms {num_sms}"
                if self.agreed(what, partial(beside.verify, op, num_sms)):
                    self.say(what)
                    schedules = self.agreed(what, partial(beside.measure, op, num_sms))
                    if schedules is not None:
                        found.append(self._overlap_record(op, num_sms, beside, schedules))
        self.timer.synchronize()
        buffer.destroy()
        return found

    def _overlap_record(
        self, op: str, num_sms: int | None, beside: BesideGemms, schedules: tuple[Schedule, Schedule, Schedule]
    ) -> Record:  # fmt: skip
        """Return the record of one exchange with GEMMs between its halves.

        The baseline of `ratio` is the same two halves, and then the GEMMs. A plain call, which has no halves, takes less time.
        """
        exchange, gemms, both = schedules
        rows = link_rows(tokens_from_to(beside.inputs.topk_idx, self.shape))[op]
        one_by_one = [a + b for a, b in zip(exchange.total, gemms.total, strict=True)]
        return self.record(
            f"{op}+gemm", len(beside.inputs.x), "bfloat16", "expert", both.total, rows * 2 * self.shape.hidden,
            baseline="the same two halves, then the GEMMs", baseline_times=one_by_one, name=f"{op}+gemm bf16 expert", num_sms=num_sms,
            expert_alignment=self.options.expert_alignment, gemm=list(self.options.gemm), num_gemms=beside.num_gemms,
            workspace_bytes=beside.buffer.workspace_bytes, **figures_of(exchange, gemms, both),
        )  # fmt: skip


_COLUMNS = {
    "operation": lambda r: r["name"], "EP": number("num_ranks", 0), "tokens": number("num_tokens", 0), "SMs": sms_of,
    "GEMMs": number("num_gemms", 0), "both us": number("us_median"), "p10-p90": spread_of, "start": number("start_us"),
    "GEMMs us": number("gemms_us"), "hook": number("hook_us"), "exchange alone": number("exchange_us"),
    "GEMMs alone": number("alone_gemms_us"), "GEMM speed": number("gemm_speed", 2),
    "hidden": lambda r: "?" if r["exchange_hidden"] is None else f"{r['exchange_hidden']:.0%}",
}  # fmt: skip


def show(records: list[Record]) -> None:
    show_head(records)
    rows, columns, depth = records[0]["gemm"]
    print(f"GEMMs of {rows} x {columns}, sums of {depth}, bf16, between start and hook of an exchange. us of the slowest rank, medians.")
    print("GEMM speed: beside the exchange, 1 is alone. hidden: part of the exchange that costs no time beside the GEMMs.")
    if any(r["exchange_hidden"] is None for r in records):
        print("?: the GEMMs took longer alone than beside the exchange, as on a busy machine; what is hidden cannot be said.")
    show_table(_COLUMNS, records)


def main(options: argparse.Namespace) -> None:
    run(OverlapRank.measure, resolve, show, options)
