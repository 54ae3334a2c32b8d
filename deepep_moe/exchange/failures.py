"""Failures of a rank between its calls, where the peers of a buffer would wait for the next one."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from deepep_moe.exchange.backward import tell_failure
from deepep_moe.exchange.buffer import Buffer

_Result = TypeVar("_Result")


def notify_peers_on_failure(buffer: Buffer, function: Callable[..., _Result], *args: Any) -> _Result:
    """Return `function(*args)`, which makes no call of the buffer or ends with one. If it fails before that call, the peers, which would
    wait for it, raise EPPeerError with the same error."""
    if torch.compiler.is_compiling():
        return function(*args)
    num_calls = buffer.num_calls
    try:
        return function(*args)
    except BaseException as error:
        notify_peers(buffer, error, num_calls)
        raise


def notify_peers(buffer: Buffer, error: BaseException, num_calls: int | None = None) -> None:
    """Let the peers raise EPPeerError with this error in their next call of the buffer. If this rank has made more than `num_calls` of
    them, they know already."""
    if not buffer.calls.is_destroyed and num_calls in (None, buffer.num_calls):
        tell_failure(buffer.calls, error)
