"""The page of a run holds all that it shows and says."""

import re

from example_page import Page, Picture, Table, read


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
    assert needs_nothing(text) and "src='data:image/png;base64,iVBORyBkb3Q='" in text and text.count("iVBORyBkb3Q=") == 1
    assert text.count("</script>") == 1 and "<td>ours &lt;/script&gt; &amp; &quot;theirs&quot;</td>" in text and "torch: &lt;2&gt;" in text
    assert 'style="background:linear-gradient(to right,var(--bar) 100.0%,transparent 0)">10</td>' in text and ">-</td>" in text
