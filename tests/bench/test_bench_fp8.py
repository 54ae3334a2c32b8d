"""The benchmark of a layer with fp8 experts: its records, on the CPU."""

import json

from bench_cases import RECORD_FIELDS, bench

from benchmarks.layers.fp8_layers import BF16, EACH, SHARED

SIZES = ["--num-tokens", "48", "--hidden", "128", "--ffn-hidden", "128", "--num-topk", "2", "--num-experts", "4", "--repeats", "1"]


def test_records(tmp_path):
    path = tmp_path / "fp8.json"
    done = bench("--device", "cpu", "--num-ranks", "2", *SIZES, "--micro-batches", "3", "--json", str(path), command="fp8")
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(path.read_text())
    assert [(each["op"], each["rival"]) for each in records] == [(f"fp8 layer {name}", BF16) for name in (EACH, SHARED)]
    for each in records:
        assert set(each) >= RECORD_FIELDS and each["num_ranks"] == 2
        assert 48 <= each["bytes_moved"] / (2 * (132 + 256)) <= 96 and each["host_us"] > 0 and each["kernel_us"] is None
        assert 0.01 < each["differences"]["output"] < 0.12 and each["rival_versions"].endswith("TransformerEngine needs a GPU")
    assert [each["micro_batches"] for each in records] == [None, 3]
