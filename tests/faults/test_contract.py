"""Cells of the table in docs/design/failures.md that the other modules leave out: arguments, destroyed buffers, different calls."""

from functools import partial

import pytest
import torch.distributed as dist
from fault_cases import SOON_S, inputs, make, make_step, outcome

from deepep_moe.errors import EPMismatchError, EPPeerError, EPTimeoutError
from deepep_moe.testing import run_ranks

on_each_kind = pytest.mark.parametrize("kind", ("shm", "collective", "low latency"))


def wrong_argument(rank, num_ranks, kind):
    buffer = make(kind, num_ranks)
    x, idx = inputs(buffer, 0)
    for step, culprit in enumerate(range(num_ranks)):
        error, elapsed_s = outcome(partial(buffer.dispatch, x, idx + 100 if rank == culprit else idx))
        assert type(error) is (ValueError if rank == culprit else EPPeerError) and elapsed_s < SOON_S, repr(error)
        assert rank == culprit or (error.rank == culprit and "it must be -1" in str(error)), repr(error)
        make_step(buffer, step)


@on_each_kind
def test_wrong_argument(kind):
    run_ranks(wrong_argument, 2, kind)


def different_calls(rank, num_ranks, kind):
    buffer = make(kind, num_ranks)
    x, idx = inputs(buffer, 0)
    out = buffer.dispatch(x, idx)
    error, elapsed_s = outcome(partial(buffer.dispatch, x, idx) if rank else partial(buffer.combine, out.recv_x, out.handle))
    assert isinstance(error, EPMismatchError) and elapsed_s < SOON_S and "ranks make different calls: rank" in str(error), repr(error)
    make_step(buffer, 1)


@on_each_kind
def test_different_calls(kind):
    run_ranks(different_calls, 2, kind)


def destroyed(rank, num_ranks, kind):
    """A process group does not tell that a peer has destroyed its buffer, as long as its process lives."""
    deadline_s = 1.0 if kind == "collective" else 300.0
    buffer = make(kind, num_ranks, deadline_s)
    make_step(buffer, 1)
    if rank == 1:
        buffer.destroy()
    else:
        error, elapsed_s = outcome(partial(make_step, buffer, 2))
        expected = EPTimeoutError if kind == "collective" else EPPeerError
        assert isinstance(error, expected) and error.rank == 1 and elapsed_s < SOON_S, repr(error)
    if kind != "collective":  # whose group is closed
        dist.barrier()
        make_step(make(kind, num_ranks), 3)


@on_each_kind
def test_destroyed(kind):
    run_ranks(destroyed, 2, kind)
