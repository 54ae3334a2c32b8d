"""Wrong arguments of one rank: peers learn of them before the deadline, before a buffer exists and in calls that name their buffer."""

import gc
import os
import weakref

import pytest
import torch
import torch.distributed as dist
from deep_ep_cases import BACKENDS
from exchange_cases import device_of
from on_ranks import on_ranks, refused

from deepep_moe.compat.deep_ep import Buffer, ElasticBuffer, HybridEPBuffer
from deepep_moe.errors import EPTimeoutError
from deepep_moe.exchange import growing

IDX = torch.tensor([[0], [2]])


def rows(hidden, wrong=False):
    return torch.ones(2, hidden, dtype=torch.bfloat16)[0 if wrong else slice(None)]


# ---- before there is a buffer, and then in it ----


@on_ranks(2, backend=BACKENDS)
def test_refused_first(rank, backend):
    device, group = device_of(backend, rank), dist.group.WORLD
    idx, counts = torch.tensor([[0, 3], [2, 1]], device=device), torch.zeros(4, dtype=torch.int32, device=device)
    x, weights, chosen = rows(128).to(device), torch.ones(2, 2, device=device), idx.new_ones(2, 4, dtype=torch.bool)
    version_1 = {"x": x, "topk_idx": idx, "topk_weights": weights, "num_tokens_per_expert": counts}
    version_2 = {"x": x, "topk_idx": idx, "topk_weights": weights, "num_experts": 4}
    with_masks = Buffer(group, low_latency_mode=True)

    def low_latency(**options):
        native = with_masks.low_latency_dispatch(x, idx, 2, 4, **options)[2].buffer
        if native.backend == "nvlink":  # which says it later
            torch.cuda.synchronize()
            native.check()

    hybrid = HybridEPBuffer(group, 128, 2, 2).dispatch_with_permute
    for call, right, wrong, error, message in (
        (Buffer(group).dispatch, version_1, {"num_tokens_per_expert": None}, ValueError, "num_tokens_per_expert is missing"),
        (Buffer(group).dispatch, version_1, {"x": x[0]}, ValueError, r"x has shape \[128\]"),
        (ElasticBuffer(group).dispatch, version_2, {"num_experts": None}, ValueError, "topk_idx and num_experts are needed"),
        (hybrid, {"hidden": x, "routing_map": chosen}, {"routing_map": chosen[:1]}, ValueError, r"routing_map has shape \[1, 4\]"),
        (low_latency, {}, {"use_nvfp4": True}, NotImplementedError, "use_nvfp4 is not served"),
    ):
        for _ in range(2):
            with refused(rank, 1, error, message):
                call(**(right | (wrong if rank == 1 else {})))
            dist.barrier()
            call(**right)


@on_ranks(2)
def test_new_sizes_without_a_rank(rank):
    """A rank that is masked and does not come is named when sizes are new."""
    os.environ["DEEPEP_MOE_TIMEOUT_S"] = "5"
    buffer, x, idx = Buffer(dist.group.WORLD, low_latency_mode=True, enable_shrink=True), rows(128), torch.tensor([[0, 3], [2, 1]])
    buffer.low_latency_dispatch(x, idx, 2, 4)
    dist.barrier()
    if rank == 1:
        return
    buffer.low_latency_update_mask_buffer(1, True)
    buffer.low_latency_dispatch(x, idx, 2, 4)
    with pytest.raises(EPTimeoutError, match=r"'num_max_dispatch_tokens_per_rank': 3, .* are new, .* ranks \[1\] are masked"):
        buffer.low_latency_dispatch(x, idx, 3, 4)


# ---- in calls of another buffer than the last one ----


@on_ranks(2)
def test_along_a_handle(rank):
    """Peers also learn of refusals of an older buffer than the last one. All ranks go on in every buffer."""
    buffer = Buffer(dist.group.WORLD)

    def first(hidden):
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(IDX, 4)
        routing = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        return buffer.dispatch(rows(hidden), **routing, topk_idx=IDX, topk_weights=torch.ones(2, 1))

    (*_, older, _), (recv_x, *_, handle, _) = first(64), first(128)
    is_wrong = rank == 1
    lanes = torch.zeros(len(recv_x), 2 if is_wrong else 1)
    for call, message in (
        (lambda: buffer.dispatch(rows(64, is_wrong), handle=older), "x has shape"),
        (lambda: buffer.dispatch(rows(128), handle, topk_idx=IDX if is_wrong else None), "topk_idx and handle were both given"),
        (lambda: buffer.combine(recv_x, handle, bias=(None,) * 3 if is_wrong else None), "bias has 3 tensors"),
        (lambda: buffer.combine(recv_x, handle, lanes), "topk_weight_grads has shape"),
    ):
        with refused(rank, 1, ValueError, message):
            call()
        buffer.dispatch(rows(64), handle=older)
        buffer.dispatch(rows(128), handle=handle)


@on_ranks(2)
def test_into_a_larger_buffer(rank):
    growing._MANY = 16  # as if memory were scarce, as on GPUs
    buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=16, hidden=64)

    def dispatch(most, idx=IDX):
        return buffer.dispatch(rows(64), topk_idx=idx, topk_weights=torch.ones(2, 1), num_experts=4, num_max_tokens_per_rank=most)

    dispatch(16)
    with refused(rank, 1, ValueError, "topk_idx has shape"):
        dispatch(64, IDX[0] if rank == 1 else IDX)
    dispatch(64)


@on_ranks(2)
def test_wrong_probs_and_maps(rank):
    buffer = HybridEPBuffer(dist.group.WORLD, hidden_dim=64, max_num_of_tokens_per_rank=16, num_local_experts=2)
    chosen = torch.zeros(2, 4, dtype=torch.bool)
    chosen[:, ::3] = True
    recv_x, probs, _, handle = buffer.dispatch(rows(64), routing_map=chosen, probs=chosen.float())
    with refused(rank, 1, ValueError, "probs has shape"):
        buffer.combine(recv_x, probs[:1] if rank == 1 else probs, handle)
    assert torch.equal(buffer.combine(recv_x, probs, handle)[1], chosen.float())

    # A token of rank 0 has more experts than any buffer has lanes: every rank refuses the call, and no later one.
    buffer = HybridEPBuffer(dist.group.WORLD, hidden_dim=64, max_num_of_tokens_per_rank=16, num_local_experts=32)
    ordinary = torch.zeros(2, 64, dtype=torch.bool)
    ordinary[:, rank::40] = True
    wide = ordinary.clone()
    wide[rank:1, :40] = True

    def dispatch(routing_map, **options):
        return buffer.dispatch_with_permute(hidden=rows(64), routing_map=routing_map, probs=routing_map.float(), **options)

    for routing_map in (wide, ordinary, wide, ordinary, ordinary):
        if routing_map is wide:
            with pytest.raises(ValueError, match="a token with 41 experts on rank 0; a token has at most 32"):
                dispatch(wide)
            continue
        for options in ({}, {"num_permuted_tokens": 8}):
            recv_x, probs, _, _, handle = dispatch(routing_map, **options)
            y, back = buffer.combine_with_unpermute(hidden=recv_x, probs=probs, handle=handle)
            assert y[0, 0] == ordinary[0].sum() and torch.equal(back, ordinary.float())


@on_ranks(2, by_map=(False, True), first=(False, True))
def test_with_a_bound(rank, by_map, first):
    """Wrong arguments of a dispatch with `num_permuted_tokens`, whose peers meet in an all-reduce first."""
    buffer = HybridEPBuffer(dist.group.WORLD, hidden_dim=64, max_num_of_tokens_per_rank=16, num_local_experts=2)
    idx, weights = torch.tensor([[0], [2]]), torch.ones(2, 1)
    routing = {"topk_idx": idx, "topk_weights": weights, "num_of_experts": 4}
    if by_map:
        routing_map = torch.zeros(2, 4, dtype=torch.bool).scatter(1, idx, True)
        routing = {"routing_map": routing_map, "probs": routing_map.float()}
    right = {"hidden": rows(64), "num_permuted_tokens": 8, "pad_multiple": 2, **routing}

    def dispatch(**wrong):
        recv_x, *_, handle = buffer.dispatch_with_permute(**(right | (wrong if rank == 1 else {})))
        assert buffer.combine_with_unpermute(hidden=recv_x, handle=handle)[0].tolist() == rows(64).tolist()

    if not first:
        dispatch()
    wrong = [
        ({"hidden": rows(64, wrong=True)}, ValueError, "x has shape"),
        ({"hidden": None}, TypeError, "x holds a NoneType"),
        ({"num_permuted_tokens": -1}, ValueError, "num_permuted_tokens is -1"),
        ({"num_permuted_tokens": "8"}, TypeError, "num_permuted_tokens is '8'"),
        ({"pad_multiple": 1 << 20}, ValueError, "pad_multiple is 1048576"),
        ({"pad_multiple": 2.0}, TypeError, "pad_multiple is 2.0"),
    ]
    if by_map:
        wrong += [
            ({"routing_map": routing_map[:1]}, ValueError, r"routing_map has shape \[1, 4\]"),
            ({"routing_map": routing_map.long()}, TypeError, "routing_map has dtype int64"),
            ({"probs": [1.0]}, TypeError, "probs must be a torch.Tensor"),
        ]
    else:
        wrong += [
            ({"topk_idx": idx[0]}, ValueError, "topk_idx has shape"),
            ({"topk_idx": None}, ValueError, "routing_map and topk_idx are missing"),
            ({"topk_weights": weights[:1]}, ValueError, "topk_weights has shape"),
            ({"topk_weights": 1.0}, TypeError, "topk_weights must be a torch.Tensor"),
            ({"num_of_experts": 5}, ValueError, "number of experts is 5"),
        ]
    for arguments, error, message in wrong:
        with refused(rank, 1, error, message):
            dispatch(**arguments)
        if not first:
            dispatch()
    dispatch()


@on_ranks(1)
def test_dropped_buffer(rank):
    buffer = Buffer(dist.group.WORLD)
    gone = weakref.ref(buffer), weakref.ref(buffer._buffers)
    gc.collect()
    gc.disable()
    del buffer
    assert [there() for there in gone] == [None, None], "its memory goes at once, not in a collection amid another call"
