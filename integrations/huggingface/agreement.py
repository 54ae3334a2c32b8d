"""Let all ranks go on, or all raise."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from deepep_moe import config
from deepep_moe.errors import EPPeerError, told
from deepep_moe.group.rendezvous import gather_objects

_DISK_TIMEOUT_S = 86_400.0  # peers wait for a rank that writes or reads a checkpoint


def agree(what: str, error: Exception | None, group: "dist.ProcessGroup | None", num_ranks: int, value: Any = None) -> list[Any]:
    """Return the value of each rank. Raises this rank's error, or EPPeerError where a peer has one. Collective."""
    return _agree(what, error, group, num_ranks, value, config.timeout_s())


@contextlib.contextmanager
def together(what: str, group: "dist.ProcessGroup | None", num_ranks: int) -> Iterator[None]:
    """Raise on all ranks if the body, which may read or write files, has failed on one. Collective."""
    error: Exception | None = None
    try:
        yield
    except Exception as failed:
        error = failed
    _agree(what, error, group, num_ranks, None, _DISK_TIMEOUT_S)


def _agree(
    what: str, error: Exception | None, group: "dist.ProcessGroup | None", num_ranks: int, value: Any, timeout_s: float
) -> list[Any]:
    words = None if error is None else told(error)[:10_000]
    answers = gather_objects({"value": value, "error": words}, group, num_ranks, what, timeout_s, dict)
    if error is not None:
        raise error
    for rank, answer in enumerate(answers):
        if answer["error"] is not None:
            raise EPPeerError(f"rank {rank} did not make its call: {answer['error']}", rank=rank)
    return [answer["value"] for answer in answers]
