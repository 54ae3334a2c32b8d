"""A rank that fails in a layer: its peers learn why, and do not wait for it."""

import itertools
import os
import re

import pytest
import torch
import torch.distributed as dist
from deepspeed_cases import HIDDEN, make_moe, on_deepspeed_ranks, read_expert
from events import tell, wait_for
from exchange_cases import look
from on_ranks import failing, refused

from deepep_moe.errors import BufferSuspendedError, EPMismatchError, EPPeerError, EPTimeoutError
from deepep_moe.exchange import growing
from deepep_moe.integrations.common import registry
from deepep_moe.integrations.deepspeed import buffers, recover, replace_moe_layers, resume, suspend

pytest.importorskip("deepspeed")


# ---- in the gate, in an expert, in the function that reads its weights ----


@on_deepspeed_ranks(device=("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(2))))
def test_peers_learn_what_failed(rank, device):
    """Peers learn of failures in the first forward too, without restored layers or destroyed buffers."""

    def read(expert):
        if place == "weights" and is_broken:
            raise error
        return read_expert(expert)

    for exact, grouped in itertools.product((True, False), (False, read)):
        layer, error = make_moe(k=2).to(device), ArithmeticError("on rank 1")
        modules = {"gate": layer.deepspeed_moe.gate, "expert": layer.deepspeed_moe.experts.deepspeed_experts[0]}
        replace_moe_layers(layer, exact=exact, grouped_experts=grouped)
        x = torch.randn(20, HIDDEN, device=device)
        for place in ("weights",) if grouped else ("gate", "expert", "gate"):
            is_broken = rank == 1
            with failing(modules.get(place, layer), is_broken and place in modules, error), refused(rank, 1, ArithmeticError, "on rank 1"):
                layer(x)
                look(registry.all_buffers()[-1])  # as the host of a GPU does not wait for a combine
            is_broken = False
            assert layer(x)[0].isfinite().all(), "all go on"


@on_deepspeed_ranks(device=("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(2))))
def test_goes_on_after_a_backward_and_after_a_rollout(rank, device):
    layer = make_moe(k=2).to(device)
    replace_moe_layers(layer)
    x = torch.randn(20, HIDDEN, device=device)

    def gradient():
        torch.manual_seed(5)  # gates draw the second expert
        rows = x.clone().requires_grad_()
        layer(rows)[0].square().sum().backward()
        return rows.grad

    expected = gradient()
    if rank == 1:
        hook = layer.deepspeed_moe.experts.deepspeed_experts[0].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ArithmeticError if rank == 1 else EPPeerError):
        gradient()
        if device.type == "cuda":  # whose host does not wait for a combine
            torch.cuda.synchronize()
            registry.all_buffers()[0].check()
    if rank == 1:
        hook.remove()
    recover()
    assert torch.equal(gradient(), expected)
    suspend()
    with pytest.raises(BufferSuspendedError):
        gradient()
    resume()
    assert torch.equal(gradient(), expected)


# ---- while buffers grow ----


@on_deepspeed_ranks()
def test_no_room_where_a_peer_refuses_for_a_reason_of_its_own(rank):
    """Rank 0 has more tokens than there is room for in a forward that rank 1 refuses, and then makes another or leaves."""
    os.environ["DEEPEP_MOE_TIMEOUT_S"] = "2"
    growing._is_bounded = lambda device: True
    plan = buffers.Plan(buffers.Options(exact=True), 2, 1)
    dispatch = buffers.ready(dist.group.WORLD, torch.empty(0, HIDDEN), plan).dispatch

    def send_nothing(buffer):
        topk_idx = torch.empty(0, 1, dtype=torch.int64)
        return buffer.dispatch(torch.empty(0, HIDDEN), topk_idx, layout="expert").recv_x

    def refuse(buffer):
        raise buffer.refuse(ValueError("for a reason of its own"))

    assert dispatch(0, send_nothing)[1].shape == (0, HIDDEN)
    if rank == 0:
        with pytest.raises(EPMismatchError, match=r"rank 0: dispatch.*layout rank.*rank 1: dispatch.*layout expert"):
            dispatch(1000, send_nothing)
        late = "rank 0 in call 5: rank 1 did not deliver, nothing came for 2 s; phase 'entry into the call', expected 5, seen 4"
        with pytest.raises(EPTimeoutError, match=late):
            dispatch(1000, send_nothing)
    else:
        for send, error, message in (
            (refuse, ValueError, "for a reason of its own"),
            (send_nothing, EPMismatchError, "ranks make different calls"),
            (refuse, ValueError, "for a reason of its own"),
        ):
            with pytest.raises(error, match=message):
                dispatch(0, send)
    dist.barrier()


# ---- swapped differently ----


@on_deepspeed_ranks()
def test_ranks_with_other_options_and_a_swap_on_one_rank(rank):
    for options, difference in (
        ({"exact": rank == 0}, "exact (rank 0: True, rank 1: False)"),
        ({"num_max_tokens_per_rank": (None, 64)[rank]}, "num_max_tokens_per_rank (rank 0: None, rank 1: 64)"),
        ({"backend": ("auto", "collective")[rank]}, "backend (rank 0: 'auto', rank 1: 'collective')"),
    ):
        layer = make_moe()
        replace_moe_layers(layer, **options)
        with pytest.raises(EPMismatchError, match=re.escape(f"{difference}; swap MoE layers with the same options on every rank")):
            layer(torch.randn(20, HIDDEN))

    os.environ["DEEPEP_MOE_TIMEOUT_S"] = "2"
    layer = make_moe()
    if rank == 1:  # DeepSpeed's own forward would wait for the others in its first all-to-all
        return wait_for("rank 0 knows")
    replace_moe_layers(layer)
    with pytest.raises(EPTimeoutError, match="rank 1 did not deliver within 2 s.*; swap MoE layers on every rank") as info:
        layer(torch.randn(20, HIDDEN))
    assert info.value.rank == 1
    tell("rank 0 knows")
