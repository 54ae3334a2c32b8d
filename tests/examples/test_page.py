"""The page of a run holds all that it shows and says."""

import re

import pytest
from example_page import Page, Picture, Table, read

from deepep_moe.errors import EPError


def page(speed: float = 10.0) -> Page:
    rows = [['ours </script> & "theirs"', 1, speed], ["none", 2, None]]
    return Page("A run", "It ran. It was fast.", {"torch": "<2>"}, [Table("Runs", ["run", "steps", "speed"], rows, bars="speed")])


def test_page_is_read_as_it_was_written(tmp_path):
    (tmp_path / "dot.png").write_bytes(b"\x89PNG dot")
    written = Page(**vars(page()) | {"pictures": [Picture.of_file("A 'dot'", tmp_path / "dot.png")]})
    written.write(tmp_path / "new" / "report.html")
    text = (tmp_path / "new" / "report.html").read_text()
    assert read(tmp_path / "new" / "report.html") == written
    addresses = re.findall(r"(?:src|href)=['\"]([^'\"]*)", text)
    assert all(address.startswith("data:") for address in addresses) and "url(" not in text, "it loads nothing"
    assert "src='data:image/png;base64,iVBORyBkb3Q='" in text and text.count("</script>") == 1
    assert "<td>ours &lt;/script&gt; &amp; &quot;theirs&quot;</td>" in text and "torch: &lt;2&gt;" in text
    assert 'style="background:linear-gradient(to right,var(--bar) 100.0%,transparent 0)">10</td>' in text and ">-</td>" in text


def test_files_that_are_no_pages(tmp_path):
    (tmp_path / "other.html").write_text("<html></html>")
    with pytest.raises(EPError, match=r"other\.html is no page of a run"):
        read(tmp_path / "other.html")
    with pytest.raises(EPError, match=r"missing\.html cannot be read"):
        read(tmp_path / "missing.html")
