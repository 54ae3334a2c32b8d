"""Other libraries as baselines in the same run: `--peer NAME`, as often as there are names."""

import argparse
import importlib
import importlib.metadata
from collections.abc import Iterable
from typing import Any

from deepep_moe.errors import BackendUnavailableError


def add_peer(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Add `--peer`. The drop-in is DeepEP's interface on deepep_moe, as programs written for DeepEP call it."""
    helped = "another library to time in the same run, if it is installed, or DeepEP's interface on deepep_moe (drop_in); may be repeated"
    parser.add_argument("--peer", choices=names, action="append", default=[], help=helped)


def _package_of(name: str) -> str:
    return "deepep_moe.compat.deep_ep" if name.startswith("drop_in") else "deep_ep"


def load_package(name: str) -> Any:
    """Import and return the package of the peer `name`. Raises BackendUnavailableError, with the reason and the fix, where that fails."""
    package = _package_of(name)
    try:
        return importlib.import_module(package)
    except (ImportError, OSError, AssertionError) as error:  # a library that it links is missing; or it dislikes the NCCL that it found
        raise BackendUnavailableError(
            f"--peer {name}: the package {package} is not importable here ({error}); install a wheel of DeepEP that was built for this "
            "PyTorch, or build it from https://github.com/deepseek-ai/DeepEP, or leave --peer out"
        ) from error


def check_peers(names: list[str]) -> None:
    """Raise BackendUnavailableError for a peer whose package is missing, or is deepep_moe itself under the peer's name."""
    for name in set(names):
        if load_package(name).__name__ != _package_of(name):
            raise BackendUnavailableError(
                f"--peer {name}: the package {_package_of(name)} is deepep_moe's own interface here; uninstall deepep-moe-compat and "
                "install a wheel of DeepEP that was built for this PyTorch, or give --peer drop_in"
            )


def version_of(package: Any) -> str:
    """Return the version that an imported package says it has, and that of the distribution that it came with."""
    name = package.__name__.split(".")[0]
    installed = [f"{d} {importlib.metadata.version(d)}" for d in sorted(set(importlib.metadata.packages_distributions().get(name, ())))]
    return " of ".join([*([package.__version__] if hasattr(package, "__version__") else []), *installed[:1]])
