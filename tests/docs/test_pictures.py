"""Every picture is shown, charts are drawn from the records, and tables of peers repeat what was measured."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
MEGATRON = (ROOT / "integrations" / "megatron" / "plugin.py").read_text()
PICTURES = ROOT / "docs" / "pictures"
PAGES = {path: path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]}
sys.path.append(str(ROOT / "benchmarks" / "plots"))

import figures  # noqa: E402
import losses  # noqa: E402


def test_charts_have_the_values_of_the_records(tmp_path):
    figures.draw(tmp_path / "figures.svg")
    expected = [f"{gbps:.0f} GB/s" for _, operation in figures.GROUPS for gbps in figures.bars_of(operation).values()]
    assert len(expected) == 18 and f"SMs push at most {figures.LIMIT_GBPS} GB/s" in PAGES[ROOT / "docs" / "limits.md"]
    for chart in (tmp_path / "figures.svg", figures.CHART):
        assert re.findall(r">(\d+ GB/s)<", chart.read_text()) == expected, "run benchmarks/plots/figures.py"


def test_lines_of_losses_are_those_of_the_records(tmp_path):
    """Heights of all lines in the picture are their values times one number and another added, as both plots share their axis."""
    losses.draw(tmp_path / "losses.svg")
    drawn = [losses.record_of(file) for file in list(losses.RECORDS.values())[: losses._NUM_DRAWN]]
    lines = [
        (losses.LINES[experts], line)
        for record in drawn
        for experts in (losses.NUDGED, losses.FP8)
        for line in losses.differences(record, experts).values()
    ]
    for picture in (tmp_path / "losses.svg", losses.PICTURE):
        found = re.findall(rf'<path d="([^"]+)" clip-path[^>]+stroke: ({"|".join(losses.LINES.values())});', picture.read_text())
        assert [colour for _, colour in found] == [colour for colour, _ in lines], "run benchmarks/plots/losses.py"
        heights = np.array([float(y) for path, _ in found for y in re.findall(r"[ML] \S+ (\S+)", path)])
        values = np.concatenate([line for _, line in lines])
        slope, start = np.polyfit(values, heights, 1)
        assert slope < 0 and np.abs(slope * values + start - heights).max() < 0.01, "run benchmarks/plots/losses.py"


def test_each_picture_is_shown_and_described():
    shown = {match for text in PAGES.values() for match in re.findall(r"!\[[^\]]+\]\((?:\.\./|docs/)?pictures/(\w+)\.svg\)", text)}
    assert shown == {path.stem for path in PICTURES.glob("*.svg")}


def test_table_of_losses_repeats_the_records():
    text = PAGES[ROOT / "docs" / "design" / "fp8_training.md"]
    rows = re.findall(r"^\| (?:small|tiny) \| [12] \| H.+\|$", text, re.MULTILINE)
    assert len(rows) == len(losses.RECORDS)
    for row, ((model, num_ranks, gpu), file) in zip(rows, losses.RECORDS.items(), strict=True):
        record = losses.record_of(file)
        assert gpu in record["hardware"] and (model, num_ranks) == (record["model"], record["num_ranks"])
        ours, nudged = (losses.ends(record, key) for key in ("difference_at_end", "nudged_at_end"))
        num_nudged = sum("nudged_at_end" in each for each in record["compared"])
        assert row == (
            f"| {model} | {num_ranks} | {gpu} | {len(record['seeds'])} | {ours.mean:+.2f}% | {ours.least:+.2f}% to {ours.most:+.2f}% "
            f"| {num_nudged} | {nudged.least:+.2f}% to {nudged.most:+.2f}% |"
        )
        at_end = {(run["seed"], run["experts"]): sum(run["losses"][-record["window"] :]) / record["window"] for run in record["runs"]}
        for each in record["compared"]:
            exact, fp8 = (at_end[each["seed"], name] for name in ("bf16", "fp8"))
            assert each["all_finite"] and (fp8 - exact) / exact == pytest.approx(each["difference_at_end"], abs=1e-5)
    many = losses.ends(losses.record_of(losses.RECORDS["tiny", 1, "H100"]), "difference_at_end")
    told = re.search(r"33 seeds of tiny were trained, .+ fp8 ends ([\d.]+)% below bf16, with a 95% interval from\s+(\S+)% to (\S+)%", text)
    assert told.groups() == (f"{-many.mean:.2f}", f"{many.mean - many.interval:.2f}", f"{many.mean + many.interval:+.2f}")


def test_interval_by_hand():
    """Differences of -1, 0 and 1%: deviation 1, error of the mean 1 / sqrt(3), times 4.303."""
    compared = [{"difference_at_end": value} for value in (-0.01, 0.0, 0.01)]
    found = losses.ends({"compared": compared}, "difference_at_end")
    assert found == pytest.approx((0.0, 4.303 / 3**0.5, -1.0, 1.0))


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
    found = {}
    for page, pattern in said.items():
        (text,) = re.findall(pattern, PAGES[ROOT / page], flags=re.MULTILINE)
        found[page] = set(re.findall(r"\b2\.\d+", text))
    run = found["docs/hardware.md"]
    assert len(set(map(frozenset, found.values()))) == 1 and len(run) == 3, found
    oldest, newest = (min(run, key=_minor), max(run, key=_minor))
    assert f"badge/PyTorch-{oldest}_to_{newest}-" in PAGES[ROOT / "README.md"]
    wheel = re.findall(r"^\| wheel beside PyTorch (.+?) \|", PAGES[ROOT / "docs" / "status.md"], flags=re.MULTILINE)[0]
    assert set(re.findall(r"\b2\.\d+", wheel)) <= run
    (pinned,) = re.findall(r"^torch==(2\.\d+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert pinned in run


def _minor(version: str) -> int:
    return int(version.split(".")[1])


def test_ci_runs_each_minor_version_of_megatron_core():
    """CI also runs the versions that need Python 3.12."""
    (limits,) = re.findall(r"^_OLDEST, _NEWEST = \(0, (\d+)\), \(0, (\d+)\)$", MEGATRON, flags=re.MULTILINE)
    lines = [line for line in (ROOT / ".ci" / "versions").read_text().splitlines() if "megatron-core)" in line or "known+=" in line]
    known = re.findall(r"\b0\.(\d+)\.\d", "\n".join(lines))
    assert list(map(int, known)) == list(range(int(limits[0]), int(limits[1]) + 1))
