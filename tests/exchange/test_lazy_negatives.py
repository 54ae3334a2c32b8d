"""Tensors whose values are not those of their memory, such as its negative (`is_neg()`). Arguments are refused, as their memory is what
moves. Gradients, which autograd hands on, are read."""

import pytest
import torch
from error_cases import HIDDEN, IDX, WEIGHTS, X, make_buffer
from exchange_cases import device_of
from on_ranks import on_ranks

from deepep_moe import LowLatencyBuffer, ops
from deepep_moe.errors import EPPeerError
from deepep_moe.exchange.by_expert import combine_by_expert, dispatch_by_expert
from deepep_moe.ops.lanes import LanesOfMap


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


@pytest.mark.parametrize("backend", ("shm", "collective"))
@on_ranks(2)
def test_exchange(rank, backend):
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


@on_ranks(2)
def test_low_latency(rank):
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


def test_gate():
    logits, bias = torch.randn(5, 8), torch.randn(8)
    for lazy in (negative, imaginary):
        for name, arguments in (("logits", dict(logits=lazy(logits))), ("expert_bias", dict(logits=logits, expert_bias=lazy(bias)))):
            with pytest.raises(ValueError, match=rf"{name} is a lazy negative .*; pass {name}.resolve_neg\(\)"):
                ops.gate(**arguments, num_topk=2)


# ---- gradients ----


def numbers(like):
    return torch.arange(1.0, like.numel() + 1, device=like.device).view(like.shape).to(like.dtype)


def plain_zeros(like):
    return torch.zeros_like(like)


def lazy_zeros(like):
    return torch._efficientzerotensor(like.shape, dtype=like.dtype, device=like.device)


def plain_ones(like):
    return torch.ones_like(like)


PAIRS = {  # gradients that are read, and the same ones in plain memory
    "negative": (lambda like: negative(numbers(like)), numbers),
    "imaginary": (lambda like: imaginary(numbers(like)), numbers),
    "zeros": (lazy_zeros, plain_zeros),
    "sparse": (lambda like: numbers(like).to_sparse(), numbers),
    "expanded": (lambda like: torch.ones((), dtype=like.dtype, device=like.device).expand(like.shape), plain_ones),
}


def gradients_of_layers(buffer, x, idx, weights, grad):
    """Backwards whose first gradient is `grad` of their output."""
    x, weights, row_weights = (tensor.clone().requires_grad_() for tensor in (x, weights, weights))
    out = buffer.dispatch(x, idx, weights)
    again = buffer.dispatch(x, handle=out.handle)
    rows = out.recv_x.detach().requires_grad_()
    row_weights = out.recv_topk_weights.detach().requires_grad_()
    combined, plain = buffer.combine(rows, out.handle, row_weights, bias=x), buffer.combine(rows, out.handle)
    parts, sent, handle = dispatch_by_expert(buffer, x, idx, weights)
    by_expert = combine_by_expert(buffer, parts, sent, handle)
    found = []
    for output, leaves in (
        (out.recv_x, (x,)), (out.recv_topk_weights, (weights,)), (again.recv_x, (x,)), (combined, (rows, row_weights, x)), (plain, (rows,)),
        (by_expert, (x, weights)), (parts[0], (x,)),
    ):  # fmt: skip
        grads = torch.autograd.grad(output, leaves, grad(output), retain_graph=True)
        found += [grad.to_dense() if grad.is_sparse else grad for grad in grads]  # that of a bias is the gradient itself
    return found


@pytest.mark.parametrize("backend", ("shm", "collective", pytest.param("nvlink", marks=pytest.mark.gpu)))
@on_ranks(2)
def test_gradients_of_the_exchange(rank, backend):
    device = device_of(backend, rank)
    buffer, inputs = make_buffer(backend), [tensor.to(device) for tensor in (X, IDX, WEIGHTS)]
    for name, (lazy, plain) in PAIRS.items():
        for is_one_rank in (False, True):  # lazy
            made = gradients_of_layers(buffer, *inputs, plain if is_one_rank and rank == 0 else lazy)
            expected = gradients_of_layers(buffer, *inputs, plain)
            assert all(map(torch.equal, made, expected)), name


def test_gradients_of_operations():
    logits, routing_map = torch.randn(5, 8), torch.rand(5, 8) > 0.7
    for name, (lazy, plain) in PAIRS.items():
        found = []
        for grad in (lazy, plain):
            leaf = logits.clone().requires_grad_()
            made = ops.gate_full(leaf, 2, dense=True, shares=True)
            lanes = LanesOfMap.apply(routing_map, leaf, 8)[1]
            for output in (made.topk_weights, made.probs, made.shares, lanes):
                found += torch.autograd.grad(output, leaf, grad(output), retain_graph=True)
        assert all(map(torch.equal, found[:4], found[4:])), name
    values = torch.rand(5, 8)
    for made, expected in zip(LanesOfMap.apply(routing_map, negative(values), 8), LanesOfMap.apply(routing_map, values, 8), strict=True):
        assert torch.equal(made, expected)
    for made, expected in zip(ops.quantize_fp8(negative(X)), ops.quantize_fp8(X), strict=True):
        assert torch.equal(made.float(), expected.float())


@pytest.mark.gpu
@on_ranks(1)
def test_on_a_gpu(rank):
    """Calls in C++ leave them to Python, which refuses them."""
    device = device_of("nvlink", rank)
    x, idx, weights, logits = X.to(device), IDX.to(device), WEIGHTS.to(device), torch.randn(5, 8).to(device)
    buffer = make_buffer("nvlink")
    for name, arguments in (("x", (negative(x), idx)), ("topk_weights", (x, idx, negative(weights)))):
        with pytest.raises(ValueError, match=f"{name} is a lazy negative"):
            buffer.dispatch(*arguments)
    with pytest.raises(ValueError, match="logits is a lazy negative"):
        ops.gate(negative(logits), 2)
