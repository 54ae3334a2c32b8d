"""Failures of the nvshmem backend: who raises what, names whom, and whether the buffer serves afterwards. Two nodes of two ranks.

The culprit has the number c. Its `mate` is the other rank of its node, its `rail` the rank with its index in the other node, and the `far`
rank is neither: it hears of the culprit through the ranks between.
"""

import logging
import os
import signal
from functools import partial

import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from events import tell, wait_for
from exchange_cases import device_of
from fault_cases import NUM_TOKENS, SOON_S, fault, inputs, look, make, make_call, make_step, outcome
from on_ranks import on_ranks

from deepep_moe import Buffer, nvshmem_module
from deepep_moe.errors import BackendUnavailableError, EPMismatchError, EPPeerError, EPTimeoutError
from deepep_moe.exchange.backends import select
from deepep_moe.exchange.failures import notify_peers
from deepep_moe.testing import run_ranks

pytestmark = pytest.mark.gpu
emulated_only = pytest.mark.skipif(not emulated_gpu.is_chosen(), reason="is about the emulated network")
DEADLINE_S = 4.0  # far from what a step takes on a busy machine
BETWEEN_NODES = "entry into the call, between nodes"
CULPRITS = (0, pytest.param(3, marks=pytest.mark.slow))


def part_of(rank: int, culprit: int) -> str:
    return ("culprit", "mate", "rail", "far")[rank ^ culprit]


def buffer_of(timeout_s=60.0):
    """A buffer that works: the first call is made."""
    buffer = make("nvshmem", 4, timeout_s)
    make_step(buffer, 0)
    dist.barrier()
    return buffer


def raised(call, error_type, *words):
    """The error of `call`, which holds `words` and came soon: long before the deadline of 60 s."""
    error, elapsed_s = outcome(call)
    assert isinstance(error, error_type), repr(error)
    assert all(word in str(error) for word in words), (str(error), words)
    assert elapsed_s < SOON_S, (elapsed_s, error)
    return error


def assert_refused(call, part, culprit, reason, cause):
    """A peer's error of a call that the culprit did not make for `reason`."""
    if part == "far":  # its rail met; the rank between has only the culprit's word
        error = raised(call, EPPeerError, f"rank {culprit ^ 2} did not make its call: EPPeerError: rank {culprit} did not make its call")
        assert (error.rank, error.cause) == (culprit ^ 2, "EPPeerError")
    else:
        error = raised(call, EPPeerError, f"rank {culprit} did not make its call: ", reason)
        assert (error.rank, error.cause) == (culprit, cause)


# ---- refusals ----


@pytest.mark.parametrize("culprit", CULPRITS)
@on_ranks(4)
def test_bad_routing(rank, culprit):
    buffer, part = buffer_of(), part_of(rank, culprit)
    x, good = inputs(buffer, 1)
    for step, (at, value, reason) in enumerate(
        [
            ((2, 1), 8, "topk_idx[2, 1] is 8; it must be -1 (no expert) or 0 to 7"),
            ((0, 3), -2, "topk_idx[0, 3] is -2; it must be -1 (no expert) or 0 to 7"),
            ((3, 2), int(good[3, 0]), f"topk_idx[3] names expert {int(good[3, 0])} twice; a token may choose an expert once"),
        ]
    ):
        idx = good.clone()
        if part == "culprit":
            idx[at] = value
            raised(partial(buffer.dispatch, x, idx), ValueError, reason)
        else:
            assert_refused(partial(buffer.dispatch, x, idx), part, culprit, f"ValueError: {reason}", "ValueError")
        make_step(buffer, 1 + step)
    buffer.destroy()


@pytest.mark.parametrize("culprit", CULPRITS)
@on_ranks(4)
def test_refused_arguments(rank, culprit):
    """A call that the host refuses: a dispatch, whose peers learn of it at once, and calls along a handle, whose hosts wait for nothing."""
    buffer, part = buffer_of(), part_of(rank, culprit)
    x, idx = inputs(buffer, 1)
    out = buffer.dispatch(x, idx)
    rows = torch.ones_like(out.recv_x)

    def wide(tensor):
        return tensor.double() if part == "culprit" else tensor

    def and_look(call):
        call()
        look(buffer)

    calls = (
        lambda: buffer.dispatch(wide(x), idx),
        lambda: and_look(lambda: buffer.combine(wide(rows), out.handle)),
        lambda: and_look(lambda: buffer.dispatch(wide(x), handle=out.handle)),
        lambda: and_look(lambda: buffer.dispatch(wide(x), idx, num_recv_rows=16)),
    )
    for step, call in enumerate(calls):
        if part == "culprit":
            raised(call, TypeError, "x has dtype float64")
        else:
            assert_refused(call, part, culprit, "TypeError: x has dtype float64", "TypeError")
        make_step(buffer, step + 1)
    for _ in range(3):  # in a row, and nobody makes a call in between
        if part == "culprit":
            raised(calls[0], TypeError, "x has dtype float64")
        else:
            assert_refused(calls[0], part, culprit, "TypeError: x has dtype float64", "TypeError")
    make_step(buffer, 9)
    buffer.destroy()


@pytest.mark.parametrize("culprit", CULPRITS)
@on_ranks(4)
def test_different_calls(rank, culprit):
    """The culprit combines while the others dispatch, or asks for another layout."""
    buffer, part = buffer_of(), part_of(rank, culprit)
    x, idx = inputs(buffer, 1)
    out = buffer.dispatch(x, idx)
    calls = {
        "combine of": (lambda: (buffer.combine(out.recv_x, out.handle), look(buffer)), lambda: buffer.dispatch(x, idx)),
        "layout rank": (lambda: buffer.dispatch(x, idx, layout="rank"), lambda: buffer.dispatch(x, idx)),
    }
    for step, (words, (ours, theirs)) in enumerate(calls.items()):
        call = ours if part == "culprit" else theirs
        if part in ("culprit", "rail"):
            me, peer = rank, rank ^ 2
            raised(call, EPMismatchError, f"ranks make different calls: rank {me}: ", f"; rank {peer}: ", words)
        else:
            found = rank ^ 1  # its neighbour in the node met another call
            told = f"rank {found} did not make its call: EPMismatchError: ranks make different calls: rank {found}: "
            error = raised(call, EPPeerError, told)
            assert (error.rank, error.cause) == (found, "EPMismatchError")
        make_step(buffer, step + 1)
    buffer.destroy()


# ---- failures before, after and between calls ----


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.error is not None:
            raise ctx.error
        return grad, None


@pytest.mark.parametrize("culprit", CULPRITS)
@on_ranks(4)
def test_injected_failures(rank, culprit):
    """Memory, interrupts, an expert, a gradient: peers hear in the call that the culprit does not make, or in the next one."""
    buffer, part = buffer_of(), part_of(rank, culprit)
    handle = buffer.dispatch(*inputs(buffer, 0)).handle

    def make_and_look(operation):
        make_call(buffer, operation, handle)
        look(buffer)

    for step, (operation, moment, kind) in enumerate(
        (
            ("dispatch", "before entry", MemoryError),
            ("dispatch", "after rows", KeyboardInterrupt),
            ("dispatch along a handle", "before entry", KeyboardInterrupt),
            ("combine", "after rows", MemoryError),
        )
    ):
        call, error = partial(make_and_look, operation), kind("fault")
        if part == "culprit":
            with fault(buffer, moment, error):
                assert outcome(call)[0] is error
        else:
            if moment == "after rows":
                call()
                call = partial(make_step, buffer, step)
            assert_refused(call, part, culprit, f"{kind.__name__}: fault", kind.__name__)
        make_step(buffer, step)
    if part == "culprit":
        notify_peers(buffer, RuntimeError("of an expert"))
    else:
        assert_refused(partial(make_step, buffer, 4), part, culprit, "RuntimeError: of an expert", "RuntimeError")
    make_step(buffer, 4)
    x, idx = inputs(buffer, 5)
    error = RuntimeError("of a gradient")
    out = buffer.dispatch(x.requires_grad_(), idx)
    y = buffer.combine(FailsInBackward.apply(out.recv_x, error if part == "culprit" else None), out.handle)
    if part == "culprit":
        assert outcome(y.sum().backward)[0] is error
    else:
        reason = "RuntimeError: its backward pass failed; see its output for the error"
        assert_refused(lambda: (y.sum().backward(), look(buffer)), part, culprit, reason, "RuntimeError")
    back_in_step(buffer)
    buffer.destroy()


# ---- deadlines ----


def back_in_step(buffer):
    """Once all have their errors, `recover` brings the ranks into step."""
    tell(f"rank {buffer.rank} has its error")
    wait_for(*(f"rank {peer} has its error" for peer in range(buffer.num_ranks)))
    buffer.recover()
    for step in range(2, 5):
        make_step(buffer, step)


def late(rank, num_ranks, culprit, operation):
    """The culprit comes once all others have given up on it."""
    buffer, part = buffer_of(DEADLINE_S), part_of(rank, culprit)
    x, idx = inputs(buffer, 1)
    out = buffer.dispatch(x, idx)
    number = buffer.num_calls + 1
    dist.barrier()
    if part == "culprit":
        wait_for(*(f"rank {culprit ^ other} gave up" for other in (1, 2, 3)))

    def call():
        if operation == "dispatch":
            buffer.dispatch(x, idx)
        else:
            buffer.combine(out.recv_x, out.handle)
        look(buffer)

    error, elapsed_s = outcome(call)
    tell(f"rank {rank} gave up")
    if part == "culprit":
        assert isinstance(error, EPTimeoutError | EPPeerError) and error.rank in (culprit ^ 1, culprit ^ 2), repr(error)
    elif part == "far":
        assert isinstance(error, EPPeerError) and error.rank == rank ^ 1, repr(error)
        assert f"rank {rank ^ 1}: rank {culprit} did not deliver within the deadline of 4000 ms; phase '{BETWEEN_NODES}'" in str(error)
    else:
        phase = BETWEEN_NODES if part == "rail" else "entry into the call"
        assert isinstance(error, EPTimeoutError), repr(error)
        assert (error.rank, error.phase, error.expected, error.seen) == (culprit, phase, number, number - 1), repr(error)
        deadline_ms = 4000 if part == "rail" else 6000  # a rank that waits for its rail speaks first
        assert f"rank {culprit} did not deliver within the deadline of {deadline_ms} ms;" in str(error), error
    assert elapsed_s < 2 * DEADLINE_S + SOON_S, (elapsed_s, error)
    back_in_step(buffer)
    buffer.destroy()


@pytest.mark.parametrize("operation", ("dispatch", pytest.param("combine", marks=pytest.mark.slow)))
def test_late_rank(operation):
    run_ranks(late, 4, {"dispatch": 3, "combine": 0}[operation], operation)


def lost(rank, num_ranks, culprit, num_arriving):
    """Of what the culprit sends over the network or is sent, `num_arriving` puts a process arrive: nothing, or entries without their
    rows."""
    os.environ["DEEPEP_MOE_EMULATED_NETWORK"] = f"lose={culprit},lose_after={num_arriving}"
    buffer, part = make("nvshmem", 4, DEADLINE_S), part_of(rank, culprit)
    assert buffer.calls.backend.rail._world.pe_of == (0, 1, 2, 3), "the option names a PE"

    def call():
        buffer.dispatch(*inputs(buffer, 1))
        look(buffer)

    error, elapsed_s = outcome(call)
    tell(f"rank {rank} has its error")
    wait_for(*(f"rank {peer} has its error" for peer in range(num_ranks)))  # a buffer that is destroyed is another error
    assert elapsed_s < 2 * DEADLINE_S + SOON_S, (elapsed_s, error)
    if part in ("culprit", "rail"):  # each misses the other
        phase = "rows of another node" if num_arriving else BETWEEN_NODES
        assert isinstance(error, EPTimeoutError), repr(error)
        assert (error.rank, error.phase, error.expected, error.seen) == (rank ^ 2, phase, 1, 0), repr(error)
        assert f"rank {rank}: rank {rank ^ 2} did not deliver within the deadline of 4000 ms" in str(error)
    elif num_arriving:  # the neighbour cannot pass on rows that it has not got
        assert isinstance(error, EPTimeoutError) and (error.rank, error.phase) == (rank ^ 1, "dispatch rows"), repr(error)
    else:
        assert isinstance(error, EPPeerError) and error.rank == rank ^ 1, repr(error)
        told = f"rank {rank ^ 1} did not make its call: EPTimeoutError: rank {rank ^ 1}: rank {rank ^ 3} did not deliver within the"
        assert told in str(error) and error.cause == "EPTimeoutError", error
    buffer.destroy()


@emulated_only
@pytest.mark.parametrize("num_arriving", (0, 1))
def test_network_that_loses(num_arriving):
    run_ranks(lost, 4, 2 - num_arriving, num_arriving)


# ---- a process that ends ----


def killed(rank, num_ranks, culprit):
    """The culprit's process ends between two calls. The survivors go on with a group and a buffer of their own."""
    buffer, part = buffer_of(DEADLINE_S), part_of(rank, culprit)
    if part == "culprit":
        os.kill(os.getpid(), signal.SIGKILL)
    error, elapsed_s = outcome(partial(make_step, buffer, 1))
    if part == "far":
        assert isinstance(error, EPPeerError) and error.rank == rank ^ 1 and f"rank {culprit} did not deliver" in str(error), repr(error)
    else:
        assert isinstance(error, EPTimeoutError) and error.rank == culprit, repr(error)
        assert error.phase == (BETWEEN_NODES if part == "rail" else "entry into the call"), repr(error)
        assert part == "rail" or "is gone; phase" in str(error), error
    assert elapsed_s < 2 * DEADLINE_S + SOON_S, (elapsed_s, error)
    tell(f"rank {rank} knows")
    survivors = [peer for peer in range(num_ranks) if peer != culprit]
    wait_for(*(f"rank {peer} knows" for peer in survivors))
    buffer.destroy()
    group = dist.new_group(survivors, backend="gloo", use_local_synchronization=True)
    for kind in ("shm", "collective"):
        other = make(kind, len(survivors), group=group)
        make_step(other, 1)
        other.destroy()
    tell(f"rank {rank} is done")
    wait_for(*(f"rank {peer} is done" for peer in survivors))


@pytest.mark.parametrize("culprit", CULPRITS)
def test_killed_rank(culprit):
    run_ranks(killed, 4, culprit, expected_dead=[culprit])


# ---- what cannot serve ----


def refusal_of(sizes, **settings):
    with pytest.raises((BackendUnavailableError, ValueError)) as info:
        Buffer(None, *sizes, timeout_s=60, **settings)
    return f"{info.type.__name__}: {info.value}"


def wrong_nodes(rank, num_ranks):
    device_of("nvshmem", rank)
    sizes = NUM_TOKENS, 16, 2 * num_ranks, num_ranks
    return [
        refusal_of(sizes, backend="nvshmem", ranks_per_node=3),
        refusal_of(sizes, backend="nvshmem", ranks_per_node=4),
        refusal_of(sizes, backend="nvshmem"),
        refusal_of(sizes, backend="nvlink", ranks_per_node=2),
    ]


def test_wrong_nodes():
    answers = run_ranks(wrong_nodes, 4)
    assert answers == [answers[0]] * 4
    for answer, words in zip(
        answers[0],
        (
            "ValueError: ranks_per_node is 3; it must be None or divide the group's 4 ranks",
            *["BackendUnavailableError: backend 'nvshmem' cannot serve: it serves several nodes, and all 4 ranks are one; backend='nvlink'"]
            * 2,
            "BackendUnavailableError: backend 'nvlink' cannot serve: it serves one node, and ranks_per_node is 2 for 4 ranks; 'nvshmem'",
        ),
        strict=True,
    ):
        assert words in answer


def without_nvshmem(rank, num_ranks, how):
    """NVSHMEM does not initialize, or is missing on one rank. 'auto' then takes another backend, and says why."""
    device_of("nvshmem", rank)
    if how == "fails":
        os.environ["DEEPEP_MOE_EMULATED_NETWORK"] = "fail_init=1"
    elif rank == 2:
        nvshmem_module.load = lambda: "it is not built; install it"
    sizes = NUM_TOKENS, 16, 2 * num_ranks, num_ranks
    told = [refusal_of(sizes, backend="nvshmem", ranks_per_node=2) for _ in range(2)]
    select.are_on_gpus = lambda peers: True  # as with an NCCL group, which CPU tensors cannot have
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logging.getLogger("deepep_moe").addHandler(handler)
    buffer = Buffer(None, *sizes, backend="auto", ranks_per_node=2, timeout_s=60)
    assert buffer.backend == "collective"
    assert rank > 0 or any(level == "WARNING" and "backend 'nvshmem' cannot serve: " in line for level, line in lines), lines
    make_step(buffer, 1)
    buffer.destroy()
    return told


@emulated_only
@pytest.mark.parametrize("how", ("fails", "is missing"))
def test_without_nvshmem(how):
    answers = run_ranks(without_nvshmem, 4, how)
    assert answers == [answers[0]] * 4
    first, second = answers[0]
    begin = "BackendUnavailableError: backend 'nvshmem' cannot serve: NVSHMEM cannot serve these ranks: on rank"
    assert first.startswith(begin) and second.startswith(begin), answers[0]
    if how == "is missing":
        assert "on rank 2: it is not built; install it" in first and second == first
    else:
        assert "nvshmemx_hostlib_init_attr" in first or "initializ" in first, first
        assert "failed before in this process" in second, second
