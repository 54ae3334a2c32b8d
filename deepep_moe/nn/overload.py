"""Measures how uneven the rows of single forwards are over ranks and experts. `LayerReport` defines each value."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NUM_CALLS = 128
"""The report looks at this many forwards of a layer, the latest ones."""
_NUM_SIZES = 3  # columns before the rows: first rank of the group, its ranks, its experts


def overloads(calls: Sequence[Tensor], groups: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return the overload of each layer, by the names of `LayerReport`; nothing for one without rows. Collective over all ranks. Raises
    ValueError on all of them where they give unequal numbers of layers.

    calls: for each layer of the job, [num_calls, num_local_experts] rows. It has no calls where this rank has no such layer. groups: the
    first global rank and the number of ranks of each layer's expert-parallel group.
    """
    is_spread = dist.is_available() and dist.is_initialized()
    device = "cuda" if is_spread and dist.get_backend() == "nccl" else "cpu"
    most = torch.tensor([max(map(len, calls), default=0), len(calls), -len(calls)], device=device)
    if is_spread:
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    num_calls, most_layers, least_layers = most.tolist()
    if most_layers != -least_layers:
        raise ValueError(f"ranks count {-least_layers} to {most_layers} MoE layers; give Metrics as many layers on every rank of the job")
    if not num_calls:
        return [{} for _ in calls]
    table = torch.zeros(len(calls), _NUM_SIZES + 2 * num_calls, dtype=torch.int64)
    for row, of_layer, (first_rank, num_ranks) in zip(table, calls, groups, strict=True):
        if len(of_layer):
            row[:_NUM_SIZES] = torch.tensor([first_rank, num_ranks, num_ranks * of_layer.shape[1]])
            of_rank, of_expert = row[_NUM_SIZES:].view(2, num_calls)
            of_rank[: len(of_layer)], of_expert[: len(of_layer)] = of_layer.sum(1), of_layer.amax(1)
    tables = [table.to(device)]
    if is_spread:
        tables = [torch.empty_like(tables[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(tables, table.to(device))
    return _by_layer(torch.stack(tables).cpu(), num_calls)


def _by_layer(table: Tensor, num_calls: int) -> list[dict[str, Any]]:
    """table: [num_ranks, num_layers, sizes and rows] of all ranks. Ranks of one group have the same first rank."""
    first_rank, num_ranks, num_experts = table[..., :_NUM_SIZES].unbind(-1)
    group = first_rank.unsqueeze(-1).expand(-1, -1, num_calls)
    of_rank, of_expert = table[..., _NUM_SIZES:].double().split(num_calls, -1)
    none = torch.zeros_like(of_rank)
    rows = none.scatter_add(0, group, of_rank)  # [group, layer, call], as all below
    busiest_rank, busiest_expert = (none.scatter_reduce(0, group, each, "amax") for each in (of_rank, of_expert))
    busiest_of_sum = none[..., 0].scatter_reduce(0, first_rank, of_rank.sum(-1), "amax")
    even_ranks, even_experts = (rows.sum((0, 2)) / sizes.amax(0) for sizes in (num_ranks, num_experts))
    values = {
        "rank_overload": busiest_rank.sum((0, 2)) / even_ranks,
        "max_rank_overload": (busiest_rank / rows).nan_to_num().amax((0, 2)) * num_ranks.amax(0),
        "rank_overload_of_sum": busiest_of_sum.sum(0) / even_ranks,
        "max_vio": busiest_expert.sum((0, 2)) / even_experts - 1,
    }
    has_rows = rows.sum((0, 2)) > 0
    return [{name: float(of[i]) for name, of in values.items()} if has_rows[i] else {} for i in range(len(has_rows))]
