"""Copies of hot experts: plans and physical experts by hand, against the definition, and what every plan must satisfy."""

import emulated_gpu
import hypothesis.strategies as st
import pytest
import torch
from exchange_cases import device_of
from hypothesis import given, settings

from deepep_moe import _C, reference
from deepep_moe.device import current_stream
from deepep_moe.ops.copies import plan_copies


def counts_of(topk_idx, num_experts):
    """Return [num_ranks, num_experts] int32, the rows of each rank's topk_idx for each expert."""
    return torch.stack([torch.bincount(idx[idx >= 0].long(), minlength=num_experts) for idx in topk_idx]).int()


def loads_of(counts, copies, rows):
    """Return the load of each rank with these copies."""
    num_ranks, num_experts = counts.shape
    loads = counts.sum(0).view(num_ranks, -1).sum(1) + rows.sum(1)
    for expert, taken in zip(copies.flatten().tolist(), rows.flatten().tolist(), strict=True):
        loads[expert // (num_experts // num_ranks)] -= taken  # 0 where there is no copy
    return loads.tolist()


def plan(device, counts, num_slots, cost, capacity=None):
    """Return copies and rows as lists, for counts of one source rank given as a list, or of all."""
    counts = torch.tensor(counts, dtype=torch.int32).to(device)
    no_tokens = torch.empty(0, 2, dtype=torch.int64, device=device)
    planned = plan_copies(no_tokens, counts, 0, num_slots=num_slots, cost=cost, capacity=capacity)
    return planned.copies.tolist(), planned.rows.tolist()


# ---- by hand ----


def test_plan_by_hand(device):
    """Loads 12 and 2 have a mean of 7, so five rows of expert 0 move. The plan costs 7 + cost, the unchanged one 12."""
    counts = [[4, 2, 1, 0], [6, 0, 0, 1]]
    assert plan(device, counts, 1, 1) == ([[-1], [0]], [[0], [5]])
    assert plan(device, counts, 2, 4) == ([[-1, -1], [0, -1]], [[0, 0], [5, 0]])
    assert plan(device, counts, 1, 5) == ([[-1], [-1]], [[0], [0]])  # 12 is as good as 7 + 5, with fewer copies
    assert plan(device, counts, 0, 0) == ([[], []], [[], []])
    assert plan(device, [[0, 0, 0, 0], [0, 0, 0, 0]], 1, 0) == ([[-1], [-1]], [[0], [0]])


def test_ties_go_to_the_lower_rank_and_expert(device):
    """Ranks 0 and 1 have 6 rows, two experts of 3 each. Rank 0 gives first, of expert 0, to rank 2."""
    counts = [[3, 3, 3, 3, 0, 0, 0, 0]] + 3 * [[0] * 8]
    assert plan(device, counts, 2, 0) == ([[-1, -1], [-1, -1], [0, -1], [2, -1]], [[0, 0], [0, 0], [3, 0], [3, 0]])


def test_small_copies_are_not_made(device):
    """Loads 20, 14, 0 have a mean of 12: rank 0 may give 8 rows, and rank 1 then 2, which is less than a cost of 3."""
    counts, none = [[20, 14, 0]] + 2 * [[0] * 3], [-1, -1]
    assert plan(device, counts, 2, 1) == ([none, none, [0, 1]], [[0, 0], [0, 0], [8, 2]])  # 12 + 2 * 1
    assert plan(device, counts, 2, 2) == ([none, none, [0, -1]], [[0, 0], [0, 0], [7, 0]])  # 14 + 2 at 13; 12 + 2 * 2 has more copies
    assert plan(device, counts, 2, 3) == ([none, none, [0, -1]], [[0, 0], [0, 0], [8, 0]])  # 14 + 3 at 12
    assert plan(device, counts, 2, 6)[0] == [none, none, none]  # 14 + 6 is not less than 20


def test_capacity_by_hand(device):
    """Loads 5, 5, 0 and one slot. Spread, rank 2 takes 1 row. Filled, it takes 4 of expert 0, and rank 0 takes 3 of expert 1."""
    counts = [[5, 5, 0]] + 2 * [[0] * 3]
    unchanged = ([[-1], [-1], [-1]], [[0], [0], [0]])
    assert plan(device, counts, 1, 0) == plan(device, counts, 1, 0, capacity=5) == unchanged
    assert plan(device, counts, 1, 9, capacity=4) == ([[1], [-1], [0]], [[3], [0], [4]])
    assert plan(device, counts, 1, 9, capacity=3) == ([[1], [-1], [0]], [[3], [0], [4]])  # nothing fits: the least maximum
    assert plan(device, counts, 0, 9, capacity=4) == ([[], [], []], [[], [], []])


@pytest.mark.parametrize("sizes", ((4, 32, 4), (8, 32, 4), (4, 64, 8), (8, 128, 8), (8, 256, 8)), ids=str)
def test_four_slots_keep_ranks_within_their_room(sizes):
    """docs/megatron.md says it of 1.2 shares."""
    (num_ranks, num_experts, num_topk), experts, generator = sizes, torch.arange(sizes[1]), torch.Generator().manual_seed(0)
    any_of_them, capacity = (3 * torch.randn(num_experts, generator=generator)).exp(), int(1.2 * 4096 * num_topk)
    for chosen in (any_of_them, experts < num_experts // num_ranks, experts % 10 == 0, experts < num_topk):
        idx = [torch.multinomial((chosen + 1e-6).expand(4096, -1), num_topk, generator=generator) for _ in range(num_ranks)]
        counts = torch.stack([each.flatten().bincount(minlength=num_experts) for each in idx]).int()
        plan = plan_copies(idx[0], counts, 0, num_slots=4, cost=2048, capacity=capacity)
        loads, has_copy = counts.sum(0).view(num_ranks, -1).sum(1) + plan.rows.sum(1), plan.copies >= 0
        loads.index_add_(0, plan.copies[has_copy] * num_ranks // num_experts, -plan.rows[has_copy].long())
        assert int(loads.max()) <= capacity, (chosen, loads)


def test_rows_by_hand(device):
    """Copies of expert 0 on ranks 1 and 2 take its rows from source rank 1, then 2, then 0, and from 2, then 1, then 0."""
    counts = torch.tensor([[6, 0, 0], [1, 0, 0], [2, 0, 0]], dtype=torch.int32)
    idx = [torch.tensor([[0, -1]] * count) for count in (6, 1, 2)]
    plans = [plan_copies(idx[rank].to(device), counts.to(device), rank, num_slots=1, cost=0) for rank in range(3)]
    assert plans[0].copies.tolist() == [[-1], [0], [0]] and plans[0].rows.tolist() == [[0], [3], [3]]
    # Physical experts: 0 and a slot, 1, on rank 0; 2 and a slot, 3, on rank 1; 4 and a slot, 5, on rank 2.
    assert [each.topk_idx[:, 0].tolist() for each in plans] == [[5, 5, 5, 0, 0, 0], [3], [3, 3]]
    assert all((each.topk_idx[:, 1] == -1).all() for each in plans)


def test_indices_that_are_no_expert(device):
    topk_idx = torch.tensor([[-1, 0], [4, -2], [3, 2**40]], device=device)
    counts = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.int32, device=device)
    assert plan_copies(topk_idx, counts, 0, num_slots=1, cost=9).topk_idx.tolist() == [[-1, 0], [6, 6], [4, 6]]


# ---- against the definition ----


def drawn_counts(generator, num_ranks, num_local):
    """Return counts up to some tens, of a skew and a scale that vary, often with equal and empty experts."""
    num_experts = num_ranks * num_local
    heat = torch.rand(num_experts, generator=generator) ** int(torch.randint(0, 9, (), generator=generator))
    if torch.rand((), generator=generator) < 0.3:
        heat[:num_local] *= 4  # a hot rank
    scale = 4.0 ** int(torch.randint(0, 4, (), generator=generator))
    return (torch.rand(num_ranks, num_experts, generator=generator) * heat * scale).round().int()


def native_plan(idx, counts, rank, num_slots, cost, capacity):
    """Return copies, rows and physical experts as the kernel writes them over other numbers, on the CPU."""
    copies, rows = (torch.full((counts.shape[0], num_slots), -77, dtype=torch.int32, device=idx.device) for _ in range(2))
    physical = torch.full_like(idx, -77)
    _C.gpu_plan_copies(idx, counts.to(idx.device), copies, rows, physical, rank, cost, capacity, current_stream(idx.device))
    return copies.cpu(), rows.cpu(), physical.cpu()


def assert_equals_reference(generator, device):
    """Draw counts and settings, and compare the kernel's plan with the definition, which serves CPUs."""

    def whole(least, most):
        return int(torch.randint(least, most + 1, (), generator=generator))

    num_ranks, num_local = whole(1, 6), whole(1, 4)
    counts = drawn_counts(generator, num_ranks, num_local)
    num_slots, cost, mean = whole(0, num_local), whole(0, 8) * whole(0, 1), int(counts.sum()) // num_ranks
    capacity = whole(0, 2 * mean + 1) if whole(0, 1) else -1
    copies, rows, _ = native_plan(torch.empty(0, 2, dtype=torch.int64, device=device), counts, 0, num_slots, cost, capacity)
    want = reference.plan_copies(counts, num_slots, cost, capacity)
    assert torch.equal(copies, want[0]) and torch.equal(rows, want[1]), f"{counts.tolist()}, {num_slots=}, {cost=}, {capacity=}"
    return int((copies >= 0).sum())


@pytest.mark.gpu
@pytest.mark.parametrize("num_plans", (3000, pytest.param(100_000, marks=pytest.mark.slow)))
def test_many_plans_equal_reference(num_plans):
    generator, device = torch.Generator().manual_seed(0), device_of("nvlink", 0)
    num_plans = num_plans // 10 if emulated_gpu.is_chosen() else num_plans
    assert sum(assert_equals_reference(generator, device) for _ in range(num_plans)) > 0.3 * num_plans


def routing(generator, num_ranks, num_experts, num_tokens, num_topk, skew):
    """Return a topk_idx of each rank, whose tokens choose experts of lognormal popularity, and -1 at some entries."""
    heat = (torch.randn(num_experts, generator=generator) * skew).exp()
    topk_idx = []
    for _ in range(num_ranks):
        keys = torch.rand(num_tokens, num_experts, generator=generator).log() / heat  # Gumbel's trick: top-k draws without replacement
        idx = keys.topk(num_topk, dim=1).indices
        topk_idx.append(idx.masked_fill(torch.rand(idx.shape, generator=generator) < 0.05, -1))
    return topk_idx


SIZES = [
    # num_ranks, num_experts, num_slots, num_tokens, num_topk, skew, cost, capacity in mean loads
    (1, 3, 2, 5, 2, 2.0, 0, None),
    (3, 6, 1, 0, 2, 2.0, 0, None),
    (4, 16, 2, 70, 3, 2.0, 5, None),
    (8, 64, 4, 300, 8, 1.5, 40, None),
    (8, 32, 2, 300, 4, 2.5, 600, 1.1),
    (8, 32, 4, 300, 4, 2.5, 10_000, 1.0),
    (8, 256, 4, 512, 8, 1.0, 60, None),
    (5, 15, 3, 9_000, 8, 1.0, 500, 1.2),
    (64, 512, 4, 40, 8, 1.5, 10, 1.05),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.int64, torch.int32), ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_reference(sizes, dtype):
    device = device_of("nvlink", 0)
    num_ranks, num_experts, num_slots, num_tokens, num_topk, skew, cost, share = sizes
    topk_idx = routing(torch.Generator().manual_seed(2), num_ranks, num_experts, num_tokens, num_topk, skew)
    counts = counts_of(topk_idx, num_experts)
    capacity = -1 if share is None else -int(-share * int(counts.sum()) // num_ranks)
    want = reference.plan_copies(counts, num_slots, cost, capacity)
    assert num_ranks == 1 or num_tokens == 0 or (want[0] >= 0).any()
    for rank in {0, num_ranks // 2, num_ranks - 1}:
        idx = topk_idx[rank].to(dtype)
        copies, rows, physical = native_plan(idx.to(device), counts, rank, num_slots, cost, capacity)
        assert torch.equal(copies, want[0]) and torch.equal(rows, want[1])
        assert torch.equal(physical, reference.physical_topk_idx(idx, counts, *want, rank))


def test_strides(device):
    """Arguments may have any strides, and the plan has contiguous tensors of its own."""
    topk_idx = routing(torch.Generator().manual_seed(3), 4, 8, 40, 2, 2.0)
    counts = counts_of(topk_idx, 8).to(device)
    idx = topk_idx[1].to(device)
    want = plan_copies(idx, counts, 1, num_slots=2, cost=0)
    got = plan_copies(idx.T.contiguous().T, counts.T.contiguous().T, 1, num_slots=2, cost=0)
    for name in ("copies", "rows", "topk_idx"):
        assert torch.equal(getattr(got, name), getattr(want, name)) and getattr(got, name).is_contiguous()


@pytest.mark.slow
def test_compiles():
    topk_idx = routing(torch.Generator().manual_seed(3), 4, 8, 40, 2, 2.0)
    counts = counts_of(topk_idx, 8)

    def physical(idx, counts):
        return plan_copies(idx, counts, 1, num_slots=2, cost=0).topk_idx

    traced = torch.compile(physical, backend="aot_eager", fullgraph=True)
    assert torch.equal(traced(topk_idx[1], counts), physical(topk_idx[1], counts))


# ---- what holds for every plan ----


@st.composite
def settings_of_plans(draw):
    num_ranks, num_local = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    count = st.integers(0, draw(st.sampled_from((1, 5, 1000))))
    rows = st.lists(count, min_size=num_ranks * num_local, max_size=num_ranks * num_local)
    counts = draw(st.lists(rows, min_size=num_ranks, max_size=num_ranks))
    return torch.tensor(counts, dtype=torch.int32), draw(st.integers(0, num_local)), draw(st.integers(0, 20))


@settings(max_examples=300, deadline=None)
@given(settings_of_plans(), st.none() | st.integers(0, 30))
def test_plans_are_sound(drawn, spare):
    """spare: the capacity, in rows above the mean load."""
    counts, num_slots, cost = drawn
    num_ranks, num_experts = counts.shape
    num_local, num_rows, mean = num_experts // num_ranks, counts.sum(0).tolist(), -(-int(counts.sum()) // num_ranks)
    capacity = None if spare is None else mean + spare
    copies, rows = plan(torch.device("cpu"), counts.tolist(), num_slots, cost, capacity)
    taken = [0] * num_experts
    for rank, (experts, quotas) in enumerate(zip(copies, rows, strict=True)):
        held = [expert for expert in experts if expert >= 0]
        assert experts == held + [-1] * (num_slots - len(held)) and len(set(held)) == len(held)
        assert all(expert // num_local != rank for expert in held)
        assert all(quota >= 1 for quota in quotas[: len(held)]) and not any(quotas[len(held) :])
        for expert, quota in zip(held, quotas, strict=False):
            taken[expert] += quota
    assert all(some <= whole for some, whole in zip(taken, num_rows, strict=True))
    before = max(loads_of(counts, torch.empty(num_ranks, 0, dtype=torch.int32), torch.empty(num_ranks, 0, dtype=torch.int32)))
    after = max(loads_of(counts, torch.tensor(copies), torch.tensor(rows)))
    assert mean <= after <= before
    if capacity is None or before <= capacity:
        assert all(quota == 0 or quota >= max(cost, 1) for quotas in rows for quota in quotas)
        sent = [sum(expert // num_local == rank for experts in copies for expert in experts if expert >= 0) for rank in range(num_ranks)]
        got = [sum(expert >= 0 for expert in experts) for experts in copies]
        assert after + cost * max(*sent, *got) <= before
    elif num_slots == num_local:
        assert after <= capacity


@settings(max_examples=100, deadline=None)
@given(settings_of_plans(), st.randoms(use_true_random=False))
def test_every_row_has_one_place(drawn, random):
    """Each copy gets as many rows as the plan says, and home the rest. Rows of its own rank come before those of others."""
    counts, num_slots, cost = drawn[0].clamp(max=40), *drawn[1:]
    num_ranks, num_experts = counts.shape
    num_local = num_experts // num_ranks
    arrived = torch.zeros(num_ranks, num_ranks * (num_local + num_slots), dtype=torch.int32)  # from each source rank
    for rank in range(num_ranks):
        entries = [expert for expert, count in enumerate(counts[rank].tolist()) for _ in range(count)]
        random.shuffle(entries)
        idx = torch.tensor(entries, dtype=torch.int64).view(-1, 1)
        planned = plan_copies(idx, counts, rank, num_slots=num_slots, cost=cost)
        logical = torch.cat([torch.arange(num_experts, dtype=torch.int32).view(num_ranks, -1), planned.copies], 1).flatten()
        assert torch.equal(logical[planned.topk_idx], idx.int())
        arrived[rank] = torch.bincount(planned.topk_idx.flatten(), minlength=len(logical))
    by_rank = arrived.view(num_ranks, num_ranks, num_local + num_slots)  # source rank, rank, place
    assert torch.equal(by_rank[:, :, num_local:].sum(0).int(), planned.rows)
    for rank, experts in enumerate(planned.copies.tolist()):
        for slot, expert in enumerate(experts):
            is_first_copy = expert >= 0 and not (planned.copies[:rank] == expert).any()
            if is_first_copy:
                own_rows = min(int(counts[rank, expert]), int(planned.rows[rank, slot]))
                assert by_rank[rank, rank, num_local + slot] == own_rows


# ---- errors, graphs ----


def test_errors(device):
    idx, counts = torch.zeros(3, 2, dtype=torch.int64, device=device), torch.zeros(2, 4, dtype=torch.int32, device=device)
    for error, message, change in [
        (TypeError, "topk_idx has dtype float32; it must be int64 or int32", {"topk_idx": idx.float()}),
        (TypeError, "counts has dtype int64; it must be int32", {"counts": counts.long()}),
        (ValueError, "topk_idx and counts have shapes", {"topk_idx": idx[0]}),
        (ValueError, r"counts has shape \[2, 3\]; .* ranks that divide the experts", {"counts": counts[:, :3]}),
        (ValueError, r"counts has shape \[65, 65\]; .* at most 64 ranks", {"counts": counts.new_zeros(65, 65)}),
        (ValueError, "rank is 2; it must be at most 1", {"rank": 2}),
        (ValueError, "num_slots is 5; it must be at most 4", {"num_slots": 5}),
        (ValueError, "cost is -1; it must be at least 0", {"cost": -1}),
        (ValueError, "capacity is -1; it must be at least 0", {"capacity": -1}),
        (TypeError, "cost is 0.5; it must be an int", {"cost": 0.5}),
    ]:
        with pytest.raises(error, match=message):
            plan_copies(**{"topk_idx": idx, "counts": counts, "rank": 0, "num_slots": 1, "cost": 0} | change)


def test_bad_counts():
    idx, counts = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int32)
    for value, message in ((-1, "is -1; .* at least 0"), (2**31 - 1, r"is 2147483647; .* sum below 2\^31")):
        counts[0, 0], counts[1, 2] = 1, value
        with pytest.raises(ValueError, match=r"counts\[1\]\[2\] " + message):
            plan_copies(idx, counts, 0, num_slots=1, cost=0)


@pytest.mark.gpu
def test_too_many_slots():
    device = device_of("nvlink", 0)
    idx, counts = torch.zeros(3, 2, dtype=torch.int64, device=device), torch.zeros(64, 512, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="512 slots on each of 64 ranks with 512 experts need .* use fewer slots"):
        plan_copies(idx, counts, 0, num_slots=512, cost=0)


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """A replay plans from the counts and top-k entries that lie there then."""
    device = device_of("nvlink", 0)
    first, second = (routing(torch.Generator().manual_seed(seed), 8, 64, 500, 8, 1.5) for seed in (4, 5))
    idx, counts = first[3].to(device), counts_of(first, 64).to(device)
    plan_copies(idx, counts, 3, num_slots=4, cost=50)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned = plan_copies(idx, counts, 3, num_slots=4, cost=50)
    for topk_idx in (first, second):
        idx.copy_(topk_idx[3]), counts.copy_(counts_of(topk_idx, 64))
        graph.replay()
        want = plan_copies(topk_idx[3], counts_of(topk_idx, 64), 3, num_slots=4, cost=50)
        assert (want.copies >= 0).any()
        for name in ("copies", "rows", "topk_idx"):
            assert torch.equal(getattr(planned, name).cpu(), getattr(want, name))
