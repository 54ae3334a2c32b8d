"""Other libraries as baselines in the same run: `--peer NAME`, as often as there are names."""

import argparse
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from deepep_moe.errors import BackendUnavailableError, EPError
from deepep_moe.tune.workload import Shape

_Result = TypeVar("_Result")


_ROOM = "benchmarks.exchange"
_CLASSES = {
    "deep_ep": ("deep_ep", "DeepEP"),
    "deep_ep_v2": ("deep_ep", "DeepEPV2"),
    "nccl_ep": ("nccl_ep", "NcclEP"),
    "drop_in": ("deep_ep", "DeepEP"),
    "drop_in_v2": ("deep_ep", "DeepEPV2"),
}
"""The module of each peer, which is imported when the peer is asked for, and its class: `(shape, group, num_max_tokens)`, with `name`,
`version`, `operations(inputs)`, which checks that its calls do the same work, and `destroy()`. Both are collective. The drop-in is DeepEP's
interface on deepep_moe, as programs written for DeepEP call it."""
_DROP_IN = "deepep_moe.compat.deep_ep"
_PACKAGES = {"deep_ep": "deep_ep", "deep_ep_v2": "deep_ep", "drop_in": _DROP_IN, "drop_in_v2": _DROP_IN}
PEERS = tuple(_CLASSES)
"""The names that `--peer` takes."""


def add_peer(parser: argparse.ArgumentParser, names: tuple[str, ...] = PEERS) -> None:
    helped = "another library to time in the same run, if it is installed, or DeepEP's interface on deepep_moe (drop_in); may be repeated"
    parser.add_argument("--peer", choices=names, action="append", default=[], help=helped)


def load_package(name: str) -> Any:
    """Import and return the package of the peer `name`. Raises BackendUnavailableError, with the reason and the fix, where that fails."""
    package = _PACKAGES[name]
    try:
        return importlib.import_module(package)
    except (ImportError, OSError, AssertionError) as error:  # a library that it links is missing; or it dislikes the NCCL that it found
        raise BackendUnavailableError(
            f"--peer {name}: the package {package} is not importable here ({error}); install a wheel of DeepEP that was built for this "
            "PyTorch, or build it from https://github.com/deepseek-ai/DeepEP, or leave --peer out"
        ) from error


def check_peers(names: list[str]) -> None:
    """Raise BackendUnavailableError for a peer whose package is missing, or is deepep_moe itself under the peer's name."""
    for name in set(names) & set(_PACKAGES):
        if load_package(name).__name__ != _PACKAGES[name]:
            raise BackendUnavailableError(
                f"--peer {name}: the package {_PACKAGES[name]} is deepep_moe's own interface here; uninstall deepep-moe-compat and install "
                "a wheel of DeepEP that was built for this PyTorch, or give --peer drop_in"
            )


def version_of(package: Any) -> str:
    """Return the version that an imported package says it has, and that of the distribution that it came with."""
    name = package.__name__.split(".")[0]
    installed = [f"{d} {importlib.metadata.version(d)}" for d in sorted(set(importlib.metadata.packages_distributions().get(name, ())))]
    return " of ".join([*([package.__version__] if hasattr(package, "__version__") else []), *installed[:1]])


def make_peer(name: str, shape: Shape, group: "dist.ProcessGroup", num_max_tokens: int) -> Any:
    """Construct the peer for batches of at most `num_max_tokens` tokens a rank. Collective; raises EPError for any failure."""
    module, kind = _CLASSES[name]
    peer = getattr(importlib.import_module(f"{_ROOM}.{module}"), kind)
    return foreign(lambda: type(kind, (peer,), {"name": name})(shape, group, num_max_tokens))


def foreign(call: Callable[[], _Result]) -> _Result:
    """Return what `call` of another library returns. Raises EPError for any error of it, such as a failed assertion."""
    try:
        return call()
    except EPError:
        raise
    except Exception as error:
        raise EPError(f"{type(error).__name__}: {error}") from error
