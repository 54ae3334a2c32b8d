"""Warnings that users see once, and the check of a framework's version, which may give one."""

import functools
import logging

import torch.distributed as dist

from deepep_moe._C import __version__
from deepep_moe.errors import EPError
from deepep_moe.installed import numbers

_log = logging.getLogger(__name__)


def warn_once(message: str, *groups: "dist.ProcessGroup | None", on_all_ranks: bool = False) -> None:
    """Log a warning, the first time only, on the first rank of all `groups`, or on every rank that calls with `on_all_ranks`.

    If no groups are given, rank 0 logs it. A layer's warning needs its pipeline stage's groups: rank 0 may have no such layer.
    """
    if on_all_ranks or is_first(*groups):
        log_once(message)


def say_on(num_layers: int, backend: str, experts: set[str], *groups: "dist.ProcessGroup | None") -> None:
    """Log as a warning, which programs show by default, that layers of a model use this library, and whose experts they have."""
    warn_once(f"deepep_moe {__version__}: {num_layers} MoE layers on this rank, backend {backend}, {'; '.join(sorted(experts))}", *groups)


def check_version(package: str, version: str, oldest: tuple[int, ...], newest: tuple[int, ...]) -> None:
    """Raise EPError for a framework that is too old, and warn about one that is newer than the tested ones."""
    least, most = (".".join(map(str, limit)) for limit in (oldest, newest))
    number = numbers(version)[: len(oldest)]
    if number < oldest:
        raise EPError(f"deepep_moe needs {package} {least} or newer, found {version}; pip install '{package}>={least}'")
    if number > newest:
        warn_once(f"{package} {version} is newer than the newest that deepep_moe was tested with ({most})")


@functools.cache
def log_once(message: str) -> None:
    """Log a warning, the first time only. Groups are no arguments, as the cache would keep them alive."""
    _log.warning(message)


def is_first(*groups: "dist.ProcessGroup | None") -> bool:
    """Return whether this rank is the first one of all `groups`. None stands for all ranks, and so do no groups."""
    return not dist.is_initialized() or all(dist.get_rank(group) == 0 for group in groups or (None,))
