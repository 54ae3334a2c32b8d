"""Lay out the drawing of a topology: a frame for each NUMA node, in it a column for each GPU with its nearest NICs below."""

from dataclasses import dataclass

from deepep_moe.topology.machine import Gpu, Nic, Topology, distance
from deepep_moe.topology.sysfs import format_cpulist

FONT = 11  # pixels, as all lengths here
_BOX, _HEIGHT, _GAP, _LINE = 132, 34, 14, 26


@dataclass(frozen=True)
class Box:
    """A rectangle; `fill` is a colour such as "#cfe8cf", or "none"."""

    left: int
    top: int
    width: int
    height: int
    fill: str


@dataclass(frozen=True)
class Line:
    """A vertical line at `x` from `top` to `bottom`."""

    x: int
    top: int
    bottom: int


@dataclass(frozen=True)
class Label:
    """Words that begin at `left` and stand on the line at `bottom`."""

    left: int
    bottom: int
    words: str


@dataclass(frozen=True)
class Drawing:
    """Shapes in the order in which they are painted, from the top left corner."""

    width: int
    height: int
    shapes: tuple[Box | Line | Label, ...]


def draw(topology: Topology) -> Drawing:
    """Return the drawing. A line between a GPU and a NIC carries their distance."""
    shapes: list[Box | Line | Label] = []
    top, width = _GAP, 0
    frames: list[tuple[str, int | None]] = [
        (f"NUMA node {node.index}: CPUs {format_cpulist(node.cpus) or 'none'}", node.index) for node in topology.nodes
    ]
    if any(device.pci.node is None for device in topology.devices):
        frames.append(("NUMA node unknown", None))
    for title, index in frames:
        frame, drawn = _frame(topology, title, index, top)
        shapes += [frame, *drawn]
        top, width = top + frame.height + _GAP, max(width, frame.width)
    if not frames:
        shapes, top, width = [Label(_GAP, top + 20, "nothing is known of this machine")], top + 40, 300
    return Drawing(width + 2 * _GAP, top, tuple(shapes))


def _frame(topology: Topology, title: str, node: int | None, top: int) -> tuple[Box, list[Box | Line | Label]]:
    gpus = [gpu for gpu in topology.gpus if gpu.pci.node == node]
    columns: list[tuple[Gpu | None, list[Nic]]] = [(gpu, list(topology.nearest_nics(gpu))) for gpu in gpus]
    near = {nic.name for _, nics in columns for nic in nics}
    others = [nic for nic in topology.nics if nic.pci.node == node and nic.name not in near]
    columns += [(None, others)] if others else []
    rows = 1 + max((len(nics) for _, nics in columns), default=0)
    width = max(360, len(columns) * (_BOX + _GAP) + _GAP)
    height = 30 + rows * (_HEIGHT + _LINE) if columns else 34
    shapes: list[Box | Line | Label] = [Label(2 * _GAP, top + 18, title)]
    for place, (gpu, nics) in enumerate(columns):
        left = 2 * _GAP + place * (_BOX + _GAP)
        if gpu is not None:
            shapes += _box(left, top + 28, f"GPU {gpu.index}", gpu.pci.bus_id, "#cfe8cf")
        for row, nic in enumerate(nics, start=1):
            y = top + 28 + row * (_HEIGHT + _LINE)
            if gpu is not None:
                middle = left + _BOX // 2
                shapes += [Line(middle, y - _LINE, y), Label(middle + 4, y - 9, distance(gpu.pci, nic.pci))]
            shapes += _box(left, y, nic.name, nic.pci.bus_id, "#cfdcee" if nic.active_ports else "#eeeeee")
    return Box(_GAP, top, width, height, "none"), shapes


def _box(left: int, top: int, name: str, bus_id: str, fill: str) -> list[Box | Line | Label]:
    return [Box(left, top, _BOX, _HEIGHT, fill), Label(left + 8, top + 14, name), Label(left + 8, top + 28, bus_id)]
