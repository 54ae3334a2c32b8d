"""A picture as SVG: boxes, arrows and bars of a timeline, in the colours of the documentation."""

from pathlib import Path
from xml.sax.saxutils import escape

KINDS = {  # fill, border
    "rank": ("#e3ecfb", "#5b7fc7"),
    "row": ("#fff1c9", "#c79a2b"),
    "work": ("#dcf1e0", "#4d9a5f"),
    "wait": ("#fbe1dd", "#c7645b"),
    "memory": ("#ececf1", "#8a8a99"),
    "plain": ("#ffffff", "#8a8a99"),
}
_SIZE = 14
_LETTER = 0.56  # of the size: width of an average letter, with some room


class Picture:
    """One SVG under construction. Text that does not fit its box raises ValueError."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, text: str = "", kind: str = "plain", *, top: bool = False) -> None:
        """Draw a box with centred lines of text; `top`: at its upper edge, as the name of a box that holds others."""
        fill, border = KINDS[kind]
        self._parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="{border}" stroke-width="1.5"/>')
        lines = text.split("\n") if text else []
        if len(lines) * 18 > h or any(_LETTER * _SIZE * len(line) > w for line in lines):
            raise ValueError(f"{text!r} does not fit a box of {w} x {h}; make it larger or say less")
        first = y + 19 if top else y + h / 2 + 5 - 9 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + w / 2, first + 18 * number, line, anchor="middle", bold=top)

    def text(self, x: float, y: float, text: str, *, size: int = _SIZE, anchor: str = "start", bold: bool = False) -> None:
        width = _LETTER * size * len(text)
        left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
        if left < 0 or left + width > self.width + 8:
            raise ValueError(f"{text!r} at {x} leaves the picture, which is {self.width} wide; move it or say less")
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(text)}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, text: str = "", *, dashed: bool = False, above: bool = True) -> None:
        """Draw an arrow, with text beside its middle."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#44475a" stroke-width="1.8"{dash} marker-end="url(#tip)"/>'
        )
        if text and x1 == x2:
            self.text(x1 + 7, (y1 + y2) / 2 + 4, text, size=13)
        elif text:
            self.text((x1 + x2) / 2, (y1 + y2) / 2 + (-7 if above else 17), text, size=13, anchor="middle")

    def svg(self) -> str:
        body = "\n".join(self._parts)
        return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" role="img"
 font-family="Helvetica, Arial, 'DejaVu Sans', sans-serif" fill="#22242e">
<title>{escape(self.title)}</title>
<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto-start-reverse">
<path d="M0,0 L10,5 L0,10 z" fill="#44475a"/></marker></defs>
<rect width="{self.width}" height="{self.height}" rx="8" fill="#ffffff"/>
{body}
</svg>
"""


def write(pictures: dict[str, Picture], folder: Path) -> None:
    for name, picture in pictures.items():
        (folder / f"{name}.svg").write_text(picture.svg())
