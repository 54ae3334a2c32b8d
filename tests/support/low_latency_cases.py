"""Routings for the tests of low-latency calls, and the comparison with the reference that runs on every rank."""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import exchange_cases
import pytest
import torch
import torch.distributed as dist
from exchange_cases import NVLINK, assert_same, device_of, finish, look, on_device, poison_outputs

from deepep_moe import LowLatencyBuffer, reference

BLOCK = 128


@dataclass
class Case(exchange_cases.Case):
    """One routing of all ranks."""

    hidden: int = 128
    num_experts: int = 24
    dtype: torch.dtype = torch.bfloat16
    max_tokens: int = 24
    masked: float = 0.2  # share of lanes without expert
    combine_weights: bool = False  # they are given to combine, not to dispatch
    fp8: bool = False
    scale_format: str = "fp32"
    wire: str | None = None
    without: int | tuple[int, ...] | None = None  # masked ranks: their tokens do not come, their experts are not reached

    @property
    def memory(self) -> tuple[Any, ...]:
        """The settings of a buffer."""
        return self.max_tokens, self.hidden, self.num_experts, self.num_topk, self.ranks_per_node, self.sums

    @property
    def dispatch_weights(self) -> bool:
        return self.with_weights and not self.combine_weights

    @property
    def left_out(self) -> tuple[int, ...]:
        return () if self.without is None else (self.without,) if isinstance(self.without, int) else self.without

    def inputs(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, topk_idx, topk_weights, NaN where there is no expert; magnitudes differ from block to block."""
        generator = torch.Generator().manual_seed(self.seed * 101 + rank)
        n = self.num_tokens[rank]
        x = torch.randn(n, self.hidden, generator=generator) * 10 ** torch.randint(-6, 3, (n, self.hidden), generator=generator).sign()
        idx = torch.rand(n, self.num_experts, generator=generator).argsort(dim=1)[:, : self.num_topk]
        idx = torch.where(torch.rand(idx.shape, generator=generator) < self.masked, -1, idx)
        weights = torch.rand(n, self.num_topk, generator=generator).masked_fill(idx < 0, torch.nan)
        return x.to(self.dtype), idx.to(self.index_dtype), weights

    def inputs_that_count(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, idx, weights = self.inputs(rank)
        if self.left_out:
            is_lost = self.is_lost(rank, idx // (self.num_experts // self.num_ranks))
            idx = torch.full_like(idx, -1) if rank in self.left_out else torch.where(is_lost, -1, idx)
        return x, idx, weights

    def is_lost(self, rank: int, to: torch.Tensor) -> torch.Tensor:
        """Return which tokens of `rank` are lost on the way to the ranks `to`. Between nodes, rows go by the rank with this index."""
        is_lost, per_node = torch.zeros_like(to, dtype=torch.bool), self.ranks_per_node or self.num_ranks
        for masked in self.left_out:
            is_lost |= to == masked
            node, index = divmod(masked, per_node)
            if rank // per_node != node and rank % per_node == index:
                is_lost |= to // per_node == node  # which it does not reach
            if rank // per_node == node:
                is_lost |= (to // per_node != node) & (to % per_node == index)  # which its node has masked
        return is_lost & (to >= 0)


class Expected:
    """The reference's results of a case."""

    def __init__(self, case: Case):
        self.case = case
        inputs = [case.inputs_that_count(rank) for rank in range(case.num_ranks)]
        xs, idxs, weights = (list(column) for column in zip(*inputs, strict=True))
        self.received = reference.low_latency.dispatch(
            xs, idxs, weights if case.dispatch_weights else None, case.num_experts, fp8=case.fp8, is_rounded=case.scale_format == "ue8m0"
        )
        self.outputs = [case.expert_outputs(rank, len(there.recv_x)) for rank, there in enumerate(self.received)]
        self._weights = weights if case.combine_weights else None
        self.combined = self.combine()

    def combine(self) -> list[torch.Tensor]:
        """The combine of `outputs`."""
        case = self.case
        return reference.low_latency.combine(
            self.outputs, self.received, case.num_tokens, fp8=case.wire == "fp8", topk_weights=self._weights,
            ranks_per_node=case.ranks_per_node, sums=case.sums,
        )  # fmt: skip


def make_buffer(case: Case, backend: str, rank: int, **options) -> LowLatencyBuffer:
    """Make a buffer on all ranks at once, so that a short deadline does not include the start of processes."""
    device_of(backend, rank)
    poison_outputs()
    if dist.is_initialized():
        dist.barrier()
    *sizes, per_node, sums = case.memory
    options = {"timeout_s": 60, "ranks_per_node": per_node, "sums": sums} | options
    buffer = LowLatencyBuffer(None, *sizes, backend=backend, **options)
    assert buffer.backend == backend and buffer.capacity == case.num_ranks * case.max_tokens
    return buffer


def start_dispatch(buffer: LowLatencyBuffer, case: Case, rank: int, backend: str):
    """The dispatch of a case, and a function that waits for it."""
    x, idx, weights = (tensor.to(device_of(backend, rank)) for tensor in case.inputs(rank))
    weights = weights if case.dispatch_weights else None
    out = buffer.dispatch(x, idx, weights, fp8=case.fp8, scale_format=case.scale_format, **case.how)
    return out, partial(finish, out.hook or out.event)


def start_combine(buffer: LowLatencyBuffer, case: Case, x: torch.Tensor, handle, out: torch.Tensor | None = None):
    """The combine of a case, and a function that waits for it."""
    weights = case.inputs(buffer.rank)[2].to(x.device) if case.combine_weights else None
    result = buffer.combine(x, handle, topk_weights=weights, out=out, wire=case.wire, **case.how)
    y, end = (result, None) if case.mode == "now" else result
    return y, partial(finish, end)


def unpack_scales(scales: torch.Tensor, scale_format: str, num_blocks: int) -> torch.Tensor:
    """[num_rows, num_blocks] fp32 of what a dispatch returns for one expert."""
    if scale_format == "fp32":
        return scales
    exponents = torch.stack([scales >> 8 * place & 0xFF for place in range(4)], dim=-1).flatten(-2)
    assert not exponents[:, num_blocks:].any(), "blocks that are not there"
    return (exponents[:, :num_blocks] << 23).to(torch.int32).view(torch.float32)


def check_dispatch(case: Case, rank: int, out, expected: Expected) -> None:
    mine = expected.received[rank]
    counts = out.num_recv_tokens_per_expert.tolist()
    assert counts == mine.num_recv_tokens_per_expert
    first = 0
    for expert, count in enumerate(counts):
        rows, behind = out.recv_x[expert, :count], out.recv_x[expert, count:]
        assert_same(f"rows of expert {expert}", rows, mine.recv_x[first : first + count])
        assert behind.float().isnan().all(), f"expert {expert}: something lies behind its {count} rows"
        if case.fp8:
            scales = unpack_scales(out.recv_x_scales[expert, :count].cpu(), case.scale_format, case.hidden // BLOCK)
            assert_same(f"scales of expert {expert}", scales, mine.recv_x_scales[first : first + count])
        first += count
    assert (out.recv_x_scales is not None) == case.fp8
    if case.fp8:
        assert out.recv_x_scales.stride(1) == 1 and out.recv_x_scales.dtype == (torch.float32, torch.int32)[case.scale_format == "ue8m0"]


def combine_rows(case: Case, rank: int, out, expected: Expected) -> torch.Tensor:
    """[num_local_experts, capacity, hidden] for combine: the outputs of the case, NaN where nothing was received."""
    x = torch.full(out.recv_x.shape, float("nan"), dtype=case.dtype)
    first = 0
    for expert, count in enumerate(out.num_recv_tokens_per_expert.tolist()):
        x[expert, :count] = expected.outputs[rank][first : first + count]
        first += count
    return x.to(out.recv_x.device)


def run_case(buffer: LowLatencyBuffer, case: Case, rank: int, backend: str, expected: Expected | None = None) -> None:
    """Dispatch and combine in `buffer`; every result must equal the reference's bits."""
    expected = expected or Expected(case)
    out, wait = start_dispatch(buffer, case, rank, backend)
    wait()
    check_dispatch(case, rank, out, expected)
    y, wait = start_combine(buffer, case, combine_rows(case, rank, out, expected), out.handle)
    wait()
    assert_same("combined_x", y, expected.combined[rank])


def check_cases(rank: int, _: int, backend: str, cases: list[Case]) -> None:
    """Cases one after another; those that follow each other and need the same memory are calls of one buffer."""
    for _, alike in itertools.groupby(cases, lambda case: case.memory):
        first, *others = alike
        buffer = make_buffer(first, backend, rank)
        for case in (first, *others):
            run_case(buffer, case, rank, backend)
        look(buffer)
        buffer.destroy()


# ---- a small buffer with rows and a routing ----

BACKENDS = ("shm", NVLINK)
ALL_BACKENDS = (*BACKENDS, pytest.param("nvshmem", marks=pytest.mark.gpu))
CASE = Case([4, 4], max_tokens=8, hidden=128, num_experts=4, num_topk=2, masked=0.0, dtype=torch.float32)
IDX = torch.tensor([[0, 2], [1, 3], [3, 0], [2, -1]])
X = torch.randn(4, 128, generator=torch.Generator().manual_seed(3))


def make(backend, rank, **options):
    return make_buffer(CASE, backend, rank, **({"timeout_s": 60} | options)), *on_device(backend, rank, X, IDX)


def check_usable(buffer, x, idx):
    out = buffer.dispatch(x, idx)
    y = buffer.combine(out.recv_x, out.handle)
    look(buffer)
    assert torch.allclose(y, x * (idx >= 0).sum(1, keepdim=True)), "usable afterwards"


def come_back(buffer, rank, masked):
    """All ranks but the masked one take it back, between the same calls."""
    dist.barrier()
    if rank == masked:
        buffer.rejoin()
    else:
        buffer.mask_rank(masked, False)
    assert buffer.masked_ranks == []


def combined_without(case, masked):
    """Return all ranks' results of a combine without `masked`, along a dispatch with it. Its sums are lost; the ranks of its rail also lose
    the sums of its node."""
    expected, weights, per_node = Expected(case), [], case.ranks_per_node or case.num_ranks
    node, index = divmod(masked, per_node)
    for rank in range(case.num_ranks):
        _, idx, all_weights = case.inputs(rank)
        to = idx // (case.num_experts // case.num_ranks)
        by_it = rank // per_node != node and rank % per_node == index
        weights.append(torch.where((to == masked) | (by_it & (to // per_node == node)), 0, all_weights))
    return reference.low_latency.combine(
        expected.outputs, expected.received, case.num_tokens, topk_weights=weights, ranks_per_node=case.ranks_per_node
    )
