"""DeepEP's normal mode against the reference: the scenarios of its own test of one node, on every backend."""

import itertools

import pytest
import torch
import torch.distributed as dist
from deep_ep_cases import BACKENDS, SIZES, Wanted, in_both_dtypes, in_both_modes, make, padded
from exchange_cases import Case, assert_same
from on_ranks import on_ranks

from deepep_moe import reference
from deepep_moe.compat.deep_ep import Buffer, Config
from deepep_moe.ops import ue8m0

ALIGNMENT = 4


def make_buffer(backend, rank, **settings):
    return make("Buffer", backend, rank, 1 << 20, 0, explicitly_destroy=True, **settings)


def check_layout(buffer, want, device):
    case, rank = want.case, want.rank
    topk_idx = want.topk_idx.to(device)
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(topk_idx, case.num_experts)
    assert_same("is_token_in_rank", in_rank, want.in_rank(rank))
    assert_same("num_tokens_per_rank", per_rank, want.in_rank(rank).sum(0).int())
    assert_same("num_tokens_per_expert", per_expert, want.topk_idx[want.topk_idx >= 0].bincount(minlength=case.num_experts).int())
    assert per_node is None and event.event is None
    return {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}


@pytest.mark.parametrize("with_previous", (False, True), ids=("", "previous"))
@in_both_modes
@pytest.mark.parametrize("with_topk", (True, False), ids=("topk", "ranks alone"))
@in_both_dtypes
@on_ranks(3, backend=BACKENDS)
def test_scenarios(rank, num_ranks, backend, fp8, with_topk, is_async, with_previous):
    case = Case([13, 0, 30], expert_alignment=ALIGNMENT, **SIZES)
    buffer, device = make_buffer(backend, rank)
    want = Wanted(case, rank, "rank", fp8)
    mine, x = want.mine, want.x_on(device)
    routing = check_layout(buffer, want, device)
    if with_topk:
        routing |= want.routing(device)
    how = {
        "async_finish": is_async,
        "allocate_on_comm_stream": is_async and with_previous,
        "config": Config(num_sms=8),
        "expert_alignment": ALIGNMENT,
    }

    def dispatch(**more):
        previous = {"previous_event": Buffer.capture()} if with_previous else {}
        *results, event = buffer.dispatch(**({"x": x} | how | previous | more))
        assert (event.event is not None) == is_async
        event.current_stream_wait()
        return results

    recv_x, recv_idx, recv_weights, counts, handle = dispatch(**routing)
    want.check_rows(recv_x)
    assert counts == want.num_rows_per_expert
    assert_same("recv_topk_idx", recv_idx, mine.recv_topk_idx if with_topk else None)
    assert_same("recv_topk_weights", recv_weights, mine.recv_topk_weights if with_topk else None)
    check_handle(handle, want)

    again = dispatch(handle=handle, expert_alignment=1)
    want.check_rows(again[0])
    assert again[1:] == [None] * 4

    num_worst = 1 + max(case.num_tokens) * num_ranks
    worst_x, worst_idx, worst_weights, no_counts, worst_handle = dispatch(**routing, num_worst_tokens=num_worst)
    rows = worst_x[0] if fp8 else worst_x
    assert len(rows) == num_worst and no_counts == []
    want.check_rows(worst_x)
    if with_topk:
        assert_same("recv_topk_idx", worst_idx[: len(mine.recv_x)], mine.recv_topk_idx)
        assert (worst_idx[len(mine.recv_x) :] == -1).all()
        assert_same("recv_topk_weights", worst_weights[: len(mine.recv_x)], mine.recv_topk_weights)
    check_combines(buffer, want, device, handle, with_topk, is_async, with_previous)
    check_combines(buffer, want, device, worst_handle, with_topk, is_async, with_previous, num_worst)
    buffer.destroy()


def check_handle(handle, want):
    """The handle's fields that DeepEP's own tests read follow from the routing."""
    prefixes, sent, _, sources, in_rank, heads = handle
    received = [int(want.in_rank(r)[:, want.rank].sum()) for r in range(want.case.num_ranks)]
    assert prefixes[:, want.rank].tolist() == list(itertools.accumulate(received))
    assert_same("is_token_in_rank", in_rank, want.in_rank(want.rank))
    assert sent[:, 0].tolist() == want.in_rank(want.rank).sum(0).tolist() and len(sources) == len(want.mine.recv_x)
    assert_same("send_head", heads, torch.where(in_rank.cpu(), in_rank.cpu().cumsum(0) - 1, -1).int())
    assert len(handle) == 6 and handle[0] is prefixes


def check_combines(buffer, want, device, handle, with_topk, is_async, with_previous, num_rows=None):
    """Rows come back summed, and weights of a token the sum over all its ranks, also in lanes whose expert another rank has."""
    case, rank, outputs = want.case, want.rank, want.outputs
    weights = [torch.rand(len(out), case.num_topk, generator=torch.Generator().manual_seed(r)) for r, out in enumerate(outputs)]
    num_rows = len(outputs[rank]) if num_rows is None else num_rows
    y, lanes = (padded(tensor, num_rows).to(device) for tensor in (outputs[rank], weights[rank]))
    for bias, added in want.biases(device):
        previous = Buffer.capture() if with_previous else None
        combined, back, event = buffer.combine(
            y, handle, lanes if with_topk else None, bias, async_finish=is_async, previous_event=previous
        )
        event.current_stream_wait()
        assert_same("combined_x", combined, want.combined(added))
        assert_same("combined weights", back, sums_of_lanes(want, weights) if with_topk else None)
    dist.barrier()  # a rank without tokens waits for nothing, and what it sends would end with it


def sums_of_lanes(want, weights):
    """The sum of each lane over the ranks that a token went to. weights: of each rank's rows."""
    case, rank = want.case, want.rank
    total = torch.zeros(case.num_tokens[rank], case.num_topk)
    for r, values in enumerate(weights):
        first = sum(int(want.in_rank(source)[:, r].sum()) for source in range(rank))
        there = want.in_rank(rank)[:, r]
        total[there] += values[first : first + int(there.sum())]
    return total


def plain_dispatch(buffer, want, device):
    *_, per_expert, in_rank, _ = buffer.get_dispatch_layout(want.topk_idx.to(device), want.case.num_experts)
    return buffer.dispatch(want.x_on(device), num_tokens_per_expert=per_expert, is_token_in_rank=in_rank, **want.routing(device))


@on_ranks(3, backend=BACKENDS)
def test_packed_scales(rank, backend):
    """Scales as four exponents to an int32, which come as they were sent, beside the rows of fp32 scales."""
    buffer, device = make_buffer(backend, rank)
    want = Wanted(Case([13, 0, 30], **(SIZES | {"hidden": 640})), rank, fp8=True)
    exponents = torch.randint(0, 255, (len(want.x), 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))
    exponents[:, 5:] = 0  # of a word whose columns do not exist
    want.scales = ue8m0.unpack(exponents.view(torch.int32), 5)
    plain = plain_dispatch(buffer, want, device)
    want.scales = exponents.view(torch.int32)
    (recv_x, recv_scales), *_, handle, _ = plain_dispatch(buffer, want, device)
    assert recv_scales.dtype == torch.int32 and recv_scales.shape == (len(recv_x), 2)
    assert_same("scales", ue8m0.unpack(recv_scales, 5), plain[0][1])
    assert_same("rows", recv_x, plain[0][0])
    again = buffer.dispatch(want.x_on(device), handle)[0]
    assert_same("scales", again[1], recv_scales)


@on_ranks(4, backend=("shm", pytest.param("nvshmem", marks=pytest.mark.gpu)))
def test_nodes(rank, backend):
    """Two nodes of two ranks, with a chosen bound. Whole numbers as weights, as the sum over nodes has another order."""
    buffer, device = make_buffer(backend, rank, ranks_per_node=2, num_max_tokens_per_rank=40)
    want = Wanted(Case([13, 0, 30, 6], **SIZES), rank)
    _, per_node, *_ = buffer.get_dispatch_layout(want.topk_idx.to(device), want.case.num_experts)
    assert per_node.tolist() == want.in_rank(rank).view(-1, 2, 2).any(2).sum(0).tolist()
    recv_x, *_, handle, _ = plain_dispatch(buffer, want, device)
    want.check_rows(recv_x)
    assert (handle.buffer.backend, handle.buffer.num_max_tokens_per_rank) == (backend, 40)
    assert len(handle) == 10 and handle[-4].tolist()[-1] == len(recv_x)
    shapes = [(len(received.recv_x), want.case.num_topk) for received in want.received]
    weights = [torch.randint(9, shape, generator=torch.Generator().manual_seed(r)).float() for r, shape in enumerate(shapes)]
    combined, back, _ = buffer.combine(recv_x, handle, weights[rank].to(device))
    rows = [received.recv_x for received in want.received]
    assert_same("combined_x", combined, reference.combine(rows, want.received, want.case.num_tokens, ranks_per_node=2)[rank])
    assert_same("combined weights", back, sums_of_lanes(want, weights))
    dist.barrier()  # a rank without tokens waits for nothing, and what it sends would end with it
