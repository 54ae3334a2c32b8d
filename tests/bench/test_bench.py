"""The benchmarks of exchanges and of the gate: their records, byte counts, figures, checks, options and refusals, on the CPU."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from bench_cases import RECORD_FIELDS, TORCHRUN, bench, options_of

from benchmarks.common import link, ranks, verify
from benchmarks.exchange import command as exchange
from benchmarks.exchange import measure
from benchmarks.gate import baselines as gate_baselines
from benchmarks.gate import measure as gate
from benchmarks.low_latency import command as low_latency
from benchmarks.run import MODULES, main
from deepep_moe import Buffer
from deepep_moe.errors import BackendUnavailableError, EPError
from deepep_moe.testing import run_ranks
from deepep_moe.tune import operations, workload

TINY = [
    "--num-tokens", "8", "3", "--hidden", "144", "--num-experts", "8", "--num-topk", "3", "--expert-alignment", "4", "--iterations", "2",
]  # fmt: skip
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHAPE = workload.Shape(num_ranks=2, hidden=144, num_experts=4, num_topk=2, expert_alignment=4)
OPERATIONS = {
    "dispatch bf16 rank", "dispatch fp8 rank", "combine bf16 rank", "dispatch bf16 expert", "dispatch fp8 expert", "combine bf16 expert",
    "cached dispatch bf16 expert",
}  # fmt: skip


# ---- what it reports ----


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
    return link.link_rows(link.tokens_from_to(idx, SHAPE))


def test_rows_over_the_link():
    """Rank 0 sends 2 rows and rank 1 sends 1; in combine it is the other way round."""
    assert run_ranks(counts_rows, 2) == [{"dispatch": 2, "cached dispatch": 2, "combine": 2}] * 2
    uneven = torch.tensor([[5, 1, 4], [0, 7, 2], [0, 3, 9]])
    assert link.link_rows(uneven) == {"dispatch": 5, "cached dispatch": 5, "combine": 6}


class Recorder:
    """A stand-in for a Buffer."""

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
    listed = operations.operations(buffer, SHAPE, inputs, num_sms)
    for operation in listed:
        operation.call()
    assert len(listed) == count and set(buffer.num_sms) == {num_sms}
    assert {o.name for o in listed} == OPERATIONS if num_sms != 0 else {"dispatch bf16 expert", "combine bf16 expert"}
    assert {(o.dtype, o.row_bytes) for o in listed} <= {("bfloat16", 288), ("float8_e4m3fn", 144 + 8)}


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
    return measure.ExchangeRank.measure(rank, num_ranks, options)


def test_wrong_operations_are_not_timed():
    for result in run_ranks(fails_in_fp8, 2, options_of(exchange, "--backend", "shm", *TINY)):
        assert {r["name"] for r in result.records} == {name for name in OPERATIONS if "fp8" not in name}
        assert len(result.failures) == 4  # two layouts, two sizes
        assert result.failures[0] == "EP2: dispatch fp8 rank, 3 tokens, num_sms None: rank 1: EPError: no such luck"


# ---- the gate ----


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


def test_gate_records(monkeypatch, capsys):
    def missing(shape, dense):
        return gate_baselines._foreign("deepep_moe.no_such_module", "route", shape, dense)

    monkeypatch.setattr(gate, "times_on_cpu", lambda call, repeats: ([4.0 if call() is not None else 0.0] * repeats, 20.0))
    monkeypatch.setattr(gate_baselines, "ON_CPU", {"torch operators": gate_baselines.operators, "Missing": missing})
    records = gate.run(gate_baselines.Shape(9, 16, 4, 4, 2), torch.float32, 2, torch.device("cpu"))
    said = "not measured: Missing (ModuleNotFoundError: No module named 'deepep_moe.no_such_module')\n"
    assert capsys.readouterr().err == said, "once"
    assert [r["op"] for r in records] == ["gate", "gate_backward", "gate dense", "gate_backward dense"]
    lanes, logits = 9 * 4 * 12, 9 * 16 * 4
    assert [r["bytes_moved"] for r in records] == [logits + lanes, logits + lanes, logits + 9 * 16 * 5 + lanes, logits + lanes]
    for r in records:
        assert set(r) >= RECORD_FIELDS
        assert (r["us_median"], r["rival_us"], r["us_called"], r["num_tokens"], r["num_experts"]) == (4.0, 4.0, 20.0, 9, 16)
        assert (r["backend"], r["rival"], r["ratio"], r["num_groups"]) == ("cpu", "torch operators", 1.0, 4)


@pytest.mark.gpu
def test_gate_is_timed_on_a_gpu():
    records = gate.run(gate_baselines.Shape(64, 16, 4, 4, 2), torch.float32, 2, torch.device("cuda", 0))
    assert all(0 < r["us_median"] < 1e6 and 0 < r["us_called"] < 1e6 for r in records)


# ---- options and refusals ----


def test_commands(monkeypatch, capsys):
    main(["--help"])
    assert "low-latency  dispatch and combine of small batches" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="'exchanges' is no benchmark; choose from exchange, low-latency, gate"):
        main(["exchanges"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for arguments in ([], ["--sweep"]):
        with pytest.raises(
            SystemExit, match="'nvlink' needs a GPU for each of 2 ranks, this machine has 0; give --num-ranks, or --backend shm"
        ):
            main(arguments)


def test_commands_of_records_are_taken(monkeypatch):
    """But for the tuner; other programs are in the history only, as docs/benchmarks.md says."""
    records = [record for file in RESULTS.glob("*.json") for record in json.loads(file.read_text())]
    for module in MODULES.values():
        for name in ("main", "resolve"):
            monkeypatch.setattr(importlib.import_module(f"benchmarks.{module}"), name, lambda options: None, raising=False)
    gone = r"python (-m deepep_moe tune .+|-m deepep_moe\.bench( (nodes|overlap|pipeline)\b.*)?|benchmarks/probes/\w+\.py)"
    for command in {record["command"] for record in records}:
        if not re.fullmatch(gone, command):
            main(shlex.split(command.removeprefix("python benchmarks/run.py ")))


def test_plan(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    options = options_of(exchange, "--sweep")
    assert options.num_ranks == [2, 4] and options.num_tokens == [128, 512, 2048, 4096, 8192, 32768]
    assert options.num_sms_of[4096] == [None, 4, 8, 12, 16, 24, 32, 0] and options.num_sms_of[128] == [None]
    options = options_of(exchange, "--num-sms", "8", "16", "--num-tokens", "64", "--num-ranks", "4")
    assert options.num_sms_of == {64: [8, 16]} and options.num_ranks == [4]
    options = options_of(low_latency)
    assert options.num_ranks == [2, 4] and options.num_tokens == [1, 8, 32, 128, 256, 512] and options.hidden == 7168 and options.on_gpu
    assert options.iterations_of == {1: 1000, 8: 1000, 32: 1000, 128: 10_000, 256: 1000, 512: 1000}
    options = options_of(low_latency, "--backend", "shm", "--iterations", "7")
    assert options.num_ranks == [2] and options.iterations_of == {1: 7, 8: 7, 32: 7, 128: 7} and options.hidden == 1024
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for command in (exchange, low_latency):
        with pytest.raises(BackendUnavailableError, match="needs a GPU for each of 2 ranks, this machine has 1"):
            options_of(command)


@pytest.mark.parametrize(
    ("commands", "arguments", "message"),
    [
        ((exchange, low_latency), "--num-experts 9", "--num-experts 9 must be a multiple of --num-ranks 2"),
        ((exchange, low_latency), "--num-ranks 0", "--num-experts 256 must be a multiple of --num-ranks 0"),
        ((exchange, low_latency), "--num-tokens 0 4", "--num-tokens and --iterations must be at least 1"),
        ((exchange, low_latency), "--iterations 0", "--num-tokens and --iterations must be at least 1"),
        ((exchange, low_latency), "--peer deep_ep", "--peer deep_ep needs GPUs"),
        ((exchange,), "--num-topk 257", "--num-topk 257"),
        ((low_latency,), "--num-topk 33", "--num-topk 33 must be 1 to 32"),
        ((low_latency,), "--hidden 200", "--hidden 200 must be a multiple of 128"),
    ],
)
def test_refusals(commands, arguments, message):
    for command in commands:
        with pytest.raises(ValueError, match=f"^{message}"):
            options_of(command, "--backend", "shm", *arguments.split())


def test_failures_are_told(monkeypatch, capsys):
    report = ranks.Report([], ["EP2: combine fp8, 3 tokens: rank 1: no"])
    monkeypatch.setattr(ranks, "start", lambda measure, options: [report])
    with pytest.raises(SystemExit, match="not timed, because it failed or its results are wrong:\nEP2: combine fp8, 3 tokens: rank 1: no"):
        main(["low-latency", "--backend", "shm"])
    assert capsys.readouterr().out == ""
