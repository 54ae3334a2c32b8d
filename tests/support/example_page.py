"""The page of a run as the examples write it, and a reader of such pages."""

import html
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "examples" / "common"))

from page import Page, Picture, Table


def read(path: Path) -> Page:
    """Return the page that `Page.write` has left at `path`."""
    text = path.read_text()
    data = json.loads(re.search(r"<script type='application/json' id='page'>(.*?)</script>", text, flags=re.DOTALL)[1])
    pictures = [Picture(html.unescape(caption), shown) for caption, shown in re.findall(r"<img alt='(.*?)' src='(.*?)'>", text)]
    return Page(**data | {"tables": [Table(**table) for table in data["tables"]], "pictures": pictures})


USED = {"optimizer": "torch.optim.adamw.AdamW", "norms": "torch.nn.modules.normalization.RMSNorm"}


def read_training(folder: Path, rival: str, num_steps: int) -> tuple[list[dict[str, Any]], Page, list[dict[str, Any]]]:
    """Return the records of a training beside a rival, its page, and the rows of both runs there. Check what every training has."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [(name, step) for name in ("deepep_moe", rival) for step in range(num_steps)]
    assert [(record["dispatcher"], record["step"]) for record in records] == steps
    assert abs(records[0]["loss"] - math.log(256)) < 0.2
    page = read(folder / "report.html")
    assert page.about.items() >= USED.items()
    (table,) = page.tables
    runs = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert all(run[column] > 0 for run in runs for column in ("exchange, ms", "step, ms"))
    return records, page, runs
