"""The benchmarks of exchanges and of the gate: their records, byte counts and checks, on the CPU."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from bench_cases import TORCHRUN, bench, options_of

from benchmarks import gate
from benchmarks.common import link, verify, workload
from benchmarks.exchange import command as exchange
from benchmarks.run import MODULES, main
from deepep_moe import Buffer
from deepep_moe.errors import EPError
from deepep_moe.testing import run_ranks

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
    result, records = bench(tmp_path, *TINY, launcher=launcher)
    assert "EP2: 8 tokens, workspace" in result.stderr and "speed-up" in result.stdout
    assert {(r["name"], r["num_tokens"]) for r in records} == {(name, n) for name in OPERATIONS for n in (3, 8)}
    for r in records:
        assert set(r) >= {"num_sms", "percent_of_link", "call_us", "link_gbps", "workspace_bytes"}
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


# ---- it measures nothing that is wrong ----


def test_wrong_results_are_found():
    """In the first row, by another exponent."""
    shape = workload.Shape(1, 144, 4, 2, 4)
    inputs = workload.make_inputs(shape, 5, 0, torch.device("cpu"))
    buffer = Buffer(None, 8, shape.hidden, shape.num_experts, shape.num_topk)
    for operation in workload.operations(buffer, shape, inputs, None):
        assert verify.verify(operation, buffer, inputs, shape, 0)
        result = operation.call()
        tensors = {"combined_x": result} if operation.op == "combine" else result._asdict()
        summed = {"combined_x", "recv_x", "recv_x_scales", *(["recv_topk_weights"] if operation.layout == "expert" else [])}
        for name in summed & {name for name, tensor in tensors.items() if tensor is not None}:
            row = tensors[name][:1].view(torch.uint8)
            row ^= 8
            wrong = workload.Operation(operation.op, operation.dtype, operation.layout, 1, lambda result=result: result)
            with pytest.raises(EPError, match=r"^combined_x differs from the definition in 1 of 5 rows"):
                verify.verify(wrong, buffer, inputs, shape, 0)
            row ^= 8


def fails_in_fp8(rank, num_ranks, options):
    def verify_but(operation, *args):
        if rank == 1 and operation.dtype == "float8_e4m3fn":
            raise EPError("no such luck")
        return True

    exchange.verify = verify_but
    return exchange.ExchangeRank.measure(rank, num_ranks, options)


def test_wrong_operations_are_not_timed():
    for result in run_ranks(fails_in_fp8, 2, options_of(exchange, "--backend", "shm", *TINY)):
        assert {r["name"] for r in result.records} == {name for name in OPERATIONS if "fp8" not in name}
        assert len(result.failures) == 4  # two layouts, two sizes
        assert result.failures[0] == "EP2: dispatch fp8 rank, 3 tokens, num_sms None: rank 1: EPError: no such luck"


# ---- the gate ----


def test_gate_and_its_baselines_agree():
    shape, generator = gate.Shape(9, 16, 4, 4, 2), torch.Generator().manual_seed(0)
    logits, bias = torch.randn(9, 16, generator=generator), torch.randn(16, generator=generator) * 0.1
    for dense in (False, True):
        expected, chosen = gate.ours(shape, dense)(logits, bias)
        for name, make in gate.BASELINES.items():
            if name == "Transformer Engine" and importlib.util.find_spec("transformer_engine") is None:
                continue
            weights, theirs = make(shape, dense)(logits, bias)
            torch.testing.assert_close(weights.sort(1).values, expected.sort(1).values, rtol=1e-5, atol=1e-6, check_dtype=False)
            assert torch.equal(theirs.sort(1).values, chosen.sort(1).values), name


# ---- commands ----


def test_commands_of_records_are_taken(monkeypatch):
    """But for the tuner; other programs are in the history only, as docs/benchmarks.md says."""
    records = [record for file in RESULTS.glob("*.json") for record in json.loads(file.read_text())]
    for module in MODULES.values():
        for name in ("main", "resolve"):
            monkeypatch.setattr(importlib.import_module(f"benchmarks.{module}"), name, lambda options: None, raising=False)
    gone = r"python (-m deepep_moe tune .+|-m deepep_moe\.bench( (nodes|overlap|pipeline)\b.*)?|.+(probes/|nccl_ep|--autoep).*)"
    for command in {record["command"] for record in records}:
        if not re.fullmatch(gone, command):
            main(shlex.split(command.removeprefix("python benchmarks/run.py ")))
