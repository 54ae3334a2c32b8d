"""Ranks that construct different things: all are told at once."""

import pytest
from fault_cases import make, make_step

from deepep_moe import Buffer, LowLatencyBuffer
from deepep_moe.errors import EPMismatchError
from deepep_moe.testing import run_ranks


def different(rank, num_ranks):
    kinds = r"ranks disagree on kind of buffer \(rank 0: 'Buffer', rank 1: 'LowLatencyBuffer'\); create the same kind on every rank"
    for backend in ("auto", "shm"):
        with pytest.raises(EPMismatchError, match=kinds):
            (Buffer, LowLatencyBuffer)[rank](None, 8, 16, 4, 2, backend=backend)
    with pytest.raises(EPMismatchError, match=r"ranks disagree on mask_stalled \(rank 0: False, rank 1: True\)"):
        LowLatencyBuffer(None, 8, 16, 4, 2, mask_stalled=rank == 1)
    make_step(make("shm", num_ranks), 1)


def test_different_constructions():
    run_ranks(different, 2)
