"""The benchmark of low-latency calls: its records, batches, checks and refusals, on the CPU."""

import argparse
import json
import statistics
from types import SimpleNamespace

import pytest
import torch
from bench_cases import RECORD_FIELDS, bench

from benchmarks.low_latency import batches as low_latency_timing
from benchmarks.low_latency import command as low_latency
from benchmarks.low_latency import measure as low_latency_measure
from benchmarks.low_latency import operations as low_latency_operations
from benchmarks.low_latency import report as low_latency_report
from benchmarks.low_latency.batches import Times
from benchmarks.low_latency.measure import Baseline, Measurement, Report
from deepep_moe import LowLatencyBuffer
from deepep_moe.errors import BackendUnavailableError, EPError
from deepep_moe.testing import run_ranks
from deepep_moe.tune import workload
from deepep_moe.tune.timing import Timer

TINY = ["--num-tokens", "9", "3", "--hidden", "256", "--num-experts", "8", "--num-topk", "3", "--iterations", "4"]
SHAPE = workload.Shape(num_ranks=2, hidden=256, num_experts=8, num_topk=3, expert_alignment=1)
NAMES = {"dispatch fp8", "dispatch bf16", "combine bf16", "combine fp8"}
FIELDS = RECORD_FIELDS | {
    "name", "wire", "half", "graph", "us_p99", "us_event", "us_host", "is_host_ahead", "num_sms", "link_gbps", "percent_of_link",
    "buffer_us", "buffer_ratio", "workspace_bytes", "iterations",
}  # fmt: skip


def options_of(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    low_latency.add_arguments(parser)
    options = parser.parse_args(arguments)
    low_latency.resolve(options)
    return options


# ---- what it reports ----


def check_record(r: dict, half: str) -> None:
    assert set(r) >= FIELDS and (r["half"], r["num_ranks"], r["num_sms"], r["iterations"]) == (half, 2, None, 4)
    assert 0 < r["us_p10"] <= r["us_median"] <= r["us_p90"] <= r["us_p99"] and r["workspace_bytes"] > 0
    assert r["bytes_moved"] % (512 if r["wire"] == "bf16" else 256 + 8) == 0 and (r["bytes_moved"] == 0) == (half == "receive")
    assert r["gbps"] == pytest.approx(r["bytes_moved"] / r["us_median"] / 1e3)
    assert r["percent_of_link"] == pytest.approx(100 * r["gbps"] / r["link_gbps"])
    if half == "both":
        in_bf16 = ", in bf16" if r["name"] == "low-latency combine fp8" else ""
        assert r["rival"] == f"all-to-all of rows (gloo) with permutes{in_bf16}"
        assert r["ratio"] == pytest.approx(r["rival_us"] / r["us_median"])
        assert r["buffer_ratio"] == pytest.approx(r["buffer_us"] / r["us_median"])
    else:
        assert r["rival"] is r["rival_us"] is r["ratio"] is r["buffer_us"] is None


def test_records(tmp_path):
    output = tmp_path / "records.json"
    result = bench(*TINY, "--json", str(output), command="low-latency")
    assert result.returncode == 0, result.stderr
    assert "EP2: 9 tokens, workspace" in result.stderr
    records = json.loads(output.read_text())
    halves = ("both", "send", "receive")
    expected = {(f"low-latency {name}", n, half, False) for name in NAMES for n in (3, 9) for half in halves}
    assert {(r["name"], r["num_tokens"], r["half"], r["graph"]) for r in records} == expected and len(records) == len(expected)
    for r in records:
        check_record(r, r["half"])
        is_fp8 = r["name"] == "low-latency dispatch fp8"
        assert r["backend"] == "shm" and r["dtype"] == ("float8_e4m3fn" if is_fp8 else "bfloat16")
    lines = [line.split()[:5] for line in result.stdout.splitlines()]
    title = lines.index(["operation", "EP", "tokens", "part", "us"])
    assert [line[-1] for line in lines[title + 1 : title + 4]] == ["both", "send", "receive"] and lines[title + 1][:2] == [
        "dispatch",
        "fp8",
    ]


@pytest.mark.slow
def test_torchrun(tmp_path):
    output = tmp_path / "records.json"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    sizes = ("--num-tokens", "3", "--hidden", "128", "--num-experts", "4", "--num-topk", "2", "--iterations", "2")
    result = bench(*sizes, "--json", str(output), launcher=launcher, command="low-latency")
    assert result.returncode == 0, result.stderr
    assert len(json.loads(output.read_text())) == 4 * 3


def made_up(num_tokens: int, graph_us: float) -> Measurement:
    baseline, many = Baseline(Times([400.0], 300.0), Times([50.0], 5.0)), [graph_us + i / 100 for i in range(100)]
    facts = ("combine", "combine fp8", "bfloat16", "fp8", num_tokens, 1_000_000, 7)
    halves = Times([6.0], 40.0), Times([3.0], 40.0)
    return Measurement(*facts, Times([11.0], 45.0, is_ahead=False), Times(many, 4.0), 9.0, *halves, baseline, [80.0])


def test_records_of_a_gpu(capsys):
    report = Report(4, "4 x imagined", "NCCL", 400.0, 132, 1.25, [made_up(8, 10.0), made_up(16, 12.0)])
    records = low_latency_report.records_of([report], options_of("--backend", "shm", "--num-ranks", "4"))
    assert [(r["num_tokens"], r["graph"], r["half"]) for r in records[:4]] == [
        (8, True, "both"), (8, False, "both"), (8, False, "send"), (8, False, "receive"),
    ]  # fmt: skip
    graph, eager, send, receive = records[:4]
    assert (graph["us_median"], graph["us_p99"], graph["us_graph_of_20"]) == (pytest.approx(10.495), pytest.approx(10.99), 9.0)
    assert (graph["num_sms"], graph["us_event"], graph["rival_us"], graph["rival_graph"]) == (132, 1.25, 50.0, True)
    assert graph["gbps"] == pytest.approx(1e3 / 10.495) and graph["percent_of_link"] == pytest.approx(1e3 / 10.495 / 4)
    assert (eager["rival_us"], eager["us_host"], eager["is_host_ahead"], eager["buffer_us"]) == (400.0, 45.0, False, 80.0)
    assert (send["us_median"], receive["us_median"], receive["bytes_moved"]) == (6.0, 3.0, 0)
    low_latency_report.show([report], records)
    printed = capsys.readouterr().out.splitlines()
    assert "EP4: 1.25 us from event to event, part of every time but `of 20`" in printed
    assert "link, every rank copying to its neighbour: EP4 400 GB/s" in printed
    figures = ["10.5", "10.1-10.9", "11.0", "9.0", "1.000", "95.3", "24", "50.0", "4.76x", "80.0"]
    (graph_line,) = (line.split() for line in printed if line.split()[3:5] == ["8", "graph"])
    assert graph_line == ["combine", "fp8", "4", "8", "graph", *figures]
    assert any(line.split()[:5] == ["combine", "fp8*", "4", "8", "both"] for line in printed)


# ---- how it measures ----


def batches_of_made_up_calls(rank, num_ranks):
    """A clock that only sleeps and calls move: a device. The host needs 20 us for a call; on rank 1 calls take longer."""
    clock = SimpleNamespace(device=0.0, host=0.0, slept_until=0.0)
    slept = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            self.at = clock.device

        def query(self):
            return clock.host >= self.at

        def synchronize(self):
            clock.host = max(clock.host, self.at)

        def elapsed_time(self, other):
            return (other.at - self.at) / 1e3

    def sleep(us):
        slept.append(us)
        clock.device = clock.host + us

    def call():
        clock.host += 20.0
        clock.device += 7.0 + rank

    low_latency_timing.torch.cuda.Event = Event
    low_latency_timing.time = SimpleNamespace(perf_counter=lambda: clock.host / 1e6)
    batches = low_latency_timing.Batches.__new__(low_latency_timing.Batches)
    batches.timer = SimpleNamespace(is_gpu=True, sleep=sleep, synchronize=lambda: None)
    batches._events = []
    times = batches.times(call, 300)
    assert slept == [1e3, 6e3, 6e3] and low_latency_timing.BATCH == 200, "the first sleep was too short"
    assert times.us == pytest.approx([8.0] * 300) and times.is_ahead and times.host_us == pytest.approx(20.0)
    sent, received = batches.halves(lambda: (call(), lambda: (call(), call())), 30)
    assert (len(sent.us), statistics.median(sent.us), statistics.median(received.us)) == (30, pytest.approx(8.0), pytest.approx(16.0))


def test_batches():
    run_ranks(batches_of_made_up_calls, 2)


def halves_on_the_cpu(rank, num_ranks):
    batches = low_latency_timing.Batches(Timer(torch.device("cpu")))
    assert batches.event_us() is None
    return [len(times.us) for times in batches.halves(lambda: (None, lambda: None), 3)]


def test_halves_on_the_cpu():
    assert run_ranks(halves_on_the_cpu, 2) == [[3, 3]] * 2


# ---- it measures nothing that is wrong ----


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_what_is_expected(num_ranks):
    """It is what the reference says, whatever the sizes."""
    shape = workload.Shape(num_ranks, 256, 12, 3, 1)
    everyone = [workload.make_inputs(shape, 21, rank, torch.device("cpu")) for rank in range(num_ranks)]
    for rank in range(num_ranks):
        low_latency_operations.confirm(everyone, shape, rank)


def test_wrong_results_are_found():
    shape = workload.Shape(1, 256, 8, 3, 1)
    everyone = [workload.make_inputs(shape, 9, 0, torch.device("cpu"))]
    buffer = LowLatencyBuffer(None, 9, shape.hidden, shape.num_experts, shape.num_topk, backend="shm")
    made = low_latency_operations.operations(buffer, shape, everyone, 0)
    assert {o.name for o in made} == NAMES and {(o.wire, o.row_bytes) for o in made} == {("bf16", 512), ("fp8", 264)}
    for operation in made:
        assert low_latency_operations.verify(operation)
        result = operation.call()
        tensors = {"combined_x": result} if operation.op == "combine" else result._asdict()
        for name in ("combined_x", "recv_x", "recv_x_scales", "num_recv_tokens_per_expert"):
            if tensors.get(name) is not None:
                place = (0,) * tensors[name].dim()
                kept = tensors[name].clone()
                tensors[name][place] = 7  # in the first row, which is there
                with pytest.raises(EPError, match=f"^{name} (differs from the reference in|is)"):
                    operation.check(result)
                tensors[name].copy_(kept)
        operation.check(result)
    buffer.destroy()


def combines_wrong_in_fp8(rank, num_ranks, options):
    combine = LowLatencyBuffer.combine

    def one_bit_off(self, *args, **kwargs):
        result = combine(self, *args, **kwargs)
        if kwargs["wire"] == "fp8" and rank == 1:
            (result[0] if kwargs.get("return_hook") else result).view(torch.uint8)[0, 0] ^= 1
        return result

    LowLatencyBuffer.combine = one_bit_off
    return low_latency_measure.measure(rank, num_ranks, options)


def test_wrong_operations_are_not_timed():
    for report in run_ranks(combines_wrong_in_fp8, 2, options_of("--backend", "shm", *TINY)):
        assert {(m.name, m.num_tokens) for m in report.measurements} == {(name, n) for name in NAMES - {"combine fp8"} for n in (3, 9)}
        assert report.failures == [
            f"EP2: combine fp8, {n} tokens: rank 1: EPError: combined_x differs from the reference in 1 of {n} rows" for n in (3, 9)
        ]


def test_failures_are_told(monkeypatch, capsys):
    report = Report(2, "imagined", "gloo", None, None, None, [], ["EP2: combine fp8, 3 tokens: rank 1: no"])
    monkeypatch.setattr(low_latency, "run", lambda options: [report])
    with pytest.raises(SystemExit, match="not timed, because it failed or its results are wrong:\nEP2: combine fp8, 3 tokens: rank 1: no"):
        low_latency.main(argparse.Namespace(json=None))
    assert capsys.readouterr().out == ""


# ---- options and refusals ----


def test_plan(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    options = options_of()
    assert options.num_ranks == [2, 4] and options.num_tokens == [1, 8, 32, 128, 256, 512] and options.hidden == 7168 and options.on_gpu
    assert options.iterations_of == {1: 1000, 8: 1000, 32: 1000, 128: 10_000, 256: 1000, 512: 1000}
    assert options_of("--quick").iterations_of == {8: 100, 128: 1000}
    options = options_of("--backend", "shm", "--iterations", "7")
    assert options.num_ranks == [2] and options.iterations_of == {1: 7, 8: 7, 32: 7, 128: 7} and options.hidden == 1024
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BackendUnavailableError, match="'nvlink' needs a GPU for each of 2 ranks, this machine has 1; give --num-ranks, or"):
        options_of()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-experts", "9"), "--num-experts 9 must be a multiple of --num-ranks 2"),
        (("--hidden", "200"), "--hidden 200 must be a multiple of 128: rows in fp8 have a scale for 128 columns"),
        (("--num-topk", "33"), "--num-topk 33 must be 1 to 32, and at most --num-experts 256"),
        (("--num-tokens", "0", "4"), "--num-tokens and --iterations must be at least 1"),
        (("--iterations", "0"), "--num-tokens and --iterations must be at least 1"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        options_of("--backend", "shm", *arguments)


@pytest.mark.multi_gpu(2)
def test_on_gpus(tmp_path):
    output = tmp_path / "records.json"
    sizes = ("--num-ranks", "2", "--num-tokens", "3", "16", "--iterations", "50", "--hidden", "512", "--num-experts", "16")
    result = bench(*sizes, "--json", str(output), command="low-latency", backend="nvlink")
    assert result.returncode == 0, result.stderr
    records = json.loads(output.read_text())
    assert len(records) == 2 * 4 * 4 and sum(r["graph"] for r in records) == 8
    assert all(r["us_graph_of_20"] > 0 and r["rival_graph"] for r in records if r["graph"])
