"""Buffers whose memory is given back for a while: calls go on as if nothing had been, and all ranks fail together."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from exchange_cases import assert_same, device_of, look, poison_outputs
from fault_cases import SOON_S, inputs, make, make_call, make_step, outcome
from on_ranks import on_ranks

from deepep_moe import Buffer, LowLatencyBuffer
from deepep_moe.errors import (
    BufferDestroyedError,
    BufferSuspendedError,
    EPCapacityError,
    EPError,
    EPMismatchError,
    EPPeerError,
    EPTimeoutError,
)
from deepep_moe.event import Event
from deepep_moe.exchange.growing import GrowingBuffer

ON_GPUS = [pytest.param(kind, marks=pytest.mark.gpu) for kind in ("nvlink", "low latency nvlink")]
KINDS = ("shm", "collective", "low latency", *ON_GPUS)
BUFFERS = ("shm", "collective", ON_GPUS[0])
MIB = 2**20


def backend_of(buffer):
    return buffer._owner() if isinstance(buffer, LowLatencyBuffer) else (buffer.calls._suspended or (buffer.calls.backend,))[0]


@on_ranks(2, kind=KINDS)
def test_calls_of_a_suspended_buffer(rank, kind):
    buffer = make(kind, 2, hidden=4096)
    x, idx = inputs(buffer, 0)
    out = buffer.dispatch(x.requires_grad_(kind in BUFFERS), idx)
    held = buffer.memory().held
    assert buffer.memory() == (buffer.workspace_bytes, 0)
    buffer.suspend()
    buffer.suspend()
    suspended = buffer.memory().suspended
    assert sum(buffer.memory()) == held and (suspended > 0.5 * held or kind == "collective"), buffer.memory()
    began = time.monotonic()
    calls = [partial(buffer.dispatch, x, idx), partial(buffer.combine, out.recv_x, out.handle), partial(buffer.refuse, ValueError())]
    gradients = [out.recv_x.sum().backward] if kind in BUFFERS else []
    for call in (*calls, partial(buffer.dispatch, x[:, :3], idx), buffer.check, *gradients):
        with pytest.raises(BufferSuspendedError, match=r"call resume\(\) on every rank"):
            call()
    assert time.monotonic() - began < SOON_S
    buffer.resume()
    buffer.resume()
    assert buffer.memory() == (held, 0)
    make_step(buffer, 1)
    buffer.suspend()
    buffer.destroy()
    for call in (buffer.memory, buffer.suspend, buffer.resume, partial(make_step, buffer, 0)):
        with pytest.raises(BufferDestroyedError):
            call()
    make_step(make(kind, 2), 1)


@on_ranks(3, kind=KINDS)
def test_a_rank_without_memory(rank, kind):
    """All ranks raise the same error, as often as it lasts; nobody keeps memory meanwhile."""
    buffer = make(kind, 3)
    make_step(buffer, 0)
    buffer.suspend()
    backend = backend_of(buffer)
    before = buffer.memory()

    def fail():
        raise RuntimeError("no memory")

    for _ in range(2):
        if rank == 1:
            backend.resume = fail
        with pytest.raises(BufferSuspendedError, match=r"still suspended, on rank 1: no memory; free memory"):
            buffer.resume()
        assert buffer.memory() == before
        with pytest.raises(BufferSuspendedError):
            make_step(buffer, 0)
    if rank == 1:
        del backend.resume
    buffer.resume()
    make_step(buffer, 1)


@contextlib.contextmanager
def full_device():
    """Leave no room for a large workspace."""
    if emulated_gpu.is_chosen():  # whose memory is in files
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 * MIB, limits[1]))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    else:
        torch.cuda.empty_cache()
        taken = torch.empty(torch.cuda.mem_get_info()[0] - 256 * MIB, dtype=torch.uint8, device="cuda")
        yield
        del taken
        torch.cuda.empty_cache()


@pytest.mark.gpu
@on_ranks(2)
def test_memory_of_a_gpu(rank):
    """The driver has it back. If there is none for a rank, its error does not stay behind for the next launch."""
    from test_nvlink_peers import memory_used

    device = device_of("nvlink", rank)
    buffer = Buffer(None, 32768, 8192, 4, 2, backend="nvlink", timeout_s=60)
    held, used = buffer.memory().held, []
    for change in (lambda: None, buffer.suspend, buffer.resume, buffer.suspend):
        change()
        dist.barrier()
        used.append(memory_used(device))
        dist.barrier()
    assert held > 2**30 and used[0] - used[1] > 0.99 * held and abs(used[2] - used[0]) < 0.01 * held, (held, used)
    no_room = full_device() if rank == 1 else contextlib.nullcontext()
    with no_room, pytest.raises(BufferSuspendedError, match="on rank 1: cannot allocate the workspace"):
        buffer.resume()
    dist.barrier()
    buffer.resume()
    x = torch.ones(1, 8192, device=device)
    out = buffer.dispatch(x, torch.tensor([[0, 2]], device=x.device))
    assert (buffer.combine(out.recv_x, out.handle) == 2).all()


@on_ranks(2)
def test_memory_of_a_cpu(rank):
    buffer = Buffer(None, 512, 4096, 4, 2, backend="shm")
    x, idx = torch.ones(512, 4096), torch.tensor([[0, 2]]).expand(512, 2).contiguous()

    def used():
        mapping = Path("/proc/self/smaps").read_text().split("memfd:deepep_moe")[1]
        return 1024 * next(int(line.split()[1]) for line in mapping.splitlines() if line.startswith("Pss:"))

    out = buffer.dispatch(x, idx)
    before = used()
    del out
    buffer.suspend()
    dist.barrier()
    assert before > MIB / 4 and used() < before / 10
    buffer.resume()
    assert (buffer.dispatch(x, idx).recv_x == 1).all()


@on_ranks(2, kind=[kind for kind in KINDS if kind != "collective"])
def test_different_numbers_of_calls(rank, kind):
    """Nobody suspends. The buffer goes on once the ranks are in step. (A refusal of `collective` waits for the peers' call.)"""
    buffer = make(kind, 2)
    make_step(buffer, 0)
    if rank == 1:
        buffer.refuse(ValueError("not now"))
    with pytest.raises(EPMismatchError, match="ranks disagree on the number of calls made"):
        buffer.suspend()
    assert buffer.memory().suspended == 0
    if rank == 0:
        with pytest.raises(EPPeerError, match="not now"):
            make_step(buffer, 1)
            look(buffer)
    if kind.startswith("low"):
        return
    buffer.recover()
    buffer.suspend()
    buffer.resume()
    make_step(buffer, 1)


@on_ranks(2, kind=KINDS)
def test_after_a_refusal(rank, kind):
    """Ranks do not wait for flags that went with the memory; also not those of a call that they have refused."""
    buffer = make(kind, 2)
    for turn in range(3):
        for _ in range(turn):
            error, _ = outcome(partial(_refuse_or_call, buffer, rank == 1))
            assert isinstance(error, EPPeerError if rank == 0 else ValueError), repr(error)
        buffer.suspend()
        buffer.resume()
    for _ in range(9):
        error, _ = outcome(partial(_refuse_or_call, buffer, rank == 0))
        assert isinstance(error, EPPeerError if rank == 1 else ValueError), repr(error)
    make_step(buffer, 1)


def _refuse_or_call(buffer, refuses):
    if refuses:
        raise buffer.refuse(ValueError("not now"))
    buffer.dispatch(*inputs(buffer, 0))
    look(buffer)


@on_ranks(2, kind=("low latency", ON_GPUS[1]))
def test_masked_rank(rank, kind):
    buffer = make(kind, 2)
    if rank == 0:
        buffer.mask_rank(1)
    with pytest.raises(ValueError if rank == 0 else EPPeerError, match=r"ranks \[1\] are masked") as caught:
        buffer.suspend()
    assert rank == 0 or (caught.value.rank, caught.value.cause) == (0, "ValueError")
    assert buffer.memory().suspended == 0


@pytest.mark.gpu
@on_ranks(2)
def test_a_failure_that_nobody_has_seen(rank):
    buffer = make("nvlink", 2)
    make_call(buffer, "dispatch", None, num_recv_rows=1)
    buffer.suspend()
    buffer.resume()
    with pytest.raises(EPCapacityError, match="more than its num_recv_rows of 1"):
        make_call(buffer, "dispatch", None, num_recv_rows=100)
    make_step(buffer, 1)


@on_ranks(2, kind=BUFFERS)
def test_an_asynchronous_call_that_failed(rank, kind):
    """The rank that has not seen it does not suspend. Nobody does then, and the ranks stay in step."""
    buffer = make(kind, 2)
    make_step(buffer, 0)
    if rank == 0:
        lost = Future()
        lost.set_exception(RuntimeError("lost"))
        buffer.calls.in_flight = Event(future=lost)
    num_calls = buffer.num_calls
    with pytest.raises(EPPeerError if rank else EPError, match="an earlier asynchronous call of this buffer failed: RuntimeError: lost"):
        buffer.suspend()
    assert buffer.num_calls == num_calls and buffer.memory().suspended == 0
    make_step(buffer, 1)
    buffer.suspend()
    buffer.resume()
    make_step(buffer, 2)


@pytest.mark.gpu
@on_ranks(2)
def test_rows_that_were_not_counted(rank):
    """Calls from C++. The counts of a late dispatch do not outlive a suspension, and later ones come as before."""
    other = make("nvlink", 2)
    buffer = Buffer(None, other.num_max_tokens_per_rank, other.hidden, other.num_experts, other.num_topk, backend="nvlink")
    x, idx = inputs(buffer, 0)
    for _ in range(2):
        buffer.combine((out := buffer.dispatch(x, idx)).recv_x, out.handle)
    late = buffer.dispatch(x, idx, num_recv_rows="guess")
    assert late.handle.is_late and buffer.calls.native is not None
    buffer.suspend()
    with pytest.raises(BufferSuspendedError, match="suspended before the rows of this dispatch were counted"):
        buffer.settle(late)
    buffer.resume()
    with pytest.raises(RuntimeError, match="the counts of this dispatch are lost"):
        buffer.settle(late)
    for _ in range(3):
        out = buffer.settle(buffer.dispatch(x, idx, num_recv_rows="guess"))
        assert torch.equal(buffer.combine(out.recv_x, out.handle), (idx >= 0).sum(1, keepdim=True) * x)
    assert buffer.calls.native is not None


@on_ranks(2, kind=KINDS, how=("async_op", "return_hook"))
def test_a_call_in_flight(rank, kind, how):
    """The call is finished first."""
    buffer = make(kind, 2)
    x, idx = inputs(buffer, 5)
    out = buffer.dispatch(x, idx, **{how: True})
    buffer.suspend()
    (out.hook or out.event.wait)()
    kept = out.recv_x.clone()
    buffer.resume()
    assert torch.equal(buffer.combine(kept, out.handle), 2 * x)


@on_ranks(3, kind=KINDS, moment=("before suspend", "in suspend", "before resume", "in resume"), expected_dead=[2])
def test_a_rank_that_is_killed(rank, kind, moment):
    buffer = make(kind, 3)
    make_step(buffer, 0)
    dist.barrier()
    backend = backend_of(buffer)

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 2:
        backend.disconnect, backend.connect = (die if moment == "in suspend" else backend.disconnect), die
    began = time.monotonic()
    with pytest.raises(EPTimeoutError) as caught:
        if rank == 2 and moment == "before suspend":
            die()
        buffer.suspend()
        if rank == 2 and moment == "before resume":
            die()
        buffer.resume()
    assert caught.value.rank == 2 and time.monotonic() - began < SOON_S, caught.value
    with pytest.raises(EPError):
        make_step(buffer, 1)
    buffer.destroy()
    assert time.monotonic() - began < SOON_S


def held():
    """Descriptors and mappings that this process holds, and where it has the emulated GPU's memory."""
    mappings = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line or "nvidia" in line]
    return len(os.listdir("/proc/self/fd")), len(mappings), [line.split()[0] for line in mappings if "emulated-gpu" in line]


@on_ranks(2, kind=KINDS)
def test_many_cycles(rank, kind):
    """Nothing is held more than before, results have the same bits, and a handle from before goes on."""
    buffer = make(kind, 2)
    poison_outputs()
    x, idx = inputs(buffer, 0)
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(rank)).to(x.device)

    def results():
        out = buffer.dispatch(x, idx)
        return out.recv_x.clone(), out.handle, buffer.combine(out.recv_x, out.handle)

    recv_x, handle, combined_x = results()
    for step in range(20):
        make_step(buffer, step)
        if step == 2:  # what threads open at their first work is there by now
            before = held()
        buffer.suspend()
        buffer.resume()
    again, _, combined_again = results()
    assert_same("recv_x", again, recv_x)
    for other in (combined_again, buffer.combine(recv_x, handle)):
        assert_same("combined_x", other, combined_x)
    make_step(buffer, 20)
    after = held()
    dist.barrier()  # a rank that leaves closes its peer's connections
    assert after == before, (after, before)


@pytest.mark.gpu
@on_ranks(2, kind=("nvlink", "low latency nvlink"))
def test_cuda_graph_replays_after_resume(rank, kind):
    """Its kernels hold the addresses of all workspaces, and read their number on the GPU."""
    make(kind, 2).destroy()  # what the device needs besides
    low_latency = kind != "nvlink"
    buffer = (LowLatencyBuffer if low_latency else Buffer)(None, 4, 16, 4, 2, backend="nvlink", timeout_s=60)
    x, idx = inputs(buffer, 0)
    bound = {} if low_latency else {"num_recv_rows": 16}

    def step():
        out = buffer.dispatch(x, idx, **bound)
        return out.recv_x, buffer.combine(out.recv_x, out.handle)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    for turn in range(12):
        if turn % 4 == 3:
            torch.cuda.synchronize()
            buffer.suspend()
            buffer.resume()
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(10 * turn + rank)))
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        got = [result[result.isfinite()].clone() for result in results]
        assert all(len(rows) for rows in got)
        if turn % 2:  # an eager call between replays, or none
            poison_outputs()
            wanted = [result[result.isfinite()] for result in step()]
            assert all(map(torch.equal, got, wanted)), turn
            buffer.check()


@on_ranks(2, kind=BUFFERS)
def test_growing_buffer(rank, kind):
    """Buffers that a larger one has replaced serve a backward, so they come back too."""
    device = device_of(kind, rank)
    growing = GrowingBuffer(
        dist.group.WORLD, 4, device, lambda bound: Buffer(None, 4 if bound < 1000 else bound, 16, 4, 2, backend=kind), None, "the option"
    )
    growing.num_max_tokens = 4
    x, idx = inputs(growing.buffer, 0)
    rows = x.clone().requires_grad_()
    first, out = growing.dispatch(4, lambda buffer: buffer.dispatch(rows, idx))
    second, _ = growing.dispatch(5, lambda buffer: buffer.dispatch(x, idx))
    held = growing.memory()
    assert first is not second and held.held == first.workspace_bytes + second.workspace_bytes
    growing.suspend()
    assert sum(growing.memory()) == held.held
    for buffer in (first, second):
        with pytest.raises(BufferSuspendedError):
            make_call(buffer, "dispatch", None)
    growing.resume()
    out.recv_x.sum().backward()
    assert growing.memory() == held and (rows.grad == 2).all()
    growing.destroy()


HOOK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
int num_allocations = 0;
int cudaMalloc(void** pointer, size_t bytes) {
    ++num_allocations;
    return ((int (*)(void**, size_t))dlsym(RTLD_NEXT, "cudaMalloc"))(pointer, bytes);
}
"""
HOOKED = """
import ctypes, torch, deepep_moe
number = ctypes.c_int.in_dll(ctypes.CDLL(None), "num_allocations")
torch.ones(1, device="cuda")
assert number.value > 0, "the hook works"
before = number.value
buffer = deepep_moe.Buffer(None, 4096, 1024, 4, 2, backend="nvlink")
buffer.suspend()
buffer.resume()
assert number.value == before
"""


@pytest.mark.gpu
def test_a_hook_on_cudamalloc(tmp_path):
    """Frameworks replace cudaMalloc by LD_PRELOAD, with memory that cannot be shared. Ours is linked statically."""
    (tmp_path / "hook.c").write_text(HOOK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "hook.so", tmp_path / "hook.c", "-ldl"], check=True)
    subprocess.run([sys.executable, "-c", HOOKED], env=os.environ | {"LD_PRELOAD": str(tmp_path / "hook.so")}, check=True)


def test_collective_suspends_its_group(monkeypatch):
    """If its backend can: gloo's says that it does not support it, and another failure is raised."""
    buffer, calls = Buffer(None, 4, 16, 2, 1, backend="collective"), []

    def refuse(words):
        raise RuntimeError(words)

    def suspended_with(suspend):
        nccl = SimpleNamespace(suspend=suspend, resume=lambda: calls.append("resume"))
        buffer.calls.backend.group = mock.Mock(_get_backend=lambda _: nccl)
        buffer.suspend()
        buffer.resume()

    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl")
    suspended_with(lambda: calls.append("suspend"))
    suspended_with(lambda: refuse("Backend nccl does not support suspend"))
    assert calls == ["suspend", "resume", "resume"]
    with pytest.raises(RuntimeError, match="out of memory"):
        suspended_with(lambda: refuse("out of memory"))


@pytest.mark.gpu
@on_ranks(4)
def test_nvshmem_refuses(rank):
    buffer = make("nvshmem", 4)
    with pytest.raises(EPError, match="cannot be suspended: NVSHMEM"):
        buffer.suspend()
    assert buffer.memory().held == buffer.workspace_bytes
    buffer.resume()
