"""The benchmarks of layers: their records, on the CPU with tiny sizes."""

from pathlib import Path

import pytest
from bench_cases import bench

from benchmarks.layers.fp8_layers import BF16, EACH, SHARED


def records_of(command: str, folder: Path, **sizes: int) -> tuple[str, list[dict]]:
    """Return what the benchmark of a layer prints, and its records."""
    words = [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    done, records = bench(folder, "--device", "cpu", *words, command=command)
    for r in records:
        assert (r["backend"], r["num_ranks"], r["num_tokens"]) == ("shm", 2, sizes["num_tokens"])
        assert r["us_median"] > 0 and r["ratio"] == pytest.approx(r["rival_us"] / r["us_median"])
    return done.stdout + done.stderr, records


def test_fp8(tmp_path):
    sizes = {"num_tokens": 48, "hidden": 128, "ffn_hidden": 128, "num_topk": 2, "num_experts": 4, "repeats": 1}
    _, records = records_of("fp8", tmp_path, num_ranks=2, micro_batches=3, **sizes)
    assert [(each["op"], each["rival"]) for each in records] == [(f"fp8 layer {name}", BF16) for name in (EACH, SHARED)]
    for each in records:
        assert 48 <= each["bytes_moved"] / (2 * (132 + 256)) <= 96 and each["host_us"] > 0 and each["kernel_us"] is None
        assert 0.01 < each["differences"]["output"] < 0.12 and each["rival_versions"].endswith("TransformerEngine needs a GPU")
    assert [each["micro_batches"] for each in records] == [None, 3]


@pytest.mark.slow
def test_megatron(tmp_path):
    pytest.importorskip("megatron.core")
    sizes = {"num_tokens": 12, "hidden": 32, "ffn_hidden": 16, "num_topk": 3, "num_experts": 4, "repeats": 2}
    printed, records = records_of("megatron", tmp_path, **sizes)
    assert "megatron exchange" in printed and "megatron layer" in printed
    of_layer = ["deepep_moe", "alltoall", "deepep_moe, sync-free", "grouped products alone"]
    rivals = {"exchange": ["alltoall", "allgather", "rows alone"], "layer": of_layer}
    assert [(r["op"], r["rival"]) for r in records] == [
        (f"megatron {what} forward+backward", rival) for what in rivals for rival in rivals[what]
    ]
    for r in records:
        assert (r["dtype"], r["layout"]) == ("bfloat16", "expert")
        assert r["bytes_moved"] % 64 == 0 and 0 < r["bytes_moved"] <= 12 * 64 * 4
        what, differences = r["op"].split()[1], r["differences"]
        if what == "layer":
            assert 0 < r["host_us"] <= r["us_median"] * 1.5 and r["rival_host_us"] > 0 and r["kernel_us"] is None
            assert "TransformerEngine" in r["rival_versions"]
        else:
            assert differences is None if r["rival"].startswith("rows") else set(differences) == {"output", "input", "probs"}


@pytest.mark.slow
def test_deepspeed(tmp_path):
    pytest.importorskip("deepspeed")
    from deepspeed_cases import repeats_bits

    sizes = {"num_tokens": 24, "hidden": 32, "ffn_hidden": 16, "num_topk": 2, "num_experts": 4, "num_layers": 2, "repeats": 2}
    printed, records = records_of("deepspeed", tmp_path, **sizes)
    assert "without grouped products" not in printed, "grouped experts are grouped"
    assert "deepspeed exchange exact" in printed and "deepspeed layer" in printed
    assert [r["op"] for r in records] == [
        f"deepspeed {what} {mode} top-2 {dtype} forward+backward"
        for dtype in ("fp32", "bf16")
        for what in ("exchange", "layer", "communication")
        for mode in ("exact", "fast", *(("grouped",) if what == "layer" else ()))
    ]
    for r in records:
        assert (r["num_topk"], r["rival"], r["num_layers"]) == (2, "deepspeed", 2)
        row_bytes = 32 * {"float32": 4, "bfloat16": 2}[r["dtype"]]
        assert r["bytes_moved"] % row_bytes == 0 and 0 < r["bytes_moved"] <= 24 * 2 * 4 * row_bytes
        what, mode = r["op"].split()[1:3]
        more = {"exchange": set(), "communication": {"gate"}, "layer": {"gate", "experts"}}
        assert set(r["differences"]) == {"output", "input"} | more[what]
        is_exact = what != "layer" and mode == "exact" and repeats_bits()
        assert not (is_exact and any(r["differences"].values())), "to the bit, where experts change nothing"
