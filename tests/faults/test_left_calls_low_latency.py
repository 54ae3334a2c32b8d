"""Faults in low-latency calls over shared memory: peers learn them at once, in this call or, where they have its rows, in the next."""

import contextlib
import itertools
from functools import partial

import pytest
from events import tell, wait_for
from fault_cases import ERRORS, alarm, check_told, inputs, make, make_step, once, outcome
from on_ranks import on_ranks


@pytest.mark.parametrize("is_interrupt", (False, True), ids=("faults before entry", "interrupts"))
@on_ranks(3)
def test_left_calls(rank, num_ranks, is_interrupt):
    buffer = make("low latency", num_ranks)
    x, idx = inputs(buffer, 0)
    handle, stock = buffer.dispatch(x, idx).handle, buffer._backend.empty
    rows = x.new_ones(buffer.num_local_experts, buffer.capacity, buffer.hidden)
    calls = partial(buffer.dispatch, x, idx), partial(buffer.combine, rows, handle)
    for (step, call), kind_of_error in itertools.product(enumerate(calls), ERRORS):
        culprit, error = (step + len(kind_of_error.__name__)) % num_ranks, kind_of_error(f"fault {step}")
        left = f"left {step} {kind_of_error.__name__}"
        if is_interrupt and rank != culprit:
            wait_for(left)
        if not is_interrupt and rank == culprit:
            buffer._backend.empty = once(stock, error)
        with alarm(0.1, error) if is_interrupt and rank == culprit else contextlib.nullcontext():
            ended = outcome(call)
        buffer._backend.empty = stock
        if rank == culprit:
            tell(left)
        elif is_interrupt:
            assert ended[0] is None, f"the rows were there: {ended[0]!r}"
            ended = outcome(calls[0])
        check_told(rank, culprit, error, *ended, f"{kind_of_error.__name__}: {error}")
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
            culprit, error = (step + return_hook) % num_ranks, kind_of_error(f"fault {step}")
            if rank != culprit:
                wait_for(f"left {step} {return_hook}")

            def call(return_hook=return_hook):
                output = buffer.combine(rows, handle, topk_weights=weights, return_hook=return_hook)
                return output[1]() if return_hook else output

            with alarm(0.1, error) if rank == culprit else contextlib.nullcontext():
                ended = outcome(call)
            if rank == culprit:
                tell(f"left {step} {return_hook}")
            check_told(rank, culprit, error, *ended, f"{kind_of_error.__name__}: {error}")
            make_step(buffer, step)
