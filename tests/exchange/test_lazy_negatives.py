"""Tensors that are the negative of their memory (`is_neg()`): refused, as their memory is what moves."""

import pytest
import torch
from error_cases import HIDDEN, IDX, WEIGHTS, X, make_buffer
from exchange_cases import device_of

from deepep_moe import LowLatencyBuffer, ops
from deepep_moe.errors import EPPeerError
from deepep_moe.testing import run_ranks


def negative(tensor):
    """As `tensor`, in contiguous memory that holds the negative."""
    made = torch._neg_view(-tensor)
    assert made.is_neg() and made.is_contiguous() and torch.equal(made, tensor)
    return made


def imaginary(tensor):
    """As `tensor`, of other strides: how programs come by such tensors."""
    made = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert made.is_neg() and torch.equal(made, tensor)
    return made


def refused_exchange(rank, num_ranks, backend):
    buffer = make_buffer(backend)
    out = buffer.dispatch(X, IDX, WEIGHTS)
    y, weights, bias = out.recv_x, out.recv_topk_weights, torch.ones(4, HIDDEN)
    for name, call in (
        ("x", lambda lazy: buffer.dispatch(lazy(X), IDX)),
        ("topk_weights", lambda lazy: buffer.dispatch(X, IDX, lazy(WEIGHTS))),
        ("topk_weights", lambda lazy: buffer.dispatch(X, handle=out.handle, topk_weights=lazy(WEIGHTS))),
        ("x", lambda lazy: buffer.combine(lazy(y), out.handle)),
        ("topk_weights", lambda lazy: buffer.combine(y, out.handle, lazy(weights))),
        ("bias", lambda lazy: buffer.combine(y, out.handle, bias=lazy(bias))),
    ):
        with pytest.raises(ValueError if rank == 1 else EPPeerError, match=rf"{name} is a lazy negative .*; pass {name}.resolve_neg\(\)"):
            call(negative if rank == 1 else torch.clone)
    with pytest.raises(ValueError if rank == 1 else EPPeerError, match=r"topk_weights is a lazy negative"):
        buffer.dispatch(X, IDX, (imaginary if rank == 1 else torch.clone)(WEIGHTS))
    assert torch.equal(buffer.dispatch(negative(X).resolve_neg(), IDX).recv_x, out.recv_x)


@pytest.mark.parametrize("backend", ("shm", "collective"))
def test_exchange(backend):
    run_ranks(refused_exchange, 2, backend)


def refused_in_low_latency(rank, num_ranks):
    buffer = LowLatencyBuffer(None, 8, HIDDEN, 4, 2, timeout_s=60)
    out = buffer.dispatch(X, IDX)
    y = out.recv_x.nan_to_num()
    for name, call in (
        ("x", lambda lazy: buffer.dispatch(lazy(X), IDX)),
        ("topk_weights", lambda lazy: buffer.dispatch(X, IDX, lazy(WEIGHTS))),
        ("x", lambda lazy: buffer.combine(lazy(y), out.handle)),
    ):
        with pytest.raises(ValueError if rank == 1 else EPPeerError, match=f"{name} is a lazy negative"):
            call(negative if rank == 1 else torch.clone)
        counts = buffer.dispatch(X, IDX).num_recv_tokens_per_expert
        assert torch.equal(counts, out.num_recv_tokens_per_expert), "all are in step"


def test_low_latency():
    run_ranks(refused_in_low_latency, 2)


def test_gate():
    logits, bias = torch.randn(5, 8), torch.randn(8)
    for lazy in (negative, imaginary):
        for name, arguments in (("logits", dict(logits=lazy(logits))), ("expert_bias", dict(logits=logits, expert_bias=lazy(bias)))):
            with pytest.raises(ValueError, match=rf"{name} is a lazy negative .*; pass {name}.resolve_neg\(\)"):
                ops.gate(**arguments, num_topk=2)


def refused_on_a_gpu(rank, num_ranks):
    device = device_of("nvlink", rank)
    x, idx, weights, logits = X.to(device), IDX.to(device), WEIGHTS.to(device), torch.randn(5, 8).to(device)
    buffer = make_buffer("nvlink")
    for name, arguments in (("x", (negative(x), idx)), ("topk_weights", (x, idx, negative(weights)))):
        with pytest.raises(ValueError, match=f"{name} is a lazy negative"):
            buffer.dispatch(*arguments)
    with pytest.raises(ValueError, match="logits is a lazy negative"):
        ops.gate(negative(logits), 2)


@pytest.mark.gpu
def test_on_a_gpu():
    """Calls in C++ leave them to Python, which refuses them."""
    run_ranks(refused_on_a_gpu, 1)
