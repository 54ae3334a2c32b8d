"""Gradients whose values are not those of their memory, such as its negative, are read. Such arguments are refused: test_watchers.py."""

import torch
from error_cases import IDX, WEIGHTS, X, imaginary, make_buffer, negative
from exchange_cases import BACKENDS, device_of
from on_ranks import on_ranks

from deepep_moe import ops
from deepep_moe.exchange.by_expert import combine_by_expert, dispatch_by_expert
from deepep_moe.ops.lanes import LanesOfMap


def numbers(like):
    return torch.arange(1.0, like.numel() + 1, device=like.device).view(like.shape).to(like.dtype)


def lazy_zeros(like):
    return torch._efficientzerotensor(like.shape, dtype=like.dtype, device=like.device)


PAIRS = {  # gradients that are read, and the same ones in plain memory
    "negative": (lambda like: negative(numbers(like)), numbers),
    "imaginary": (lambda like: imaginary(numbers(like)), numbers),
    "zeros": (lazy_zeros, torch.zeros_like),
    "sparse": (lambda like: numbers(like).to_sparse(), numbers),
    "between pieces": (lambda like: torch.cat([like.new_zeros(1), numbers(like).flatten()])[1:].view(like.shape), numbers),
    "expanded": (lambda like: torch.ones((), dtype=like.dtype, device=like.device).expand(like.shape), torch.ones_like),
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
    gradients = []
    for output, leaves in (
        (out.recv_x, (x,)), (out.recv_topk_weights, (weights,)), (again.recv_x, (x,)), (combined, (rows, row_weights, x)), (plain, (rows,)),
        (by_expert, (x, weights)), (parts[0], (x,)),
    ):  # fmt: skip
        grads = torch.autograd.grad(output, leaves, grad(output), retain_graph=True)
        gradients += [grad.to_dense() if grad.is_sparse else grad for grad in grads]  # that of a bias is the gradient itself
    return gradients


@on_ranks(2, backend=BACKENDS)
def test_gradients_of_the_exchange(rank, backend):
    device = device_of(backend, rank)
    buffer, inputs = make_buffer(backend), [tensor.to(device) for tensor in (X, IDX, WEIGHTS)]
    for name, (lazy, plain) in PAIRS.items():
        for is_one_rank in (False, True):  # lazy
            actual = gradients_of_layers(buffer, *inputs, plain if is_one_rank and rank == 0 else lazy)
            expected = gradients_of_layers(buffer, *inputs, plain)
            assert all(map(torch.equal, actual, expected)), name


def test_gradients_of_operations():
    logits, routing_map = torch.randn(5, 8), torch.rand(5, 8) > 0.7
    for name, (lazy, plain) in PAIRS.items():
        grads = []
        for grad in (lazy, plain):
            leaf = logits.clone().requires_grad_()
            actual = ops.gate_full(leaf, 2, dense=True, shares=True)
            lanes = LanesOfMap.apply(routing_map, leaf, 8)[1]
            for output in (actual.topk_weights, actual.probs, actual.shares, lanes):
                grads += torch.autograd.grad(output, leaf, grad(output), retain_graph=True)
        assert all(map(torch.equal, grads[:4], grads[4:])), name
    values = torch.rand(5, 8)
    for actual, expected in zip(LanesOfMap.apply(routing_map, negative(values), 8), LanesOfMap.apply(routing_map, values, 8), strict=True):
        assert torch.equal(actual, expected)
    for actual, expected in zip(ops.quantize_fp8(negative(X)), ops.quantize_fp8(X), strict=True):
        assert torch.equal(actual.float(), expected.float())
