"""A small low-latency buffer with rows and a routing, for the tests of errors."""

import pytest
import torch
from exchange_cases import on_device
from low_latency_cases import Case, finish, make_buffer

BACKENDS = ("shm", pytest.param("nvlink", marks=pytest.mark.gpu))
on_every_backend = pytest.mark.parametrize("backend", BACKENDS)
CASE = Case([4, 4], max_tokens=8, hidden=128, num_experts=4, num_topk=2, masked=0.0, dtype=torch.float32)
IDX = torch.tensor([[0, 2], [1, 3], [3, 0], [2, -1]])
X = torch.randn(4, 128, generator=torch.Generator().manual_seed(3))


def make(backend, rank, **options):
    return make_buffer(CASE, backend, rank, **({"timeout_s": 60} | options)), *on_device(backend, rank, X, IDX)


def check_usable(buffer, x, idx):
    out = buffer.dispatch(x, idx)
    y = buffer.combine(out.recv_x, out.handle)
    finish(buffer)
    assert torch.allclose(y, x * (idx >= 0).sum(1, keepdim=True)), "usable afterwards"
