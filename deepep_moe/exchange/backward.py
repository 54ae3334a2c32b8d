"""A backward pass that fails between two calls, as in an expert or a gradient's hook."""

import contextlib

import torch

from deepep_moe.errors import EPError
from deepep_moe.exchange.calls import Calls
from deepep_moe.library import is_traced


class _Watch:
    """PyTorch calls it at the end of a backward pass, and only drops it where the pass fails."""

    def __init__(self, calls: Calls):
        self._calls: Calls | None = calls
        self._num_calls = calls.backend.num_calls

    def __call__(self) -> None:
        self._calls = None

    def __del__(self) -> None:
        calls = self._calls
        if calls is None or calls.is_destroyed or calls.backend.num_calls != self._num_calls:
            return
        with contextlib.suppress(EPError, RuntimeError):  # the error of the pass says more
            calls.refuse(RuntimeError("its backward pass failed; see its output for the error"))


def watch_backward(calls: Calls) -> None:
    """If the backward pass that runs fails before its next call of the buffer, the peers, which would wait for that, raise EPPeerError. For
    buffers of CPU tensors: a GPU's backward costs too little to be watched."""
    if calls.backend.device is None and not is_traced(()):
        torch.autograd.Variable._execution_engine.queue_callback(_Watch(calls))
