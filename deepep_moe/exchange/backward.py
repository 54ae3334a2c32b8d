"""A backward pass that fails between two calls, as in an expert or a gradient's hook."""

import contextlib

import torch

from deepep_moe.errors import EPError
from deepep_moe.exchange.calls import Calls, live_calls
from deepep_moe.library import is_traced


class _Watch:
    """PyTorch calls it at the end of a backward pass, and only drops it where the pass fails."""

    def __init__(self, calls: Calls):
        self._number, self._num_calls = calls.number, calls.backend.num_calls
        self._is_over = False

    def __call__(self) -> None:
        self._is_over = True

    def __del__(self) -> None:
        if not self._is_over:
            pass_failed(self._number, self._num_calls)


def watch_backward(calls: Calls) -> None:
    """If the backward pass that runs fails before its next call of the buffer, the peers, which would wait for that, raise EPPeerError. (A
    backward in csrc/torch does the same.)"""
    if not is_traced(()) and torch._C._current_graph_task_id() >= 0:
        torch.autograd.Variable._execution_engine.queue_callback(_Watch(calls))


def pass_failed(number: int, num_calls: int) -> None:
    """Tell the peers, unless the buffer with these calls has made more than `num_calls`: then the call has told them."""
    calls = live_calls.get(number)
    if calls is None or calls.is_destroyed or calls.backend.num_calls != num_calls:
        return
    with contextlib.suppress(EPError, RuntimeError):  # the error of the pass says more
        calls.refuse(RuntimeError("its backward pass failed; see its output for the error"))
