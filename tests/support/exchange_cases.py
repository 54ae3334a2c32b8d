"""Routings for the tests of dispatch and combine, and the comparison with the reference that runs on every rank."""

import contextlib
import ctypes
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import emulated_gpu
import pytest
import torch
import torch.distributed as dist

from deepep_moe import Buffer, reference
from deepep_moe.host_pool import HostPool
from deepep_moe.testing import run_ranks

NETWORK = "DEEPEP_MOE_EMULATED_NETWORK"
NVLINK = pytest.param("nvlink", marks=pytest.mark.gpu)
BACKENDS = ("shm", "collective", NVLINK)
on_cpus_and_gpus = pytest.mark.parametrize(
    "backends", [pytest.param(("shm", "collective"), id="cpu"), pytest.param(("nvlink",), id="nvlink", marks=pytest.mark.gpu)]
)


def in_environment(rank: int, num_ranks: int, variables: dict[str, str], function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` with environment variables. Those that a test sets do not reach a rank, whose server has begun before."""
    os.environ.update(variables)
    return function(rank, num_ranks, *args)


def bytes_put(pe: int) -> int:
    """Bytes that this rank has put to a PE of the emulated network, where they are counted as they arrive: here all have."""
    torch.cuda.synchronize()
    dist.barrier()
    count = ctypes.CDLL("libemulated_gpu.so").emulated_nvshmem_bytes
    count.restype = ctypes.c_uint64
    return count(pe)


def poison_outputs() -> None:
    """Fill every output with NaN before it is written: what nobody writes then shows."""
    torch._C._set_deterministic_algorithms(True)  # as torch.use_deterministic_algorithms, without its slow imports
    torch.utils.deterministic.fill_uninitialized_memory = True
    if not hasattr(HostPool, "clean_empty"):
        HostPool.clean_empty = HostPool.empty

        def poisoned(self, shape, dtype):
            tensor = self.clean_empty(shape, dtype)
            tensor.view(torch.uint8).fill_(0xFF)
            return tensor

        HostPool.empty = poisoned


@dataclass
class Case:
    """One routing of all ranks. `num_tokens` has an element per rank; `pattern` says how tokens choose experts."""

    num_tokens: list[int]
    hidden: int = 72
    num_experts: int = 12
    num_topk: int = 3
    dtype: torch.dtype = torch.float32
    layout: str = "expert"
    expert_alignment: int = 1
    pattern: str = "uniform"
    index_dtype: torch.dtype = torch.int64
    seed: int = 0
    with_weights: bool = True
    with_bias: bool = False
    num_sms: int | None = None
    max_sms: int | None = None
    ranks_per_node: int | None = None
    sums: str = "ranks"
    bulk_copies: bool = True  # nvlink: with the instructions of sm_90 where they are
    mode: str = "now"  # or "async", "hook"
    backends: tuple[str, ...] = ("shm", "collective")
    max_tokens: int | None = None
    bound: int | None = None  # on the rows of a rank, behind which are zeros
    by_lane: bool = False  # how topk_idx and topk_weights lie, as gates have them that fill lanes one after another

    @property
    def num_ranks(self) -> int:
        return len(self.num_tokens)

    @property
    def how(self) -> dict[str, bool]:
        """How a call is made."""
        return {"async_op": self.mode == "async", "return_hook": self.mode == "hook"}

    @property
    def memory(self) -> tuple[Any, ...]:
        """What buffers are made with."""
        sizes = self.max_tokens or max(self.num_tokens), self.hidden, self.num_experts, self.num_topk
        return *sizes, self.ranks_per_node, self.max_sms, self.sums, self.bulk_copies, self.backends

    def routing(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 101 + rank)
        shape = (self.num_tokens[rank], self.num_experts)
        scores = torch.rand(shape, generator=generator)
        if self.pattern == "one_expert":
            scores[:, self.num_experts // 2] = 2
        elif self.pattern == "one_rank":
            scores[:, : self.num_experts // self.num_ranks] += 1
        elif self.pattern == "skewed":
            scores *= torch.linspace(1, 0.1, self.num_experts)
        topk_idx = scores.argsort(dim=1, descending=True)[:, : self.num_topk]
        if self.pattern == "one_expert":
            topk_idx[:, 1:] = -1
        elif self.pattern == "masked":
            topk_idx = torch.where(torch.rand(topk_idx.shape, generator=generator) < 0.5, topk_idx, -1)
        elif self.pattern == "nobody":
            topk_idx = torch.full_like(topk_idx, -1)
        return topk_idx.to(self.index_dtype).contiguous()

    def inputs(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 7 + rank)
        x = torch.randn(self.num_tokens[rank], self.hidden, generator=generator).to(self.dtype)
        return x, self.routing(rank), torch.rand(self.num_tokens[rank], self.num_topk, generator=generator)

    def bias(self, rank: int) -> torch.Tensor:
        return torch.randn(self.num_tokens[rank], self.hidden, generator=torch.Generator().manual_seed(rank + 5)).to(self.dtype)

    def expert_outputs(self, rank: int, num_rows: int) -> torch.Tensor:
        return torch.randn(num_rows, self.hidden, generator=torch.Generator().manual_seed(self.seed + rank + 77)).to(self.dtype)


ROUNDS = int(os.environ.get("DEEPEP_MOE_STRESS_ROUNDS", "100"))


def random_case(seed: int, num_ranks: int, backends: tuple[str, ...], ranks_per_node: int | None = None) -> Case:
    """One of many cases, of which five after each other are of one buffer."""
    draw, sizes = random.Random(seed), random.Random(1000 * num_ranks + seed // 5)
    num_experts = num_ranks * sizes.randint(1, 6)
    num_topk, alignment = sizes.randint(1, min(num_experts, 8)), draw.choice((1, 3, 16))
    sums = "ranks" if "nvshmem" in backends else sizes.choice(("ranks", "lanes", "lanes_fma"))
    if ranks_per_node is None and "nvlink" not in backends:
        ranks_per_node = sizes.choice([n for n in range(1, num_ranks + 1) if num_ranks % n == 0])
    num_sms = draw.choice((None, 1, 5, 0) if sums == "ranks" else (None, 1, 5))
    bound = None if num_sms == 0 else draw.choice((None, 96 * num_ranks * num_topk + alignment * num_experts))
    return Case(
        [draw.choice((0, 96, 1, 32, 49)) for _ in range(num_ranks)], max_tokens=96, hidden=8 * sizes.randint(1, 40),
        num_experts=num_experts, num_topk=num_topk, expert_alignment=alignment, bound=bound, seed=seed, sums=sums,
        dtype=draw.choice((torch.float32, torch.bfloat16, torch.float16)), index_dtype=draw.choice((torch.int64, torch.int32)),
        layout=draw.choice(("expert", "rank") if sums == "ranks" else ("expert",)), by_lane=draw.random() < 0.5,
        pattern=draw.choice(("uniform", "skewed", "masked", "one_expert", "one_rank", "nobody")), num_sms=num_sms,
        with_weights=draw.random() < 0.5, with_bias=draw.random() < 0.5, mode=draw.choice(("now", "async", "hook")),
        backends=backends, ranks_per_node=ranks_per_node,
    )  # fmt: skip


def check_each(rank: int, _: int, cases: list[Case]) -> None:
    """Calls of cases on each of their backends; every result must equal the reference's bits. Cases that follow each other and need the
    same memory are calls of the same buffers."""
    poison_outputs()
    for _, alike in itertools.groupby(cases, lambda case: case.memory):
        buffers: list[Buffer] = []
        for case in alike:
            buffers = buffers or [make_buffer(case, backend, rank) for backend in case.backends]
            try:
                check_calls(rank, case, buffers)
            except Exception as error:
                error.add_note(f"in {case}")
                raise
        for buffer in buffers:
            buffer.destroy()


def make_buffer(case: Case, backend: str, rank: int, **options: Any) -> Buffer:
    device_of(backend, rank)
    *sizes, per_node, max_sms, sums, bulk_copies, _ = case.memory
    settings = {"timeout_s": 60, "ranks_per_node": per_node, "max_sms": max_sms, "sums": sums} | options
    buffer = Buffer(None, *sizes, backend=backend, **settings)
    assert buffer.backend == backend
    if backend == "nvlink" and not bulk_copies:
        buffer.calls.backend.tuning.uses_bulk_copies = False
    return buffer


def check_calls(rank: int, case: Case, buffers: list[Buffer]) -> None:
    """A dispatch, a combine and a dispatch along the handle, in each of the buffers."""
    ranks = range(case.num_ranks)
    xs, idxs, weights = inputs_of(case)
    received = reference.dispatch(
        xs, idxs, weights if case.with_weights else None, case.num_experts, layout=case.layout, expert_alignment=case.expert_alignment
    )  # fmt: skip
    outputs = [case.expert_outputs(r, len(received[r].recv_x)) for r in ranks]
    row_weights = [torch.rand(len(output), generator=torch.Generator().manual_seed(r)) for r, output in enumerate(outputs)]
    biases = [case.bias(r) for r in ranks]
    combined = reference.combine(
        outputs, received, case.num_tokens, row_weights if case.with_weights else None, biases if case.with_bias else None,
        ranks_per_node=case.ranks_per_node, sums=case.sums,
    )  # fmt: skip
    how = case.how | {"num_sms": case.num_sms}

    def bounded(tensor: torch.Tensor | None, rest: int = 0) -> torch.Tensor | None:
        if tensor is None or case.bound is None:
            return tensor
        return torch.cat([tensor, tensor.new_full((case.bound - len(tensor), *tensor.shape[1:]), rest)])

    for buffer in buffers:
        device = device_of(buffer.backend, rank)
        x, idx, weight = (tensors[rank].to(device) for tensors in (xs, idxs, weights))
        if case.by_lane:
            idx, weight = (tensor.t().contiguous().t() for tensor in (idx, weight))
        weight = weight if case.with_weights else None
        settings = {"layout": case.layout, "expert_alignment": case.expert_alignment, "num_recv_rows": case.bound}
        out = buffer.dispatch(x, idx, weight, **settings, **how)
        finish(out.hook or out.event)
        mine = received[rank]
        assert_same("recv_x", out.recv_x, bounded(mine.recv_x))
        assert out.num_recv_tokens_per_expert.tolist() == mine.num_recv_tokens_per_expert
        assert out.handle.num_rows_per_expert_list == out.handle.num_rows_per_expert.tolist()
        assert_same("recv_topk_weights", out.recv_topk_weights, bounded(mine.recv_topk_weights))
        assert_same("recv_topk_idx", out.recv_topk_idx, bounded(mine.recv_topk_idx, -1))
        given_weights = bounded(row_weights[rank]).to(device) if case.with_weights else None
        bias = biases[rank].to(device) if case.with_bias else None
        y = buffer.combine(bounded(outputs[rank]).to(device), out.handle, given_weights, bias=bias, **how)
        if case.mode != "now":
            y, end = y
            finish(end)
        assert_same("combined_x", y, combined[rank])
        again = buffer.dispatch(x, topk_weights=weight, handle=out.handle, **how)
        finish(again.hook or again.event)
        assert_same("recv_x along the handle", again.recv_x, bounded(mine.recv_x))
        assert_same("recv_topk_weights along the handle", again.recv_topk_weights, bounded(mine.recv_topk_weights))


def finish(end: Any) -> None:
    """`end`: an event, a hook, or None of a call that is over."""
    if end is not None:
        end() if callable(end) else end.wait()


def on_device(backend: str, rank: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """`tensors` where `backend` wants them."""
    return [tensor.to(device_of(backend, rank)) for tensor in tensors]


def device_of(backend: str, rank: int) -> torch.device:
    """Return the device for tensors of `backend`; ranks share the GPUs."""
    if backend not in ("nvlink", "nvshmem"):
        return torch.device("cpu")
    if emulated_gpu.is_chosen():
        emulated_gpu.install()
        return torch.device("cpu")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", rank % torch.cuda.device_count())


def look(buffer: Any) -> None:
    """Raise what a GPU has found in the calls so far."""
    if buffer.backend in ("nvlink", "nvshmem"):
        torch.cuda.synchronize()
        buffer.check()


def new_stream():
    """A stream that PyTorch has not made, and its address."""
    address = torch.zeros(1, dtype=torch.int64)
    assert torch.cuda.cudart().cudaStreamCreate(address.data_ptr()).value == 0
    return torch.cuda.ExternalStream(address.item()), address.item()


def assert_same(name: str, ours: torch.Tensor | None, reference_value: torch.Tensor | None) -> None:
    """Equal shape, dtype and bits."""
    assert (ours is None) == (reference_value is None), f"{name}: {ours} against {reference_value}"
    if ours is None or reference_value is None:
        return
    ours, reference_value = ours.cpu(), reference_value.cpu()
    assert ours.dtype == reference_value.dtype and ours.shape == reference_value.shape, (
        f"{name}: {ours.dtype} {list(ours.shape)} against {reference_value.dtype} {list(reference_value.shape)}"
    )
    ours, reference_value = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (ours, reference_value))
    different = (ours.view(torch.uint8) != reference_value.view(torch.uint8)).nonzero()
    assert len(different) == 0, f"{name}: {len(different)} bytes differ, first at {different[0].tolist()}"


def opened(case: Case, backend: str, rank: int, **options: Any) -> tuple[Any, ...]:
    """A buffer for a case, and this rank's x, topk_idx and topk_weights where the backend wants them."""
    poison_outputs()
    return make_buffer(case, backend, rank, **options), *on_device(backend, rank, *case.inputs(rank))


def modes_of_calls(buffer: Buffer) -> list[Any]:
    """Return a list to which every call of the buffer adds its mode from now on."""
    backend: Any = buffer.calls.backend
    modes: list[Any] = []

    def noted(call: Any) -> Any:
        def run(args: Any) -> Any:
            modes.append(args.mode)
            return call(args)

        return run

    for name in ("plan", "dispatch_cached", "combine"):
        setattr(backend, name, noted(getattr(backend, name)))
    return modes


def plans_of_copies() -> list[Any]:
    """Return a list to which each plan of copies of experts is added from now on."""
    from deepep_moe.nn.balance import Copies

    plans, plan = [], Copies.plan
    Copies.plan = lambda *args: plans.append(plan(*args)) or plans[-1]
    return plans


def inputs_of(case: Case) -> list[list[torch.Tensor]]:
    """Rows, routings and weights of a case, each by rank."""
    return [list(column) for column in zip(*(case.inputs(rank) for rank in range(case.num_ranks)), strict=True)]


def check_cases(cases: list[Case], **options: Any) -> None:
    """Check cases, which have as many ranks, in the same processes."""
    run_ranks(check_each, cases[0].num_ranks, cases, **options)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def assert_all_same(name: str, ours: Iterable[Any], theirs: Iterable[Any]) -> None:
    """Equal bits of tensors, one by one."""
    for number, pair in enumerate(zip(ours, theirs, strict=True)):
        assert_same(f"{name}, tensor {number}", *pair)


def assert_fields_same(ours: Any, theirs: Any, *names: str) -> None:
    """Equal bits of tensors that have the same name in both."""
    for name in names:
        assert_same(name, getattr(ours, name), getattr(theirs, name))
