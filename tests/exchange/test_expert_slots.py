"""Copies of experts in the slots of other ranks, and their gradients."""

import math
import os
import random
import signal

import pytest
import torch
import torch.distributed as dist
from exchange_cases import assert_all_same, device_of
from on_ranks import on_ranks, refused

from deepep_moe import ExpertSlots
from deepep_moe.errors import EPError, EPMismatchError, EPPeerError, EPTimeoutError

BACKENDS = ("collective", pytest.param("nvlink", marks=pytest.mark.gpu))
COPIES = [[2, -1], [1, 0]]  # of two experts a rank


def opened(backend, rank, num_bytes=1 << 16, timeout_s=60.0):
    device = device_of(backend, rank)
    dist.barrier()
    slots = ExpertSlots(None, num_bytes, backend=backend, timeout_s=timeout_s)
    slots.memory.fill_(0xFF)
    return slots, device


def fetched(backend, rank, **options):
    """Slots after a fetch, and the arguments of one."""
    slots, device = opened(backend, rank, **options)
    copies = torch.tensor(COPIES, dtype=torch.int32, device=device)
    held, weights = slots.empty(2, 16, dtype=torch.float32), torch.ones(2, 16, device=device)
    slots.fetch(copies, held, weights)
    slots.check()
    return slots, copies, held, weights


def called(slots, call, *arguments, **options):
    """A call and its error, which a GPU reports afterwards."""
    call(*arguments, **options)
    torch.cuda.synchronize() if slots.backend == "nvlink" else None
    slots.check()


# ---- by hand ----


@on_ranks(2, backend=BACKENDS)
def test_by_hand(rank, backend):
    slots, device = opened(backend, rank)
    copies = torch.tensor(COPIES, dtype=torch.int32, device=device)
    weights = torch.tensor([[1.0 + 2 * rank] * 8, [2.0 + 2 * rank] * 8], device=device)  # expert e: e + 1
    held = slots.empty(2, 8, dtype=torch.float32)
    slots.fetch(copies, held, weights)
    slots.check()
    held = held.cpu()
    if rank == 0:
        assert (held[0] == 3).all() and held[1].isnan().all()
    else:
        assert (held[0] == 2).all() and (held[1] == 1).all()
    grads, parts = torch.full((2, 8), 0.5, device=device), slots.empty(2, 8, dtype=torch.float32)
    parts.copy_(torch.tensor([[10.0 + rank] * 8, [20.0 + rank] * 8]))
    slots.return_gradients(copies, parts, grads)
    slots.check()
    assert grads[:, 0].tolist() == ([21.5, 11.5] if rank == 0 else [10.5, 0.5])


@on_ranks(3, backend=BACKENDS)
def test_order_of_the_sum(rank, backend):
    """1 + 2^-24 + 2^-24 in fp32 is 1; the copies of ranks 1 and 2 come one after the other."""
    slots, device = opened(backend, rank)
    copies = torch.tensor([[-1], [0], [0]], dtype=torch.int32, device=device)
    grads, part = torch.ones(1, 8, device=device), slots.empty(1, 8, dtype=torch.float32)
    part.fill_(2.0**-24)
    slots.return_gradients(copies, part, grads)
    assert (grads == 1).all()
    if rank == 0:
        grads.fill_(2.0**-24)
    part.fill_(2.0**-24 if rank == 1 else 1.0)
    slots.return_gradients(copies, part, grads)
    assert (grads == (1 + 2.0**-23 if rank == 0 else 1)).all()


# ---- against loops ----


def drawn(generator, num_ranks, num_local, num_slots):
    """Copies of experts of other ranks, some slots empty."""
    table = []
    for rank in range(num_ranks):
        others = [expert for expert in range(num_ranks * num_local) if expert // num_local != rank]
        row = generator.sample(others, min(num_slots, len(others)))
        row = [expert if generator.random() < 0.8 else -1 for expert in row]
        table.append(row + [-1] * (num_slots - len(row)))
    return table


def values(seed, rank, shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(dtype)


def apart(weights, distance):
    """The same values, `distance` elements between two experts."""
    wide = torch.full((len(weights), weights[0].numel() + distance), math.nan, dtype=weights.dtype, device=weights.device)
    return wide[:, : weights[0].numel()].view(weights.shape).copy_(weights)


SHAPES = [
    ([(3, 8)], torch.float32, torch.float32),
    ([(8192 + 8,), (24, 48)], torch.bfloat16, torch.float32),
    ([(2, 3, 4096), (8,), (640, 72)], torch.bfloat16, torch.bfloat16),
    ([(1024, 40)], torch.float16, torch.float32),
    ([(16,)], torch.float16, torch.float16),
]


@on_ranks((1, 2, 3, 4), backend=BACKENDS, number=range(len(SHAPES)))
def test_equals_loops(rank, num_ranks, backend, number):
    shapes, dtype, home_dtype = SHAPES[number]
    generator = random.Random(number)
    slots, device = opened(backend, rank, num_bytes=1 << 22)
    ranks = range(num_ranks)
    for round_ in range(4):
        num_local, num_slots = generator.randint(1, 5), generator.randint(1, 4)
        table = drawn(generator, num_ranks, num_local, num_slots)
        copies = torch.tensor(table, dtype=torch.int32, device=device)
        num_sms = generator.choice((None, 1, 3))
        slots._used = 0
        held = [slots.empty(num_slots, *shape, dtype=dtype) for shape in shapes]
        weights = [[values(10 * round_ + i, r, (num_local, *shape), dtype) for i, shape in enumerate(shapes)] for r in ranks]
        for tensor in held:
            tensor.fill_(math.nan)
        distance = 8 * (round_ % 2)
        slots.fetch(copies, held, [apart(weight.to(device), distance) for weight in weights[rank]], num_sms=num_sms)
        for i, shape in enumerate(shapes):
            expected = torch.full((num_slots, *shape), math.nan, dtype=dtype)
            for slot, expert in enumerate(table[rank]):
                if expert >= 0:
                    expected[slot] = weights[expert // num_local][i][expert % num_local]
            assert_all_same("slots", [held[i].cpu()], [expected])
        parts = [[values(500 + 10 * round_ + i, r, (num_slots, *shape), dtype) for i, shape in enumerate(shapes)] for r in ranks]
        grads = [[values(900 + 10 * round_ + i, r, (num_local, *shape), home_dtype) for i, shape in enumerate(shapes)] for r in ranks]
        own_grads = [grad.to(device, copy=True) for grad in grads[rank]]
        for tensor, part in zip(held, parts[rank], strict=True):
            tensor.copy_(part)
        slots.return_gradients(copies, held, own_grads, num_sms=num_sms)
        slots.check()
        for i in range(len(shapes)):
            total = grads[rank][i].float()
            for r in ranks:
                for slot, expert in enumerate(table[r]):
                    if expert // num_local == rank:  # not for -1
                        total[expert % num_local] += parts[r][i][slot].float()
            assert_all_same("gradients", [own_grads[i].cpu()], [total.to(home_dtype)])
    slots.destroy()


@on_ranks(2)
@pytest.mark.gpu
def test_cuda_graph(rank):
    slots, device = opened("nvlink", rank)
    copies = torch.full((2, 2), -1, dtype=torch.int32, device=device)
    weights, held = torch.zeros(2, 64, device=device), slots.empty(2, 64, dtype=torch.float32)
    grads = torch.zeros(2, 64, device=device)
    slots.fetch(copies, held, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots.fetch(copies, held, weights)
        slots.return_gradients(copies, held, grads)
    for seed in range(1, 4):
        copies.copy_(torch.tensor(COPIES if seed % 2 else [[3, 2], [-1, 0]], dtype=torch.int32))
        weights.fill_(seed + 10 * rank)
        grads.fill_(0.5)
        held.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        slots.check()
        expected = ([[seed, seed], [seed + 10, 0]] if seed % 2 else [[seed, 0], [seed + 10, seed + 10]])[rank]
        assert grads[:, 0].tolist() == [0.5 + value for value in expected]


# ---- errors ----


@on_ranks(2, backend=BACKENDS)
def test_bad_calls(rank, backend):
    """The peer of a rank with a bad argument raises EPPeerError; of calls that differ all ranks hear. Later calls are right."""
    slots, copies, held, weights = fetched(backend, rank)
    device = copies.device
    bad = {
        "1 tensors of slots and 2 of weights; give 1 to 8 of both": (copies, held, [weights, weights]),
        "contiguous int32": (copies.long(), held, weights),
        "1 to 32": (copies.repeat(1, 17), held, weights),
        "outside the memory": (copies, torch.ones(2, 16, device=device), weights),
        "of two dimensions": (copies, held, weights[0]),
        "one first dimension": (copies, held[:1], weights),
        "64 bytes in slots and 32 in weights": (copies, held, weights[:, :8].contiguous()),
        "must be contiguous": (copies, held, weights.t().contiguous().t()),
        "at a multiple of 16": (copies, held, torch.ones(2, 18, device=device)[:, :16]),
    }
    for message, args in bad.items():
        with refused(rank, 1, ValueError, message):
            called(slots, slots.fetch, *(args if rank == 1 else (copies, held, weights)))
    with refused(rank, 1, ValueError, "num_sms is 0"):
        called(slots, slots.fetch, copies, held, weights, num_sms=0 if rank == 1 else None)
    good = (held, weights)
    for error, message, args in (
        (TypeError, "grads must be float32, or as slots are", (held, weights.bfloat16())),
        (ValueError, "grads has a tensor twice", ([held, held], [weights, weights])),
        (TypeError, "all must have one dtype", (held.view(torch.int32), weights)),
    ):
        with refused(rank, 1, error, message):
            called(slots, slots.return_gradients, copies, *(args if rank == 1 else good))
    with pytest.raises(ValueError, match="bytes were asked for"):
        slots.empty(1 << 16, dtype=torch.float32)
    for wrong in ([[0, -1], [-1, -1]], [[2, -1], [7, -1]], [[2, 2], [-1, 0]]):  # on both ranks
        with pytest.raises(ValueError, match=r"copies\[\d, \d\] is \d; it must be -1 or an expert of another rank"):
            called(slots, slots.fetch, torch.tensor(wrong, dtype=torch.int32, device=device), held, weights)
    other = slots.empty(2, 16, dtype=torch.float32)
    calls = [(slots.fetch if rank else slots.return_gradients, copies, held)]
    calls += (
        [(slots.fetch, copies, other if rank else held)]
        if backend == "nvlink"
        else [(slots.fetch, copies if rank else torch.full_like(copies, -1), held)]
    )
    for call, table, tensor in calls:
        with pytest.raises(EPMismatchError, match="ranks make different calls: rank"):
            called(slots, call, table, tensor, weights)
    held.zero_()
    slots.fetch(copies, held, weights)
    slots.check()
    assert (held[0] == 1).all()


@on_ranks(2, backend=BACKENDS, call=("fetch", "return"), expected_dead=[1])
def test_killed(rank, backend, call):
    slots, copies, held, weights = fetched(backend, rank)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(EPTimeoutError, match="rank 1 did not deliver") as info:
        called(slots, slots.fetch if call == "fetch" else slots.return_gradients, copies, held, weights)
    assert info.value.rank == 1


@on_ranks(2, backend=BACKENDS)
def test_destroyed(rank, backend):
    slots, copies, held, weights = fetched(backend, rank, timeout_s=2.0)
    if rank == 1:
        slots.destroy()
        slots.destroy()
        assert (held[0] == 1).all()
        with pytest.raises(EPError, match="were destroyed"):
            slots.fetch(copies, held, weights)
    else:
        with pytest.raises(EPPeerError if backend == "nvlink" else EPTimeoutError):  # a process group does not tell
            called(slots, slots.fetch, copies, held, weights)
    dist.barrier() if backend == "nvlink" else None
