"""Plans copies of hot experts, and the way of rows to them."""

from collections.abc import Iterator

import torch
from torch import Tensor

NUM_THRESHOLDS = 32
Copies = list[list[tuple[int, int]]]  # of each rank: (expert, rows), in the order of its slots


def plan_copies(counts: Tensor, num_slots: int, cost: int, capacity: int = -1) -> tuple[Tensor, Tensor]:
    """Plan which ranks get copies of which experts, and how many rows each copy takes, so that ranks have similar loads.

    Args:
        counts: [num_ranks, num_experts] int32, rows that each source rank sends to each expert. They sum up to less than 2^31.

        num_slots: copies that a rank may hold.
        cost: at least 0. Rows that a rank computes while one copy moves.
        capacity: rows that a rank has room for, or -1 for no bound.

    Returns:
        copies [num_ranks, num_slots] int32: the expert in each slot of each rank, or -1. No copy is on its expert's home rank, and no rank
        has two of an expert. Slots fill from 0 up, in the order of choice.
        rows [num_ranks, num_slots] int32: rows that the copy takes, at least 1; 0 where there is no copy.

    The plan is a function of these integers alone, so each rank computes the same one.

    Experts stay on their home rank: expert e is at home on rank e // (num_experts / num_ranks). The load of a rank is the rows of its home
    experts that no copy takes, and the rows of its copies. `mean` is the mean load, rounded up, `top` the largest load without copies. If
    `capacity` is less than that, `top` is the larger of `capacity` and `mean`. There are 32 thresholds, mean + i * (top - mean) // 32.

    Candidates are: no copy at all, then `spread` with each threshold in order. With a capacity, if none of them fits, `fill` with each
    threshold too. A candidate fits if no load is above the capacity, and one that fits is better than one that does not. If two fit, the
    smaller objective is better: the largest load + cost * the largest number of copies that one rank sends or gets. If two do not fit, the
    smaller largest load is better. If these are equal, fewer copies are better, then the earlier candidate.

    With num_slots >= num_experts / num_ranks every capacity of at least `mean` is met. With fewer slots the result may exceed a capacity
    that other plans meet. The caller compares loads with its capacity.
    """
    num_ranks = counts.shape[0]
    num_rows: list[int] = counts.sum(0).tolist()
    no_copies: Copies = [[] for _ in range(num_ranks)]
    loads, _ = _loads(num_rows, no_copies)
    mean = -(-sum(loads) // num_ranks)
    top = max(loads) if capacity < 0 else max(mean, min(max(loads), capacity))
    thresholds = sorted({mean + i * (top - mean) // NUM_THRESHOLDS for i in range(NUM_THRESHOLDS)})  # equal ones give equal plans

    def badness(plan: Copies) -> tuple[bool, int, int]:
        loads, most_moves = _loads(num_rows, plan)
        exceeds = 0 <= capacity < max(loads)
        return exceeds, max(loads) if exceeds else max(loads) + cost * most_moves, sum(map(len, plan))

    best = no_copies
    for threshold in thresholds:
        best = min(best, spread(num_rows, num_ranks, num_slots, threshold, max(cost, 1)), key=badness)  # the first, if equal
    for threshold in thresholds if badness(best)[0] else ():
        best = min(best, fill(num_rows, num_ranks, num_slots, threshold), key=badness)
    copies, rows = (torch.full((num_ranks, num_slots), value, dtype=torch.int32, device=counts.device) for value in (-1, 0))
    for rank, held in enumerate(best):
        for slot, (expert, taken) in enumerate(held):
            copies[rank, slot], rows[rank, slot] = expert, taken
    return copies, rows


def _loads(num_rows: list[int], plan: Copies) -> tuple[list[int], int]:
    """Return the load of each rank, and the largest number of copies that one rank sends or gets."""
    num_ranks, num_local = len(plan), len(num_rows) // len(plan)
    loads = [sum(num_rows[rank * num_local : (rank + 1) * num_local]) for rank in range(num_ranks)]
    sent = [0] * num_ranks
    for rank, held in enumerate(plan):
        for expert, taken in held:
            loads[rank] += taken
            loads[expert // num_local] -= taken
            sent[expert // num_local] += 1
    return loads, max(max(sent), *map(len, plan))


def _largest(values: list[int]) -> int:
    """Return the index of the largest value, the lowest if there are several."""
    return values.index(max(values))


def spread(num_rows: list[int], num_ranks: int, num_slots: int, threshold: int, least: int) -> Copies:
    """Bring loads down to the threshold, the largest first, by copies of at least `least` rows.

    Repeat: the donor is the rank with the largest load, the receiver that with the smallest of those with a free slot. The donor's
    expert with the most rows left at home gets a copy there, of as many rows as bring neither rank past the threshold. The lower rank or
    expert is taken if several are equal. If the expert has less than `least` rows, the donor gives no more. If donor or receiver is nearer
    to the threshold than that, so are all others, and the plan is complete.

    A copy exhausts its expert, its donor's excess or its receiver's room, so no receiver is asked to take a second copy of an expert.
    """
    num_local, left, gives_no_more = len(num_rows) // num_ranks, list(num_rows), set()
    plan: Copies = [[] for _ in range(num_ranks)]
    loads, _ = _loads(num_rows, plan)
    while True:
        excess = [0 if rank in gives_no_more else load - threshold for rank, load in enumerate(loads)]
        room = [threshold - load if len(held) < num_slots else 0 for load, held in zip(loads, plan, strict=True)]
        if min(max(excess), max(room)) < least:
            return plan
        donor, receiver = _largest(excess), _largest(room)
        home = range(donor * num_local, (donor + 1) * num_local)
        expert = home[_largest([left[e] for e in home])]
        if left[expert] < least:
            gives_no_more.add(donor)
            continue
        taken = min(left[expert], excess[donor], room[receiver])
        _take(plan, loads, left, donor, receiver, expert, taken)


def fill(num_rows: list[int], num_ranks: int, num_slots: int, threshold: int) -> Copies:
    """Bring loads down to the threshold by filling one rank after the other up to it, each from one donor.

    Repeat while a load is above the threshold. The donor is the rank with the largest load. The receiver has a free slot and the smallest
    load. The donor fills it up to the threshold, or until its slots are taken, with copies of its experts that have the most rows left at
    home. If several are equal, the lower rank or expert is taken. The donor may fall below the threshold, and be filled later.

    This is Walker's alias method. A rank has one donor, so it needs no more slots than a rank has home experts.
    """
    num_local, left = len(num_rows) // num_ranks, list(num_rows)
    plan: Copies = [[] for _ in range(num_ranks)]
    loads, _ = _loads(num_rows, plan)
    while True:
        room = [threshold - load if len(held) < num_slots else 0 for load, held in zip(loads, plan, strict=True)]
        donor, receiver = _largest(loads), _largest(room)
        if loads[donor] <= threshold or room[receiver] < 1:
            return plan
        home = range(donor * num_local, (donor + 1) * num_local)
        while loads[receiver] < threshold and len(plan[receiver]) < num_slots:
            expert = home[_largest([left[e] for e in home])]
            _take(plan, loads, left, donor, receiver, expert, min(left[expert], threshold - loads[receiver]))


def _take(plan: Copies, loads: list[int], left: list[int], donor: int, receiver: int, expert: int, taken: int) -> None:
    plan[receiver].append((expert, taken))
    left[expert] -= taken
    loads[donor] -= taken
    loads[receiver] += taken


def physical_topk_idx(topk_idx: Tensor, counts: Tensor, copies: Tensor, rows: Tensor, rank: int) -> Tensor:
    """Return topk_idx [num_tokens, num_topk] of this `rank` with physical experts, in its dtype; -1 stays -1.

    There are num_ranks * (num_experts / num_ranks + num_slots) physical experts: those of a rank are its home experts, then its slots. An
    index that is no expert becomes their number, which every dispatch refuses.

    counts, copies, rows: as `plan_copies` takes and returns them, for all ranks. The copies of an expert take rows by ascending rank, each
    as many as `rows` says, and home takes the rest. The copy on rank d takes rows of source rank d first, then of d + 1, d + 2, ... (mod
    num_ranks), and of the home rank last. It takes those of one source rank in the order of topk_idx, by token.
    """
    num_ranks, num_experts = counts.shape
    num_local, num_slots = num_experts // num_ranks, copies.shape[1]
    targets: list[Iterator[int]] = []  # of each expert: where each of this rank's rows goes that a copy takes
    for expert in range(num_experts):
        home, left, target = expert // num_local, counts[:, expert].tolist(), []
        for d, slot in (copies == expert).nonzero().tolist():
            quota = int(rows[d, slot])
            for source in (*((d + i) % num_ranks for i in range(num_ranks) if (d + i) % num_ranks != home), home):
                taken = min(quota, left[source])
                quota, left[source] = quota - taken, left[source] - taken
                if source == rank:
                    target += taken * [d * (num_local + num_slots) + num_local + slot]
        targets.append(iter(target))

    def place(expert: int) -> int:
        if expert >= num_experts or expert < -1:
            return num_ranks * (num_local + num_slots)
        return expert if expert == -1 else next(targets[expert], expert + expert // num_local * num_slots)

    places = [place(expert) for expert in topk_idx.flatten().tolist()]
    return torch.tensor(places, dtype=topk_idx.dtype, device=topk_idx.device).view(topk_idx.shape)
