"""What users are told once, and what peers are told that would wait otherwise."""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.utils.checkpoint import _StopRecomputationError

from deepep_moe.buffer import Buffer
from deepep_moe.errors import EPError

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@functools.cache
def say_once(message: str, *, on_all_ranks: bool = False) -> None:
    """A warning on rank 0, or on whichever rank has one, the first time only."""
    if on_all_ranks or not dist.is_initialized() or dist.get_rank() == 0:
        _log.warning(message)


def or_tell(buffer: Buffer, function: Callable[..., _Result], *args: Any) -> _Result:
    """`function(*args)`, which makes no call of the buffer. If it fails the peers, who would wait for this rank, are told."""
    try:
        return function(*args)
    except Exception as error:
        tell(buffer, error)
        raise


def tell(buffer: Buffer, error: Exception, num_calls: int | None = None) -> None:
    """Lets the peers raise EPPeerError with this error in their next call of the buffer, unless this rank has made more than `num_calls` of
    them, and so has told them itself."""
    if isinstance(error, _StopRecomputationError):  # by which checkpointing ends a recomputation
        return
    with contextlib.suppress(EPError, RuntimeError):  # peers that do not come, a GPU that failed: `error` says more
        if num_calls is None or buffer.num_calls == num_calls:
            buffer.refused(error)
