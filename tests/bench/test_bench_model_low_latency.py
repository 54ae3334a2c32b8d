"""The model of low-latency calls over nodes: by hand, against what others have published, and what the protocol is for."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from bench_cases import RECORD_FIELDS, ROOT

from benchmarks.model import low_latency_report
from benchmarks.model.low_latency import (
    GUESSED,
    MEASURED,
    Batch,
    Latencies,
    batches_of,
    by_message,
    combine,
    compared,
    dispatch,
    draw,
    lines,
    times_of,
)
from benchmarks.model.machine import MACHINES
from benchmarks.model.published import LOW_LATENCY
from benchmarks.run import main

RECORDS = json.loads((ROOT / "benchmarks/results/modelled-low-latency-nodes-2026-11-26.json").read_text())

ROW_WIRE = {"dispatch": "fp8", "combine": "bf16"}
VARIES = {"us_median", "us_p10", "us_p90", "us_p99", "us_by_message", "gbps", "ratio", "error", "versions", "command"}
NONE = Latencies(0.0, 0.0, 0.0, 0.0)
PLAIN = replace(MACHINES["h100"], nic_gbps=1.0, nvlink_gbps=10.0, put_us=5.0, message_us=0.0)


def test_one_token_by_hand():
    """2 nodes of 2 ranks. Rank 0's token has two experts on rank 3, one on rank 2. A row takes 1 us over the network. NVLink passes one
    each 0.1 us."""
    experts_of = np.zeros((4, 1, 4), dtype=np.int64)
    experts_of[0, 0, 2:] = 1, 2
    batch, late = Batch(2, experts_of), np.zeros(4)
    assert dispatch(batch, PLAIN, NONE, 1000, late) == pytest.approx([0, 0, 6.0, 6.1])  # rank 2 has it first
    assert combine(batch, PLAIN, NONE, 1000, late) == pytest.approx([6.1, 0, 0, 0])  # rank 2 has both sums by 0.1
    assert by_message(batch, PLAIN, NONE, 1000, late) == pytest.approx([0, 0, 6, 8])  # three rows leave one after the other
    own = np.zeros((4, 1, 4), dtype=np.int64)
    own[0, 0, 1:3] = 2, 1
    assert by_message(Batch(2, own), PLAIN, NONE, 1000, late) == pytest.approx([0, 8, 7, 0])  # rank 2's leaves between the two
    assert by_message(Batch(2, own), PLAIN, NONE, 1000, late, over_nvlink=True) == pytest.approx([0, 0.1, 6, 0])


def test_rows_that_share_a_put_by_hand():
    """2 nodes of 1 rank. Rank 0's three tokens go to rank 1. Two rows are packed 1 us later than one, and land together."""
    experts_of = np.zeros((2, 3, 2), dtype=np.int64)
    experts_of[0, :, 1] = 1
    batch, late, free = Batch(1, experts_of), np.zeros(2), replace(PLAIN, nvlink_gbps=1e9)
    for call in (dispatch, combine):
        told = [call(batch, free, NONE, 1000, late, chunk_rows).max() for chunk_rows in (1, 2, 3, 8)]
        assert told == pytest.approx([8.0, 8.0, 10.0, 10.0])  # of two and one, the one leaves first; three come 2 us later
        told = [call(batch, replace(free, message_us=4.0), NONE, 1000, late, chunk_rows).max() for chunk_rows in (1, 2, 3)]
        assert told == pytest.approx([17.0, 13.0, 11.0])  # a message takes 4 us, whatever it holds


def test_messages_bound_what_bytes_do_not():
    batch, late = draw(16, 8, 64, 8, 256, 0), np.zeros(16)
    many = replace(MACHINES["h100"], message_us=2.0)
    assert np.median(dispatch(batch, many, Latencies(), 64, late)) > 2.0 * 64 / 2
    assert np.median(by_message(batch, many, Latencies(), 64, late)) > 2.0 * 64 * 7


def test_held_against_published_tables():
    """Rates are those of the other model; DeepEP's messages come out within 10% of its table, and too fast but for one."""
    for line in lines(nums_ranks=(16, 32, 64), num_seeds=1):
        assert line.error is not None and -0.10 < line.error < 0.03, line


def test_two_hops_over_nics_of_50_gbps():
    made = {line.op: line for line in lines(replace(MACHINES["h100"], nic_gbps=50.0), (16,), num_seeds=1)}
    assert made["dispatch"].us_p99 < 60 and made["combine"].us_p99 < 85, made
    assert all(line.us < line.by_message_us / 3 for line in made.values())


def test_late_ranks_hold_up_others():
    late = np.zeros(16)
    late[5] = 100.0
    batch = draw(16, 8, 32, 8, 256, 0)
    for call in (dispatch, combine):
        took = call(batch, MACHINES["h100"], Latencies(), 7392, late)
        assert took.argmin() == 5 and (np.delete(took, 5) > 95).all()


# ---- what is assumed, and what is documented ----


def test_kernels_as_measured():
    """Sums of latencies are the halves of the record of four GPUs."""
    records = json.loads((ROOT / "benchmarks/results/h200-low-latency-nodes-2x2-four-gpus-2026-11-26.json").read_text())
    us = {(r["op"], r["half"]): r["us_median"] for r in records if r["backend"] == "nvshmem" and r["wire"] == ROW_WIRE[r["op"]]}
    out, back = MEASURED["dispatch"], MEASURED["combine"]
    assert out.start_us + out.pack_us == pytest.approx(us["dispatch", "send"], abs=0.05)
    assert out.hop_us + out.place_us == pytest.approx(us["dispatch", "receive"], abs=0.05)
    assert back.start_us + back.hop_us + back.pack_us == pytest.approx(us["combine", "send"], abs=0.05)
    assert back.place_us == pytest.approx(us["combine", "receive"], abs=0.05)


def test_command(tmp_path, monkeypatch, capsys):
    """It writes the records that are committed; here of the smallest size."""
    monkeypatch.setattr(low_latency_report, "lines", lambda machine: lines(machine, (16,)))
    monkeypatch.setattr(low_latency_report, "SMALL", (16,))
    monkeypatch.setattr(low_latency_report, "LOW_LATENCY", [row for row in LOW_LATENCY if row.num_ranks == 16])
    file = tmp_path / "records.json"
    main(["model", "--low-latency", "--json", str(file)])
    committed = [r for r in RECORDS if r["num_ranks"] == 16]
    for made, one in zip(json.loads(file.read_text()), committed, strict=True):
        assert set(made) >= RECORD_FIELDS and made["assumptions"]
        assert {name: made[name] for name in made if name not in VARIES} == {name: one[name] for name in one if name not in VARIES}
        assert made["us_median"] == pytest.approx(one["us_median"], rel=1e-3)
    printed = capsys.readouterr().out
    assert len(re.findall(r"^(?:dispatch|combine) +16 ", printed, flags=re.MULTILINE)) == 4 + 8 + 2
    assert len(re.findall(r"[+-]\d+%", printed)) == 8 and "a message each" in printed
    with pytest.raises(SystemExit, match="--low-latency has no plot: leave --plot out"):
        main(["model", "--low-latency", "--plot", str(tmp_path / "plot.png")])


def find(part, op, num_ranks, **kind):
    (found,) = [
        r for r in RECORDS
        if (r["part"], r["op"], r["num_ranks"]) == (part, f"model low-latency {op}", num_ranks)
        and all((r["machine"] | r)[name] == value for name, value in kind.items())
    ]  # fmt: skip
    return found


def test_documented_figures_are_those_of_the_record():
    page = (ROOT / "docs/model.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (dispatch|combine) \| " + r"\| ".join([r"(\d+) "] * 5) + r"\| ([+-]\d+)% \|$", page, re.MULTILINE)
    assert len(rows) == 10
    for ranks, op, *cells, error in rows:
        fast, slow = (find("sizes", op, int(ranks), nic_gbps=nic) for nic in (50.0, 46.0))
        theirs = find("published", op, int(ranks), rival="DeepEP V1")
        us = fast["us_median"], fast["us_p99"], slow["us_median"], slow["us_by_message"], theirs["rival_us"]
        assert [*cells, error] == [*(f"{each:.0f}" for each in us), f"{100 * theirs['error']:+.0f}"], (ranks, op)
    for text, count in ((page, 16), ((ROOT / "docs/design/low_latency_nodes.md").read_text(), 4)):
        figures = r"\| ".join([r"([\d.]+) "] * 3)
        rows = re.findall(r"^\| (\d+) \| (dispatch|combine) \| ([1248]) \| " + figures + r"\|$", text, re.MULTILINE)
        assert len(rows) == count
        for ranks, op, chunk_rows, *cells in rows:
            of = [find("puts", op, int(ranks), chunk_rows=int(chunk_rows), message_us=us) for us in low_latency_report.MESSAGE_US]
            assert cells == [f"{r['us_median']:.1f}" for r in of], (ranks, op, chunk_rows)
    rows = re.findall(r"^\| (\d+) \| (dispatch|combine) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 4
    for ranks, op, *cells in rows:
        of = find("sizes", op, int(ranks), nic_gbps=50.0), find("measured kernels", op, int(ranks))
        assert cells == [f"{r['us_median']:.1f}" for r in of], (ranks, op)


def test_documented_errors_of_other_tables():
    rows = re.findall(
        r"^\| (.+) \| (\d+) \| (dispatch|combine) \| (network|NVLink) \| ([\d.]+)(?: to (\d+))? \| (\d+) \| ([+-]\d+)% \|$",
        (ROOT / "docs/model.md").read_text(), re.MULTILINE,
    )  # fmt: skip
    assert len(rows) == sum(row.source != "DeepEP V1" for row in LOW_LATENCY) == 14
    for source, ranks, op, way, us, us_to, model, error in rows:
        r = find("published", op, int(ranks), rival=source)
        middle = (float(us) + float(us_to)) / 2 if us_to else float(us)
        assert (r["rival_us"], r["rival_us_to"]) == (middle, float(us_to) if us_to else None) and r["over_nvlink"] == (way == "NVLink")
        assert (model, error) == (f"{r['us_median']:.0f}", f"{100 * r['error']:+.0f}"), (source, ranks, op)


def test_assumptions_of_puts():
    """One row a put is the fastest while a message takes no longer than the bytes of a row, and not where it takes 0.3 us."""
    machine, batches = replace(MACHINES["h100"], nic_gbps=50.0), batches_of(16, num_seeds=1)
    for message_us, best in ((0.1, 1), (0.3, 2)):
        us = {
            rows: np.median(times_of("dispatch", batches, replace(machine, message_us=message_us), chunk_rows=rows)) for rows in (1, 2, 4)
        }
        assert min(us, key=us.get) == best, us
    slower = np.median(times_of("combine", batches, machine, latencies=MEASURED))
    assert np.median(times_of("combine", batches, machine, latencies=GUESSED)) < slower < 85
    row = next(row for row in LOW_LATENCY if row.source == "pplx-garden")
    assert np.median(compared(row, num_seeds=1)) < row.us
