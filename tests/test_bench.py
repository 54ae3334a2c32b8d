"""The benchmark of the link: its records, its byte counts, its checks and its refusals, on the CPU."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_package import RECORD_FIELDS

from deepep_moe import Buffer
from deepep_moe.bench import link, measure, operations, report, verify
from deepep_moe.bench.__main__ import _with_command
from deepep_moe.errors import BackendUnavailableError, EPError
from deepep_moe.testing import run_ranks

ROOT = Path(__file__).parent.parent
TINY = ["--tokens", "8", "3", "--hidden", "144", "--experts", "8", "--topk", "3", "--alignment", "4", "--iterations", "2"]
SHAPE = operations.Shape(num_ranks=2, hidden=144, num_experts=4, num_topk=2, expert_alignment=4)
OPERATIONS = {
    "dispatch bf16 rank", "dispatch fp8 rank", "combine bf16 rank", "dispatch bf16 expert", "dispatch fp8 expert", "combine bf16 expert",
    "cached dispatch bf16 expert",
}  # fmt: skip


def options_of(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    link.add_arguments(parser)
    options = parser.parse_args(arguments)
    link.resolve(options)
    return options


def bench(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", *launcher, "deepep_moe.bench", "link", "--backend", "shm", *arguments]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


# ---- what it reports ----


@pytest.mark.parametrize(
    "launcher", [(), ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")], ids=["alone", "torchrun"]
)
def test_records(launcher, tmp_path):
    output, image = tmp_path / "records.json", tmp_path / "plot.png"
    result = bench(*TINY, "--output", str(output), "--plot", str(image), launcher=launcher)
    assert result.returncode == 0, result.stderr
    assert "EP2: 8 tokens, workspace" in result.stderr and "speed-up" in result.stdout and image.stat().st_size > 0
    records = json.loads(output.read_text())
    assert {(r["name"], r["num_tokens"]) for r in records} == {(name, n) for name in OPERATIONS for n in (3, 8)}
    for r in records:
        assert set(r) >= RECORD_FIELDS | {"num_sms", "percent_of_link", "call_us", "link_gbps", "workspace_bytes"}
        assert (r["backend"], r["num_ranks"], r["num_sms"], r["iterations"]) == ("shm", 2, None, 2)
        assert r["bytes_moved"] % (144 + 8 if r["dtype"] == "float8_e4m3fn" else 288) == 0
        assert r["gbps"] == pytest.approx(r["bytes_moved"] / r["us_median"] / 1e3)
        assert r["percent_of_link"] == pytest.approx(100 * r["gbps"] / r["link_gbps"])
        assert r["rival_us"] == r["rival_permuted_us" if r["layout"] == "expert" else "rival_alone_us"]
        assert r["ratio"] == pytest.approx(r["rival_us"] / r["us_median"])


def counts_rows(rank, num_ranks):
    # rank 0: token 0 stays, token 1 goes to both, token 2 to rank 1; rank 1: one token, to both
    idx = torch.tensor([[[0, 1], [0, 2], [2, 3]], [[3, 1]]][rank])
    return operations.link_rows(operations.gather_counts(operations.tokens_per_rank(idx, SHAPE)))


def test_rows_over_the_link():
    """Rank 0 sends 2 rows and rank 1 sends 1; in combine it is the other way round."""
    assert run_ranks(counts_rows, 2) == [{"dispatch": 2, "cached dispatch": 2, "combine": 2}] * 2
    uneven = torch.tensor([[5, 1, 4], [0, 7, 2], [0, 3, 9]])
    assert operations.link_rows(uneven) == {"dispatch": 5, "cached dispatch": 5, "combine": 6}


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
    buffer, inputs = Recorder(), operations.make_inputs(SHAPE, 5, 0, torch.device("cpu"))
    made = operations.operations(buffer, SHAPE, inputs, num_sms)
    for operation in made:
        operation.call()
    assert len(made) == count and set(buffer.num_sms) == {num_sms}
    assert {o.name for o in made} == OPERATIONS if num_sms != 0 else {"dispatch bf16 expert", "combine bf16 expert"}
    assert {(o.dtype, o.row_bytes) for o in made} <= {("bfloat16", 288), ("float8_e4m3fn", 144 + 8)}


# ---- it measures nothing that is wrong ----


def test_wrong_results_are_found():
    shape = operations.Shape(1, 144, 4, 2, 4)
    inputs = operations.make_inputs(shape, 5, 0, torch.device("cpu"))
    buffer = Buffer(None, 8, shape.hidden, shape.num_experts, shape.num_topk)
    for operation in operations.operations(buffer, shape, inputs, None):
        assert verify.verify(operation, [inputs], shape, 0)
        result = operation.call()
        tensors = {"combined_x": result} if operation.op == "combine" else result._asdict()
        for name in {"combined_x", "recv_x", "recv_x_scales", "recv_topk_idx", "recv_topk_weights"} & set(tensors):
            if tensors[name] is None:
                continue
            tensors[name].view(torch.uint8)[1] ^= 1
            wrong = operations.Operation(operation.op, operation.dtype, operation.layout, 1, lambda result=result: result)
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


def test_commands():
    assert _with_command([]) == ["exchange"] and _with_command(["gate"]) == ["gate"]
    assert _with_command(["--backend", "shm"])[0] == "exchange" and _with_command(["--backend=nvlink", "--sweep"])[0] == "link"


def test_plan(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    options = options_of("--sweep")
    assert options.ranks == [2, 4] and options.tokens == [128, 512, 2048, 4096, 8192, 32768]
    assert options.num_sms_of[4096] == [None, 4, 8, 12, 16, 24, 32, 0] and options.num_sms_of[128] == [None]
    options = options_of("--num-sms", "8", "16", "--tokens", "64", "--ranks", "4")
    assert options.num_sms_of == {64: [8, 16]} and options.ranks == [4]
    with pytest.raises(ValueError, match="--experts 10 must be a multiple of --ranks 4"):
        options_of("--experts", "10")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BackendUnavailableError, match="'nvlink' needs a GPU for each of 2 ranks, this machine has 1; give --ranks"):
        options_of()


def test_launched(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"--ranks \[2\] under a launcher that started 3 ranks; leave --ranks out"):
        options_of("--backend", "shm", "--ranks", "2", "--experts", "9")
    assert options_of("--backend", "shm", "--experts", "9").ranks == [3]


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="deep_ep is installed")
def test_missing_peer():
    result = bench(*TINY, "--peer", "deep_ep")
    assert result.returncode == 1
    assert result.stderr.startswith(
        "--peer deep_ep: the package deep_ep is not importable here (No module named 'deep_ep'); install DeepEP"
    )


def test_missing_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EPError, match="--plot needs matplotlib .*; pip install matplotlib"):
        report.load_pyplot()
