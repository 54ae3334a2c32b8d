"""Pictures are those that their scripts draw, and tables of peers repeat what was measured."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
PAGES = {path: path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]}
for folder in (ROOT / "docs" / "scripts", ROOT / "benchmarks" / "plots"):
    sys.path.append(str(folder))

import draw  # noqa: E402
import drawing  # noqa: E402
import figures  # noqa: E402
import losses  # noqa: E402


def test_pictures_are_drawn_by_their_scripts():
    drawn = {name: picture.svg() for name, picture in draw.all_pictures().items()}
    drawn |= {figures.CHART.stem: figures.chart(), losses.PICTURE.stem: losses.picture()}
    assert {path.stem for path in PICTURES.glob("*")} == set(drawn)
    stale = [name for name, svg in drawn.items() if (PICTURES / f"{name}.svg").read_text() != svg]
    assert not stale, f"run docs/scripts/draw.py, benchmarks/plots/figures.py and losses.py: {stale}"


def test_each_picture_is_shown_and_described():
    shown = {match for text in PAGES.values() for match in re.findall(r"!\[[^\]]+\]\((?:\.\./|docs/)?pictures/(\w+)\.svg\)", text)}
    assert shown == {path.stem for path in PICTURES.glob("*.svg")}


def test_each_design_page_has_a_picture():
    without = [path.name for path in (ROOT / "docs" / "design").glob("*.md") if "pictures/" not in PAGES[path]]
    assert not without


def test_text_that_does_not_fit_is_refused():
    picture = drawing.Picture(100, 50, "title")
    with pytest.raises(ValueError, match="'far too many words' does not fit a box of 40 x 20; make it larger or say less"):
        picture.box(0, 0, 40, 20, "far too many words")
    with pytest.raises(ValueError, match="'a long line of text' at 50 leaves the picture, which is 100 wide"):
        picture.text(50, 20, "a long line of text")


def test_table_of_losses_repeats_the_records():
    text = PAGES[ROOT / "docs" / "design" / "fp8_training.md"]
    row = r"^\| (small|tiny) \| (\d) \| ([\d.]+) \| ([\d.]+) \| ([-+.\d]+)% \| (?:([-+.\d]+)%|not measured) \|$"
    rows = re.findall(row, text, re.MULTILINE)
    compared = {(model, each["seed"]): each for model in losses.MODELS for each in losses.record_of(model)["compared"]}
    assert len(rows) == len(compared) == 6
    for model, seed, exact, ours, difference, nudged in rows:
        found = compared[model, int(seed)]
        assert (exact, ours) == (f"{found['bf16_at_end']:.4f}", f"{found['fp8_at_end']:.4f}")
        assert difference == f"{100 * found['difference_at_end']:+.2f}"
        assert nudged == (f"{100 * found['nudged_at_end']:+.2f}" if "nudged_at_end" in found else "")


ROW = re.compile(r"^\| ((?:dispatch|combine|low-latency)[^|]+) \| (\d+) \| (\d+) us \| (\d+) us \| (\d+ us|not measured) \|$", re.MULTILINE)


@pytest.mark.parametrize("page", ("README.md", "docs/benchmarks.md"))
def test_tables_beside_deepep_repeat_both_records(page):
    rows = ROW.findall((ROOT / page).read_text())
    assert len(rows) >= 4
    files = {name: file for _, name, file in figures.GROUPS}
    for what, num_tokens, ours, first, second in rows:
        name = what.replace(", layout `rank`", " rank")
        record, theirs = figures.record_of(files[name], name), figures.deepep_of(name)
        assert int(num_tokens) == record["num_tokens"] and int(ours) == round(record["us_median"]), what
        assert int(first) == round(theirs["DeepEP V1"]), what
        assert second == (f"{theirs['DeepEP V2']:.0f} us" if "DeepEP V2" in theirs else "not measured"), what


# ---- the README ----


def test_readme_is_short_and_its_badges_are_true():
    readme, project = PAGES[ROOT / "README.md"], (ROOT / "pyproject.toml").read_text()
    assert len(readme.splitlines()) <= 150
    (least_python,) = re.findall(r'requires-python = ">=([\d.]+)"', project)
    (least, below) = re.findall(r'"torch>=([\d.]+),<2\.(\d+)"', project)[0]
    badges = re.findall(r"\[!\[([^\]]+)\]\((\S+)\)\]", readme)
    assert [text for text, _ in badges] == ["licence: MIT", f"Python {least_python}+", f"PyTorch {least} to 2.{int(below) - 1}"]
    assert [url.split("/badge/")[1] for _, url in badges] == [
        "licence-MIT-blue", f"Python-{least_python}%2B-blue", f"PyTorch-{least}_to_2.{int(below) - 1}-blue"
    ]  # fmt: skip
    assert 'license = "MIT"' in project


def test_readme_names_the_tested_versions():
    for name, folder in (("DeepSpeed", "deepspeed"), ("Megatron-Core", "megatron")):
        source = (ROOT / "integrations" / folder / "plugin.py").read_text()
        (limits,) = re.findall(r"^_OLDEST, _NEWEST = \(([\d, ]+)\), \(([\d, ]+)\)$", source, flags=re.MULTILINE)
        oldest, newest = (limit.replace(", ", ".") for limit in limits)
        assert f"| {name} | {oldest} to {newest} |" in PAGES[ROOT / "README.md"]


def test_columns_have_titles_and_rows_can_be_read_alone():
    """An empty title or an empty first cell leaves the reader to guess."""
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for table in re.findall(r"^\|.*\|\n\|[-|]+\|\n(?:\|.*\n?)*", PAGES[page], flags=re.MULTILINE):
            title, _, *rows = table.strip().splitlines()
            assert all(cell.strip() for cell in title.strip("|").split("|")), f"{page}: {title}"
            assert all(row.split("|")[1].strip() for row in rows), f"{page}: {title}"


def test_peers_say_where_they_were_measured():
    about, *rows = json.loads((ROOT / "benchmarks" / "peers" / figures.DEEPEP).read_text())
    assert {"what", "machine", "workload", "date"} == set(about)
    assert all({"operation", "num_ranks", "num_tokens"} <= set(row) and {"v1_us", "v2_us"} & set(row) for row in rows)
