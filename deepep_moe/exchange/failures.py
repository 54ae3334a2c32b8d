"""Telling the peers of a buffer that this rank fails between its calls, where they would wait for the next one."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.utils.checkpoint import _StopRecomputationError

from deepep_moe.errors import EPError
from deepep_moe.exchange.buffer import Buffer

_Result = TypeVar("_Result")


def or_tell(buffer: Buffer, function: Callable[..., _Result], *args: Any) -> _Result:
    """`function(*args)`, which makes no call of the buffer. If it fails the peers, who would wait for this rank, are told."""
    try:
        return function(*args)
    except Exception as error:
        tell(buffer, error)
        raise


@contextlib.contextmanager
def telling(buffer: Buffer) -> Iterator[None]:
    """A block that ends with a call of the buffer, its only one. If the block fails before, the peers are told."""
    num_calls = buffer.num_calls
    try:
        yield
    except Exception as error:
        tell(buffer, error, num_calls)
        raise


def tell(buffer: Buffer, error: Exception, num_calls: int | None = None) -> None:
    """Lets the peers raise EPPeerError with this error in their next call of the buffer, unless this rank has made more than `num_calls` of
    them, and so has told them itself."""
    if isinstance(error, _StopRecomputationError):  # by which checkpointing ends a recomputation
        return
    with contextlib.suppress(EPError, RuntimeError):  # peers that do not come, a GPU that failed: `error` says more
        if num_calls is None or buffer.num_calls == num_calls:
            buffer.refused(error)
