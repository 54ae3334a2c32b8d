"""Wrong arguments of one rank, in calls that say for which buffer they are, or that make a larger one: the peers learn them at once."""

import gc
import time
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist

from deepep_moe import LowLatencyBuffer
from deepep_moe.compat.deep_ep import Buffer, ElasticBuffer, HybridEPBuffer
from deepep_moe.errors import EPPeerError
from deepep_moe.exchange import growing
from deepep_moe.testing import run_ranks

SOON_S = 30.0  # a deadline is 300 s
IDX = torch.tensor([[0], [2]])


def fails_on_rank_1(rank, call, error, message):
    """`call` raises `error` on rank 1, and soon an EPPeerError with its message on the others."""
    began = time.monotonic()
    with pytest.raises(error if rank == 1 else EPPeerError, match=message):
        call()
    assert time.monotonic() - began < SOON_S


def rows(hidden, wrong=False):
    return torch.ones(2, hidden, dtype=torch.bfloat16)[0 if wrong else slice(None)]


def along_an_older_handle(rank, num_ranks):
    buffer = Buffer(dist.group.WORLD)

    def first(hidden):
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(IDX, 4)
        routing = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        return buffer.dispatch(rows(hidden), **routing, topk_idx=IDX, topk_weights=torch.ones(2, 1))[4]

    handles = {hidden: first(hidden) for hidden in (64, 128)}
    fails_on_rank_1(rank, lambda: buffer.dispatch(rows(64, rank == 1), handle=handles[64]), ValueError, "x has shape")
    for hidden, handle in handles.items():
        buffer.dispatch(rows(hidden), handle=handle)


def test_along_an_older_handle():
    run_ranks(along_an_older_handle, 2)


def into_a_larger_buffer(rank, num_ranks):
    growing._MANY = 16  # as if memory were scarce, as on GPUs
    buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=16, hidden=64)

    def dispatch(most, idx=IDX):
        return buffer.dispatch(rows(64), topk_idx=idx, topk_weights=torch.ones(2, 1), num_experts=4, num_max_tokens_per_rank=most)

    dispatch(16)
    fails_on_rank_1(rank, partial(dispatch, 64, IDX[0] if rank == 1 else IDX), ValueError, "topk_idx has shape")
    dispatch(64)


def test_into_a_larger_buffer():
    run_ranks(into_a_larger_buffer, 2)


def probs_of_a_combine(rank, num_ranks):
    buffer = HybridEPBuffer(dist.group.WORLD, hidden_dim=64, max_num_of_tokens_per_rank=16, num_local_experts=2)
    chosen = torch.zeros(2, 4, dtype=torch.bool)
    chosen[:, ::3] = True
    recv_x, probs, _, handle = buffer.dispatch(rows(64), routing_map=chosen, probs=chosen.float())
    fails_on_rank_1(rank, lambda: buffer.combine(recv_x, probs[:1] if rank == 1 else probs, handle), ValueError, "probs has shape")
    assert torch.equal(buffer.combine(recv_x, probs, handle)[1], chosen.float())


def test_probs_of_a_combine():
    run_ranks(probs_of_a_combine, 2)


def words_without_encoding(rank, num_ranks):
    buffer = LowLatencyBuffer(None, 8, 128, 4, 1, backend="shm")
    x = torch.ones(2, 128, dtype=torch.bfloat16)

    def call():
        if rank == 1:
            raise buffer.refuse(ValueError("no file '\udc80'"))
        buffer.dispatch(x, IDX)

    fails_on_rank_1(rank, call, ValueError, "no file '")
    dist.barrier()


def test_words_without_encoding():
    run_ranks(words_without_encoding, 2)


def drop(rank, num_ranks):
    buffer = Buffer(dist.group.WORLD)
    gone = weakref.ref(buffer), weakref.ref(buffer._buffers)
    gc.collect()
    gc.disable()
    del buffer
    assert [there() for there in gone] == [None, None], "its memory goes at once, not in a collection amid another call"


def test_dropped_buffer():
    run_ranks(drop, 1)
