"""HybridEP's buffer against the reference: routing by maps and by indices, bounds, padding, on every backend."""

import pytest
import torch
import torch.distributed as dist
from deep_ep_cases import BACKENDS, SIZES, Wanted, ascending, check_start, padded
from deep_ep_cases import make as make_kind
from exchange_cases import Case, assert_same, on_device
from on_ranks import on_ranks

from deepep_moe.compat.deep_ep.hybrid import indices_to_map


def make(backend, rank, hidden=256, num_local_experts=4, most=40, **settings):
    return make_kind("HybridEPBuffer", backend, rank, hidden, most, num_local_experts, **settings)


# ---- small enough to check by hand ----


def test_indices_to_map():
    topk_idx = torch.tensor([[2, 0], [-1, 1], [-1, -1]])
    routing_map, probs = indices_to_map(topk_idx, torch.tensor([[0.5, 0.25], [9.0, 2.0], [9.0, 9.0]]).double(), 3, 3)
    assert routing_map.tolist() == [[True, False, True], [False, True, False], [False] * 3]
    assert probs.dtype == torch.float32 and probs.tolist() == [[0.25, 0.0, 0.5], [0.0, 2.0, 0.0], [0.0] * 3]
    routing_map, probs = indices_to_map(topk_idx.int(), None, 3, 4)
    assert routing_map.sum(1).tolist() == [2, 1, 0] and probs is None
    with pytest.raises(ValueError, match="topk_idx has 3 rows and num_of_tokens is 4"):
        indices_to_map(topk_idx, None, 4, 3)


@on_ranks(2, backend=BACKENDS)
def test_ignored_by_hand(rank, backend):
    """An index that is no expert counts as none, with a bound on the rows and without one. Rank 0 has tokens 1 and 10 and experts 0 and 1,
    rank 1 has tokens 2 and 20 and experts 2 and 3."""
    buffer, device = make(backend, rank, hidden=8, num_local_experts=2, most=2)
    x = (torch.full((2, 8), float(rank + 1)) * torch.tensor([[1.0], [10.0]])).to(device)
    topk_idx = torch.tensor([[[0, 4], [99, 2]], [[-1, 3], [-7, 2]]])[rank]
    topk_idx, weights = on_device(backend, rank, topk_idx, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    for index_dtype, bound in ((torch.int64, None), (torch.int32, None), (torch.int64, 4), (torch.int32, torch.tensor(4))):
        rows, probs, _, counts, handle = buffer.dispatch_with_permute(
            hidden=x, topk_idx=topk_idx.to(index_dtype), topk_weights=weights, num_of_experts=4, num_permuted_tokens=bound
        )
        want = [[1.0], [10.0, 20.0, 2.0]][rank]
        assert rows[: len(want), 0].tolist() == want and not rows[len(want) :].any() and len(rows) == (len(want) if bound is None else 4)
        assert probs[: len(want)].tolist() == [[1.0], [4.0, 4.0, 2.0]][rank]
        assert counts.tolist() == [[1, 0], [2, 1]][rank] and handle[-1].tolist() == 0
        y, back = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
        assert y[:, 0].tolist() == x[:, 0].tolist()
        assert back.tolist() == [[[1.0, 0, 0, 0], [0, 0, 4.0, 0]], [[0, 0, 0, 2.0], [0, 0, 4.0, 0]]][rank]
    rows, _, _, handle = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_of_experts=4)
    assert rows[:, 0].tolist() == [[1.0], [10.0, 2.0, 20.0]][rank]


# ---- against the reference ----


@pytest.mark.parametrize("bound", (False, True), ids=("", "bound"))
@pytest.mark.parametrize("by_map", (False, True), ids=("indices", "map"))
@on_ranks(3, kind=("bf16", "fp8", "lanes"), backend=BACKENDS)
def test_scenarios(rank, num_ranks, backend, kind, by_map, bound):
    fp8, case = kind == "fp8", Case([13, 0, 30], expert_alignment=8, sums="lanes" if kind == "lanes" else "ranks", **SIZES)
    idxs = ascending(case)
    want = Wanted(case, rank, "expert", fp8, idxs)
    buffer, device = make(backend, rank, num_local_experts=case.num_experts // num_ranks)
    topk_idx, topk_weights = idxs[rank].to(device), want.topk_weights.to(device)
    routing = {"topk_idx": topk_idx, "topk_weights": topk_weights, "num_of_experts": case.num_experts}
    routing_map, probs = indices_to_map(topk_idx, topk_weights, case.num_tokens[rank], case.num_experts)
    if by_map:
        routing = {"routing_map": routing_map, "probs": probs}
    hidden = {"hidden": want.x.to(device), "scaling_factor": torch.ones(1)}
    if fp8:
        hidden = {"hidden": want.x.view(torch.uint8).to(device), "scaling_factor": want.scales.to(device)}
    how = {"pad_multiple": case.expert_alignment, "fuse_permute_dispatch": True}
    num_rows = len(want.mine.recv_x)
    if bound:
        num_rows += 2 * case.expert_alignment
        how |= {"num_permuted_tokens": torch.tensor(num_rows), "non_blocking": True}

    def check(results, with_probs):
        rows, row_probs, scales, counts, handle = results
        assert rows.dtype == hidden["hidden"].dtype and len(rows) == num_rows
        check_start("rows", rows.view(want.mine.recv_x.dtype), want.mine.recv_x)
        for name, ours, expected, is_there in (
            ("probs", row_probs, want.mine.recv_topk_weights, with_probs),
            ("scales", scales, want.mine.recv_x_scales, fp8),
        ):
            assert (ours is not None) == is_there, name
            if is_there:
                check_start(name, ours, expected)
        assert counts.dtype == torch.int64 and counts.tolist() == want.num_rows_per_expert
        assert handle[-1].tolist() == 0
        return handle

    handle = check(buffer.dispatch_with_permute(**hidden, **routing, **how), True)
    assert check(buffer.dispatch_with_permute(**hidden, handle=handle, **how), False) is handle
    check(buffer.dispatch_with_permute(**hidden, handle=handle, **routing, **how), True)
    assert len(handle) == 11 and handle[8] == case.num_tokens[rank]
    assert handle[7].tolist() == list(want.mine.num_recv_tokens_per_expert)
    if case.sums == "ranks":
        experts = torch.arange(rank * handle.buffer.num_local_experts, (rank + 1) * handle.buffer.num_local_experts)
        local = [(idxs[source][token][:, None] == experts).any(0).tolist() for source, token in want.mine.tokens]
        assert handle[3].tolist() == [len(want.mine.tokens)] and handle[4].tolist() == local

    values, back = want.lanes(0.5)
    rows, values = (padded(each, num_rows).to(device) for each in (want.outputs[rank], values))
    y, dense = buffer.combine_with_unpermute(hidden=rows, probs=values, handle=handle, fuse_unpermute_combine=True)
    assert_same("sums", y, want.combined())
    assert_same("probs", dense, indices_to_map(idxs[rank], back, case.num_tokens[rank], case.num_experts)[1])
    y, dense = buffer.combine_with_unpermute(hidden=rows, handle=handle)
    assert_same("sums", y, want.combined())
    assert dense is None
    dist.barrier()  # a rank without tokens waits for nothing, and what it sends would end with it


# ---- bounds ----


def first_lanes(idxs, num_experts, bounds, alignment):
    """The routings that are left when each rank keeps the rows that fit into its bound, one after another."""
    left, num_ranks = [idx.clone() for idx in idxs], len(idxs)
    for rank, bound in enumerate(bounds):
        num_rows = 0
        for expert in range(rank * num_experts // num_ranks, (rank + 1) * num_experts // num_ranks):
            for idx in left:
                for token, lane in (idx == expert).nonzero().tolist():
                    if num_rows < bound // alignment * alignment:
                        num_rows += 1
                    else:
                        idx[token, lane] = -1
            num_rows = -(-num_rows // alignment) * alignment
    return left


@pytest.mark.parametrize("bounds", ([40, 40, 40], [0, 8, 200], [200, 200, 200], [24, 0, 0]), ids=str)
@on_ranks(3, backend=BACKENDS, alignment=(1, 8))
def test_rows_behind_the_bound_are_dropped(rank, backend, alignment, bounds):
    case = Case([13, 20, 30], expert_alignment=alignment, hidden=64, dtype=torch.bfloat16)
    buffer, device = make(backend, rank)
    idxs = ascending(case)
    left = first_lanes(idxs, case.num_experts, bounds, case.expert_alignment)
    has_dropped = any((idx != rest).any() for idx, rest in zip(idxs, left, strict=True))
    want = Wanted(case, rank, "expert", topk_idx=left)
    routing_map, probs = indices_to_map(idxs[rank], want.topk_weights, case.num_tokens[rank], case.num_experts)
    rows, row_probs, _, counts, handle = buffer.dispatch_with_permute(
        hidden=want.x.to(device), routing_map=routing_map.to(device), probs=probs.to(device), num_permuted_tokens=bounds[rank],
        pad_multiple=case.expert_alignment, non_blocking=True,
    )  # fmt: skip
    assert len(rows) == bounds[rank] and handle[-1].tolist() == int(has_dropped)
    check_start("rows", rows, want.mine.recv_x)
    check_start("probs", row_probs, want.mine.recv_topk_weights)
    assert counts.tolist() == want.num_rows_per_expert
    y, back = buffer.combine_with_unpermute(hidden=padded(want.outputs[rank], len(rows)).to(device), probs=row_probs, handle=handle)
    assert_same("sums", y, want.combined())
    assert_same("probs", back, indices_to_map(left[rank], want.topk_weights, case.num_tokens[rank], case.num_experts)[1])


# ---- numbers of lanes, sizes, questions ----


@on_ranks(2, backend=BACKENDS)
def test_wider_tokens_than_before(rank, backend):
    """A token may choose more experts than any has before; handles of before stay good."""
    buffer, device = make(backend, rank, hidden=64, num_local_experts=6, most=4)
    held = []
    for num_topk, who in ((1, 0), (3, 0), (2, 1), (5, 1), (12, 0)):
        case = Case([300, 7], hidden=64, num_topk=num_topk, dtype=torch.bfloat16)
        idxs = [case.routing(r).sort(1).values for r in range(2)]
        idxs[1 - who][:, 1:] = -1  # the other rank's tokens choose one
        want = Wanted(case, rank, "expert", topk_idx=idxs)
        routing_map, probs = indices_to_map(idxs[rank], want.topk_weights, case.num_tokens[rank], 12)
        rows, row_probs, _, _, handle = buffer.dispatch_with_permute(
            hidden=want.x.to(device), routing_map=routing_map.to(device), probs=probs.to(device)
        )
        assert_same("rows", rows, want.mine.recv_x)
        assert_same("probs", row_probs, want.mine.recv_topk_weights)
        held.append((want, handle))
    for want, handle in held:
        assert_same("sums", buffer.combine_with_unpermute(hidden=want.outputs[rank].to(device), handle=handle)[0], want.combined())


@on_ranks(2, backend=BACKENDS)
def test_wider_tokens_with_a_bound(rank, backend):
    """Nobody looks at the map then: lanes behind those of before are dropped, and the flag says so."""
    buffer, device = make(backend, rank, hidden=8, num_local_experts=1, most=1)
    x = torch.full((1, 8), rank + 1.0, device=device)
    how = {"hidden": x, "num_permuted_tokens": 2, "non_blocking": True}
    for probs, is_seen in (([[1.0, 0.0]], True), ([[1.0, 2.0]], False)):
        probs = torch.tensor(probs, device=device)
        rows, row_probs, _, counts, handle = buffer.dispatch_with_permute(routing_map=probs > 0, probs=probs, **how)
        left = probs.tolist() if is_seen else [[1.0, 0.0]]
        weight = left[0][rank]
        assert handle[-1].tolist() == int(not is_seen) and counts.tolist() == [2 if weight else 0]
        assert rows[:, 0].tolist() == ([1.0, 2.0] if weight else [0.0, 0.0]) and row_probs.tolist() == [weight, weight]
        assert buffer.combine_with_unpermute(hidden=rows, probs=row_probs, handle=handle)[1].tolist() == left


@on_ranks(2)
def test_questions(rank, num_ranks):
    buffer, _ = make("shm", rank, hidden=64, most=100, num_sms_dispatch_api=24, num_blocks_permute=4, load_cached_kernels=True)

    def sizes(config):
        return config.hidden_dim, config.max_num_of_tokens_per_rank, config.num_of_experts_per_rank

    config = buffer.configurer.buffer_config
    assert sizes(config) == (64, 100, 4)
    changed = buffer.update_template_config(hidden_dim=128, num_of_tokens_per_rank=200, num_of_stages_dispatch_api=5)
    assert sizes(changed) == (128, 200, 4) and changed.num_of_stages_dispatch_api == 5 and sizes(config) == (64, 200, 4)
    assert (buffer.num_of_nodes, buffer.num_of_hybrid_ep_ranks_per_nvlink_domain, buffer.rank, buffer.group_size) == (1, num_ranks, rank, 2)
    buffer.empty_jit_cache()
    dist.barrier()  # which no call has been: a rank that ends early takes the connections of the others with it


@on_ranks(1)
def test_refusals(rank):
    buffer, _ = make("shm", rank, hidden=64, num_local_experts=2)
    x, topk_idx = torch.ones(2, 64), torch.tensor([[0, 1], [1, 0]])
    rows, *_, handle = buffer.dispatch_with_permute(hidden=x, topk_idx=topk_idx)
    for error, message, call, arguments in (
        (ValueError, "routing_map and topk_idx are missing", buffer.dispatch_with_permute, {"hidden": x}),
        (ValueError, "non_blocking is True", buffer.dispatch_with_permute, {"hidden": x, "topk_idx": topk_idx, "non_blocking": True}),
        (TypeError, "handle is a NoneType", buffer.combine_with_unpermute, {"hidden": rows}),
        (ValueError, r"x has shape \[3, 64\]", buffer.combine_with_unpermute, {"hidden": rows[:3], "handle": handle}),
    ):
        with pytest.raises(error, match=message):
            call(**arguments)
