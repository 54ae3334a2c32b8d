"""The page of a run: it holds all that it shows and says, and two of them can be compared."""

import json
import re

import pytest

from deepep_moe.bench.__main__ import main
from deepep_moe.bench.page.page import Page, Picture, Table, compared, read, write_comparison
from deepep_moe.bench.page.records import page_of
from deepep_moe.errors import EPError


def page(speed: float = 10.0) -> Page:
    rows = [['ours </script> & "theirs"', 1, speed], ["none", 2, None]]
    return Page("A run", "It ran. It was fast.", {"torch": "<2>"}, [Table("Runs", ["run", "steps", "speed"], rows, bars="speed")])


def needs_nothing(text: str) -> bool:
    """Does the page load nothing: no address but those that hold their data?"""
    return all(address.startswith("data:") for address in re.findall(r"(?:src|href)=['\"]([^'\"]*)", text)) and "url(" not in text


def test_page_is_read_as_it_was_written(tmp_path):
    (tmp_path / "dot.png").write_bytes(b"\x89PNG dot")
    written = Page(**vars(page()) | {"pictures": [Picture.of_file("A 'dot'", tmp_path / "dot.png")]})
    written.write(tmp_path / "new" / "report.html")
    text = (tmp_path / "new" / "report.html").read_text()
    assert read(tmp_path / "new" / "report.html") == written
    assert needs_nothing(text) and "src='data:image/png;base64,iVBORyBkb3Q='" in text and text.count("</script>") == 1
    assert "<td>ours &lt;/script&gt; &amp; &quot;theirs&quot;</td>" in text and "torch: &lt;2&gt;" in text
    assert 'style="background:linear-gradient(to right,var(--bar) 100.0%,transparent 0)">10</td>' in text and ">-</td>" in text


def test_two_pages_side_by_side(tmp_path):
    first, second = page(10.0), page(25.0)
    rows = compared(first, second).rows
    assert rows == [
        ['ours </script> & "theirs", steps', 1, 1, 1.0],
        ['ours </script> & "theirs", speed', 10.0, 25.0, 2.5],
        ["none, steps", 2, 2, 1.0],
    ]
    write_comparison(first, second, tmp_path / "both.html")
    text = (tmp_path / "both.html").read_text()
    assert "A run, two runs" in text and text.count("It was fast.") == 2 and "2.5" in text and needs_nothing(text)


def test_files_that_are_no_pages(tmp_path):
    (tmp_path / "other.html").write_text("<html></html>")
    with pytest.raises(EPError, match=r"other\.html is no page of a run; give one that --report or an example has written"):
        read(tmp_path / "other.html")
    with pytest.raises(SystemExit, match=r"missing\.html cannot be read"):
        main(["compare", str(tmp_path / "missing.html"), str(tmp_path / "other.html")])


def test_report_of_a_benchmark(tmp_path, capsys):
    for name in ("a", "b"):
        main(["gate", "--num-tokens", "16", "--repeats", "2", "--report", str(tmp_path / f"{name}.html")])
    records = json.loads((tmp_path / "a.json").read_text())
    assert read(tmp_path / "a.html") == page_of(records)
    (calls,) = page_of(records).tables
    assert [row[1] for row in calls.rows] == [record["us_median"] for record in records] and calls.rows[0][0].endswith("16 tokens")
    main(["compare", str(tmp_path / "a.html"), str(tmp_path / "b.html"), "--out", str(tmp_path / "both.html")])
    assert f"wrote {tmp_path / 'both.html'}" in capsys.readouterr().out


def test_what_a_benchmark_showed():
    record = {"op": "dispatch", "us_median": 2.0, "us_p10": 1.0, "us_p90": 3.0, "gbps": 1.0, "rival": None, "rival_us": None, "ratio": None}
    record |= {
        "num_ranks": 2,
        "num_tokens": 8,
        "layout": "rank",
        "num_sms": 0,
        "hardware": "a CPU",
        "command": "",
        "versions": {"torch": "2"},
    }
    alone = page_of([record])
    assert alone.told == "1 calls were timed, none of them beside a baseline."
    assert alone.tables[0].rows[0][0] == "dispatch, 2 ranks, 8 tokens, layout rank, 0 SMs"
    beside = page_of([record | {"ratio": ratio, "rival": "gloo", "rival_us": 2 * ratio} for ratio in (0.5, 2.0, 4.0)])
    assert beside.told.startswith(
        "2 of 3 comparisons with a baseline are faster. The speed-up is 2.00 in the median, 0.50 at least and 4.00"
    )
