"""Write the drawing of a topology as PNG, by matplotlib."""

import importlib
import io
from typing import Any

from deepep_moe.errors import EPError
from deepep_moe.topology.drawing import FONT, Box, Drawing, Label, Line

_DPI = 144  # two dots for each pixel of the drawing, as a point is 1/72 inch


def png(drawing: Drawing) -> bytes:
    """Return the bytes of a PNG file. Raises EPError, with the fix, where matplotlib is missing."""
    try:
        figures, patches = (importlib.import_module(f"matplotlib.{name}") for name in ("figure", "patches"))
    except ImportError as error:
        raise EPError(f"PNG needs matplotlib ({error}); pip install matplotlib, or give --svg") from error
    figure = figures.Figure(figsize=(drawing.width / 72, drawing.height / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.set_axis_off()
    for shape in drawing.shapes:
        _paint(axes, patches, shape)
    file = io.BytesIO()
    figure.savefig(file, dpi=_DPI, format="png")
    return file.getvalue()


def _paint(axes: Any, patches: Any, shape: Box | Line | Label) -> None:
    if isinstance(shape, Label):
        axes.text(shape.left, shape.bottom, shape.words, fontsize=FONT, family="sans-serif", parse_math=False)
    elif isinstance(shape, Line):
        axes.plot((shape.x, shape.x), (shape.top, shape.bottom), color="#555555", linewidth=1)
    else:
        place = (shape.left, shape.top), shape.width, shape.height
        axes.add_patch(patches.Rectangle(*place, facecolor=shape.fill, edgecolor="#555555"))
