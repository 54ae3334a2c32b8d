"""The model of calls over several nodes: by hand, against an event loop, our records and published tables; docs repeat its records."""

import json
import re

import numpy as np
import pytest
from bench_cases import RECORD_FIELDS, ROOT

from benchmarks import model
from benchmarks.model import Machine, simulate
from benchmarks.run import main

RESULTS = ROOT / "benchmarks" / "results"
MODELLED = json.loads((RESULTS / "modelled-nodes-2026-11-25.json").read_text())
PAGE = (ROOT / "docs" / "model.md").read_text()
# Bytes a microsecond: an SM 50,000, a NIC 50,000, NVLink 100,000.
ROUND = Machine("round numbers", nvlink_gbps=100.0, nic_gbps=50.0, put_us=5.0, message_us=1.0, sm_gbps=50.0, start_us=10.0)
SHORT = {"bfloat16": "bf16", "float8_e4m3fn": "fp8"}


def goes(shape, *rows):
    """Choices [sources, tokens, nodes, ranks of a node]: those at the indices `rows`."""
    chosen = np.zeros(shape, dtype=bool)
    for row in rows:
        chosen[row] = True
    return chosen


# ---- by hand ----


def test_one_chunk_and_four():
    """Two nodes of one GPU, whose four tokens all go to the other one. In four chunks only the first and the last wait for it all."""
    sent = goes((1, 4, 2, 1), (0, slice(None), 1, 0))
    call = simulate("dispatch", sent, ROUND, 100_000, 4, 2)
    assert call.us == pytest.approx(10 + 5 + 8 + (8 + 1) + 5 + 8), "start and peers' words, one SM packs, NIC, put, one SM forwards"
    assert (call.network_bytes, call.logical_bytes, call.bound) == (400_000, 400_000, "latency")
    assert call.busy_us == pytest.approx({"SMs": 8, "NIC": 9, "NVLink": 0})
    assert simulate("combine", sent, ROUND, 100_000, 4, 2).us == pytest.approx(10 + 5 + (8 + 1) + 5)
    assert simulate("dispatch", sent, ROUND, 100_000, 1, 2).us == pytest.approx(10 + 5 + 2 + 4 * 3 + 5 + 2)


def test_row_for_a_neighbour():
    """2 x 2, one token of rank 0 (node 0) for rank 3: to rank 2, then over NVLink. By symmetry one of rank 2 goes to rank 1."""
    sent = goes((2, 1, 2, 2), (0, 0, 1, 1))
    call = simulate("dispatch", sent, ROUND, 100_000, 8, 2)
    assert call.us == pytest.approx(15 + 2 + 3 + 5 + 2) and call.busy_us["NVLink"] == pytest.approx(1)
    assert simulate("combine", sent, ROUND, 100_000, 8, 2).us == pytest.approx(15 + 1 + 3 + 5), "both SMs push"


# ---- held against measurements ----


def test_records_of_one_host():
    """Four GPUs of one host, from 2048 tokens on: 3.5% off in the rank layout, 9.5% in the expert layout, whose sums cost some. A dispatch
    whose host waits for the counts takes 188 us at least."""
    records = json.loads((RESULTS / "h200-nvlink-2026-11-22.json").read_text())
    records = [r for r in records if r["num_ranks"] == 4 and r["op"] in ("dispatch", "combine")]
    records = [r for r in records if r["num_sms"] is None and r["num_tokens"] >= 2048]
    assert len(records) == 24
    for r in records:
        sent = model.choose(1, r["num_tokens"], 256, None, per_node=4)
        us = simulate(r["op"], sent, model.MACHINES["h100"], model.ROW_BYTES[SHORT[r["dtype"]]], 16, 12).us
        us = max(us, 188.4) if r["op"] == "dispatch" else us
        assert us == pytest.approx(r["us_median"], rel=0.035 if r["layout"] == "rank" else 0.095), r["name"]


def committed(entry):
    """The committed record of what `entry` is of."""
    same = {name: entry[name] for name in ("op", "rival", "dtype", "num_ranks", "num_tokens", "num_experts")}
    if entry["part"] in ("uniform", "group-limited"):
        same["routing"] = entry["part"]
    if entry["part"] == "published":
        same["num_sms"] = entry["num_sms"]
    (record,) = [r for r in MODELLED if {name: r.get(name) for name in same} == same]
    return record


def test_command_repeats_the_committed_records(tmp_path, monkeypatch, capsys):
    """Here of the smallest size."""
    monkeypatch.setattr(model, "PUBLISHED", [(*row[:5], {16: row[5][16]}) for row in model.PUBLISHED if 16 in row[5]][1:4])
    file = tmp_path / "records.json"
    main(["model", "--num-nodes", "2", "--json", str(file)])
    records = json.loads(file.read_text())
    assert len(records) == 6 + 7
    for r in records:
        assert set(r) >= RECORD_FIELDS and r["hardware"].startswith("modelled: ")
        was = committed(r)
        assert r["us_median"] == pytest.approx(was["us_median"], rel=1e-3) and r.get("bound") == was.get("bound")
        assert r.get("error") == pytest.approx(was.get("error"), abs=1e-3)
    assert len(capsys.readouterr().out.splitlines()) == len(records) + 1


# ---- docs ----


def spread(errors):
    """Return the range from least to most in the form of a table cell."""
    ends = dict.fromkeys(f"{100 * end:+.0f}%" for end in (min(errors), max(errors))) if errors else ()
    return " to ".join(ends)


def test_documented_published_figures():
    rows = re.findall(r"^\| (.+?) \| (\d+) " + r"\| ([^|]*)" * 3 + r"\|$", PAGE, re.MULTILINE)
    published = [r for r in MODELLED if r["rival"] is not None]
    assert len(published) == 40
    sources = dict.fromkeys((r["rival"], str(r["num_sms"])) for r in published)
    assert [row[:2] for row in rows] == list(sources)
    for *source, sixteen, thirty_two, sixty_four in rows:
        for cell, num_ranks in ((sixteen, 16), (thirty_two, 32), (sixty_four, 64)):
            errors = [r["error"] for r in published if [r["rival"], str(r["num_sms"]), r["num_ranks"]] == [*source, num_ranks]]
            assert cell.strip() == spread(errors), (source, num_ranks)


def test_documented_sizes():
    of = {(r["op"], r["dtype"], r["num_ranks"], r["routing"]): r for r in MODELLED if r["rival"] is None}
    assert len(of) == 36 and {r["bound"] for r in of.values()} == {"NIC"}
    rows = re.findall(r"^\| (\d+) " + r"\| ([\d.]+), ([\d.]+) " * 3 + r"\| ([\d.]+) GB \|$", PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == ["16", "32", "64", "128", "256", "512"]
    for num_ranks, *cells, size in rows:
        for number, routing in enumerate(("uniform", "group-limited")):
            fp8, out, back = (
                of[f"model {op}", dtype, int(num_ranks), routing]
                for op, dtype in (("dispatch", "float8_e4m3fn"), ("dispatch", "bfloat16"), ("combine", "bfloat16"))
            )
            fp8_ms, out_ms, back_ms = (f"{r['us_median'] / 1e3:.2f}" for r in (fp8, out, back))
            assert cells[number::2] == [f"{fp8['nodes_per_token']:.2f}", fp8_ms, out_ms] and out_ms == back_ms, (num_ranks, routing)
            assert f"{fp8['network_workspace_bytes'] / 1e9:.2f}" == size
    table = re.findall(r"^\| (\d+) nodes \| ([\d.]+) \| ([\d.]+) \|$", (ROOT / "docs" / "multi_node.md").read_text(), flags=re.MULTILINE)
    assert len(table) == 4
    for num_nodes, *nodes in table:
        records = [of["model combine", "bfloat16", 8 * int(num_nodes), routing] for routing in ("uniform", "group-limited")]
        assert [f"{r['nodes_per_token']:.2f}" for r in records] == nodes
