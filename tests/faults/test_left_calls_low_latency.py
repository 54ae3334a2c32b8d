"""Faults in low-latency calls over shared memory: peers learn them at once, in this call or, where they have its rows, in the next."""

import contextlib

from events import tell, wait_for
from fault_cases import ERRORS, SOON_S, alarm, inputs, make, make_step, once, outcome
from on_ranks import on_ranks

from deepep_moe.errors import EPPeerError


def calls_of(buffer, handle):
    x, idx = inputs(buffer, 0)
    rows = x.new_ones(buffer.num_local_experts, buffer.capacity, buffer.hidden)
    return {"dispatch": lambda: buffer.dispatch(x, idx), "combine": lambda: buffer.combine(rows, handle)}


def check_told(rank, culprit, error, found, elapsed_s, what):
    if rank == culprit:
        assert found is error, f"{what}: {found!r}"
        return
    assert isinstance(found, EPPeerError) and found.rank == culprit and elapsed_s < SOON_S, f"{what}: {found!r}"
    assert f"rank {culprit} did not make its call: {type(error).__name__}: {error}" in str(found), what
    assert found.cause == type(error).__name__, what


@on_ranks(3)
def test_faults_before_entry(rank, num_ranks):
    buffer = make("low latency", num_ranks)
    calls = calls_of(buffer, buffer.dispatch(*inputs(buffer, 0)).handle)
    for step, (operation, call) in enumerate(calls.items()):
        for kind_of_error in ERRORS:
            culprit, error = (step + len(kind_of_error.__name__)) % num_ranks, kind_of_error(f"fault {step}")
            own = buffer._backend.empty
            if rank == culprit:
                buffer._backend.empty = once(own, error)
            check_told(rank, culprit, error, *outcome(call), (operation, kind_of_error))
            buffer._backend.empty = own
            make_step(buffer, step)


@on_ranks(3)
def test_interrupts(rank, num_ranks):
    buffer = make("low latency", num_ranks)
    calls = calls_of(buffer, buffer.dispatch(*inputs(buffer, 0)).handle)
    for step, (operation, call) in enumerate(calls.items()):
        for kind_of_error in ERRORS:
            culprit, error = (step + len(kind_of_error.__name__)) % num_ranks, kind_of_error(f"fault {step}")
            if rank != culprit:
                wait_for(f"left {step} {kind_of_error.__name__}")
            with alarm(0.1, error) if rank == culprit else contextlib.nullcontext():
                found = outcome(call)
            if rank == culprit:
                tell(f"left {step} {kind_of_error.__name__}")
            else:
                assert found[0] is None, f"the rows were there: {found[0]!r}"
                found = outcome(calls["dispatch"])
            check_told(rank, culprit, error, *found, (operation, kind_of_error))
            make_step(buffer, step)


@on_ranks(3)
def test_interrupts_of_a_combine_with_weights(rank, num_ranks):
    """A combine with weights of its own waits for the peers before it sends, so they have no rows, and learn it in this call."""
    buffer = make("low latency", num_ranks)
    x, idx = inputs(buffer, 0)
    handle = buffer.dispatch(x, idx).handle
    rows, weights = x.new_ones(buffer.num_local_experts, buffer.capacity, buffer.hidden), x.new_ones(idx.shape)
    for step, kind_of_error in enumerate(ERRORS):
        for return_hook in (False, True):
            culprit, error, what = (step + return_hook) % num_ranks, kind_of_error(f"fault {step}"), (kind_of_error, return_hook)
            if rank != culprit:
                wait_for(f"left {step} {return_hook}")

            def call(return_hook=return_hook):
                made = buffer.combine(rows, handle, topk_weights=weights, return_hook=return_hook)
                return made[1]() if return_hook else made

            with alarm(0.1, error) if rank == culprit else contextlib.nullcontext():
                found = outcome(call)
            if rank == culprit:
                tell(f"left {step} {return_hook}")
            check_told(rank, culprit, error, *found, what)
            make_step(buffer, step)
