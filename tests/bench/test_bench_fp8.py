"""The benchmark of a layer with fp8 experts: its records, on the CPU."""

import json

from bench_cases import RECORD_FIELDS, bench

from benchmarks.layers.fp8_layers import BF16, EACH, GRAPHS, SHARED

SIZES = ["--num-tokens", "48", "--hidden", "128", "--ffn-hidden", "128", "--num-topk", "2", "--num-experts", "4", "--repeats", "1"]


def test_records(tmp_path):
    path = tmp_path / "fp8.json"
    done = bench("--device", "cpu", "--num-ranks", "2", *SIZES, "--micro-batches", "3", "--json", str(path), command="fp8")
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(path.read_text())
    assert [(each["op"], each["rival"]) for each in records] == [(f"fp8 layer {name}", BF16) for name in (EACH, SHARED)]
    for each in records:
        assert set(each) >= RECORD_FIELDS and each["num_ranks"] == 2 and each["wire"]["row_bytes"] == {"fp8": 132, "bf16": 256}
        assert 48 <= each["wire"]["rows"] <= 96 and each["host_us"] > 0 and each["kernel_us"] is None
        assert 0.01 < each["differences"]["output"] < 0.12 and each["rival_versions"].endswith("TransformerEngine needs a GPU")
    # Two bytes and the scales of two of the four experts' parameters.
    parameters = 2 * 3 * 128 * 128
    assert [each["kept_bytes"] for each in records] == [0, 2 * parameters + 8 * parameters // 128**2]
    assert [each["micro_batches"] for each in records] == [None, 3]
    assert records[0]["not_captured"] == dict.fromkeys(GRAPHS, "CUDA graphs need a GPU")
