"""Draw a topology as SVG: a frame for each NUMA node, in it a column for each GPU with its nearest NICs below."""

from xml.sax.saxutils import escape

from deepep_moe.topology.machine import Gpu, Nic, Topology, distance
from deepep_moe.topology.sysfs import format_cpulist

_BOX, _HEIGHT, _GAP, _LINE = 132, 34, 14, 26  # pixels


def svg(topology: Topology) -> str:
    """Return the drawing as the text of an SVG file. A line between a GPU and a NIC carries their distance."""
    parts: list[str] = []
    top, width = _GAP, 0
    frames: list[tuple[str, int | None]] = [
        (f"NUMA node {node.index}: CPUs {format_cpulist(node.cpus) or 'none'}", node.index) for node in topology.nodes
    ]
    if any(device.pci.node is None for device in topology.devices):
        frames.append(("NUMA node unknown", None))
    for title, index in frames:
        drawn, frame_width, frame_height = _frame(topology, title, index, top)
        parts += drawn
        top, width = top + frame_height + _GAP, max(width, frame_width)
    if not frames:
        parts, top, width = [_label(_GAP, top + 20, "nothing is known of this machine")], top + 40, 300
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 2 * _GAP}" height="{top}" font-family="sans-serif" font-size="11">'
    return "\n".join([head, *parts, "</svg>", ""])


def _frame(topology: Topology, title: str, node: int | None, top: int) -> tuple[list[str], int, int]:
    gpus = [gpu for gpu in topology.gpus if gpu.pci.node == node]
    columns: list[tuple[Gpu | None, list[Nic]]] = [(gpu, list(topology.nearest_nics(gpu))) for gpu in gpus]
    near = {nic.name for _, nics in columns for nic in nics}
    others = [nic for nic in topology.nics if nic.pci.node == node and nic.name not in near]
    columns += [(None, others)] if others else []
    rows = 1 + max((len(nics) for _, nics in columns), default=0)
    width = max(360, len(columns) * (_BOX + _GAP) + _GAP)
    height = 30 + rows * (_HEIGHT + _LINE) if columns else 34
    parts = [f'<rect x="{_GAP}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#555"/>', _label(2 * _GAP, top + 18, title)]
    for place, (gpu, nics) in enumerate(columns):
        left = 2 * _GAP + place * (_BOX + _GAP)
        if gpu is not None:
            parts += _box(left, top + 28, f"GPU {gpu.index}", gpu.pci.bus_id, "#cfe8cf")
        for row, nic in enumerate(nics, start=1):
            y = top + 28 + row * (_HEIGHT + _LINE)
            if gpu is not None:
                middle = left + _BOX // 2
                parts.append(f'<line x1="{middle}" y1="{y - _LINE}" x2="{middle}" y2="{y}" stroke="#555"/>')
                parts.append(_label(middle + 4, y - 9, distance(gpu.pci, nic.pci)))
            parts += _box(left, y, nic.name, nic.pci.bus_id, "#cfdcee" if nic.active_ports else "#eee")
    return parts, width, height


def _box(left: int, top: int, name: str, bus_id: str, fill: str) -> list[str]:
    frame = f'<rect x="{left}" y="{top}" width="{_BOX}" height="{_HEIGHT}" rx="4" fill="{fill}" stroke="#555"/>'
    return [frame, _label(left + 8, top + 14, name), _label(left + 8, top + 28, bus_id)]


def _label(left: int, top: int, words: str) -> str:
    return f'<text x="{left}" y="{top}">{escape(words)}</text>'
