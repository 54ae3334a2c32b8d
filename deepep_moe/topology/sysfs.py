"""Read small files of sysfs and procfs below a root folder, and note what is not known."""

import os
import re
from pathlib import Path

_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")


def is_bus_id(name: str) -> bool:
    """Return whether `name` is that of a PCI device, such as "0000:1b:00.0"."""
    return bool(_BUS_ID.fullmatch(name))


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Return the CPUs of a list such as "0-3,8,10-11", ascending. Raises ValueError where `text` is no such list."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def format_cpulist(cpus: tuple[int, ...]) -> str:
    """Return CPUs, ascending, as "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


class Tree:
    """The files below `root`. `notes` collects what is not known, one sentence each."""

    def __init__(self, root: Path):
        self.root = root
        self.notes: list[str] = []

    def text(self, path: str) -> str:
        """Return the text of the file, "" where it cannot be read. Drivers may refuse a file that is there."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder, none where it cannot be read."""
        try:
            return sorted(os.listdir(self.root / folder))
        except OSError:
            return []

    def cpulist(self, path: str) -> tuple[int, ...]:
        """Return the list of CPUs in a file; none, and a note, where the file is damaged."""
        text = self.text(path)
        try:
            return parse_cpulist(text)
        except ValueError:
            self.notes.append(f"/{path} cannot be used: {text!r} is no list of CPUs such as 0-3,8.")
            return ()

    def pci_path(self, link: str) -> tuple[str, ...]:
        """Return the bridges above the device that `link` leads to and the device, from the host bridge down; () where it leads nowhere."""
        parts = Path(os.path.realpath(self.root / link)).parts
        hosts = [index for index, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)]
        return parts[hosts[-1] :] if hosts and all(map(is_bus_id, parts[hosts[-1] + 1 :])) else ()
