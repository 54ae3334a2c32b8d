"""Failures between the calls of a layer, forwards and backwards: the peers learn them at once, and all go on."""

import contextlib
import threading
from functools import partial

import pytest
import torch
from exchange_cases import BACKENDS, device_of, look
from fault_cases import SOON_S, FailsInBackward, check_told, outcome
from on_ranks import on_ranks

from deepep_moe import Buffer
from deepep_moe.errors import BufferDestroyedError, EPPeerError
from deepep_moe.exchange.calls import notify_peers_on_failure
from deepep_moe.nn import MoELayer, Router
from deepep_moe.worker import Worker

HIDDEN = 16


class Expert(torch.nn.Linear):
    fails, in_backward = None, None

    def forward(self, x):
        if self.fails is not None:
            raise self.fails
        y = super().forward(x)
        return y if self.in_backward is None else FailsInBackward.apply(y, self.in_backward)


def fail(error, *_):
    raise error


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


def make_step(model, x, buffer):
    model.zero_grad()
    model(x).sum().backward()
    look(buffer)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


BACKWARD_FAILED = "RuntimeError: its backward pass failed; see its output for the error"
IN_FORWARD = [("fails", kind_of_error) for kind_of_error in (KeyboardInterrupt, SystemExit, MemoryError)]
IN_BACKWARD = [("in_backward", kind_of_error) for kind_of_error in (RuntimeError, KeyboardInterrupt)]
ON_GPUS = [("fails", RuntimeError), ("in_backward", RuntimeError)] * 2


def fails(rank, num_ranks, backend):
    model, x, experts, buffer = make_model(rank, num_ranks, backend)
    expert, step = experts[1], partial(make_step, model, x, buffer)
    step()
    for where, kind_of_error in ON_GPUS if backend == "nvlink" else IN_FORWARD + IN_BACKWARD:
        error = kind_of_error("of an expert")
        setattr(expert, where, error if rank == 1 else None)
        check_told(rank, 1, error, *outcome(step), f"{kind_of_error.__name__}: of an expert" if where == "fails" else BACKWARD_FAILED)
        setattr(expert, where, None)
        if backend == "nvlink":  # a peer has made calls that the culprit has not by the time that it learns it, where it next looks
            buffer.recover()
        step()
    if backend == "nvlink":
        return
    error = RuntimeError("of a hook")
    hook = expert.weight.register_hook(partial(fail, error)) if rank == 1 else None
    check_told(rank, 1, error, *outcome(step), BACKWARD_FAILED)
    if hook is not None:
        hook.remove()
    for _ in range(2):
        step()


@on_ranks((2, pytest.param(3, marks=pytest.mark.slow)), backend=("shm", "collective"))
def test_layer(rank, num_ranks, backend):
    fails(rank, num_ranks, backend)


@pytest.mark.gpu
@on_ranks((2, 3))
def test_layer_on_gpus(rank, num_ranks):
    fails(rank, num_ranks, "nvlink")


def test_ends_that_are_no_failures():
    """The end of a generator, and of a recomputation, are no failures."""
    buffer = Buffer(None, 8, HIDDEN, 2, 2)
    with contextlib.suppress(GeneratorExit):
        notify_peers_on_failure(buffer, fail, GeneratorExit())
    assert buffer.num_calls == 0


@on_ranks(2)
def test_asynchronous_calls(rank, num_ranks):
    """A call is made once it is submitted, whenever the thread enters it: what fails before its function returns is no failure of the next
    call, and what fails afterwards is one."""
    buffer, x, error = Buffer(None, 8, HIDDEN, 2, 1, backend="shm"), torch.ones(8, HIDDEN), RuntimeError("of an expert")
    out = buffer.dispatch(x, torch.arange(8).view(-1, 1) % 2)

    def combine():
        return buffer.combine(out.recv_x, out.handle, async_op=True)[1]

    def dispatch():
        return buffer.dispatch(x, handle=out.handle, async_op=True).event

    def fail_once_entered(go_on, event):
        go_on.set()
        event.wait()
        fail(error)

    for call in (combine, dispatch):
        if rank == 1:
            buffer.calls._worker, go_on = Worker(), threading.Event()
            buffer.calls._worker.submit(go_on.wait)  # before it enters the call
            raised, elapsed_s = outcome(partial(notify_peers_on_failure, buffer, fail_once_entered, go_on, call()))
        else:
            call().wait()
            raised, elapsed_s = outcome(combine().wait)
        check_told(rank, 1, error, raised, elapsed_s, "RuntimeError: of an expert")
        if rank == 1:
            buffer.calls._worker, go_on = Worker(), threading.Event()
            buffer.calls._worker.submit(go_on.wait)
            threading.Timer(0.3, go_on.set).start()
            assert outcome(partial(notify_peers_on_failure, buffer, lambda: fail(error, call())))[0] is error  # noqa: B023
        else:
            call().wait()
        assert torch.equal(buffer.combine(out.recv_x, out.handle), x)


@on_ranks(2, backend=BACKENDS)
def test_recovery(rank, num_ranks, backend):
    """Ranks that have made different numbers of calls are in step again."""
    model, x, experts, buffer = make_model(rank, num_ranks, backend)
    expert = experts[0]
    step = partial(make_step, model, x, buffer)
    step()
    for turn in range(3):
        error = RuntimeError("of an expert")
        expert.fails = error if rank == turn % num_ranks else None
        raised, elapsed_s = outcome(partial(model, x))
        expert.fails = None
        assert (raised is error if rank == turn % num_ranks else isinstance(raised, EPPeerError)) and elapsed_s < SOON_S, repr(raised)
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
