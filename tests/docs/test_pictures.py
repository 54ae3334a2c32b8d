"""Every picture is shown, charts are drawn from the records, and tables of peers repeat what was measured."""

import json
import re
import statistics
import sys

import pytest
from scripts import ROOT

PICTURES = ROOT / "docs" / "pictures"
PAGES = {path: path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]}
sys.path.append(str(ROOT / "benchmarks" / "plots"))

import figures  # noqa: E402

LOSSES = {  # records in benchmarks/examples, by model, ranks and GPU
    ("small", 1, "H200"): "h200-fp8-curves-small-2026-11-26.json",
    ("tiny", 1, "H100"): "h100-fp8-curves-tiny-2026-11-26.json",
    ("tiny", 1, "H200"): "h200-fp8-curves-tiny-2026-11-26.json",
    ("tiny", 2, "H100"): "h100-fp8-curves-tiny-ep2-2026-11-26.json",
}


def test_charts_have_the_values_of_the_records(tmp_path):
    figures.draw(tmp_path / "figures.svg")
    expected = [f"{gbps:.0f} GB/s" for _, operation in figures.GROUPS for gbps in figures.bars_of(operation).values()]
    assert len(expected) == 18 and f"SMs push at most {figures.LIMIT_GBPS} GB/s" in PAGES[ROOT / "docs" / "limits.md"]
    for chart in (tmp_path / "figures.svg", figures.CHART):
        assert re.findall(r">(\d+ GB/s)<", chart.read_text()) == expected, "run benchmarks/plots/figures.py"


def test_each_picture_is_shown_and_described():
    shown = {match for text in PAGES.values() for match in re.findall(r"!\[[^\]]+\]\((?:\.\./|docs/)?pictures/(\w+)\.svg\)", text)}
    assert shown == {path.stem for path in PICTURES.glob("*.svg")}


def differences_at_end(record, key):
    """Return by how many percent the losses of all seeds that have `key` end apart from those of bf16."""
    return [100 * each[key] for each in record["compared"] if key in each]


def test_table_of_losses_repeats_the_records():
    text = PAGES[ROOT / "docs" / "design" / "fp8_training.md"]
    rows = re.findall(r"^\| (?:small|tiny) \| [12] \| H.+\|$", text, re.MULTILINE)
    assert len(rows) == len(LOSSES)
    for row, ((model, num_ranks, gpu), file) in zip(rows, LOSSES.items(), strict=True):
        record = json.loads((ROOT / "benchmarks" / "examples" / file).read_text())
        assert gpu in record["hardware"] and (model, num_ranks) == (record["model"], record["num_ranks"])
        ours, nudged = (differences_at_end(record, key) for key in ("difference_at_end", "nudged_at_end"))
        assert row == (
            f"| {model} | {num_ranks} | {gpu} | {len(record['seeds'])} | {statistics.mean(ours):+.2f}% "
            f"| {min(ours):+.2f}% to {max(ours):+.2f}% | {len(nudged)} | {min(nudged):+.2f}% to {max(nudged):+.2f}% |"
        )
        at_end = {(run["seed"], run["experts"]): sum(run["losses"][-record["window"] :]) / record["window"] for run in record["runs"]}
        for each in record["compared"]:
            exact, fp8 = (at_end[each["seed"], name] for name in ("bf16", "fp8"))
            assert each["all_finite"] and (fp8 - exact) / exact == pytest.approx(each["difference_at_end"], abs=1e-5)


# ---- versions ----


def test_a_page_names_the_tested_versions():
    for name, folder in (("DeepSpeed", "deepspeed"), ("Megatron-Core", "megatron")):
        source = (ROOT / "integrations" / folder / "plugin.py").read_text()
        (limits,) = re.findall(r"^_OLDEST, _NEWEST = \(([\d, ]+)\), \(([\d, ]+)\)$", source, flags=re.MULTILINE)
        oldest, newest = (limit.replace(", ", ".") for limit in limits)
        assert f"| {name} | {oldest} to {newest} |" in PAGES[ROOT / "docs" / "hardware.md"]


def test_pages_name_the_same_versions_of_pytorch():
    said = {
        "docs/hardware.md": r"^\| PyTorch \| .+ \| (.+) \|$",
        "docs/install.md": r"^pip install \. .*\((.+) were run\)$",
        "docs/status.md": r"^\| Linux x86-64, gcc 12; PyTorch (.+) \| run \|",
    }
    versions = {}
    for page, pattern in said.items():
        (text,) = re.findall(pattern, PAGES[ROOT / page], flags=re.MULTILINE)
        versions[page] = set(re.findall(r"\b2\.\d+", text))
    run = versions["docs/hardware.md"]
    assert len(set(map(frozenset, versions.values()))) == 1 and len(run) == 3, versions
    assert f"badge/PyTorch-{'%2C_'.join(sorted(run, key=lambda version: int(version[2:])))}-" in PAGES[ROOT / "README.md"], "these only"
    wheel = re.findall(r"^\| wheel beside PyTorch (.+?) \|", PAGES[ROOT / "docs" / "status.md"], flags=re.MULTILINE)[0]
    assert set(re.findall(r"\b2\.\d+", wheel)) <= run
    (pinned,) = re.findall(r"^torch==(2\.\d+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert pinned in run
