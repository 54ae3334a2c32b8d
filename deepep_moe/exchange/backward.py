"""A backward pass that fails between two calls: in an expert, in a gradient's hook, or in a forward that it repeats."""

import contextlib

import torch
from torch.utils.checkpoint import _StopRecomputationError

from deepep_moe.errors import EPError, told
from deepep_moe.exchange.calls import Calls, live_calls
from deepep_moe.library import is_dry_run

_ENDS = (_StopRecomputationError, GeneratorExit)
"""By which checkpointing ends a recomputation, and Python a generator."""
_REASON = "RuntimeError: its backward pass failed; see its output for the error"


class _Watch:
    """PyTorch calls it at the end of a backward pass, and only drops it where the pass fails."""

    def __init__(self, calls: Calls, reason: str):
        self._number, self._num_calls, self._reason = calls.number, calls.num_calls, reason
        self._is_over = False

    def __call__(self) -> None:
        self._is_over = True

    def __del__(self) -> None:
        if not self._is_over:
            pass_failed(self._number, self._num_calls, self._reason)


def watch_backward(calls: Calls, reason: str = _REASON) -> bool:
    """If the backward pass that runs fails before its next call of the buffer, the peers, which would wait for that, raise EPPeerError. (A
    backward in csrc/torch does the same.) Return False where none runs."""
    runs = not is_dry_run() and torch._C._current_graph_task_id() >= 0
    if runs:
        torch.autograd.Variable._execution_engine.queue_callback(_Watch(calls, reason))
    return runs


def pass_failed(number: int, num_calls: int, reason: str = _REASON) -> None:
    """Tell the peers, unless the buffer with these calls has made more than `num_calls`: then the call has told them."""
    calls = live_calls.get(number)
    if calls is None or calls.is_destroyed or calls.num_calls != num_calls:
        return
    with contextlib.suppress(EPError, RuntimeError):  # the error of the pass says more
        calls.tell(reason)


def tell_failure(calls: Calls, error: BaseException) -> None:
    """Tell the peers that this rank does not make its next call because of `error`. In a forward that a backward pass repeats, they learn
    it once the pass has failed: if it goes on, the error has only ended the repetition, which had all that it needed."""
    if isinstance(error, _ENDS):
        return
    with contextlib.suppress(EPError, RuntimeError):  # of peers that do not come, a GPU that failed: `error` says more
        if not watch_backward(calls, told(error)):
            calls.refuse(error)
