"""A small low-latency buffer with rows and a routing, for the tests of errors."""

import pytest
import torch
import torch.distributed as dist
from exchange_cases import look, on_device
from low_latency_cases import Case, Expected, make_buffer

from deepep_moe import reference

BACKENDS = ("shm", pytest.param("nvlink", marks=pytest.mark.gpu))
ALL_BACKENDS = (*BACKENDS, pytest.param("nvshmem", marks=pytest.mark.gpu))
on_every_backend = pytest.mark.parametrize("backend", BACKENDS)
CASE = Case([4, 4], max_tokens=8, hidden=128, num_experts=4, num_topk=2, masked=0.0, dtype=torch.float32)
IDX = torch.tensor([[0, 2], [1, 3], [3, 0], [2, -1]])
X = torch.randn(4, 128, generator=torch.Generator().manual_seed(3))


def make(backend, rank, **options):
    return make_buffer(CASE, backend, rank, **({"timeout_s": 60} | options)), *on_device(backend, rank, X, IDX)


def check_usable(buffer, x, idx):
    out = buffer.dispatch(x, idx)
    y = buffer.combine(out.recv_x, out.handle)
    look(buffer)
    assert torch.allclose(y, x * (idx >= 0).sum(1, keepdim=True)), "usable afterwards"


def come_back(buffer, rank, masked):
    """All ranks but the masked one take it back, between the same calls."""
    dist.barrier()
    if rank == masked:
        buffer.rejoin()
    else:
        buffer.mask_rank(masked, False)
    assert buffer.masked_ranks == []


def combined_without(case, masked):
    """Return all ranks' results of a combine without `masked`, along a dispatch with it. Its sums are lost; the ranks of its rail also lose
    the sums of its node."""
    expected, weights, per_node = Expected(case), [], case.ranks_per_node or case.num_ranks
    node, index = divmod(masked, per_node)
    for rank in range(case.num_ranks):
        _, idx, all_weights = case.inputs(rank)
        to = idx // (case.num_experts // case.num_ranks)
        by_it = rank // per_node != node and rank % per_node == index
        weights.append(torch.where((to == masked) | (by_it & (to // per_node == node)), 0, all_weights))
    return reference.low_latency.combine(
        expected.outputs, expected.received, case.num_tokens, topk_weights=weights, ranks_per_node=case.ranks_per_node
    )
