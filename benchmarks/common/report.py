"""Options, tables and figures that benchmarks share."""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepep_moe.errors import EPError


def load_pyplot() -> Any:
    """Import and return matplotlib.pyplot. Raises EPError, with the fix, where matplotlib is missing."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise EPError(f"--plot needs matplotlib ({error}); pip install matplotlib, or leave --plot out") from error


def save_figure(figure: Any, path: Path) -> None:
    """Write `figure` to `path`, whose folder need not be there, and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    load_pyplot().close(figure)
    print(f"wrote {path}")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", "--output", type=Path, help="file to write the records to")


def with_version(made: dict[str, Any], name: str, version: str | None) -> dict[str, Any]:
    """Return a record with the version of the library `name` among its versions, if there is one."""
    return made if version is None else made | {"versions": made["versions"] | {name: version}}


def show_peers(records: Sequence[dict[str, Any]]) -> None:
    """Print the versions of the other libraries that the records are of."""
    versions = {r["backend"]: r["versions"][r["backend"]] for r in records if r["backend"] in r["versions"]}
    if versions:
        print("other libraries: " + ", ".join(f"{name} is {version}" for name, version in versions.items()))
