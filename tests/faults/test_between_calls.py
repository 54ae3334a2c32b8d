"""Failures between the calls of a layer, forwards and backwards: the peers learn them at once, and all go on."""

import contextlib
from functools import partial

import pytest
import torch
from exchange_cases import device_of
from fault_cases import SOON_S, outcome
from on_ranks import on_ranks

from deepep_moe import Buffer
from deepep_moe.errors import BufferDestroyedError, EPPeerError
from deepep_moe.nn import MoELayer, Router
from deepep_moe.testing import run_ranks

HIDDEN = 16
IN_FORWARD = (KeyboardInterrupt, SystemExit, MemoryError)


class Raises(torch.autograd.Function):
    """Its backward fails."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ctx.error


class Expert(torch.nn.Linear):
    fails, in_backward = None, None

    def forward(self, x):
        if self.fails is not None:
            raise self.fails
        y = super().forward(x)
        return y if self.in_backward is None else Raises.apply(y, self.in_backward)


def fail(error, *_):
    raise error


def learns(rank, error, found, elapsed_s, reason):
    if rank == 1:
        assert found is error, repr(found)
    else:
        assert isinstance(found, EPPeerError) and found.rank == 1 and elapsed_s < SOON_S, repr(found)
        assert f"rank 1 did not make its call: {reason}" in str(found), found
        assert found.cause == reason.split(":")[0], found.cause


def make_model(rank, num_ranks, backend):
    device = device_of(backend, rank)
    torch.manual_seed(rank)
    buffer = Buffer(None, 8, HIDDEN, 2 * num_ranks, 2, backend=backend)
    layers = [
        MoELayer(Router(HIDDEN, 2 * num_ranks, 2), [Expert(HIDDEN, HIDDEN) for _ in range(2)], Expert(HIDDEN, HIDDEN), buffer=buffer)
        for _ in range(2)
    ]
    experts = [layer.experts.experts[1] for layer in layers]
    return torch.nn.Sequential(*layers).to(device), torch.randn(8, HIDDEN, device=device), experts, buffer


def make_step(model, x):
    model.zero_grad()
    model(x).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def fails(rank, num_ranks, backend):
    model, x, experts, _ = make_model(rank, num_ranks, backend)
    expert = experts[1]
    step = partial(make_step, model, x)
    step()
    for kind_of_error in IN_FORWARD:
        error = kind_of_error("of an expert")
        expert.fails = error if rank == 1 else None
        learns(rank, error, *outcome(partial(model, x)), f"{kind_of_error.__name__}: of an expert")
        expert.fails = None
        step()
    for kind_of_error in (RuntimeError, KeyboardInterrupt):
        error = kind_of_error("of a backward")
        expert.in_backward = error if rank == 1 else None
        learns(rank, error, *outcome(step), "RuntimeError: its backward pass failed; see its output for the error")
        expert.in_backward = None
        step()
    error = RuntimeError("of a hook")
    hook = expert.weight.register_hook(partial(fail, error)) if rank == 1 else None
    learns(rank, error, *outcome(step), "RuntimeError: its backward pass failed; see its output for the error")
    if hook is not None:
        hook.remove()
    for _ in range(2):
        step()


@pytest.mark.parametrize("backend", ("shm", "collective"))
@pytest.mark.parametrize("num_ranks", (2, pytest.param(3, marks=pytest.mark.slow)))
def test_layer(num_ranks, backend):
    run_ranks(fails, num_ranks, backend)


@pytest.mark.gpu
@on_ranks((2, 3))
def test_layer_on_gpus(rank, num_ranks):
    """A peer has made calls that the culprit has not by the time that it learns it: where it next looks."""
    model, x, experts, buffer = make_model(rank, num_ranks, "nvlink")
    expert = experts[1]

    def step():
        model.zero_grad()
        model(x).sum().backward()
        torch.cuda.synchronize()
        buffer.check()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())

    step()
    for where in ("fails", "in_backward", "fails", "in_backward"):
        error = RuntimeError(where)
        setattr(expert, where, error if rank == 1 else None)
        reason = "RuntimeError: fails" if where == "fails" else "RuntimeError: its backward pass failed; see its output for the error"
        learns(rank, error, *outcome(step), reason)
        setattr(expert, where, None)
        buffer.recover()
        step()


@on_ranks(1)
def test_ends_that_are_no_failures(rank, num_ranks):
    """The end of a generator, and of a recomputation, are no failures."""
    from deepep_moe.exchange.failures import notify_peers_on_failure

    buffer = Buffer(None, 8, HIDDEN, 2 * num_ranks, 2)
    with contextlib.suppress(GeneratorExit):
        notify_peers_on_failure(buffer, fail, GeneratorExit())
    assert buffer.num_calls == 0


@on_ranks(2, backend=("shm", "collective", pytest.param("nvlink", marks=pytest.mark.gpu)))
def test_recovery(rank, num_ranks, backend):
    """Ranks that have made different numbers of calls are in step again."""
    model, x, experts, buffer = make_model(rank, num_ranks, backend)
    expert = experts[0]
    step = partial(make_step, model, x)
    step()
    for turn in range(3):
        error = RuntimeError("of an expert")
        expert.fails = error if rank == turn % num_ranks else None
        found, elapsed_s = outcome(partial(model, x))
        expert.fails = None
        assert (found is error if rank == turn % num_ranks else isinstance(found, EPPeerError)) and elapsed_s < SOON_S, repr(found)
        if backend != "collective":  # there a refusal waits for the peers
            for _ in range(rank * turn):
                buffer.refuse(RuntimeError("alone"))
        num_calls = buffer.num_calls
        buffer.recover()
        assert buffer.num_calls >= num_calls
        step()
    buffer.calls.destroy()
    with pytest.raises(BufferDestroyedError):
        buffer.recover()
