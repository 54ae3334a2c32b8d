"""Activation recomputation of MoE layers, which goes along the handles of the first forward.

Megatron-Core's `checkpoint` runs a part of the model without gradients, and once more in the backward. The second run sends its rows where
the first one sent them, with no exchange of counts, and reads the probs of the experts chosen then. So a router that would choose
otherwise in the second run cannot come apart from its rows.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.handle import DispatchHandle
from deepep_moe.integrations.common.patches import Patches, Stock
from deepep_moe.library import Context
from deepep_moe.ops.copies import CopyPlan

_ATTRIBUTE = "_deepep_moe_dispatches"  # of a checkpoint's context


class Dispatched(NamedTuple):
    """One dispatch of a first run."""

    buffer: Buffer
    handle: DispatchHandle
    choice: tuple[CopyPlan, torch.Tensor] | None = None
    """With copies of experts: their plan, and topk_idx before it."""


class _Run(NamedTuple):
    """A checkpointed part that runs."""

    dispatches: deque[Dispatched]
    """Those of the first run in order, or those that are left in the second."""
    is_second: bool
    trains: bool
    """This is the run of a forward of which a backward comes."""


class _Runs(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Run] = []
        self.trains = False  # the part that is about to begin


_runs = _Runs()


def trains() -> bool:
    """Return whether this is a forward of which a backward comes. Each is one once: a second run is none."""
    return _runs.stack[-1].trains if _runs.stack else torch.is_grad_enabled()


def record(dispatched: Dispatched) -> None:
    """Remember a dispatch, if it is of a first run."""
    run = _runs.stack[-1] if _runs.stack else None
    if run is not None and not run.is_second:
        run.dispatches.append(dispatched)


def recorded() -> Dispatched | None:
    """Return what the first run did in the place of the next dispatch, or None outside of a second run."""
    run = _runs.stack[-1] if _runs.stack else None
    return run.dispatches[0] if run is not None and run.is_second and run.dispatches else None


def take_recorded() -> Dispatched | None:
    """Take what `recorded` returns, to be dispatched now."""
    dispatch = recorded()
    if dispatch is not None:
        _runs.stack[-1].dispatches.popleft()
    return dispatch


@contextlib.contextmanager
def _running(run: _Run) -> Iterator[None]:
    _runs.stack.append(run)
    try:
        yield
    finally:
        _runs.stack.pop()


def serve_recompute(patches: Patches) -> None:
    """Let Megatron-Core's checkpoints keep the dispatches of their first run for the second."""
    from megatron.core.tensor_parallel.random import CheckpointFunction

    @patches.around(CheckpointFunction, "apply")
    def apply(stock: Stock, *args: object) -> object:
        _runs.trains = trains()  # PyTorch switches gradients off before it calls `forward`
        return stock(*args)

    @patches.around(CheckpointFunction, "forward")
    def forward(stock: Stock, ctx: Context, *args: object) -> object:
        run = _Run(deque(), is_second=False, trains=_runs.trains)
        with _running(run):
            outputs = stock(ctx, *args)
        setattr(ctx, _ATTRIBUTE, run.dispatches)
        return outputs

    @patches.around(CheckpointFunction, "backward")
    def backward(stock: Stock, ctx: Context, *grads: object) -> object:
        # A copy: a graph that is retained runs its backward again.
        with _running(_Run(deque(getattr(ctx, _ATTRIBUTE, ())), is_second=True, trains=False)):
            return stock(ctx, *grads)
