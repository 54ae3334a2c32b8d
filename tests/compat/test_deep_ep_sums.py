"""DEEPEP_MOE_SUMS with version 2 and HybridEP: results are those of the reference, and the same bits on 1, 2 and 4 ranks."""

import os

import pytest
import torch
import torch.distributed as dist
from exchange_cases import Case, assert_all_same, device_of, poison_outputs
from on_ranks import on_ranks

from deepep_moe import reference
from deepep_moe.compat import deep_ep

BACKENDS = ("shm", pytest.param("nvlink", marks=pytest.mark.gpu))
CASE = Case([48], hidden=64, num_experts=8, num_topk=5, dtype=torch.bfloat16, pattern="masked")
FACTORS = (torch.arange(8) + 1.0).sqrt()  # by which experts scale rows
HOW = ("ElasticBuffer", "ElasticBuffer, bound", "HybridEPBuffer", "HybridEPBuffer, bound", "HybridEPBuffer, map")


def results_of(how, group, rank, num_ranks, device):
    """This rank's sums, the weights that come back, and the gradient of its rows if that of a sum is the sum."""
    x, idx, weights = (tensor.tensor_split(num_ranks)[rank].clone().to(device) for tensor in CASE.inputs(0))
    factors = FACTORS.tensor_split(num_ranks)[rank].to(device)

    def scaled(rows, counts):
        of_rows = factors.repeat_interleave(counts.long().to(device))
        return (rows * torch.nn.functional.pad(of_rows, (0, len(rows) - len(of_rows)))[:, None]).to(x.dtype)

    if "ElasticBuffer" in how:
        buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=48)
        more = {"num_experts": 8, "do_expand": True, "do_cpu_sync": "bound" not in how}
        rows, _, recv_weights, handle, _ = buffer.dispatch(x, idx, weights, **more)
        assert torch.equal(handle.topk_idx, idx)
        counts = handle.num_unaligned_recv_tokens_per_expert
        y, back, _ = buffer.combine(scaled(rows, counts), handle, recv_weights)
        return y, back, buffer.combine(scaled(buffer.dispatch(y, handle=handle, do_expand=True)[0], counts), handle)[0]
    buffer = deep_ep.HybridEPBuffer(group, 64, 48, 8 // num_ranks)
    routing, bound = {"topk_idx": idx, "topk_weights": weights}, {"num_permuted_tokens": 48 * 5} if "bound" in how else {}
    if "map" in how:
        routing = dict(zip(("routing_map", "probs"), deep_ep.hybrid_ep_buffer.indices_to_map(idx, weights, len(x), 8), strict=True))
    rows, recv_weights, _, counts, handle = buffer.dispatch_with_permute(hidden=x, **routing, **bound)
    y, back = buffer.combine_with_unpermute(hidden=scaled(rows, counts), probs=recv_weights, handle=handle)
    rows = buffer.dispatch_with_permute(hidden=y, handle=handle, **bound)[0]
    return y, back, buffer.combine_with_unpermute(hidden=scaled(rows, counts), handle=handle)[0]


@on_ranks((1, 2, 4), backend=BACKENDS, how=HOW)
def test_same_bits(rank, num_ranks, backend, how):
    os.environ["DEEPEP_MOE_SUMS"] = "lanes"
    device = device_of(backend, rank)
    poison_outputs()
    alone = [dist.new_group([r]) for r in range(num_ranks)][rank]
    expected = results_of(how, alone, 0, 1, device)
    actual = results_of(how, dist.group.WORLD, rank, num_ranks, device)
    assert_all_same("results", actual, (tensor.tensor_split(num_ranks)[rank] for tensor in expected))
    x, idx, _ = CASE.inputs(0)
    idx = idx.masked_fill(idx < 0, 8).sort(1).values.where(torch.tensor("map" in how), idx)  # lanes of a map ascend
    received = reference.dispatch([x], [idx.masked_fill(idx == 8, -1)], None, 8)
    rows = received[0].recv_x * FACTORS.repeat_interleave(torch.tensor(received[0].num_recv_tokens_per_expert))[:, None]
    assert torch.equal(expected[0].cpu(), reference.combine([rows.to(x.dtype)], received, [48], sums="lanes")[0])


@on_ranks(2)
def test_refusals(rank):
    os.environ["DEEPEP_MOE_SUMS"] = "lanes_fma"
    x, idx = torch.ones(2, 8), torch.tensor([[0, 1], [1, 0]])
    buffer, hybrid = deep_ep.ElasticBuffer(dist.group.WORLD), deep_ep.HybridEPBuffer(dist.group.WORLD, 8, 2, 1)
    for dispatch in (lambda: buffer.dispatch(x, idx, num_experts=2), lambda: hybrid.dispatch(x, topk_idx=idx)):
        with pytest.raises(ValueError, match="DEEPEP_MOE_SUMS is 'lanes_fma', but of compact rows the caller adds up those of a token"):
            dispatch()
    handle = buffer.dispatch(x, idx, num_experts=2, do_expand=True)[3]
    for name in ("num_recv_tokens", "psum_num_recv_tokens_per_scaleup_rank", "recv_src_metadata"):
        with pytest.raises(NotImplementedError, match=f"{name} is not known with DEEPEP_MOE_SUMS=lanes_fma"):
            getattr(handle, name)
    handle = hybrid.dispatch_with_permute(hidden=x, topk_idx=idx)[4]
    assert handle[3] is None and handle[4] is None and handle[8] == 2
