"""Cells of the table in docs/design/failures.md that the other modules leave out: destroyed buffers, low-latency refusals,
constructions, bounds."""

import itertools
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from events import tell, wait_for
from exchange_cases import look
from fault_cases import NUM_TOKENS, SOON_S, inputs, make, make_step, outcome
from on_ranks import on_ranks

from deepep_moe import Buffer, LowLatencyBuffer
from deepep_moe.errors import EPCapacityError, EPMismatchError, EPPeerError, EPTimeoutError
from deepep_moe.exchange.backends.shm import ShmBackend
from deepep_moe.group.rendezvous import Exchange
from deepep_moe.low_latency.shm import ShmLowLatencyBackend

GPUS = [pytest.param(kind, marks=pytest.mark.gpu) for kind in ("nvlink", "low latency nvlink")]
KINDS = ("shm", "collective", "low latency", *GPUS)


@on_ranks(2, kind=KINDS)
def test_destroyed(rank, num_ranks, kind):
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


@on_ranks(2, kind=("shm", "low latency", *GPUS))
def test_different_buffers(rank, num_ranks, kind):
    """Each rank is in another buffer: it waits for its peer there."""
    buffers = [make(kind, num_ranks, 3.0) for _ in range(num_ranks)]
    for buffer in buffers:
        make_step(buffer, 0)
    dist.barrier()
    error, elapsed_s = outcome(partial(make_step, buffers[rank], 1))
    assert isinstance(error, EPTimeoutError) and error.rank == 1 - rank and elapsed_s < SOON_S, repr(error)
    dist.barrier()
    for buffer in buffers:
        if isinstance(buffer, Buffer):
            buffer.recover()
            make_step(buffer, 2)
    dist.barrier()


@on_ranks(2, kind=("low latency", GPUS[1]))
def test_refusals_of_low_latency(rank, num_ranks, kind):
    """A rank of a low-latency buffer refuses a call. Its peer learns of it in the same call, whichever call it makes itself."""
    buffer = make(kind, num_ranks)
    x, idx = inputs(buffer, 0)
    weights, out = torch.ones_like(idx, dtype=torch.float32), buffer.dispatch(x, idx)
    calls = {
        "dispatch": lambda rows=x: buffer.dispatch(rows, idx),
        "combine": lambda rows=out.recv_x: buffer.combine(rows, out.handle),
        "weighted combine": lambda rows=out.recv_x: buffer.combine(rows, out.handle, topk_weights=weights),
    }
    wrong = {"dispatch": x.double(), "combine": out.recv_x.double(), "weighted combine": out.recv_x.double()}
    for step, (refused, other) in enumerate(itertools.product(calls, calls)):
        culprit = step % num_ranks
        if rank == culprit:
            error, elapsed_s = outcome(partial(calls[refused], wrong[refused]))
            assert isinstance(error, TypeError), repr(error)
        else:
            error, elapsed_s = outcome(lambda other=other: (calls[other](), look(buffer)))
            assert isinstance(error, EPPeerError) and (error.rank, error.cause) == (culprit, "TypeError"), repr(error)
        assert elapsed_s < SOON_S
        for bad in (-1, num_ranks, rank, True, None):  # which tells nobody anything
            with pytest.raises(ValueError, match=f"rank is {bad}; it must be one of 0 to {num_ranks - 1}, and not this rank, {rank}"):
                buffer.mask_rank(bad)
    make_step(buffer, 1)
    assert buffer.masked_ranks == []


# ---- ranks that construct different buffers ----


@on_ranks(2)
def test_different_constructions(rank, num_ranks):
    for backend in ("auto", "shm"):
        with pytest.raises(EPMismatchError, match=r"disagree on kind of buffer \(rank 0: 'Buffer', rank 1: 'LowLatencyBuffer'\)"):
            (Buffer, LowLatencyBuffer)[rank](None, 8, 16, 4, 2, backend=backend)
    with pytest.raises(EPMismatchError, match=r"ranks disagree on mask_stalled \(rank 0: False, rank 1: True\)"):
        LowLatencyBuffer(None, 8, 16, 4, 2, mask_stalled=rank == 1)
    make_step(make("shm", num_ranks), 1)


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


@on_ranks(3, is_end=(False, True), kind=(Buffer, LowLatencyBuffer), expected_dead=lambda kind, is_end: [1] if is_end else [])
def test_rank_that_leaves(rank, kind, is_end):
    """Rank 1 leaves without an answer, by an interrupt or by the end of its process, while its peers wait for what it has to say."""

    def leave(*_):
        if is_end:
            os._exit(0)
        raise KeyboardInterrupt

    dist.barrier()
    if rank == 1:
        (ShmBackend, ShmLowLatencyBackend)[kind is LowLatencyBuffer].connect = leave
    raised, elapsed_s = outcome(lambda: kind(None, 8, 16, 6, 2, timeout_s=25.0))
    if rank == 1:
        assert isinstance(raised, KeyboardInterrupt)
    else:
        assert isinstance(raised, EPTimeoutError) and raised.rank == 1 and elapsed_s < SOON_S, repr(raised)
        assert is_end or raised.phase == "mapping of workspaces", repr(raised)
    tell(f"rank {rank} knows")
    wait_for("rank 0 knows", "rank 2 knows")


# ---- more rows than a rank has room for, on GPUs ----


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "num_ranks", "layout", "by_native"),
    (("nvlink", 2, "rank", False), ("nvlink", 3, "expert", True), ("nvshmem", 4, "expert", False)),
)
@on_ranks(())
def test_too_small_a_bound_on_gpus(rank, num_ranks, kind, layout, by_native):
    """A rank has room for one row less than it would receive, and its host waits for nothing. All ranks raise EPCapacityError: in its node
    without a further call, in other nodes in the next one. Nobody sums what the failed dispatch has left, whoever has looked before."""
    buffer, num_rows = make(kind, num_ranks), NUM_TOKENS * num_ranks
    if by_native:
        buffer.calls.native = buffer.calls.backend.native_calls(buffer.calls.number, buffer.calls.own_mode)
        assert buffer.calls.native is not None

    def hears(call, culprit):
        error, elapsed_s = outcome(call)
        assert isinstance(error, EPCapacityError) and error.rank == culprit and elapsed_s < SOON_S, repr(error)
        text = f"rank {culprit} would receive {num_rows} rows, more than its num_recv_rows of {num_rows - 1}; give a larger bound or none"
        assert str(error) == text

    for step, (who_looks, then) in enumerate(itertools.product(("all", "culprit", "nobody"), ("combine", "along", "dispatch"))):
        culprit, (x, idx) = (1, num_ranks - 1)[step % 2], inputs(buffer, step)
        is_in_its_node, waits = kind == "nvlink" or rank // 2 == culprit // 2, (rank, step) == (0, 8)
        bound = num_rows - 1 if rank == culprit else None if waits else num_rows + rank
        send, out = partial(buffer.dispatch, x, idx, layout=layout, num_recv_rows=bound), None
        if waits and is_in_its_node:  # the host, for counts
            hears(send, culprit)
        else:
            out = send()
            torch.cuda.synchronize()
        dist.barrier()
        assert out is None or out.handle.has_failed is is_in_its_node
        assert out is None or not is_in_its_node or not out.num_recv_tokens_per_expert.any()
        has_looked = who_looks == "all" or (who_looks == "culprit" and rank == culprit)
        if has_looked:
            (hears if is_in_its_node else lambda call, _: call())(buffer.check, culprit)
            buffer.check()  # once is enough
        dist.barrier()
        if then == "dispatch" or out is None:
            if kind == "nvlink" and who_looks == "all":
                assert len(buffer.dispatch(x, idx, layout=layout).recv_x) == num_rows
            else:
                hears(partial(buffer.dispatch, x, idx, layout=layout), culprit)
        else:
            if then == "combine":
                call = partial(buffer.combine, torch.ones_like(out.recv_x), out.handle)
            else:
                call = partial(buffer.dispatch, x, handle=out.handle)
            if kind == "nvlink" and has_looked:  # the host knows no more; the kernel does
                call()
                with pytest.raises(ValueError, match="the dispatch of this handle has failed, so nothing goes along it"):
                    look(buffer)
            elif is_in_its_node:
                hears(call, culprit)
            else:
                call()
                hears(partial(look, buffer), culprit)
        make_step(buffer, step)
    out = buffer.dispatch(*inputs(buffer, 0), layout=layout, num_recv_rows=num_rows)  # as many as come
    assert (buffer.combine(out.recv_x, out.handle)[:, 0] == num_ranks * inputs(buffer, 0)[0][:, 0]).all()
    look(buffer)
