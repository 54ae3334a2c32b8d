"""The benchmark of low-latency calls: its records and checks, on the CPU."""

import pytest
import torch
from bench_cases import bench

from benchmarks.common import workload
from benchmarks.low_latency import operations as low_latency_operations
from deepep_moe import LowLatencyBuffer
from deepep_moe.errors import EPError

TINY = [
    "--num-tokens", "9", "3", "--hidden", "256", "--num-experts", "8", "--num-topk", "3", "--iterations", "4",
]  # fmt: skip
NAMES = {"dispatch fp8", "dispatch bf16", "combine bf16", "combine fp8"}
FIELDS = {"us_event", "us_host", "is_host_ahead", "link_gbps", "percent_of_link"}


# ---- what it reports ----


def check_record(r: dict, half: str) -> None:
    assert set(r) >= FIELDS and r["us_event"] is None and (r["half"], r["num_ranks"], r["num_sms"], r["iterations"]) == (half, 2, None, 4)
    assert 0 < r["us_p10"] <= r["us_median"] <= r["us_p90"] <= r["us_p99"] and r["workspace_bytes"] > 0
    assert r["bytes_moved"] % (512 if r["wire"] == "bf16" else 256 + 8) == 0 and (r["bytes_moved"] == 0) == (half == "receive")
    in_bf16 = ", in bf16" if r["name"] == "low-latency combine fp8" else ""
    assert r["rival"] == (f"all-to-all of rows (gloo) with permutes{in_bf16}" if half == "both" else None)


def test_records(tmp_path):
    result, records = bench(tmp_path, *TINY, command="low-latency")
    assert "EP2: 9 tokens, workspace" in result.stderr
    halves = ("both", "send", "receive")
    expected = {(f"low-latency {name}", n, half, False) for name in NAMES for n in (3, 9) for half in halves}
    assert {(r["name"], r["num_tokens"], r["half"], r["graph"]) for r in records} == expected and len(records) == len(expected)
    for r in records:
        check_record(r, r["half"])
        is_fp8 = r["name"] == "low-latency dispatch fp8"
        assert r["backend"] == "shm" and r["dtype"] == ("float8_e4m3fn" if is_fp8 else "bfloat16")
    assert "both" in result.stdout


# ---- it measures nothing that is wrong ----


def test_wrong_results_are_found():
    shape = workload.Shape(1, 256, 8, 3, 1)
    everyone = [workload.make_inputs(shape, 9, 0, torch.device("cpu"))]
    buffer = LowLatencyBuffer(None, 9, shape.hidden, shape.num_experts, shape.num_topk, backend="shm")
    listed = low_latency_operations.operations(buffer, shape, everyone, 0)
    assert {o.name for o in listed} == NAMES and {(o.wire, o.row_bytes) for o in listed} == {("bf16", 512), ("fp8", 264)}
    for operation in listed:
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


@pytest.mark.multi_gpu(2)
def test_on_gpus(tmp_path):
    sizes = ("--num-ranks", "2", "--num-tokens", "3", "16", "--iterations", "50", "--hidden", "512", "--num-experts", "16")
    _, records = bench(tmp_path, *sizes, command="low-latency", backend="nvlink")
    assert len(records) == 2 * 4 * 4 and sum(r["graph"] for r in records) == 8
    assert all(r["us_graph_of_20"] > 0 and r["rival_graph"] for r in records if r["graph"])
