"""Buffers whose rows can be computed by hand, and faults at each step of their calls. Runs in workers.

Each token has an expert on each rank, so every rank waits for every other one.
"""

import contextlib
import math
import os
import random
import signal
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from events import tell, wait_for
from exchange_cases import device_of, look

from deepep_moe import Buffer, LowLatencyBuffer, device
from deepep_moe.errors import EPMismatchError, EPPeerError, EPTimeoutError
from deepep_moe.exchange.backends.collective import CollectiveBackend
from deepep_moe.exchange.backends.nvlink import NvlinkBackend
from deepep_moe.exchange.backends.shm import ShmBackend
from deepep_moe.testing import run_ranks
from deepep_moe.testing.launch import RankFailedError

SOON_S = 20.0  # far from the deadline of 300 s, and kept on a busy machine
NUM_TOKENS = 4
ERRORS = (MemoryError, KeyboardInterrupt, RuntimeError)
ON_GPUS = ("nvlink", "low latency nvlink")


def make(kind: str, num_ranks: int, timeout_s: float = 300.0, hidden: int = 16, num_tokens: int = NUM_TOKENS, group: Any = None) -> Any:
    """Return a buffer with two experts a rank. `kind` is a backend of `Buffer` (`nvshmem` with nodes of two ranks), one of `ON_GPUS`, "two
    hops" (`collective` over nodes of two ranks) or "low latency" (over shared memory)."""
    if kind in (*ON_GPUS, "nvshmem"):
        device_of("nvlink", dist.get_rank())
    dist.barrier(group=group)
    sizes = (group, num_tokens, hidden, 2 * num_ranks, num_ranks)
    if kind.startswith("low latency"):
        return LowLatencyBuffer(*sizes, backend="nvlink" if kind in ON_GPUS else "shm", timeout_s=timeout_s)
    if kind == "two hops":
        return Buffer(*sizes, backend="collective", timeout_s=timeout_s, ranks_per_node=2)
    buffer = Buffer(*sizes, backend=kind, timeout_s=timeout_s, ranks_per_node=2 if kind == "nvshmem" else None)
    if kind in ("nvlink", "nvshmem"):
        buffer.calls.native = None  # so that its calls are checked in Python, and go by the backend, which faults are put into
    return buffer


def routing(num_ranks: int, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    """Token t goes to local expert t % 2 of every rank."""
    return 2 * torch.arange(num_ranks).expand(num_tokens, num_ranks) + (torch.arange(num_tokens) % 2)[:, None]


def values(step: int, rank: int) -> list[float]:
    return [float(100 * step + 10 * rank + token) for token in range(NUM_TOKENS)]


def inputs(buffer: Any, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor(values(step, buffer.rank))[:, None].expand(NUM_TOKENS, buffer.hidden).contiguous()
    device = device_of(buffer.backend, buffer.rank)
    return x.to(device), routing(buffer.num_ranks).to(device)


def make_step(buffer: Any, step: int) -> None:
    """A dispatch and a combine, in a Buffer a dispatch along the handle too. All ranks must give the same `step`."""
    num_ranks, (x, idx) = buffer.num_ranks, inputs(buffer, step)
    received = [[values(step, rank)[token] for rank in range(num_ranks) for token in (expert, expert + 2)] for expert in (0, 1)]
    out = buffer.dispatch(x, idx)
    look(buffer)
    if isinstance(buffer, LowLatencyBuffer):
        assert [rows[: len(wanted), 0].tolist() for rows, wanted in zip(out.recv_x, received, strict=True)] == received, step
    else:
        assert out.recv_x[:, -1].tolist() == received[0] + received[1], step
        along = buffer.dispatch(x + 1, handle=out.handle)
        look(buffer)
        assert (along.recv_x == out.recv_x + 1).all(), step
    combined_x = buffer.combine(out.recv_x, out.handle)
    look(buffer)
    assert combined_x[:, 0].tolist() == [num_ranks * value for value in values(step, buffer.rank)], step


def make_call(buffer: Buffer, operation: str, handle: Any, **how: Any) -> Any:
    x, idx = inputs(buffer, 0)
    if operation == "dispatch":
        return buffer.dispatch(x, idx, **how)
    if operation == "dispatch along a handle":
        return buffer.dispatch(x, handle=handle, **how)
    return buffer.combine(torch.ones(handle.num_rows, buffer.hidden, device=x.device), handle, **how)


def at_random(function: Any, num_ranks: int, kind: str, *, is_killed: bool = False) -> None:
    """Run `function(rank, num_ranks, kind, seed)`; rank seed % num_ranks is the victim."""
    seed = random.SystemRandom().randrange(2**32)
    try:
        run_ranks(function, num_ranks, kind, seed, expected_dead=[seed % num_ranks] if is_killed else ())
    except RankFailedError as error:
        raise AssertionError(f"seed {seed}, {kind}: {error}") from error


def signal_later(seed: int, within_s: float, number: int, stopped_s: float = 0.0) -> None:
    """Let another process send this one a signal at some moment. If it stops this process, it continues `stopped_s` later."""
    process = os.getpid()
    if os.fork() == 0:
        time.sleep(random.Random(seed).uniform(0, within_s))
        os.kill(process, number)
        if number == signal.SIGSTOP:
            time.sleep(stopped_s)
            os.kill(process, signal.SIGCONT)
            tell("resumed")
        os._exit(0)


def held() -> tuple[int, int, int]:
    """Descriptors, threads and mappings of ours that this process holds."""
    with open("/proc/self/maps") as file:
        mappings = sum("deepep_moe" in line and "memfd" in line for line in file)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mappings


# ---- faults ----


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: BaseException) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise ctx.error


class Replaced:
    """A native object with other methods of some names."""

    def __init__(self, native: Any, **methods: Any):
        self.__dict__.update(methods, native=native)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)


def under(make_context: Any, buffer: Any) -> Any:
    """The buffer, whose calls are made in a context each."""

    def wrapped(call: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            with make_context():
                return call(*args, **options)

        return run

    return Replaced(buffer, dispatch=wrapped(buffer.dispatch), combine=wrapped(buffer.combine))


def raising(method: Any, error: BaseException, is_after: bool) -> Any:
    def run(*args: Any) -> Any:
        output = method(*args) if is_after else None  # noqa: F841  # lives as long as the error: kernels may be still at work on it
        raise error

    return run


@contextlib.contextmanager
def unchecked(buffer: Any) -> Any:
    """Nobody looks at failures of the calls made meanwhile, as in a CUDA graph."""
    communicator = buffer.calls.backend._native
    with mock.patch.object(buffer.calls.backend, "_native", Replaced(communicator, check=lambda: None)):
        yield communicator


MOVES = ("dispatch", "dispatch_cached", "combine")
MOMENTS = {
    "dispatch": ("before entry", "before rows are allocated", "before rows", "after rows"),
    "dispatch along a handle": ("before entry", "before rows", "after rows"),
    "combine": ("before entry", "before rows", "after rows"),
}


def moments(kind: str) -> list[tuple[str, str]]:
    """(operation, moment) of the faults that can be put into the calls of a backend. The native call of `shm` that enters also moves rows,
    but for a dispatch: see `interrupted`."""
    cases = [(operation, moment) for operation, those in MOMENTS.items() for moment in those]
    if kind == "nvlink":  # one native call does it all
        return [case for case in cases if case[1] != "before rows"]
    return [case for case in cases if kind != "shm" or case[0] == "dispatch" or case[1] != "before rows"]


def once(method: Any, error: BaseException, is_after: bool = False) -> Any:
    """`method`, whose first call raises."""
    calls: list[int] = []

    def run(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            return method(*args)
        if is_after:
            method(*args)
        raise error

    return run


def is_rows(size: Any, dtype: torch.dtype | None) -> bool:
    """Received ones, which are more than `inputs`."""
    return len(size) == 2 and size[0] > NUM_TOKENS and dtype not in (torch.int32, torch.int64)


@contextlib.contextmanager
def allocations_fail(error: BaseException, which: Any) -> Any:
    """Let the first `torch.empty`, in C++ too, of a size and dtype that `which` takes raise the error. What was made lives as long as that
    does: kernels of the emulated GPU may be still at work on it."""
    failed: list[bool] = []
    error.made = tensors = []  # type: ignore[attr-defined]

    def empty(size: Any, *, dtype: torch.dtype | None = None, **how: Any) -> torch.Tensor:
        if not failed and which(size, dtype):
            failed.append(True)
            raise error
        strides = [math.prod(size[i + 1 :]) for i in range(len(size))]
        tensors.append(torch.empty_strided(size, strides, dtype=dtype, device=how.get("device"), pin_memory=bool(how.get("pin_memory"))))
        return tensors[-1]

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("empty.memory_format", empty, "CPU" if device.GPU == "cpu" else "CUDA")
        yield


@contextlib.contextmanager
def fault(buffer: Buffer, moment: str, error: BaseException) -> Any:
    """Let the call made meanwhile fail at `moment`."""
    backend = buffer.calls.backend
    if isinstance(backend, NvlinkBackend) and moment == "before rows are allocated":
        with allocations_fail(error, is_rows):
            yield
        return
    if moment == "before rows are allocated":
        name, faulty = "_allocate", once(backend._allocate, error)
    elif isinstance(backend, CollectiveBackend):
        name = "_entry" if moment == "before entry" else "_all_to_all"
        faulty = once(getattr(backend, name), error, is_after=moment == "after rows")
    else:
        entries = ("plan", *MOVES[1:]) if isinstance(backend, ShmBackend) else MOVES
        before = entries if moment == "before entry" else MOVES if moment == "before rows" else ()
        name, after = "_calls" if isinstance(backend, NvlinkBackend) else "_exchange", MOVES if moment == "after rows" else ()
        native = getattr(backend, name)
        faulty = Replaced(native, **{each: raising(getattr(native, each), error, each in after) for each in (*before, *after)})
    with mock.patch.object(backend, name, faulty):
        yield


@contextlib.contextmanager
def alarm(after_s: float, error: BaseException) -> Any:
    """Raise from a signal's handler, as Ctrl-C does."""

    def handle(*_: Any) -> None:
        raise error

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def check_told(rank: int, culprit: int, error: BaseException, raised: BaseException | None, elapsed_s: float, reason: str) -> None:
    """The culprit raises its own error, and the others learn the reason, "kind: words", at once."""
    if rank == culprit:
        assert raised is error, repr(raised)
        return
    assert isinstance(raised, EPPeerError) and raised.rank == culprit and elapsed_s < SOON_S, repr(raised)
    assert f"its call: {reason}" in str(raised) and raised.cause == reason.split(":")[0], (raised, raised.cause)


def outcome(call: Any) -> tuple[BaseException | None, float]:
    """Return the error that the call raised, or None, and the seconds that it took."""
    began = time.monotonic()
    try:
        call()
    except BaseException as error:
        return error, time.monotonic() - began
    return None, time.monotonic() - began


# ---- ranks out of step ----

OUT_OF_STEP = (EPTimeoutError, EPPeerError, EPMismatchError)


def step_until_right(buffer: Any) -> list[BaseException]:
    """Make the same step until it succeeds; return the errors."""
    errors: list[BaseException] = []
    for _ in range(10):
        error, _ = outcome(lambda: make_step(buffer, 1))
        if error is None:
            return errors
        assert isinstance(error, OUT_OF_STEP), repr(error)
        errors.append(error)
    raise AssertionError(f"out of step: {errors}")


def back_in_step(buffer: Any) -> None:
    """`recover` brings the ranks of a Buffer into step, once all have their errors: it waits for one deadline, and so does a late rank in
    its call. Those of a LowLatencyBuffer repeat the step until it succeeds."""
    tell(f"rank {buffer.rank} has its error")
    if isinstance(buffer, Buffer):
        wait_for(*(f"rank {peer} has its error" for peer in range(buffer.num_ranks)))
        buffer.recover()
    else:
        step_until_right(buffer)
    for step in range(2, 5):  # of the same numbers on all ranks
        make_step(buffer, step)
    dist.barrier()
