"""Which failures of a peer make a buffer grow."""

import pytest
import torch
import torch.distributed as dist
from fault_cases import inputs
from on_ranks import on_ranks

from deepep_moe import Buffer
from deepep_moe.errors import EPMismatchError, EPPeerError
from deepep_moe.exchange.growing import GrowingBuffer


def make(backend, timeout_s=60.0):
    def construct(num_tokens):
        return Buffer(None, num_tokens, 16, 4, 2, backend=backend, timeout_s=timeout_s)

    growing = GrowingBuffer(dist.group.WORLD, 4, torch.device("cpu"), construct, None, "the option")
    growing.num_max_tokens = 4
    return growing


def send(buffer):
    return buffer.dispatch(*inputs(buffer, 0))


@on_ranks(2, backend=["shm", "collective"])
def test_a_peer_with_more_tokens(rank, backend):
    growing = make(backend)
    first = growing.buffer
    buffer, out = growing.dispatch(5 if rank == 1 else 4, send)
    assert buffer is growing.buffer is not first and growing.num_max_tokens == 128 and len(out.recv_x) == 8


@on_ranks(2, backend=["shm", "collective"])
def test_a_peer_that_fails_otherwise(rank, backend):
    """A peer's error that tells of an earlier lack of room is not one."""
    growing = make(backend, timeout_s=10.0)
    first, error = growing.buffer, ValueError("no rows, after OutgrownError: a rank dispatches 5 tokens")

    def refuse(buffer):
        raise buffer.refuse(error)

    with pytest.raises(ValueError if rank == 1 else EPPeerError, match="no rows, after OutgrownError") as caught:
        growing.dispatch(4, refuse if rank == 1 else send)
    assert caught.value is error if rank == 1 else caught.value.cause == "ValueError"
    assert growing.buffer is first and len(growing.dispatch(4, send)[1].recv_x) == 8


@on_ranks(2, backend=["shm", "collective"])
def test_a_peer_in_another_call(rank, backend):
    """A meeting is no dispatch that a layer makes, such as one of the drop-in for DeepEP: in the rank layout, of fp32 rows."""
    growing = make(backend)
    x, idx = inputs(growing.buffer, 0)
    with pytest.raises(EPMismatchError):
        if rank == 1:
            growing.buffer.dispatch(x.float(), idx, layout="rank")
        else:
            growing.meet()
    growing.meet()
    assert len(send(growing.buffer).recv_x) == 8
