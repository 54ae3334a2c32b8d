"""A self-contained HTML page of a run: what it showed, tables, pictures. It loads nothing, and holds its figures as JSON too."""

import base64
import dataclasses
import html
import json
from dataclasses import dataclass, field
from pathlib import Path

Cell = str | float | None
_STYLE = """
:root { color-scheme: light dark; --line: #d5d8dc; --soft: #5f6368; --bar: #1f5fa833 }
@media (prefers-color-scheme: dark) { :root { --line: #444; --soft: #aaa; --bar: #7fb2e555 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1500px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem }
.summary { font-size: 1.1rem; max-width: 60rem } .about { color: var(--soft); font-size: .85rem; overflow-wrap: anywhere }
table { border-collapse: collapse; display: block; overflow-x: auto } th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line) }
th { text-align: left; font-weight: 600 } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
td.bar { min-width: 12rem } img { max-width: 100%; background: #fff; border-radius: 4px } figure { margin: 1rem 0 }
figcaption { color: var(--soft); font-size: .9rem }
"""


@dataclass(frozen=True)
class Table:
    """Rows under `columns`; the first cell of a row is its name. The column called `bars` is drawn as bars too."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    bars: str = ""


@dataclass(frozen=True)
class Picture:
    """`data` is an address that holds the picture itself."""

    caption: str
    data: str

    @classmethod
    def of_file(cls, caption: str, path: Path) -> "Picture":
        kind = "svg+xml" if path.suffix == ".svg" else path.suffix[1:]
        return cls(caption, f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}")


@dataclass(frozen=True)
class Page:
    """`summary` is what the run showed, in a sentence or two; `about` says where and how it ran."""

    title: str
    summary: str
    about: dict[str, str]
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)

    def write(self, path: Path) -> None:
        fields = dataclasses.asdict(dataclasses.replace(self, pictures=[]))  # which the page shows from its own bytes
        data = json.dumps(fields).replace("<", "\\u003c")  # no text in it ends the script
        body = f"{_head(self.title, self.summary)}{_body(self)}\n<script type='application/json' id='page'>{data}</script>"
        _write(path, self.title, body)


def _write(path: Path, title: str, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{html.escape(title)}</title>"
    path.write_text(f"<!doctype html>\n<html lang='en'><head>{head}<style>{_STYLE}</style></head>\n<body>{body}</body></html>\n")
    print(f"wrote {path}")


def _head(title: str, summary: str) -> str:
    return f"<h1>{html.escape(title)}</h1>\n<p class='summary'>{html.escape(summary)}</p>\n"


def _body(page: Page) -> str:
    about = " &middot; ".join(f"{html.escape(name)}: {html.escape(value)}" for name, value in page.about.items())
    pictures = "".join(
        f"<figure><figcaption>{html.escape(picture.caption)}</figcaption>"
        f"<img alt='{html.escape(picture.caption, quote=True)}' src='{picture.data}'></figure>\n"
        for picture in page.pictures
    )
    return f"<p class='about'>{about}</p>\n{''.join(map(_table, page.tables))}{pictures}"


def _table(table: Table) -> str:
    numeric = [any(isinstance(row[i], (int, float)) for row in table.rows) for i in range(len(table.columns))]
    head = "".join(f"<th{_class(number)}>{html.escape(name)}</th>" for name, number in zip(table.columns, numeric, strict=True))
    drawn = table.columns.index(table.bars) if table.bars else None
    most = max((row[drawn] or 0 for row in table.rows), default=0) if drawn is not None else 0
    rows = ""
    for row in table.rows:
        cells = [f"<td{_class(number)}>{html.escape(_text(cell))}</td>" for cell, number in zip(row, numeric, strict=True)]
        if drawn is not None and most:
            percent = 100 * (row[drawn] or 0) / most  # type: ignore[operator]
            style = f"background:linear-gradient(to right,var(--bar) {percent:.1f}%,transparent 0)"
            cells[drawn] = f'<td class="number bar" style="{style}">{html.escape(_text(row[drawn]))}</td>'
        rows += f"<tr>{''.join(cells)}</tr>\n"
    return f"<h2>{html.escape(table.title)}</h2>\n<table><tr>{head}</tr>\n{rows}</table>\n"


def _class(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    return cell if isinstance(cell, str) else f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
