"""The number of SMs that send on a machine without a profile (deepep_moe/tuning/fit.py)."""

import json
import re

import pytest
from scripts import ROOT

from deepep_moe.tuning.fit import fit


@pytest.mark.parametrize(("num_sms", "link_gbps", "expected"), [(148, 714, (23, 27)), (132, 178.5, (6, 7))])
def test_link(num_sms, link_gbps, expected):
    """In proportion to the rate of the link: that of NVLink 5, and half of NVLink 4's."""
    assert fit(num_sms, 9, link_gbps) == expected


@pytest.mark.parametrize(("num_sms", "expected"), [(12, 3), (4, 1), (3, 1), (1, 1)])
def test_small_share_of_a_gpu(num_sms, expected):
    """At most a quarter of the SMs sends, and at least one."""
    assert fit(num_sms, 9)[0] == expected


# ---- docs/tuning.md ----

PAGE = (ROOT / "docs" / "tuning.md").read_text()


def test_table_of_the_sweep():
    """Its figures are those of the record."""
    records = json.loads((ROOT / "benchmarks" / "results" / "h200-nvlink-2026-11-26.json").read_text())
    rows = re.findall(r"^\| EP(\d) (\w+), (\w+)(?: .)? \| ([\d |]+) \|$", PAGE, flags=re.MULTILINE)
    assert len(rows) == 6
    for num_ranks, op, layout, cells in rows:
        what = {"num_ranks": int(num_ranks), "op": op, "layout": layout, "dtype": "bfloat16", "num_tokens": 4096}
        gbps = {r["num_sms"]: r["gbps"] for r in records if {name: r[name] for name in what} == what}
        assert [f"{gbps[num_sms]:.0f}" for num_sms in (4, 8, 12, 16, 24, 32)] == cells.split(" | ")


def test_table_of_machines():
    for machine, (num_sms, num_sms_of_sums) in {
        "H100, H200: 132 SMs": fit(132, 9),
        "B200: 148 SMs; not measured": fit(148, 10),
        "half of an H100 (66 SMs, MPS)": fit(66, 9),
        "a quarter of an H100 (33 SMs, MPS)": fit(33, 9),
        "GPUs before sm_90 (no bulk copies), and others whose link is not known": fit(108, 8),
    }.items():
        assert f"| {machine} | {num_sms} | {num_sms_of_sums} |" in PAGE
