"""The page of a run as the examples write it, and a reader of such pages."""

import html
import json
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples" / "common"))

from page import Page, Picture, Table


def read(path: Path) -> Page:
    """Return the page that `Page.write` has left at `path`."""
    text = path.read_text()
    data = json.loads(re.search(r"<script type='application/json' id='page'>(.*?)</script>", text, flags=re.DOTALL)[1])
    pictures = [Picture(html.unescape(caption), shown) for caption, shown in re.findall(r"<img alt='(.*?)' src='(.*?)'>", text)]
    return Page(**data | {"tables": [Table(**table) for table in data["tables"]], "pictures": pictures})
