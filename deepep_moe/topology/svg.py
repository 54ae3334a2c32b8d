"""Write the drawing of a topology as SVG."""

from xml.sax.saxutils import escape

from deepep_moe.topology.drawing import FONT, Box, Drawing, Label, Line


def svg(drawing: Drawing) -> str:
    """Return the text of an SVG file."""
    size = f'width="{drawing.width}" height="{drawing.height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="{FONT}">'
    return "\n".join([head, *map(_element, drawing.shapes), "</svg>", ""])


def _element(shape: Box | Line | Label) -> str:
    if isinstance(shape, Label):
        return f'<text x="{shape.left}" y="{shape.bottom}">{escape(shape.words)}</text>'
    if isinstance(shape, Line):
        return f'<line x1="{shape.x}" y1="{shape.top}" x2="{shape.x}" y2="{shape.bottom}" stroke="#555"/>'
    place = f'x="{shape.left}" y="{shape.top}" width="{shape.width}" height="{shape.height}"'
    return f'<rect {place} rx="{0 if shape.fill == "none" else 4}" fill="{shape.fill}" stroke="#555"/>'
