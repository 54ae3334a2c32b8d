"""Ranks that construct different buffers: all raise at once."""

import os
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from events import tell, wait_for
from fault_cases import SOON_S, make, make_step, outcome
from on_ranks import on_ranks

from deepep_moe import Buffer, LowLatencyBuffer
from deepep_moe.errors import EPMismatchError, EPTimeoutError
from deepep_moe.exchange.backends.shm import ShmBackend
from deepep_moe.group.rendezvous import Exchange
from deepep_moe.low_latency.shm import ShmLowLatencyBackend


@on_ranks(2)
def test_different_constructions(rank, num_ranks):
    for backend in ("auto", "shm"):
        with pytest.raises(EPMismatchError, match=r"disagree on kind of buffer \(rank 0: 'Buffer', rank 1: 'LowLatencyBuffer'\)"):
            (Buffer, LowLatencyBuffer)[rank](None, 8, 16, 4, 2, backend=backend)
    with pytest.raises(EPMismatchError, match=r"ranks disagree on mask_stalled \(rank 0: False, rank 1: True\)"):
        LowLatencyBuffer(None, 8, 16, 4, 2, mask_stalled=rank == 1)
    make_step(make("shm", num_ranks), 1)


# ---- a rank that gives up the construction, while another one waits for it ----


@on_ranks(3, kind=(Buffer, LowLatencyBuffer))
def test_rank_that_gives_up(rank, kind):
    """Rank 1 introduces itself to rank 2 only. So rank 0 waits for rank 1, and rank 2, one message further, for rank 0."""
    dist.barrier()
    if rank == 1:
        post = Exchange._post

        def stall(exchange):
            group = exchange._group

            def send(tensors, peer, tag):
                if peer == 0:
                    wait_for("rank 0 knows", "rank 2 knows")
                    raise SystemExit
                return group.send(tensors, peer, tag)

            exchange._group = SimpleNamespace(send=send, recv=group.recv)
            post(exchange)

        Exchange._post = stall
    error, elapsed_s = outcome(lambda: kind(None, 8, 16, 6, 2, timeout_s=1.0 if rank == 0 else 25.0))
    if rank == 1:
        assert isinstance(error, SystemExit)
        return
    assert isinstance(error, EPTimeoutError) and elapsed_s < SOON_S, repr(error)
    if rank == 0:
        assert error.rank == 1 and "rank 1 did not deliver within 1 s; phase 'construction of a Buffer'" in str(error)
    else:
        assert error.rank == 1 and "rank 0 closed its connection, as it has given up on rank 1" in str(error)
    tell(f"rank {rank} knows")


def interrupt(*_):
    raise KeyboardInterrupt


def end(*_):
    os._exit(0)


@on_ranks(3, leave=(interrupt, end), kind=(Buffer, LowLatencyBuffer), expected_dead=lambda kind, leave: [1] if leave is end else [])
def test_rank_that_leaves(rank, kind, leave):
    """Rank 1 leaves without an answer, by an interrupt or by the end of its process, while its peers wait for what it has to say."""
    dist.barrier()
    if rank == 1:
        (ShmBackend, ShmLowLatencyBackend)[kind is LowLatencyBuffer].connect = leave
    raised, elapsed_s = outcome(lambda: kind(None, 8, 16, 6, 2, timeout_s=25.0))
    if rank == 1:
        assert isinstance(raised, KeyboardInterrupt)
    else:
        assert isinstance(raised, EPTimeoutError) and raised.rank == 1 and elapsed_s < SOON_S, repr(raised)
        assert leave is end or raised.phase == "mapping of workspaces", repr(raised)
    tell(f"rank {rank} knows")
    wait_for("rank 0 knows", "rank 2 knows")
