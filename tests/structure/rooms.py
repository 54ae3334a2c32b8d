"""Write which files each folder has into docs/design/README.md: `python tests/structure/rooms.py`, after files came or went.

The table's second column is written by hand; a new folder gets a row with an empty one.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design" / "README.md"
ROW = re.compile(r"^\| `((?:deepep_moe|csrc|integrations)[\w/]*)` \| (.*) \| (.*) \|$", re.MULTILINE)
SOURCES = (".py", ".pyi", ".cpp", ".h", ".cu", ".cuh")


def rooms() -> dict[str, str]:
    """Return for each folder its files: those of sources by name alone, as a header and its source are one, others in full."""
    files: dict[str, set[str]] = {}
    for room in ("deepep_moe", "csrc", "integrations"):
        for path in (ROOT / room).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so":
                name = path.stem if path.suffix in SOURCES else path.name
                files.setdefault(str(path.parent.relative_to(ROOT)), set()).add(name)
    return {folder: ", ".join(sorted(names - {"__init__"})) or "none" for folder, names in sorted(files.items())}


def rows(text: str) -> dict[str, tuple[str, str]]:
    """Return what the page says of each folder: what it holds, and its files."""
    return {folder: (holds, files) for folder, holds, files in ROW.findall(text)}


def write() -> None:
    text = PAGE.read_text()
    holds = {folder: text_of for folder, (text_of, _) in rows(text).items()}
    first, *_, last = ROW.finditer(text)
    table = "\n".join(f"| `{folder}` | {holds.get(folder, '')} | {files} |" for folder, files in rooms().items())
    PAGE.write_text(text[: first.start()] + table + text[last.end() :])


if __name__ == "__main__":
    write()
