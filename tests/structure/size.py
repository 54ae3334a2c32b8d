"""Print how large the repository is: `python tests/structure/size.py`.

`test_structure.py` fails where a number is more than 3% above its limit. To allow more, raise the limit here on purpose.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = (".py", ".pyi", ".cpp", ".h", ".cu", ".cuh")
LIMITS = {
    "lines of deepep_moe, csrc and integrations": 42_900,
    "lines of benchmarks": 4_500,
    "lines of tests": 30_250,
    "words of docs and README": 48_460,
    "lines of JSON in benchmarks": 2_000,
    "times the word Any in Python code of deepep_moe and integrations": 485,
}


def files(folder: str, suffixes: Iterable[str]) -> list[Path]:
    """Return the files below `folder` that end in one of `suffixes`."""
    return [path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes and "__pycache__" not in path.parts]


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def words(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().split()) for path in paths)


def words_any(paths: Iterable[Path]) -> int:
    return sum(len(re.findall(r"\bAny\b", path.read_text())) for path in paths)


def sizes() -> dict[str, int]:
    """Return each number of LIMITS as it is now."""
    product = [path for folder in ("deepep_moe", "csrc", "integrations") for path in files(folder, SOURCES)]
    counted: list[tuple[Callable[[Iterable[Path]], int], list[Path]]] = [
        (lines, product),
        (lines, files("benchmarks", SOURCES)),
        (lines, files("tests", SOURCES)),
        (words, [ROOT / "README.md", *files("docs", [".md"])]),
        (lines, files("benchmarks", [".json"])),
        (words_any, [path for path in product if path.suffix in (".py", ".pyi")]),
    ]
    return {name: count(paths) for name, (count, paths) in zip(LIMITS, counted, strict=True)}


if __name__ == "__main__":
    for name, size in sizes().items():
        print(f"{size:7}  {name} (limit {LIMITS[name]})")
