"""Read small files of sysfs and procfs below a root folder, and say what could not be read."""

import os
import re
from pathlib import Path

_MAX_CPUS = 1 << 16
_MOST_BYTES = 1 << 20  # of a file that is read: /proc/cpuinfo of a large machine has that, and no other one is near it
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # no terminal and no XML file should get them
_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")


def is_bus_id(name: str) -> bool:
    """Return whether `name` is that of a PCI device, such as "0000:1b:00.0"."""
    return bool(_BUS_ID.fullmatch(name))


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Return the CPUs of a list such as "0-3,8,10-11", ascending.

    Raises ValueError where `text` is no such list.
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not first <= last < _MAX_CPUS:
            raise ValueError(f"{text!r} is no list of CPUs such as 0-3,8")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def format_cpulist(cpus: tuple[int, ...]) -> str:
    """Return CPUs, ascending, as "0-3,8"."""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


class Tree:
    """The files below `root`. `notes` collects what was wrong with them, one sentence each."""

    def __init__(self, root: Path):
        self.root = root
        self.notes: list[str] = []

    def note(self, sentence: str) -> None:
        """Keep `sentence` for the reader, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def text(self, path: str) -> str:
        """Return the text of the file, "" where it is missing or cannot be read. Drivers may refuse a file that is there."""
        if not self.is_file(path):  # a pipe would be waited for
            return ""
        try:
            with open(self.root / path, errors="replace") as file:
                return _CONTROLS.sub("?", file.read(_MOST_BYTES)).strip()
        except OSError:
            return ""

    def exists(self, path: str) -> bool:
        """Return whether the file is there; False where a folder above it may not be entered, for which `Path.exists` raises."""
        return os.path.exists(self.root / path)

    def is_file(self, path: str) -> bool:
        """Return whether it is an ordinary file; False where that is not to be seen."""
        return os.path.isfile(self.root / path)

    def names(self, folder: str, pattern: str = "*") -> list[str]:
        """Return the sorted names in a folder, none where it is missing."""
        try:
            return sorted(path.name for path in (self.root / folder).glob(pattern))
        except OSError:
            return []

    def cpulist(self, path: str) -> tuple[int, ...]:
        """Return the list of CPUs in a file; none, and a note, where the file is damaged."""
        try:
            return parse_cpulist(self.text(path))
        except ValueError as error:
            self.note(f"/{path} cannot be used: {error}.")
            return ()

    def integer(self, path: str, default: int) -> int:
        """Return the whole number in a file; `default` where it is missing, and with a note where it is damaged."""
        text = self.text(path)
        if not text or re.fullmatch(r"-?\d{1,9}", text):
            return int(text or default)
        self.note(f"/{path} cannot be used: {text[:40]!r} is not a whole number.")
        return default

    def pci_path(self, link: str) -> tuple[str, ...]:
        """Return the bridges above the device that `link` leads to and the device, from the host bridge down; () where it leads nowhere."""
        try:
            parts = (self.root / link).resolve(strict=True).parts
        except (OSError, RuntimeError):
            return ()
        hosts = [index for index, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)]
        return parts[hosts[-1] :] if hosts and all(map(is_bus_id, parts[hosts[-1] + 1 :])) else ()
