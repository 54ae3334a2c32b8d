"""Dispatch and combine as they are defined: slow loops over all ranks' tensors at once, in one process.

Every backend must agree with these functions bit for bit. An argument or result that is a list has one element per rank.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Received:
    """The rows that one rank receives, as `deepep_moe.Buffer.dispatch` returns them."""

    layout: str
    recv_x: Tensor
    recv_x_scales: Tensor | None
    recv_topk_idx: Tensor | None
    recv_topk_weights: Tensor | None
    num_recv_tokens_per_expert: list[int]
    tokens: list[tuple[int, int]]
    """(source rank, token index) of every token received, in order."""
    row_of_lane: list[dict[int, int]]
    """For every token received: lane -> row of recv_x (expert layout)."""


def rank_of(expert: int, num_experts: int, num_ranks: int) -> int:
    """Return the rank that holds `expert`: ranks hold equal, consecutive shares."""
    return expert // (num_experts // num_ranks)


def layout(topk_idx: Tensor, num_ranks: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts of one rank's tokens: num_tokens_per_rank [num_ranks] int32, num_tokens_per_expert [num_experts] int32 and
    is_token_in_rank [num_tokens, num_ranks] bool."""
    is_token_in_rank = torch.zeros(topk_idx.shape[0], num_ranks, dtype=torch.bool)
    num_tokens_per_expert = torch.zeros(num_experts, dtype=torch.int32)
    for token, lanes in enumerate(topk_idx.tolist()):
        for expert in lanes:
            if expert >= 0:
                is_token_in_rank[token, rank_of(expert, num_experts, num_ranks)] = True
                num_tokens_per_expert[expert] += 1
    return is_token_in_rank.sum(0, dtype=torch.int32), num_tokens_per_expert, is_token_in_rank


def _zero_rows(like: Tensor | None, num_rows: int) -> Tensor | None:
    return None if like is None else torch.zeros((num_rows, *like.shape[1:]), dtype=torch.float32).to(like.dtype)


def _receive(
    rank: int, x: Sequence[Tensor], topk_idx: Sequence[Tensor], topk_weights: Sequence[Tensor] | None, num_experts: int, layout: str,
    expert_alignment: int, x_scales: Sequence[Tensor] | None,
) -> Received:  # fmt: skip
    num_local_experts = num_experts // len(x)
    first = rank * num_local_experts
    tokens: list[tuple[int, int]] = []
    local_lanes: list[list[int]] = []
    for source, idx in enumerate(topk_idx):
        for token, lanes in enumerate(idx.tolist()):
            local = [expert - first if 0 <= expert - first < num_local_experts else -1 for expert in lanes]
            if any(expert >= 0 for expert in local):
                tokens.append((source, token))
                local_lanes.append(local)

    row_of_lane: list[dict[int, int]] = [{} for _ in tokens]
    counts, num_rows = [], 0
    for expert in range(num_local_experts):
        chosen = [(slot, lanes.index(expert)) for slot, lanes in enumerate(local_lanes) if expert in lanes]
        for offset, (slot, lane) in enumerate(chosen):
            row_of_lane[slot][lane] = num_rows + offset
        counts.append(len(chosen))
        num_rows += -(-len(chosen) // expert_alignment) * expert_alignment
    if layout == "rank":
        num_rows = len(tokens)

    recv_x, recv_x_scales = _zero_rows(x[0], num_rows), _zero_rows(None if x_scales is None else x_scales[0], num_rows)
    recv_topk_idx, recv_topk_weights = None, None
    if layout == "rank":
        recv_topk_idx = torch.tensor(local_lanes, dtype=topk_idx[0].dtype).reshape(len(tokens), topk_idx[0].shape[1])
        if topk_weights is not None:
            recv_topk_weights = torch.zeros(recv_topk_idx.shape)
    elif topk_weights is not None:
        recv_topk_weights = torch.zeros(num_rows)
    assert recv_x is not None
    for slot, (source, token) in enumerate(tokens):
        for lane, row in row_of_lane[slot].items():
            if layout == "rank":
                row = slot
            recv_x[row] = x[source][token]
            if recv_x_scales is not None and x_scales is not None:
                recv_x_scales[row] = x_scales[source][token]
            if recv_topk_weights is not None and topk_weights is not None:
                recv_topk_weights[(row, lane) if layout == "rank" else row] = topk_weights[source][token, lane]
    return Received(layout, recv_x, recv_x_scales, recv_topk_idx, recv_topk_weights, counts, tokens, row_of_lane)


def dispatch(
    x: Sequence[Tensor],
    topk_idx: Sequence[Tensor],
    topk_weights: Sequence[Tensor] | None,
    num_experts: int,
    *,
    layout: str = "expert",
    expert_alignment: int = 1,
    x_scales: Sequence[Tensor] | None = None,
) -> list[Received]:
    """Dispatch for all ranks.

    x: [num_tokens, hidden] of each rank; topk_idx: [num_tokens, num_topk], -1 = none; topk_weights: fp32, same shape, or None.
    Layout "rank": one row per token received, by (source rank, token). Layout "expert": one row per (token, local expert), grouped by
    expert, inside a group by (source rank, token). Zero rows pad each group to a multiple of `expert_alignment`.
    """
    how = num_experts, layout, expert_alignment, x_scales
    return [_receive(r, x, topk_idx, topk_weights, *how) for r in range(len(x))]


def expert_side(received: Received, x: Tensor, weights: Tensor | None, slot: int) -> Tensor:
    """Return one token's row on one rank: the sum over its local lanes, ascending, in fp32."""
    rows = list(dict(sorted(received.row_of_lane[slot].items())).values()) if received.layout == "expert" else [slot]
    total = torch.zeros(x.shape[1])
    for row in rows:
        term = x[row].float()
        total = total + (term if weights is None else weights[row] * term)
    return total


def combine(
    x: Sequence[Tensor],
    received: Sequence[Received],
    num_tokens: Sequence[int],
    weights: Sequence[Tensor] | None = None,
    bias: Sequence[Tensor] | None = None,
    ranks_per_node: int | None = None,
    sums: str = "ranks",
    rounded: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """Return the combine of all ranks for rows `x` in the order of `received`, the result of `dispatch`.

    x: [num_rows, hidden] of each rank; weights: [num_rows] fp32; bias: [num_tokens, hidden]. A token's rows are summed in three steps.
    First on each rank (`expert_side`), rounded. Then over the ranks of a node, ascending, in fp32, rounded if the token is another node's.
    Then over the nodes, ascending, in fp32, plus `bias`, rounded once. `ranks_per_node` None: all ranks are one node. `rounded` is what the
    wire makes of fp32 rows, by default rows of x's dtype.
    sums: as in `deepep_moe.Buffer`. With "lanes" and "lanes_fma" there is one step, over the lanes of top-k, ascending, in fp32.
    """
    if sums != "ranks":
        return _combine_by_lane(x, received, num_tokens, weights, bias, sums == "lanes_fma")
    per_node, rounded = ranks_per_node or len(x), rounded or (lambda rows: rows.to(x[0].dtype).float())
    totals = [torch.zeros(n, x[0].shape[1]) for n in num_tokens]
    for first in range(0, len(x), per_node):
        of_node = [torch.zeros_like(total) for total in totals]
        for rank in range(first, first + per_node):
            for slot, (source, token) in enumerate(received[rank].tokens):
                row = expert_side(received[rank], x[rank], None if weights is None else weights[rank], slot)
                of_node[source][token] += rounded(row[None])[0]
        for source, rows in enumerate(of_node):
            crosses = source // per_node != first // per_node
            totals[source] += rounded(rows) if crosses else rows
    if bias is not None:
        totals = [total + b.float() for total, b in zip(totals, bias, strict=True)]
    return [total.to(x[0].dtype) for total in totals]


def _combine_by_lane(
    x: Sequence[Tensor], received: Sequence[Received], num_tokens: Sequence[int], weights: Sequence[Tensor] | None,
    bias: Sequence[Tensor] | None, is_fused: bool,
) -> list[Tensor]:  # fmt: skip
    terms: list[list[dict[int, tuple[Tensor, Tensor]]]] = [[{} for _ in range(n)] for n in num_tokens]
    for rank, there in enumerate(received):
        for slot, (source, token) in enumerate(there.tokens):
            for lane, row in there.row_of_lane[slot].items():
                weight = torch.ones(()) if weights is None else weights[rank][row]
                terms[source][token][lane] = weight, x[rank][row].float()
    totals = [torch.zeros(n, x[0].shape[1]) for n in num_tokens]
    for source, of_tokens in enumerate(terms):
        for token, by_lane in enumerate(of_tokens):
            for _, (weight, values) in sorted(by_lane.items()):
                total = totals[source][token]
                totals[source][token] = fused_multiply_add(weight, values, total) if is_fused else total + weight * values
    if bias is not None:
        totals = [total + b.float() for total, b in zip(totals, bias, strict=True)]
    return [total.to(x[0].dtype) for total in totals]


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of fp32 or narrower, in whole numbers, rounded once to fp32, ties to even. `a` and `c` are broadcast to `b`, [n]."""
    values = zip(*([int(value) for value in (tensor.double() * 2.0**149).expand_as(b).tolist()] for tensor in (a, b, c)), strict=True)
    return torch.tensor([_rounded(x * y + (z << 149)) for x, y, z in values], dtype=torch.float32)


def _rounded(exact: int) -> float:
    """Round a multiple of 2**-298, the product of two fp32 units, to the nearest fp32, ties to even."""
    num_bits = max(exact.bit_length() - 24, 149)  # those that are rounded away, all below the unit of denormal numbers
    kept, rest = exact >> num_bits, exact & ((1 << num_bits) - 1)
    half = 1 << (num_bits - 1)
    return math.ldexp(kept + (rest > half or (rest == half and kept & 1)), num_bits - 298)


def combine_lane_values(values: Sequence[Tensor], received: Sequence[Received], topk_idx: Sequence[Tensor]) -> list[Tensor]:
    """Bring one value per lane back to its source, [num_tokens, num_topk] fp32, 0 where the lane has no expert: the gradient of
    `topk_weights`, from values that lie as `recv_topk_weights` does."""
    result = [torch.zeros(idx.shape) for idx in topk_idx]
    for rank, there in enumerate(received):
        for slot, (source, token) in enumerate(there.tokens):
            for lane, row in there.row_of_lane[slot].items():
                value = values[rank][slot] if there.layout == "rank" else values[rank][row]
                result[source][token, lane] = value if value.numel() == 1 else value[lane]
    return result
