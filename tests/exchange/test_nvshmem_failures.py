"""Failures of the nvshmem backend: who raises what, names whom, and whether the buffer serves afterwards. Two nodes of two ranks.

The culprit has the number c. Its `mate` is the other rank of its node, its `rail` the rank with its index in the other node. The `far` rank
is neither, and hears of the culprit through the ranks between.
"""

import atexit
import os
import signal
import time
from functools import partial

import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from events import tell, wait_for
from exchange_cases import NETWORK, device_of, look
from fault_cases import NUM_TOKENS, SOON_S, FailsInBackward, back_in_step, fault, inputs, make, make_call, make_step, outcome
from logs import heard
from on_ranks import on_ranks

from deepep_moe import Buffer, LowLatencyBuffer, nvshmem_module
from deepep_moe.errors import BackendUnavailableError, EPMismatchError, EPPeerError, EPTimeoutError
from deepep_moe.exchange.backends import select
from deepep_moe.exchange.calls import notify_peers
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


def check_refusal(call, part, culprit, kind, reason):
    """The culprit's call raises an error of this kind; its peers' calls raise that it has not made it."""
    if part == "culprit":
        raised(call, kind, reason)
    elif part == "far":  # its rail met; the rank between has only the culprit's word
        error = raised(call, EPPeerError, f"rank {culprit ^ 2} did not make its call: EPPeerError: rank {culprit} did not make its call")
        assert (error.rank, error.cause) == (culprit ^ 2, "EPPeerError")
    else:
        error = raised(call, EPPeerError, f"rank {culprit} did not make its call: ", f"{kind.__name__}: {reason}")
        assert (error.rank, error.cause) == (culprit, kind.__name__)


# ---- refusals ----


@on_ranks(4, culprit=CULPRITS)
def test_refusals(rank, culprit):
    """Routings that kernels refuse, and arguments that the host refuses: of a dispatch, whose peers learn of it at once, and of calls whose
    hosts wait for nothing. Then calls that differ."""
    buffer, part = buffer_of(), part_of(rank, culprit)
    x, idx = inputs(buffer, 1)
    out = buffer.dispatch(x, idx)
    rows, twice = torch.ones_like(out.recv_x), int(idx[3, 0])

    def routed(token, lane, expert):
        wrong = idx.clone()
        wrong[token, lane] = expert
        return partial(buffer.dispatch, x, wrong if part == "culprit" else idx)

    def wide(tensor):
        return tensor.double() if part == "culprit" else tensor

    error, reason = TypeError, "x has dtype float64"
    calls = [
        (routed(2, 1, 8), ValueError, "topk_idx[2, 1] is 8"),
        (routed(0, 3, -2), ValueError, "topk_idx[0, 3] is -2"),
        (routed(3, 2, twice), ValueError, f"topk_idx[3] names expert {twice} twice"),
        (lambda: buffer.dispatch(wide(x), idx), error, reason),
        (lambda: (buffer.combine(wide(rows), out.handle), look(buffer)), error, reason),
        (lambda: (buffer.dispatch(wide(x), handle=out.handle), look(buffer)), error, reason),
        (lambda: (buffer.dispatch(wide(x), idx, num_recv_rows=16), look(buffer)), error, reason),
    ]
    for step, (call, error, reason) in enumerate(calls):
        check_refusal(call, part, culprit, error, reason)
        make_step(buffer, step + 1)
    for _ in range(3):  # in a row, and nobody makes a call in between
        check_refusal(calls[3][0], part, culprit, error, reason)
    make_step(buffer, 9)
    out = buffer.dispatch(x, idx)  # then the culprit combines while the others dispatch, or asks for another layout
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
            neighbour = rank ^ 1  # the other rank of its node met another call
            message = f"rank {neighbour} did not make its call: EPMismatchError: ranks make different calls: rank {neighbour}: "
            error = raised(call, EPPeerError, message)
            assert (error.rank, error.cause) == (neighbour, "EPMismatchError")
        make_step(buffer, step + 1)
    buffer.destroy()


# ---- failures before, after and between calls ----


@on_ranks(4, culprit=CULPRITS)
def test_injected_failures(rank, culprit):
    """Memory, interrupts, an expert, a gradient: peers hear in the call that the culprit does not make, or in the next one."""
    buffer, part = buffer_of(), part_of(rank, culprit)
    handle = buffer.dispatch(*inputs(buffer, 0)).handle
    buffer.calls.native = None  # as `fault` needs it

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
            check_refusal(call, part, culprit, kind, "fault")
        make_step(buffer, step)
    if part == "culprit":
        notify_peers(buffer, RuntimeError("of an expert"))
    else:
        check_refusal(partial(make_step, buffer, 4), part, culprit, RuntimeError, "of an expert")
    make_step(buffer, 4)
    x, idx = inputs(buffer, 5)
    error = RuntimeError("of a gradient")
    out = buffer.dispatch(x.requires_grad_(), idx)
    y = buffer.combine(FailsInBackward.apply(out.recv_x, error) if part == "culprit" else out.recv_x, out.handle)
    if part == "culprit":
        assert outcome(y.sum().backward)[0] is error
    else:
        reason = "its backward pass failed; see its output for the error"
        check_refusal(lambda: (y.sum().backward(), look(buffer)), part, culprit, RuntimeError, reason)
    back_in_step(buffer)
    buffer.destroy()


# ---- deadlines ----


@on_ranks(4, operation=("dispatch", pytest.param("combine", marks=pytest.mark.slow)))
def test_late_rank(rank, operation):
    """The culprit comes once all others have given up on it."""
    culprit = {"dispatch": 3, "combine": 0}[operation]
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


@emulated_only
@on_ranks(4, num_arriving=(0, 1))
def test_network_that_loses(rank, num_ranks, num_arriving):
    """Only `num_arriving` puts of each process from or to the culprit arrive: nothing, or entries without rows."""
    culprit = 2 - num_arriving
    os.environ[NETWORK] = f"lose={culprit},lose_after={num_arriving}"
    buffer, part = make("nvshmem", 4, DEADLINE_S), part_of(rank, culprit)
    assert buffer.calls.backend.world.pe_of == (0, 1, 2, 3), "the option names a PE"

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
    elif num_arriving:  # the other rank of the node cannot pass on rows that it has not got
        assert isinstance(error, EPTimeoutError) and (error.rank, error.phase) == (rank ^ 1, "dispatch rows"), repr(error)
    else:
        assert isinstance(error, EPPeerError) and error.rank == rank ^ 1, repr(error)
        message = f"rank {rank ^ 1} did not make its call: EPTimeoutError: rank {rank ^ 1}: rank {rank ^ 3} did not deliver within the"
        assert message in str(error) and error.cause == "EPTimeoutError", error
    buffer.destroy()


# ---- a process that ends ----


@on_ranks(4, culprit=CULPRITS, expected_dead=lambda culprit: [culprit])
def test_killed_rank(rank, num_ranks, culprit):
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


# ---- what cannot serve ----


def refusal_of(sizes, kind=Buffer, **settings):
    with pytest.raises((BackendUnavailableError, ValueError)) as info:
        kind(None, *sizes, timeout_s=60, **settings)
    return f"{info.type.__name__}: {info.value}"


@on_ranks(4)
def test_wrong_nodes(rank, num_ranks):
    device_of("nvshmem", rank)
    sizes = NUM_TOKENS, 16, 2 * num_ranks, num_ranks
    for settings, words in (
        ({"backend": "nvshmem", "ranks_per_node": 3}, "ValueError: ranks_per_node is 3"),
        ({"backend": "nvshmem", "ranks_per_node": 4}, "it serves several nodes, and all 4 ranks are one"),
        ({"backend": "nvshmem"}, "it serves several nodes, and all 4 ranks are one"),
        ({"backend": "nvlink", "ranks_per_node": 2}, "it serves one node, and ranks_per_node is 2 for 4 ranks"),
    ):
        for kind in (Buffer, LowLatencyBuffer):
            assert words in refusal_of(sizes, kind, **settings)


def without_nvshmem(rank, num_ranks, how):
    """NVSHMEM does not initialize, or is missing on one rank. 'auto' then takes another backend, and says why."""
    device_of("nvshmem", rank)
    if how == "fails":
        os.environ[NETWORK] = "fail_init=1"
    elif rank == 2:
        nvshmem_module.load = lambda: "it is not built; install it"
    sizes = NUM_TOKENS, 16, 2 * num_ranks, num_ranks
    refusals = [refusal_of(sizes, backend="nvshmem", ranks_per_node=2) for _ in range(2)]
    select.are_on_gpus = lambda peers: True  # as with an NCCL group, which CPU tensors cannot have
    lines = heard()
    buffer = Buffer(None, *sizes, backend="auto", ranks_per_node=2, timeout_s=60)
    assert buffer.backend == "collective"
    assert rank > 0 or any("backend 'nvshmem' cannot serve: " in line for line in lines), lines
    make_step(buffer, 1)
    buffer.destroy()
    return refusals


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


# ---- puts that are still under way when their rank has no use for them any more ----

KEPT = []  # buffers that nobody destroys


def buffer_of_two_nodes(timeout_s):
    """Return a buffer over two nodes of one rank each."""
    device_of("nvlink", dist.get_rank())
    buffer = Buffer(None, NUM_TOKENS, 16, 4, 2, backend="nvshmem", timeout_s=timeout_s, ranks_per_node=1)
    make_step(buffer, 0)
    dist.barrier()
    return buffer


@emulated_only
@on_ranks(2, how=("destroyed", "kept", "dropped", "forked"), expected_dead=lambda how: [] if how == "forked" else [0])
def test_what_was_put_arrives(rank, how):
    """The process of rank 0 ends right after its last call, which is a refusal, as that waits for nobody. Its reason is under way."""
    os.environ[NETWORK] = "delay_us=500000"
    buffer = buffer_of_two_nodes(30.0)
    if rank == 0:
        buffer.refuse(ValueError("the last call"))
        if how == "destroyed":
            buffer.destroy()
        elif how == "dropped":
            del buffer
        else:
            KEPT.append(buffer)
        if how == "forked":
            return  # a process that multiprocessing has forked asks atexit for nothing
        if how != "destroyed":
            atexit._run_exitfuncs()  # as an interpreter that ends does
        os.kill(os.getpid(), signal.SIGKILL)
    error, elapsed_s = outcome(lambda: buffer.dispatch(*inputs(buffer, 1)))
    assert isinstance(error, EPPeerError) and "rank 0 did not make its call: ValueError: the last call" in str(error), repr(error)
    assert elapsed_s < SOON_S, elapsed_s
    buffer.destroy()


@emulated_only
@on_ranks(2)
def test_what_does_not_arrive(rank):
    """Puts of rank 0 are under way for longer than its deadline. It logs that, and neither its other buffer nor its end hangs."""
    os.environ[NETWORK] = "hold_after=12"  # a message and a chunk of rows in each of six calls
    first, second = buffer_of_two_nodes(60.0), buffer_of_two_nodes(3.0)
    lines = heard()
    if rank == 0:
        second.refuse(ValueError("the last call"))
        began = time.monotonic()
        second.destroy()
        first.destroy()
        assert 2.9 < time.monotonic() - began < SOON_S
        assert len(lines) == 1 and "what rank 0 has put has not arrived within 3 s" in lines[0], lines
        tell("rank 0 has given up")
    wait_for("rank 0 has given up")


@emulated_only
@on_ranks(4, along_handle=(False, True))
def test_rows_of_a_refused_dispatch(rank, num_ranks, along_handle):
    """Ranks off the culprit's rail meet, so their rows cross, while they learn in their nodes that the call has failed. The next call
    writes to the same places."""
    os.environ[NETWORK] = "delay_us=100000"
    buffer = make("nvshmem", num_ranks, 30.0)
    x, idx = inputs(buffer, 1)
    handle = buffer.dispatch(x, idx).handle
    for step in range(1, 5):
        is_culprit = rank == step % num_ranks
        rows = x.double() if is_culprit else x
        routing = {"handle": handle} if along_handle else {"topk_idx": idx}
        error, elapsed_s = outcome(lambda rows=rows: (buffer.dispatch(rows, **routing), look(buffer)))  # noqa: B023
        assert isinstance(error, TypeError if is_culprit else EPPeerError) and elapsed_s < SOON_S, (error, elapsed_s)
        make_step(buffer, step)
    buffer.destroy()
