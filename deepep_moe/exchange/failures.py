"""Tell the peers of a failure between two calls of a buffer; else they would wait for the next call.

Such failures come from an expert, from a gradient's hook, or from a forward that a backward pass repeats.
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.utils.checkpoint import _StopRecomputationError

from deepep_moe.errors import EPError, describe
from deepep_moe.exchange.calls import Calls, live_calls
from deepep_moe.library import is_dry_run

if TYPE_CHECKING:
    from deepep_moe.exchange.buffer import Buffer

_Result = TypeVar("_Result")
ENDS = (_StopRecomputationError, GeneratorExit)
"""Exceptions with which checkpointing ends a recomputation, and Python a generator. They are no failures."""
_REASON = "RuntimeError: its backward pass failed; see its output for the error"


class _Watch:
    """PyTorch calls this at the end of a backward pass, and drops it without a call if the pass fails."""

    def __init__(self, calls: Calls, reason: str):
        self._number, self._num_calls, self._reason = calls.number, calls.num_calls, reason
        self._is_over = False

    def __call__(self) -> None:
        self._is_over = True

    def __del__(self) -> None:
        if not self._is_over:
            pass_failed(self._number, self._num_calls, self._reason)


def watch_backward(calls: Calls, reason: str = _REASON) -> bool:
    """Make the peers raise EPPeerError if the running backward pass fails before its next call of the buffer. (A backward in csrc/torch
    does the same.) Return False if no backward pass runs."""
    runs = not is_dry_run() and torch._C._current_graph_task_id() >= 0
    if runs:
        torch.autograd.Variable._execution_engine.queue_callback(_Watch(calls, reason))
    return runs


def pass_failed(number: int, num_calls: int, reason: str = _REASON) -> None:
    """Tell the peers, unless the buffer has made more than `num_calls` calls: then a later call has told them."""
    calls = live_calls.get(number)
    if calls is None or calls.is_destroyed or calls.num_calls != num_calls:
        return
    with contextlib.suppress(EPError, RuntimeError):  # the error of the forward or backward says more
        calls.tell(reason)


def tell_failure(calls: Calls, error: BaseException) -> None:
    """Tell the peers that this rank does not make its next call because of `error`. If a backward pass repeats this forward, the peers are
    told only once that pass fails; the error may have been a way to end the repetition early."""
    if isinstance(error, ENDS):
        return
    with contextlib.suppress(EPError, RuntimeError):  # missing peers or a failed GPU: `error` says more
        if not watch_backward(calls, describe(error)):
            calls.refuse(error)


def notify_peers_on_failure(buffer: "Buffer", function: Callable[..., _Result], *args: object) -> _Result:
    """Return `function(*args)`, which makes no call of the buffer or ends with one. If it fails before that call, the peers raise
    EPPeerError with the same error instead of waiting."""
    if torch.compiler.is_compiling():
        return function(*args)
    num_calls = buffer.num_calls
    try:
        return function(*args)
    except BaseException as error:
        notify_peers(buffer, error, num_calls)
        raise


def notify_peers(buffer: "Buffer", error: BaseException, num_calls: int | None = None) -> None:
    """Make the peers raise EPPeerError with this error in their next call of the buffer. If this rank has made more than `num_calls`
    calls, they know already."""
    if not buffer.calls.is_destroyed and num_calls in (None, buffer.num_calls):
        tell_failure(buffer.calls, error)
