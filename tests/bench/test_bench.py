"""The benchmarks of the link and of overlap: their records, byte counts, figures, checks and refusals, on the CPU."""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_cases import RECORD_FIELDS, bench

from benchmarks.common import verify
from benchmarks.exchange import cpu as exchange
from benchmarks.exchange import measure
from benchmarks.exchange import nvlink as link
from benchmarks.gate import baselines as gate_baselines
from benchmarks.gate import gpu as gate_gpu
from benchmarks.overlap import command as overlap
from benchmarks.overlap import measure as overlap_measure
from benchmarks.overlap import report as overlap_report
from benchmarks.overlap.measure import BesideGemms, Overlap, Schedule
from benchmarks.run import with_name
from deepep_moe import Buffer
from deepep_moe.errors import BackendUnavailableError, EPError
from deepep_moe.testing import run_ranks
from deepep_moe.tune import operations, timing, workload

ROOT = Path(__file__).parents[2]
TINY = [
    "--num-tokens",
    "8",
    "3",
    "--hidden",
    "144",
    "--num-experts",
    "8",
    "--num-topk",
    "3",
    "--expert-alignment",
    "4",
    "--iterations",
    "2",
]
SHAPE = workload.Shape(num_ranks=2, hidden=144, num_experts=4, num_topk=2, expert_alignment=4)
OPERATIONS = {
    "dispatch bf16 rank", "dispatch fp8 rank", "combine bf16 rank", "dispatch bf16 expert", "dispatch fp8 expert", "combine bf16 expert",
    "cached dispatch bf16 expert",
}  # fmt: skip


def options_of(*arguments: str, command=link) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = parser.parse_args(arguments)
    link.resolve(options)
    return options


# ---- what it reports ----


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize("launcher", [(), pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["alone", "torchrun"])
def test_records(launcher, tmp_path):
    output = tmp_path / "records.json"
    result = bench(*TINY, "--output", str(output), launcher=launcher)
    assert result.returncode == 0, result.stderr
    assert "EP2: 8 tokens, workspace" in result.stderr and "speed-up" in result.stdout
    records = json.loads(output.read_text())
    assert {(r["name"], r["num_tokens"]) for r in records} == {(name, n) for name in OPERATIONS for n in (3, 8)}
    for r in records:
        assert set(r) >= RECORD_FIELDS | {"num_sms", "percent_of_link", "call_us", "link_gbps", "workspace_bytes"}
        assert (r["backend"], r["num_ranks"], r["num_sms"], r["iterations"]) == ("shm", 2, None, 2)
        assert r["bytes_moved"] % (144 + 8 if r["dtype"] == "float8_e4m3fn" else 288) == 0
        assert r["gbps"] == pytest.approx(r["bytes_moved"] / r["us_median"] / 1e3)
        assert r["percent_of_link"] == pytest.approx(100 * r["gbps"] / r["link_gbps"])
        assert r["rival_us"] == r["rival_permuted_us"] and ("(token, rank)" in r["rival"]) == (r["layout"] == "rank")
        assert r["ratio"] == pytest.approx(r["rival_us"] / r["us_median"])


def counts_rows(rank, num_ranks):
    # rank 0: token 0 stays, token 1 goes to both, token 2 to rank 1; rank 1: one token, to both
    idx = torch.tensor([[[0, 1], [0, 2], [2, 3]], [[3, 1]]][rank])
    return workload.link_rows(workload.gather_counts(workload.tokens_per_rank(idx, SHAPE)))


def test_rows_over_the_link():
    """Rank 0 sends 2 rows and rank 1 sends 1; in combine it is the other way round."""
    assert run_ranks(counts_rows, 2) == [{"dispatch": 2, "cached dispatch": 2, "combine": 2}] * 2
    uneven = torch.tensor([[5, 1, 4], [0, 7, 2], [0, 3, 9]])
    assert workload.link_rows(uneven) == {"dispatch": 5, "cached dispatch": 5, "combine": 6}


class Recorder:
    """In place of a Buffer."""

    def __init__(self):
        self.buffer = Buffer(None, 8, SHAPE.hidden, SHAPE.num_experts, SHAPE.num_topk)
        self.num_sms = []

    def dispatch(self, *args, num_sms=None, **kwargs):
        self.num_sms.append(num_sms)
        return self.buffer.dispatch(*args, **kwargs)

    def combine(self, *args, num_sms=None):
        self.num_sms.append(num_sms)
        return self.buffer.combine(*args)


@pytest.mark.parametrize(("num_sms", "count"), [(None, 7), (12, 7), (0, 2)])
def test_operations(num_sms, count):
    buffer, inputs = Recorder(), workload.make_inputs(SHAPE, 5, 0, torch.device("cpu"))
    made = operations.operations(buffer, SHAPE, inputs, num_sms)
    for operation in made:
        operation.call()
    assert len(made) == count and set(buffer.num_sms) == {num_sms}
    assert {o.name for o in made} == OPERATIONS if num_sms != 0 else {"dispatch bf16 expert", "combine bf16 expert"}
    assert {(o.dtype, o.row_bytes) for o in made} <= {("bfloat16", 288), ("float8_e4m3fn", 144 + 8)}


# ---- exchanges beside GEMMs ----


@pytest.mark.slow
def test_overlap_records(tmp_path):
    output = tmp_path / "records.json"
    result = bench(*TINY, "--gemm", "16", "8", "32", "--output", str(output), command="overlap")
    assert result.returncode == 0, result.stderr
    assert "dispatch+gemm bf16 expert" in result.stdout
    records = json.loads(output.read_text())
    assert [(r["op"], r["num_tokens"]) for r in records] == [(f"{op}+gemm", n) for n in (3, 8) for op in ("dispatch", "combine")]
    for r in records:
        assert set(r) >= RECORD_FIELDS | {"gemm_speed", "exchange_hidden", "link_gbps"}
        assert (r["backend"], r["num_ranks"], r["num_sms"], r["iterations"], r["gemm"]) == ("shm", 2, None, 2, [16, 8, 32])
        assert r["hidden"] == 144 and r["num_gemms"] >= 1 and r["bytes_moved"] % 288 == 0
        assert r["gemm_speed"] == pytest.approx(r["alone_gemms_us"] / r["gemms_us"])
        hidden = (r["exchange_us"] + r["alone_gemms_us"] - r["us_median"]) / r["exchange_us"]
        assert r["exchange_hidden"] == (None if hidden > 1.1 else pytest.approx(min(hidden, 1.0)))


def made_up(**changes) -> Overlap:
    """Alone, the start takes 50 and the hook 550; behind the GEMMs, which take 840 instead of 800, the hook takes 70."""
    exchange = Schedule(("start", "hook"), [[50.0, 600.0], [49.0, 590.0], [51.0, 610.0]], [[50.0, 550.0], [49.0, 541.0], [51.0, 559.0]])
    gemms = Schedule(("GEMMs",), [[800.0], [790.0], [805.0]], [[800.0], [790.0], [805.0]])
    both = Schedule(("start", "GEMMs", "hook"), [[50.0, 890.0, 960.0]] * 3, [[50.0, 840.0, 70.0]] * 3)
    facts = dict(num_sms=0, backend="nvlink", exchange=exchange, gemms=gemms, both=both)
    sizes = dict(num_tokens=4096, gemm=(64, 32, 16), num_gemms=12, link_bytes=144_000_000, workspace_bytes=7)
    return Overlap("combine", **(facts | sizes | changes))


def test_overlap_figures():
    assert made_up().gemm_speed == pytest.approx(800 / 840)
    assert made_up().hidden == pytest.approx((600 + 800 - 960) / 600)
    slow = Schedule(("start", "GEMMs", "hook"), [[50.0, 890.0, 1600.0]], [[50.0, 840.0, 710.0]])
    assert made_up(both=slow).hidden == pytest.approx(-1 / 3)
    just = Schedule(("start", "GEMMs", "hook"), [[50.0, 740.0, 790.0]], [[50.0, 690.0, 50.0]])
    assert made_up(both=just).hidden == 1.0, "10 us less than the GEMMs alone, which is noise"


def test_overlap_that_cannot_be_told(capsys):
    """Other work has slowed the GEMMs alone: an exchange cannot be hidden by more than all of it."""
    quick = Schedule(("start", "GEMMs", "hook"), [[5.0, 100.0, 110.0]], [[5.0, 95.0, 10.0]])
    made = measure.Report(4, "4 x imagined", "NCCL", None, overlaps=[made_up(both=quick)])
    assert made.overlaps[0].hidden is None
    records = overlap_report.records_of([made], options_of("--backend", "shm", command=overlap))
    assert records[0]["exchange_hidden"] is None
    overlap_report.show(records)
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].split()[-1] == "?" and "?: the GEMMs took longer alone than beside the exchange" in printed


def test_overlap_record_of_made_up_times(capsys):
    made = measure.Report(4, "4 x imagined", "NCCL", 400.0, overlaps=[made_up(), made_up(num_sms=None)])
    copied, sent = overlap_report.records_of([made], options_of("--backend", "shm", command=overlap))
    assert (copied["op"], copied["num_ranks"], copied["num_sms"], sent["num_sms"]) == ("combine+gemm", 4, 0, None)
    assert (copied["us_median"], copied["rival_us"], copied["ratio"]) == (960, 1400, pytest.approx(1400 / 960))
    assert copied["link_gbps"] == 400
    assert (copied["start_us"], copied["gemms_us"], copied["hook_us"]) == (50, 840, 70)
    assert (copied["exchange_hook_us"], copied["exchange_hook_us_p10"], copied["exchange_hook_us_p90"]) == (550, 541, 559)
    overlap_report.show([copied, sent])
    printed = capsys.readouterr().out.splitlines()
    name = ["combine+gemm", "bf16", "expert", "4", "4096"]
    figures = ["12", "960.0", "960.0-960.0", "50.0", "840.0", "70.0", "600.0", "800.0", "0.95", "73%"]
    assert printed[-2].split() == [*name, "copy", *figures] and printed[-1].split() == [*name, "-", *figures]
    assert "link, every rank copying to its neighbour: EP4 400 GB/s" in printed


def slowest_schedule(rank, num_ranks):
    ends = [[[10.0, 30.0], [11.0, 25.0]], [[14.0, 29.0], [9.0, 26.0]]][rank]
    beside = SimpleNamespace(timer=SimpleNamespace(marks=lambda call, iterations: ends), iterations=2)
    return BesideGemms._schedule(beside, ("start", "hook"), None)


def test_schedule_of_the_slowest_rank():
    for found in run_ranks(slowest_schedule, 2):
        assert found.ends == [[14.0, 30.0], [11.0, 26.0]] and found.total == [30.0, 26.0]
        assert found.lengths == [[14.0, 20.0], [11.0, 17.0]] and found.length("hook") == [20.0, 17.0]


class WrongCounts:
    """A buffer whose split dispatch says, in one number, something else than the plain call."""

    def __init__(self, buffer):
        self.buffer = buffer
        self.combine = buffer.combine

    def dispatch(self, *args, return_hook=False, **kwargs):
        out = self.buffer.dispatch(*args, return_hook=return_hook, **kwargs)
        return out._replace(num_recv_tokens_per_expert=out.num_recv_tokens_per_expert + return_hook)


def verifies_hooks(rank, num_ranks):
    device, options = torch.device("cpu"), argparse.Namespace(iterations=2, gemm=(8, 8, 8))
    everyone = [workload.make_inputs(SHAPE, 5, source, device) for source in range(num_ranks)]
    buffer = Buffer(None, 8, SHAPE.hidden, SHAPE.num_experts, SHAPE.num_topk, backend="shm")
    right, wrong = (BesideGemms(timing.Timer(device), b, SHAPE, everyone, rank, options) for b in (buffer, WrongCounts(buffer)))
    assert all(right.verify(op, None) for op in overlap_measure.OPS) and wrong.verify("combine", None)
    with pytest.raises(EPError, match="num_recv_tokens_per_expert through the hook differs from the plain call's in 2 of 2 rows"):
        wrong.verify("dispatch", None)


def test_hooks_are_verified():
    run_ranks(verifies_hooks, 2)


def test_marks_on_a_stream(monkeypatch):
    """Each mark is an event; times count from the event before the call, the first calls do not count."""
    clock, synchronized = iter(range(1000)), []

    class Event:
        def record(self):
            self.at = next(clock)

        def synchronize(self):
            synchronized.append(self.at)

        def elapsed_time(self, other):
            return float(other.at - self.at)

    timer = timing.Timer.__new__(timing.Timer)
    timer.is_gpu, timer._start, timer._marked, timer._line_up = True, Event(), [Event() for _ in range(4)], lambda: None
    assert timer.marks(lambda mark: (mark(), mark(), mark()), 2) == [[1e3, 2e3, 3e3]] * 2
    assert synchronized == [3, 7, 11, 15, 19], "the last event of every call"


@pytest.mark.multi_gpu(2)
def test_overlap_on_gpus(tmp_path):
    output = tmp_path / "records.json"
    sizes = ("--num-ranks", "2", "--num-tokens", "512", "--iterations", "3", "--gemm", "256", "256", "256")
    result = bench(*sizes, "--output", str(output), command="overlap", backend="nvlink")
    assert result.returncode == 0, result.stderr
    records = json.loads(output.read_text())
    assert [(r["op"], r["num_sms"]) for r in records] == [(f"{op}+gemm", n) for op in ("dispatch", "combine") for n in (0, None)]
    assert all(r["exchange_us"] > 0 for r in records)


# ---- it measures nothing that is wrong ----


def test_wrong_results_are_found():
    shape = workload.Shape(1, 144, 4, 2, 4)
    inputs = workload.make_inputs(shape, 5, 0, torch.device("cpu"))
    buffer = Buffer(None, 8, shape.hidden, shape.num_experts, shape.num_topk)
    for operation in operations.operations(buffer, shape, inputs, None):
        assert verify.verify(operation, [inputs], shape, 0)
        result = operation.call()
        tensors = {"combined_x": result} if operation.op == "combine" else result._asdict()
        for name in {"combined_x", "recv_x", "recv_x_scales", "recv_topk_idx", "recv_topk_weights"} & set(tensors):
            if tensors[name] is None:
                continue
            tensors[name].view(torch.uint8)[1] ^= 1
            wrong = workload.Operation(operation.op, operation.dtype, operation.layout, 1, lambda result=result: result)
            with pytest.raises(EPError, match=f"^{name} differs from the definition in 1 of "):
                verify.verify(wrong, [inputs], shape, 0)
            tensors[name].view(torch.uint8)[1] ^= 1


def fails_in_fp8(rank, num_ranks, options):
    def verify_but(operation, *args):
        if rank == 1 and operation.dtype == "float8_e4m3fn":
            raise EPError("no such luck")
        return True

    measure.verify = verify_but
    return measure.measure(rank, num_ranks, options)


def test_wrong_operations_are_not_timed():
    for result in run_ranks(fails_in_fp8, 2, options_of("--backend", "shm", *TINY)):
        assert {m.name for m in result.measurements} == {name for name in OPERATIONS if "fp8" not in name}
        assert len(result.failures) == 4  # two layouts, two sizes
        assert result.failures[0] == "EP2: dispatch fp8 rank, 3 tokens, num_sms None: rank 1: EPError: no such luck"


# ---- options and refusals ----


def test_gate_and_its_baselines_agree():
    shape, generator = gate_baselines.Shape(9, 16, 4, 4, 2), torch.Generator().manual_seed(0)
    logits, bias = torch.randn(9, 16, generator=generator), torch.randn(16, generator=generator) * 0.1
    for dense in (False, True):
        expected, chosen = gate_baselines.ours(shape, dense)(logits, bias)
        for name, make in gate_baselines.BASELINES.items():
            if name == "torch.compile" or (name == "Transformer Engine" and importlib.util.find_spec("transformer_engine") is None):
                continue
            weights, theirs = make(shape, dense)(logits, bias)
            torch.testing.assert_close(weights.sort(1).values, expected.sort(1).values, rtol=1e-5, atol=1e-6, check_dtype=False)
            assert torch.equal(theirs.sort(1).values, chosen.sort(1).values), name


def test_gate_records_on_a_gpu(monkeypatch, capsys):
    def missing(shape, dense):
        return gate_baselines._foreign("deepep_moe.no_such_module", "route", shape, dense)

    monkeypatch.setattr(gate_gpu, "kernel_us", lambda call, repeats: [4.0 if call() is not None else 0.0] * repeats)
    monkeypatch.setattr(gate_gpu, "called_us", lambda call, repeats: 20.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(gate_baselines, "BASELINES", {"torch operators": gate_baselines.operators, "Missing": missing})
    records = gate_gpu.run(gate_baselines.Shape(9, 16, 4, 4, 2), torch.float32, 2, torch.device("cpu"))
    said = "not measured: Missing (ModuleNotFoundError: No module named 'deepep_moe.no_such_module')\n"
    assert capsys.readouterr().err == said, "once"
    assert [r["op"] for r in records] == ["gate", "gate_backward", "gate dense", "gate_backward dense"]
    lanes, logits = 9 * 4 * 12, 9 * 16 * 4
    assert [r["bytes_moved"] for r in records] == [logits + lanes, logits + lanes, logits + 9 * 16 * 5 + lanes, logits + lanes]
    for r in records:
        assert set(r) >= RECORD_FIELDS
        assert (r["us_median"], r["rival_us"], r["us_called"], r["num_tokens"], r["num_experts"]) == (4.0, 4.0, 20.0, 9, 16)
        assert (r["hardware"], r["rival"], r["ratio"], r["num_groups"]) == ("a GPU", "torch operators", 1.0, 4)
    assert len(list(gate_gpu.sweep(8))) == 36


@pytest.mark.gpu
def test_gate_is_timed_on_a_gpu():
    records = gate_gpu.run(gate_baselines.Shape(64, 16, 4, 4, 2), torch.float32, 2, torch.device("cuda", 0))
    assert all(0 < r["us_median"] < 1e6 and 0 < r["us_called"] < 1e6 for r in records)


def test_commands():
    assert with_name([]) == ["exchange"] and with_name(["gate"]) == ["gate"]
    assert with_name(["--backend", "shm"])[0] == "exchange" and with_name(["--backend=nvlink", "--sweep"])[0] == "link"
    assert with_name(["overlap", "--backend", "nvlink"])[0] == "overlap"


def test_plan(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    options = options_of("--sweep")
    assert options.num_ranks == [2, 4] and options.num_tokens == [128, 512, 2048, 4096, 8192, 32768]
    assert options.num_sms_of[4096] == [None, 4, 8, 12, 16, 24, 32, 0] and options.num_sms_of[128] == [None]
    assert options.overlap_tokens == [4096] and options_of("--quick").overlap_tokens == [4096]
    assert options_of("--backend", "shm").overlap_tokens == []
    options = options_of(command=overlap)
    assert options.num_ranks == [2, 4] and options.overlap_tokens == [4096] and options.num_tokens == [] and options.gemm == link.GEMM
    options = options_of("--num-sms", "8", "16", "--num-tokens", "64", "--num-ranks", "4")
    assert options.num_sms_of == {64: [8, 16]} and options.num_ranks == [4]
    with pytest.raises(ValueError, match="--num-experts 10 must be a multiple of --num-ranks 4"):
        options_of("--num-experts", "10")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BackendUnavailableError, match="'nvlink' needs a GPU for each of 2 ranks, this machine has 1; give --num-ranks"):
        options_of()


def test_launched(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"--num-ranks \[2\] under a launcher that started 3 ranks; leave --num-ranks out"):
        options_of("--backend", "shm", "--num-ranks", "2", "--num-experts", "9")
    assert options_of("--backend", "shm", "--num-experts", "9").num_ranks == [3]


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="deep_ep is installed")
def test_missing_peer():
    result = bench(*TINY, "--peer", "deep_ep")
    assert result.returncode == 1
    assert result.stderr.startswith(
        "--peer deep_ep: the package deep_ep is not importable here (No module named 'deep_ep'); install a wheel of DeepEP"
    )


@pytest.mark.parametrize("given", (("--num-ranks", "0"), ("--num-tokens", "0"), ("--num-experts", "9"), ("--num-topk", "65")))
def test_exchange_refuses_sizes_that_make_no_sense(given):
    result = subprocess.run([sys.executable, "benchmarks/run.py", *given], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 1 and "must be at least 1, --num-experts" in result.stderr and "Traceback" not in result.stderr


def test_exchanges_are_verified_before_they_are_timed():
    """Two tokens of 3 and 5, each to an expert of either rank, which both ranks' rows come back from as they are."""
    options = argparse.Namespace(num_experts=4, num_ranks=2, num_topk=2, layout="expert")
    x, idx, weights = torch.tensor([[3.0], [5.0]]), torch.tensor([[0, 2], [3, 1]]), torch.tensor([[0.5, 1.0], [2.0, 1.0]])

    def pairs(rows=2 * [3.0, 5.0], ours=(4.5, 15.0), theirs=(6.0, 10.0)):
        made = {"ours": (2 * [3.0, 5.0], ours), "all-to-all": (rows, theirs)}
        tensors = {name: [torch.tensor(values)[:, None] for values in pair] for name, pair in made.items()}
        return {name: (lambda rows=rows: rows, lambda sums=sums: sums) for name, (rows, sums) in tensors.items()}

    assert exchange._verify(pairs(), options, (x, idx, weights)) == 2 * 4 + 4 * 4
    with pytest.raises(EPError, match="all-to-all dispatched other rows than ours"):
        exchange._verify(pairs(rows=[3.0, 5.0, 5.0, 3.0]), options, (x, idx, weights))
    with pytest.raises(EPError, match="ours combined to other sums"):
        exchange._verify(pairs(ours=(6.0, 10.0)), options, (x, idx, weights))
    options.layout = "rank"
    assert exchange._verify(pairs(ours=(6.0, 10.0)), options, (x, idx, weights)) == 24
    with pytest.raises(EPError, match="all-to-all combined to other sums"):
        exchange._verify(pairs(ours=(6.0, 10.0), theirs=(3.0, 10.0)), options, (x, idx, weights))
