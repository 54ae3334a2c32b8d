"""Low-latency calls whose sums go by lanes: the bits of the reference, and so those of `Buffer`, on every backend."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from exchange_cases import assert_same, device_of, on_device
from low_latency_cases import Case, check_cases, finish, make_buffer, run_case
from low_latency_faults import BACKENDS, on_every_backend
from on_ranks import on_ranks

from deepep_moe import Buffer, LowLatencyBuffer
from deepep_moe.errors import EPPeerError
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


@on_every_backend
@pytest.mark.parametrize("num_tokens", ([24], [9, 0], [5, 24, 17, 0], [3, 0, 5, 1, 2, 4, 6, 1]), ids=str)
def test_equals_reference(num_tokens, backend):
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    cases = [Case(num_tokens, dtype=dtype, num_topk=5, sums=sums) for dtype, sums in itertools.product(dtypes, SUMS)]
    cases += [replace(cases[0], **changes) for changes in ({"with_weights": False}, {"combine_weights": True}, {"num_topk": 1})]
    run_ranks(check_cases, len(num_tokens), backend, cases)


@on_every_backend
@pytest.mark.parametrize("mode", ("async", "hook"))
def test_modes(mode, backend):
    run_ranks(check_cases, 4, backend, [replace(CASE, mode=mode, combine_weights=weighted) for weighted in (False, True)])


@on_every_backend
def test_fp8(backend):
    run_ranks(check_cases, 4, backend, [replace(CASE, fp8=True, scale_format=name, hidden=640) for name in ("fp32", "ue8m0")])


@pytest.mark.gpu
@pytest.mark.parametrize("per_node", (1, 2))
def test_nodes(per_node):
    run_ranks(check_cases, 4, "nvshmem", [replace(CASE, ranks_per_node=per_node, sums=sums) for sums in SUMS])


@on_every_backend
@on_ranks(4)
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


@on_ranks(2, backend=BACKENDS)
def test_refusals(rank, backend):
    buffer = make_buffer(replace(CASE, num_tokens=[3, 3]), backend, rank)
    x, idx = on_device(backend, rank, torch.ones(3, 128, dtype=torch.bfloat16), torch.tensor([[0, 1, 2, 3, 4]] * 3))
    for wrong, words in (
        ({"topk_idx": idx[:, :1].contiguous()}, r"topk_idx has shape \[3, 1\]; it must be \[3, 5\]"),
        ({"x": x[:, :64].contiguous(), "topk_idx": idx}, r"x has shape \[3, 64\]; it must be \[3, 128\]"),
        ({"topk_idx": idx, "topk_weights": torch.ones(3, 1, device=x.device)}, r"topk_weights has shape \[3, 1\]"),
    ):
        with pytest.raises(ValueError if rank == 0 else EPPeerError, match=words):
            buffer.dispatch(**({"x": x} | (wrong if rank == 0 else {"topk_idx": idx})))
            finish(buffer)
    twice = idx.clone()
    twice[2, 4] = 1
    with pytest.raises(ValueError if rank == 0 else EPPeerError, match=r"topk_idx\[2\b.*names expert 1 twice"):
        buffer.dispatch(x, twice if rank == 0 else idx)
        finish(buffer)
    out = buffer.dispatch(x, idx)
    with pytest.raises(ValueError, match="wire is 'fp8' with sums='lanes'"):
        buffer.combine(out.recv_x, out.handle, wire="fp8")
