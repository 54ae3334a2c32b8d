"""Dispatches that return before the host knows how many rows come, against plain ones, bit for bit."""

from copy import deepcopy

import pytest
import torch
from error_cases import on_gpus
from exchange_cases import assert_all_same, assert_same, look
from on_ranks import on_ranks

from deepep_moe import Buffer
from deepep_moe.errors import EPPeerError
from deepep_moe.nn import GroupedExperts, Metrics, MoELayer, Router, SwiGLU

EVEN, TO_ONE = [[0, 2], [1, 3], [3, 0], [2, 1]], [[0, 1], [1, 0], [0, 1], [1, 0]]  # 2 experts a rank: all rows of TO_ONE go to rank 0


def plain_layer(buffer, x, idx, weights):
    """Return outputs and gradients of a layer whose experts double their rows."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = buffer.dispatch(x, idx, weights)
    y = buffer.combine(2 * out.recv_x, out.handle, out.recv_topk_weights)
    return y, *torch.autograd.grad(y.sum(), (x, weights))


def late_layer(buffer, x, idx, weights, before_settle=lambda: None):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = buffer.dispatch(x, idx, weights, num_recv_rows="guess")
    was_late = out.handle.is_late
    rows = 2 * out.recv_x
    before_settle()
    settled = buffer.settle(out)
    if settled is not out:
        rows = 2 * settled.recv_x
        assert not settled.handle.is_late and buffer.settle(settled) is settled
        assert len(settled.recv_x) == sum(settled.handle.num_rows_per_expert_list) > len(out.recv_x)
    y = buffer.combine(rows, settled.handle, settled.recv_topk_weights)
    return was_late, settled is not out, (y, *torch.autograd.grad(y.sum(), (x, weights)))


@pytest.mark.gpu
@on_ranks(2, calls_between=(False, True), sums=("ranks", "lanes", "lanes_fma"))
def test_rows_that_fit_and_rows_that_do_not(rank, calls_between, sums):
    """Ranks have a guess from the third dispatch on. Then rank 0 gets twice as many rows and rank 1 none; neither needs the other to know.
    The counts may also be asked for by the buffer's next call, on the way to a combine of another dispatch."""
    (buffer, x, _), (twin, _, _) = on_gpus(rank, sums=sums), on_gpus(rank, sums=sums)
    even, to_one = (torch.tensor(idx, device=x.device) for idx in (EVEN, TO_ONE))
    weights = torch.rand(4, 2, device=x.device)
    other = buffer.dispatch(x, even, layer=1)

    def between():
        if calls_between:
            assert_same("combined_x", buffer.combine(other.recv_x, other.handle), 2 * x)

    for idx, is_late, misses in ((even, False, False), (even, False, False), (even, True, False), (to_one, True, rank == 0)):
        was_late, has_missed, results = late_layer(buffer, x, idx, weights, between)
        assert (was_late, has_missed) == (is_late, misses)
        assert_all_same("results", results, plain_layer(twin, x, idx, weights))


@pytest.mark.gpu
@on_ranks(2)
def test_guesses_that_come_to_nothing(rank):
    """Rows that did not fit and are combined, or whose gradient is asked for, and another buffer's output: refused on all ranks. A refusal
    after a late dispatch is the next call of the rank, and nobody can read the counts after it. The buffer goes on after `recover`."""
    (buffer, x, _), (other, _, _) = on_gpus(rank), on_gpus(rank)
    even, to_one = (torch.tensor(idx, device=x.device) for idx in (EVEN, TO_ONE))
    leaf = x.clone().requires_grad_()

    def guessed(idx, rows=x):
        for _ in range(2):
            buffer.combine((out := buffer.dispatch(x, even)).recv_x, out.handle)
        out = buffer.dispatch(rows, idx, num_recv_rows="guess")
        assert out.handle.is_late
        return out

    out = guessed(to_one)
    error, text = (ValueError, r"x has shape .*\[8, 16\]") if rank == 0 else (EPPeerError, "rank 0 did not make its call")
    with pytest.raises(error, match=text):
        buffer.combine(out.recv_x, out.handle)
        look(buffer)
    buffer.recover()
    out = guessed(to_one, leaf)
    with pytest.raises(ValueError, match="handle belongs to buffer"):
        other.settle(out)
    error, text = (RuntimeError, "the rows of this dispatch did not fit") if rank == 0 else (EPPeerError, "rank 0 did not")
    with pytest.raises(error, match=text):
        out.recv_x.sum().backward()
        look(buffer)
    buffer.recover()
    out = guessed(even)
    buffer.refuse(ValueError("an expert has failed"))
    for call in (lambda: buffer.settle(out), lambda: buffer.combine(out.recv_x, out.handle)):
        with pytest.raises(RuntimeError, match="the counts of this dispatch are lost"):
            call()
    buffer.recover()
    late = buffer.dispatch(x, even, num_recv_rows="guess")
    buffer.recover()
    again = buffer.dispatch(x, even)  # while `late` is kept
    assert_same("combined_x", buffer.combine(again.recv_x, again.handle), 2 * x)
    with pytest.raises(RuntimeError, match="the counts of this dispatch are lost"):
        buffer.settle(late)


class Called(torch.nn.Module):
    """Experts that a layer does not know, and whose rows it does not guess."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, counts):
        return self.experts(x, counts)


@pytest.mark.gpu
@on_ranks(2)
def test_layers_with_grouped_experts(rank):
    """The third forward guesses its rows. In the fourth all tokens go to rank 0, whose experts run twice. In the fifth rank 1 has no guess,
    as its last two dispatches differed."""
    (buffer, x, _), (twin, _, _) = on_gpus(rank), on_gpus(rank)
    router = Router(16, 4, 2, expert_bias=True, device=x.device)
    experts, shared = GroupedExperts(2, 16, 8, device=x.device), SwiGLU(16, 8, device=x.device)
    layer, called = (MoELayer(router, module, shared, buffer=one) for module, one in ((experts, buffer), (Called(deepcopy(experts)), twin)))
    metrics = Metrics(layer)
    for bias in ([1.0, 0, 1, 0], [0, 1.0, 0, 1], [1.0, 0, 1, 0], [1.0, 1, 0, 0], [0, 0, 1.0, 1]):
        router.expert_bias.copy_(torch.tensor(bias) * 10)
        results = []
        for module in (layer, called):
            module.zero_grad()
            y = module(x)
            y.square().sum().backward()
            results.append([y.detach(), *(parameter.grad.clone() for parameter in module.parameters())])
        torch.testing.assert_close(*results, rtol=0, atol=0)
    for _ in range(2):
        layer(x)
    error = ValueError if rank == 0 else EPPeerError  # the peer has a guess, and learns of it when it settles
    with pytest.raises(error, match=r"its last dimension must be hidden, 16"):
        layer(x[:, :8] if rank == 0 else x)
    torch.testing.assert_close(layer(x), called(x), rtol=0, atol=0)
    (report,) = metrics.take()
    assert (report.num_repeats, sum(report.rows_per_expert)) == (1, 8 * 2 * 4 * 2), report


@on_ranks(2)
def test_cpus_count_at_once(rank):
    """There is nothing to queue, so a guess would save nothing."""
    buffer = Buffer(None, 4, 16, 4, 2, backend="shm")
    x, idx = torch.randn(4, 16), torch.tensor(EVEN)
    for _ in range(3):
        out = buffer.dispatch(x, idx, num_recv_rows="guess")
        assert not out.handle.is_late and buffer.settle(out) is out
        assert_same("combined_x", buffer.combine(out.recv_x, out.handle), 2 * x)
    with pytest.raises(TypeError, match="num_recv_rows"):
        buffer.dispatch(x, idx, num_recv_rows="most")
