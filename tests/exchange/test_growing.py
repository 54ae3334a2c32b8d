"""Some failures of a peer make a buffer grow."""

import pytest
import torch
import torch.distributed as dist
from exchange_cases import BACKENDS, assert_same, device_of
from fault_cases import inputs
from on_ranks import on_ranks

from deepep_moe import Buffer
from deepep_moe.errors import Cause, EPMismatchError, EPPeerError
from deepep_moe.exchange.growing import GrowingBuffer


class OutgrownError(ValueError):
    """It has the name of the library's."""


def make(backend, timeout_s=60.0, rank=0, **options):
    device = device_of(backend, rank)

    def construct(num_tokens):
        return Buffer(None, num_tokens, 16, 4, 2, backend=backend, timeout_s=timeout_s, **options)

    growing = GrowingBuffer(dist.group.WORLD, 4, device, construct, None, "the option", is_bounded=backend == "nvshmem")
    growing.num_max_tokens = 4
    return growing


def send(buffer):
    return buffer.dispatch(*inputs(buffer, 0))


@on_ranks(2, backend=BACKENDS, sums=("ranks", "lanes"))
def test_a_peer_with_more_tokens(rank, backend, sums):
    growing = make(backend, rank=rank, sums=sums)
    first, given = growing.buffer, inputs(growing.buffer, 0)
    torch.set_default_dtype(torch.float64)  # in which no backend sends rows
    buffer, out = growing.dispatch(5 if rank == 1 else 4, lambda buffer: buffer.dispatch(*given))
    assert buffer is growing.buffer is not first and growing.num_max_tokens == 128 and len(out.recv_x) == 8


@pytest.mark.gpu
@on_ranks(4, ranks_per_node=(1, 2))
def test_a_rank_of_another_node_with_more_tokens(rank, ranks_per_node):
    """With two ranks a node, rank 3 is neither in rank 0's node nor on its rail, and hears of it through rank 1 or 2 alone."""
    growing = make("nvshmem", rank=rank, ranks_per_node=ranks_per_node)
    first, device = growing.buffer, device_of("nvshmem", rank)
    x, idx = torch.ones(5 - (rank > 0), 16), torch.zeros(5 - (rank > 0), 2, dtype=torch.int64)
    idx[:, 1] = -1
    buffer, out = growing.dispatch(len(x), lambda buffer: buffer.dispatch(x.to(device), idx.to(device)))
    assert buffer is growing.buffer is not first and growing.num_max_tokens == 128
    assert len(out.recv_x) == (17 if rank == 0 else 0)


@on_ranks(2, backend=["shm", "collective"])
def test_a_peer_that_fails_otherwise(rank, backend):
    """A peer's error with the name and the words of a lack of room is not one."""
    growing = make(backend, timeout_s=10.0)
    first, error = growing.buffer, OutgrownError("a rank dispatches 5 tokens")

    def refuse(buffer):
        raise buffer.refuse(error)

    with pytest.raises(ValueError if rank == 1 else EPPeerError, match="a rank dispatches 5 tokens") as caught:
        growing.dispatch(4, refuse if rank == 1 else send)
    assert caught.value is error if rank == 1 else (caught.value.cause, caught.value.code) == ("OutgrownError", Cause.OTHER)
    assert growing.buffer is first and len(growing.dispatch(4, send)[1].recv_x) == 8


@on_ranks(2, backend=["shm", "collective"], sums=("ranks", "lanes"))
def test_a_peer_in_another_call(rank, backend, sums):
    """A meeting is no dispatch that a layer makes, such as one of the drop-in for DeepEP: in the rank layout, of fp32 rows."""
    growing = make(backend, sums=sums)
    x, idx = inputs(growing.buffer, 0)
    with pytest.raises(EPMismatchError):
        if rank == 1:
            growing.buffer.dispatch(x.float(), idx, layout="rank" if sums == "ranks" else "expert")
        else:
            growing.meet()
    growing.meet()
    assert len(send(growing.buffer).recv_x) == 8


@pytest.mark.gpu
@on_ranks(2)
def test_a_peer_with_more_tokens_while_rows_are_guessed(rank):
    """A rank that has queued its experts on guessed rows learns in `settle` that a peer has no room, and all dispatch again."""
    growing, device, num_tokens = make("nvlink", rank=rank), device_of("nvlink", rank), 4 + (rank == 0)
    x, idx = torch.randn(num_tokens, 16, device=device), torch.tensor([0, 2], device=device).repeat(num_tokens, 1)

    def send(buffer):
        return buffer.dispatch(x[: buffer.num_max_tokens_per_rank], idx[: buffer.num_max_tokens_per_rank], num_recv_rows="guess")

    first = growing.buffer
    for _ in range(2):
        growing.dispatch(4, send)
    buffer, out = growing.dispatch(num_tokens, send)
    if out.handle.is_late:
        assert rank == 1 and buffer is first
        buffer, out = growing.settle(num_tokens, send, buffer, out)
    assert buffer is growing.buffer is not first
    assert_same("combined_x", buffer.combine(out.recv_x, out.handle), 2 * x)
