"""The benchmark of the host's time: its records."""

import pytest
import torch
import torch.distributed as dist
from bench_cases import RECORD_FIELDS

from benchmarks.host import command, drop_in, measure

OPS = {
    "host layer forward", "host layer backward", "host layer backward alone", "host dispatch", "host dispatch cached",
    "host combine", "host gate", "host gate dense", "host low-latency",
}  # fmt: skip
"""Those of the docs."""


DROP_IN_OPS = [
    f"host drop-in {op}"
    for op in (
        "dispatch", "dispatch cached", "combine", "V2 dispatch", "V2 dispatch cached", "V2 combine", "HybridEP dispatch",
        "HybridEP dispatch cached", "HybridEP combine", "HybridEP combine with probs",
    )
]  # fmt: skip


def test_drop_in(monkeypatch):
    """Each call of DeepEP's interface stands beside ours, on a group that is gone afterwards."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    times = drop_in.times(measure.Shape(8, 128, 8, 2), repeats=2, device="cpu")
    assert list(times) == DROP_IN_OPS and not dist.is_initialized()
    assert all(len(part) == 2 and min(part) > 0 for pair in times.values() for part in pair)


@pytest.mark.gpu
def test_records():
    records = command.run(measure.Shape(8, 128, 8, 2), repeats=2)
    assert {r["op"] for r in records if r["rival"] == command.SMALLEST} >= OPS
    assert [r["op"] for r in records if r["rival"] == drop_in.NATIVE] == DROP_IN_OPS
    for record in records:
        assert set(record) >= RECORD_FIELDS and record["us_p10"] <= record["us_median"] <= record["us_p90"] and record["rival_us"] > 0
