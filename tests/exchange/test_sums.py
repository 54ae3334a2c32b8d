"""Sums by lanes: the same bits whatever ranks, nodes, backends and placements of experts there are."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from exchange_cases import BACKENDS, Case, assert_all_same, device_of, opened, poison_outputs
from on_ranks import on_ranks

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from deepep_moe import Buffer, reference
from deepep_moe.ops import weighted

# ---- by hand ----


@on_ranks(4, backend=BACKENDS, ranks_per_node=(None, 2))
def test_by_hand(rank, backend, ranks_per_node):
    """256 + 1 is 256 in bf16, so what is rounded between lanes loses both ones of 256 + 1 + 1 = 258."""
    if backend == "nvlink" and ranks_per_node:
        return  # it serves one node
    device = device_of(backend, rank)
    poison_outputs()
    buffer = Buffer(None, 1, 8, 4, 3, backend=backend, sums="lanes", ranks_per_node=ranks_per_node)
    x = torch.ones(1, 8, dtype=torch.bfloat16, device=device)
    out = buffer.dispatch(x, torch.tensor([[1, 0, 3]], device=device), torch.tensor([[256.0, 1.0, 1.0]], device=device))
    assert out.recv_x.shape == ((0, 8) if rank == 2 else (4, 8))
    y = buffer.combine(out.recv_x, out.handle, out.recv_topk_weights)
    assert y.tolist() == [[258.0] * 8]
    y = buffer.combine(out.recv_x, out.handle, bias=torch.full((1, 8), 0.5, dtype=torch.bfloat16, device=device))
    assert y.tolist() == [[3.5] * 8]


def test_one_rounding_by_hand():
    """(1 + 2^-23) * (1 - 2^-23) is 1 - 2^-46, which fp32 rounds to 1 before it subtracts 1, unless both are one operation. A tie goes to
    the even neighbour, also among denormal numbers."""
    unit, least = 2.0**-23, 2.0**-149
    for a, b, addends, expected in (
        (1 + unit, 1 - unit, [-1.0], [-(2.0**-46)]),
        (0.5, unit, [1.0, 1 + unit, -1 - unit], [1.0, 1 + 2 * unit, -1.0]),
        (0.5, least, [0.0, least, -least], [0.0, 2 * least, 0.0]),
        (0.625, least, [0.0], [least]),
    ):
        c = torch.tensor(addends)
        for multiply_add in (weighted.fused_multiply_add, reference.exchange.fused_multiply_add):
            assert multiply_add(torch.tensor(a), torch.tensor(b).expand_as(c), c).tolist() == expected


FLOATS = st.floats(width=32, allow_nan=False, min_value=-(2.0**60), max_value=2.0**60)


@settings(max_examples=300, deadline=None)
@given(values=st.lists(st.tuples(FLOATS, FLOATS, FLOATS), min_size=1, max_size=30), scale=st.sampled_from((1.0, 2.0**-100, 2.0**-60)))
def test_one_rounding(values, scale):
    a, b, c = (torch.tensor(column, dtype=torch.float32) for column in zip(*values, strict=True))
    a, nearly = a * scale, -(a * scale * b)  # and sums of which little is left
    for addend in (c, nearly, torch.nextafter(nearly, c)):
        fused = weighted.fused_multiply_add(a, b, addend)
        assert (fused == reference.exchange.fused_multiply_add(a, b, addend)).all()


CASE = Case([48], hidden=64, num_experts=8, num_topk=5, dtype=torch.bfloat16, pattern="masked")


# ---- rows that do not fit ----


@pytest.mark.gpu
@on_ranks(2)
def test_rows_left_out(rank, num_ranks):
    """Another row is sent in place of rows beyond a bound, so that no rank waits for them. Sums of the other rows are right. All are
    finite, even if the memory for copy engines holds NaN."""
    for bound in (0, 8):
        buffer, x, idx, weights = opened(replace(CASE, num_tokens=[11, 6], pattern="one_expert"), "nvlink", rank, sums="lanes")
        buffer.allow_excess()
        buffer.dispatch(torch.full_like(x, torch.nan), torch.where(idx < 0, -1, 0), weights, num_sms=0)
        out = buffer.dispatch(x, idx, weights, num_recv_rows=bound)
        y = buffer.combine(out.recv_x, out.handle, out.recv_topk_weights)
        if rank == 0:
            kept = slice(0, bound)
            assert torch.equal(y[kept], (x.float() * weights[:, :1])[kept].to(x.dtype))
            assert bound == 0 or y.isfinite().all()
        buffer.check()


@pytest.mark.gpu
@on_ranks(2)
def test_copy_engines_send_no_single_rows(rank, num_ranks):
    """They serve the dispatch."""
    buffer, x, idx, weights = opened(replace(CASE, num_tokens=[11, 6]), "nvlink", rank, sums="lanes")
    out, expected = buffer.dispatch(x, idx, weights, num_sms=0), buffer.dispatch(x, idx, weights)
    assert_all_same("rows", (out.recv_x, out.recv_topk_weights), (expected.recv_x, expected.recv_topk_weights))
    for num_sms in (1, 3):
        again = buffer.combine(out.recv_x, out.handle, out.recv_topk_weights, num_sms=num_sms)
        assert torch.equal(again, buffer.combine(out.recv_x, out.handle, out.recv_topk_weights))
    with pytest.raises(ValueError, match="num_sms=0 cannot serve sums by lanes"):
        buffer.combine(out.recv_x, out.handle, out.recv_topk_weights, num_sms=0)


# ---- refusals ----


def test_refusals():
    """Bad arguments are refused as in other buffers: test_errors.py."""
    with pytest.raises(ValueError, match="sums is 'lane'"):
        Buffer(None, 4, 8, 4, 2, sums="lane")
    with pytest.raises(ValueError, match="num_sms is 0; with sums='lanes' it must be 1 or more"):
        Buffer(None, 4, 8, 4, 2, sums="lanes", num_sms=0)
    buffer = Buffer(None, 4, 8, 4, 2, sums="lanes", backend="shm")
    assert (buffer.num_topk, buffer.num_max_tokens_per_rank, buffer.sums) == (2, 4, "lanes")
    x, idx = torch.ones(4, 8), torch.tensor([[0, 1]] * 4)
    with pytest.raises(ValueError, match="layout is 'rank'; with sums='lanes'"):
        buffer.dispatch(x, idx, layout="rank")
    calls = buffer.num_calls
    with mock.patch("deepep_moe.exchange.calls.for_lanes", side_effect=MemoryError), pytest.raises(MemoryError):
        buffer.dispatch(x, idx)
    assert buffer.num_calls == calls + 1, "the peers were told"
