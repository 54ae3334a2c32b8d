"""Ranks that construct different things: all are told at once."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from events import tell, wait_for
from fault_cases import SOON_S, make, make_step, outcome
from on_ranks import on_ranks

from deepep_moe import Buffer, LowLatencyBuffer, ops
from deepep_moe.errors import EPMismatchError, EPTimeoutError
from deepep_moe.exchange.backends.shm import ShmBackend
from deepep_moe.group.rendezvous import Exchange
from deepep_moe.low_latency.shm import ShmLowLatencyBackend
from deepep_moe.testing import run_ranks


@on_ranks(2)
def test_different_constructions(rank, num_ranks):
    kinds = r"ranks disagree on kind of buffer \(rank 0: 'Buffer', rank 1: 'LowLatencyBuffer'\); create the same kind on every rank"
    for backend in ("auto", "shm"):
        with pytest.raises(EPMismatchError, match=kinds):
            (Buffer, LowLatencyBuffer)[rank](None, 8, 16, 4, 2, backend=backend)
    with pytest.raises(EPMismatchError, match=r"ranks disagree on mask_stalled \(rank 0: False, rank 1: True\)"):
        LowLatencyBuffer(None, 8, 16, 4, 2, mask_stalled=rank == 1)
    make_step(make("shm", num_ranks), 1)


# ---- a rank that gives up the construction, while another one waits for it ----


def gives_up_on_a_stalled_rank(rank, kind):
    """Rank 1 introduces itself to rank 2 only. So rank 0 waits for rank 1, and rank 2, one message further, for rank 0."""
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


def fails_while_it_maps(rank, kind):
    """Rank 1 fails in a way that is nobody's answer, while its peers wait for what it has to say."""
    error, backend = KeyboardInterrupt(), (ShmBackend, ShmLowLatencyBackend)[kind is LowLatencyBuffer]
    if rank == 1:
        backend.connect = fail_with(error)
    found, elapsed_s = outcome(lambda: kind(None, 8, 16, 6, 2, timeout_s=25.0))
    if rank == 1:
        assert found is error
    else:
        assert isinstance(found, EPTimeoutError) and found.phase == "mapping of workspaces" and elapsed_s < SOON_S, repr(found)
        assert found.rank == 1, repr(found)
    tell(f"rank {rank} knows")
    wait_for(*(f"rank {peer} knows" for peer in range(3)))


def fail_with(error):
    def fail(*_):
        raise error

    return fail


def in_three_ranks(rank, _, function, kind):
    dist.barrier()
    function(rank, kind)


def ends_while_it_maps(rank, kind):
    """Rank 1's process ends, and tells nobody."""
    if rank == 1:
        (ShmBackend, ShmLowLatencyBackend)[kind is LowLatencyBuffer].connect = lambda *_: os._exit(0)
    found, elapsed_s = outcome(lambda: kind(None, 8, 16, 6, 2, timeout_s=25.0))
    assert isinstance(found, EPTimeoutError) and elapsed_s < SOON_S and found.rank == 1, repr(found)
    tell(f"rank {rank} knows")
    wait_for("rank 0 knows", "rank 2 knows")


@pytest.mark.parametrize("kind", (Buffer, LowLatencyBuffer))
def test_rank_that_ends(kind):
    run_ranks(in_three_ranks, 3, ends_while_it_maps, kind, expected_dead=[1])


@pytest.mark.parametrize("kind", (Buffer, LowLatencyBuffer))
@pytest.mark.parametrize("function", (gives_up_on_a_stalled_rank, fails_while_it_maps))
def test_rank_that_gives_up(function, kind):
    run_ranks(in_three_ranks, 3, function, kind)


# ---- what native code would refuse in its own words ----


@pytest.mark.parametrize("kind", (Buffer, LowLatencyBuffer))
@pytest.mark.parametrize(
    ("name", "value", "text"),
    (
        ("hidden", 2**40, "hidden is 1099511627776; it must be at most 2147483647"),
        ("num_experts", 2**40, "num_experts is 1099511627776; it must be at most 2147483647"),
        ("num_max_tokens_per_rank", 2**40, "num_max_tokens_per_rank is 1099511627776; it must be at most 2147483647"),
        ("timeout_s", True, "timeout_s is True; it must be a positive number of seconds"),
    ),
)
def test_settings(kind, name, value, text):
    settings = {"num_max_tokens_per_rank": 8, "hidden": 16, "num_experts": 4, "num_topk": 2} | {name: value}
    with pytest.raises(ValueError, match=f"^{text}$"):
        kind(None, **settings)


@pytest.mark.parametrize("backend", ("shm", "collective"))
def test_bound_on_rows(backend):
    buffer, x, idx = Buffer(None, 8, 16, 4, 2, backend=backend), torch.ones(4, 16), torch.tensor([[0, 1]] * 4)
    for bound in (2**62, 2**31, -1):
        with pytest.raises(ValueError, match=f"^num_recv_rows is {bound}; it must be None or a number of rows, at most 2147483647$"):
            buffer.dispatch(x, idx, num_recv_rows=bound)


def test_options_of_low_latency():
    buffer = LowLatencyBuffer(None, 8, 128, 4, 2)
    with pytest.raises(ValueError, match=r"^scale_format is \['fp32'\]; it must be one of \['fp32', 'ue8m0'\]$"):
        buffer.dispatch(torch.ones(4, 128), torch.tensor([[0, 1]] * 4), fp8=True, scale_format=["fp32"])
    with pytest.raises(TypeError, match="^dtype is 'float32'; it must be float32 or bfloat16 or float16$"):
        buffer.combine_input("float32")
    with pytest.raises(TypeError, match="^mask_stalled is 'yes'; it must be a bool$"):
        LowLatencyBuffer(None, 8, 128, 4, 2, mask_stalled="yes")


@pytest.mark.parametrize(
    ("options", "text"),
    (
        ({"num_groups": 2.0}, "num_groups is 2.0; it must be an int"),
        ({"normalize": "no"}, "normalize is 'no'; it must be a bool"),
        ({"logits": [[1.0]]}, "logits must be a torch.Tensor, not list"),
        ({"expert_bias": [0.0]}, "expert_bias must be a torch.Tensor, not list"),
    ),
)
def test_options_of_gate(options, text):
    with pytest.raises(TypeError, match=f"^{text}$"):
        ops.gate(**({"logits": torch.ones(4, 8), "num_topk": 2} | options))
