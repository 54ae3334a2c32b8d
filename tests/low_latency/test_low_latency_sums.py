"""Low-latency calls whose sums go by lanes: the bits of the reference, and so those of `Buffer`, on every backend."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from exchange_cases import assert_same, device_of, on_device
from low_latency_cases import BACKENDS, Case, check_cases, make_buffer, run_case
from on_ranks import on_ranks

from deepep_moe import Buffer, LowLatencyBuffer
from deepep_moe.testing import run_ranks

SUMS = ("lanes", "lanes_fma")
CASE = Case([9, 24, 0, 17], num_topk=5, sums="lanes")


@on_ranks(2, backend=BACKENDS)
def test_by_hand(rank, backend):
    """256 + 1 is 256 in bf16, so what is rounded between lanes loses both ones of 256 + 1 + 1 = 258."""
    device_of(backend, rank)
    buffer = LowLatencyBuffer(None, 2, 8, 4, 3, backend=backend, sums="lanes")
    x, idx = on_device(backend, rank, torch.ones(2, 8, dtype=torch.bfloat16), torch.tensor([[3, 0, 1], [2, -1, 0]]))
    weights = torch.tensor([[256.0, 1.0, 1.0], [2.0, torch.nan, 3.0]], device=x.device)
    out = buffer.dispatch(x, idx, weights)
    assert out.num_recv_tokens_per_expert.tolist() == [[4, 2], [2, 2]][rank]
    assert buffer.combine(out.recv_x, out.handle)[:, 0].tolist() == [258.0, 5.0]
    out = buffer.dispatch(x, idx)
    assert buffer.combine(out.recv_x, out.handle)[:, 0].tolist() == [3.0, 2.0]
    into = torch.full_like(x, torch.nan)
    assert buffer.combine(out.recv_x, out.handle, topk_weights=weights, out=into) is into
    assert into[:, 0].tolist() == [258.0, 5.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_tokens", ([24], [9, 0], [5, 24, 17, 0], [3, 0, 5, 1, 2, 4, 6, 1]), ids=str)
def test_equals_reference(num_tokens, backend):
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    cases = [Case(num_tokens, dtype=dtype, num_topk=5, sums=sums) for dtype, sums in itertools.product(dtypes, SUMS)]
    changes = (
        {"with_weights": False}, {"combine_weights": True, "mode": "hook"}, {"num_topk": 1, "mode": "async"}, {"fp8": True, "hidden": 640},
        {"fp8": True, "hidden": 640, "scale_format": "ue8m0", "mode": "hook"},
    )  # fmt: skip
    cases += [replace(cases[0], **each) for each in changes]
    run_ranks(check_cases, len(num_tokens), backend, cases)


@on_ranks(4, backend=BACKENDS)
def test_masked_rank(rank, backend):
    buffer = make_buffer(CASE, backend, rank)
    run_case(buffer, CASE, rank, backend)
    if rank != 1:
        buffer.mask_rank(1)
    dist.barrier()
    if rank != 1:
        run_case(buffer, replace(CASE, without=1), rank, backend)
    dist.barrier()


@on_ranks((1, 2, 4, 8), backend=BACKENDS, sums=SUMS)
def test_bits_of_other_buffers(rank, num_ranks, backend, sums):
    """Training on all ranks with `Buffer`, and rollout on one or on all with `LowLatencyBuffer`, return the same bits."""
    alone = [dist.new_group([r]) for r in range(num_ranks)][rank]
    case = Case([24], num_topk=5)
    x, idx, weights = (tensor.tensor_split(num_ranks)[rank].contiguous() for tensor in case.inputs(0))
    x, idx, weights = on_device(backend, rank, x, idx, weights)
    sizes = 24, case.hidden, case.num_experts, case.num_topk
    buffer = Buffer(None, *sizes, backend=backend, sums=sums)
    out = buffer.dispatch(x, idx, weights)
    trained = buffer.combine(out.recv_x, out.handle, out.recv_topk_weights)
    for group in (alone, None):
        buffer = LowLatencyBuffer(group, *sizes, backend=backend, sums=sums)
        received = buffer.dispatch(x, idx, weights)
        assert_same("combined_x", buffer.combine(received.recv_x, received.handle), trained)
