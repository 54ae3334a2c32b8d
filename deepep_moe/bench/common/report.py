"""Load matplotlib and save figures."""

import importlib
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
