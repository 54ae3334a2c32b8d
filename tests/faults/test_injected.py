"""Faults at each step of a call: one rank fails, the others learn it at once, and the next calls of all ranks are right."""

import contextlib
import itertools
import time
from functools import partial

import pytest
import torch
from events import tell, wait_for
from exchange_cases import look
from fault_cases import ERRORS, MOMENTS, SOON_S, alarm, check_told, fault, inputs, make, make_call, make_step, moments, outcome, routing
from on_ranks import on_ranks

from deepep_moe.errors import EPPeerError

SLOW = [pytest.param(*size, marks=pytest.mark.slow) for size in (("shm", 2), ("collective", 5), ("two hops", 6))]
CPUS = [("shm", 3), ("collective", 3), ("two hops", 4), *SLOW]
GPUS = [pytest.param("nvlink", num_ranks, marks=pytest.mark.gpu) for num_ranks in (2, 3)]


def check_told_of(buffer, culprit, error, raised, elapsed_s, what):
    """The culprit raises its own error. A peer raises EPPeerError in the same call, or in the next one if it has all rows of this one."""
    if buffer.rank == culprit:
        assert raised is error, f"{what}: {raised!r}"
        return
    in_next_call = raised is None
    if in_next_call:
        raised, elapsed_s = outcome(lambda: buffer.dispatch(*inputs(buffer, 0)))
    assert isinstance(raised, EPPeerError) and raised.rank == culprit, f"{what}: {raised!r}"
    assert f"{type(error).__name__}: {error}" in str(raised) and f"rank {culprit}" in str(raised), f"{what}: {raised}"
    assert elapsed_s < SOON_S, what
    is_entered = what[1] != "before entry" and (buffer.backend, what[1]) != ("nvlink", "before rows are allocated")  # there is a guess
    is_over = what[1] in ("after rows", "waiting for rows")
    assert in_next_call is (is_over or (buffer.backend != "shm" and is_entered)), what


@pytest.mark.parametrize(("kind", "num_ranks"), [*CPUS, *GPUS])
@on_ranks((), is_async=(False, True))
def test_faults(rank, num_ranks, kind, is_async):
    buffer = make(kind, num_ranks)
    handle = buffer.dispatch(*inputs(buffer, 0)).handle

    def call(operation):
        output = make_call(buffer, operation, handle, async_op=is_async)
        if is_async:  # the event raises
            (output[1] if operation == "combine" else output.event).wait()
        look(buffer)

    for step, (operation, moment) in enumerate(moments(kind)):
        for kind_of_error in (ERRORS[step % 2 * 2],) if is_async else ERRORS:  # an interrupt is for the main thread
            culprit, error = (step + len(kind_of_error.__name__)) % num_ranks, kind_of_error(f"fault {step}")
            with fault(buffer, moment, error) if rank == culprit else contextlib.nullcontext():
                ended = outcome(partial(call, operation))
            check_told_of(buffer, culprit, error, *ended, (operation, moment, kind_of_error))
            make_step(buffer, step)


# ---- interrupts ----


@pytest.mark.parametrize(("kind", "num_ranks"), CPUS)
@on_ranks(())
def test_interrupts_in_entry(rank, num_ranks, kind):
    """A signal's handler raises while this rank waits for peers to enter. A process group lets it raise once they have."""
    buffer = make(kind, num_ranks)
    handle = buffer.dispatch(*inputs(buffer, 0)).handle
    for step, operation in enumerate(MOMENTS):
        culprit, error = step % num_ranks, ERRORS[step](f"fault {step}")
        if rank != culprit:
            wait_for(f"left {step}") if kind == "shm" else time.sleep(0.3)
        with alarm(0.1, error) if rank == culprit else contextlib.nullcontext():
            ended = outcome(partial(make_call, buffer, operation, handle))
        if rank == culprit:
            tell(f"left {step}")
        check_told_of(buffer, culprit, error, *ended, (operation, "in entry"))
        make_step(buffer, step)


@on_ranks((3, pytest.param(5, marks=pytest.mark.slow)))
def test_interrupts_between_chunks(rank, num_ranks):
    """The rings are full: the last rank does not drain them before the culprit has left."""
    hidden, num_tokens, late = 4096, 500, num_ranks - 1
    buffer = make("shm", num_ranks, hidden=hidden, num_tokens=num_tokens)
    x, idx, error = torch.full((num_tokens, hidden), float(rank)), routing(num_ranks, num_tokens), KeyboardInterrupt("fault")
    move, culprit = buffer.calls._move, 0
    if rank == late:
        buffer.calls._move = lambda *args: (wait_for("left"), move(*args))
    with alarm(0.3, error) if rank == culprit else contextlib.nullcontext():
        ended = outcome(lambda: buffer.dispatch(x, idx))
    if rank == culprit:
        tell("left")
    buffer.calls._move = move
    check_told_of(buffer, culprit, error, *ended, ("a dispatch", "between chunks"))
    out = buffer.dispatch(x, idx)
    sources = out.recv_x.view(2, num_ranks, -1, hidden)  # by local expert, then source
    assert (sources == torch.arange(num_ranks).view(1, -1, 1, 1)).all()
    assert (buffer.combine(torch.ones_like(out.recv_x), out.handle) == num_ranks).all()


@on_ranks(3)
def test_interrupts_of_low_latency_calls(rank, num_ranks):
    """Peers learn them at once: where they have the rows of the call, in the next one. A combine with weights of its own waits for the
    peers before it sends."""
    buffer = make("low latency", num_ranks)
    x, idx = inputs(buffer, 0)
    handle = buffer.dispatch(x, idx).handle
    rows, weights = x.new_ones(buffer.num_local_experts, buffer.capacity, buffer.hidden), x.new_ones(idx.shape)
    dispatch, combine = partial(buffer.dispatch, x, idx), partial(buffer.combine, rows, handle)
    weighted = partial(combine, topk_weights=weights)
    calls = dispatch, combine, weighted, lambda: weighted(return_hook=True)[1]()
    for (step, call), kind_of_error in itertools.product(enumerate(calls), ERRORS):
        culprit, error = (step + len(kind_of_error.__name__)) % num_ranks, kind_of_error(f"fault {step}")
        left = f"left {step} {kind_of_error.__name__}"
        if rank != culprit:
            wait_for(left)
        with alarm(0.1, error) if rank == culprit else contextlib.nullcontext():
            ended = outcome(call)
        if rank == culprit:
            tell(left)
        elif step < 2:
            assert ended[0] is None, f"the rows were there: {ended[0]!r}"
            ended = outcome(dispatch)
        check_told(rank, culprit, error, *ended, f"{kind_of_error.__name__}: {error}")
        make_step(buffer, step)
