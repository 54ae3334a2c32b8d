"""Gradients of weights that a GPU adds to fp32 sums. Operands are small whole numbers, so every order of adding gives the same bits."""

import itertools

import pytest
import torch
from exchange_cases import device_of

from deepep_moe.ops import grouped_products
from deepep_moe.ops.grouped_products import Groups

pytestmark = pytest.mark.gpu
NAN = float("nan")
COUNTS = ([64], [0, 5, 0], [63, 65, 1, 0], [128, 3, 200])
SHAPES = ((8, 8), (136, 264), (256, 512))  # out, in: less than a tile of a pair of blocks, more than one, whole ones


@pytest.fixture
def device(monkeypatch):
    device = device_of("nvlink", 0)
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("only Hopper GPUs have the kernel")
    monkeypatch.setattr(grouped_products, "has_kernels", lambda _: True)  # an emulated GPU too
    return device


def case_of(counts, out, columns, tail=70):
    """Gradients, rows and sums on the CPU, and the sums that are expected. The tail of the rows is NaN."""
    generator = torch.Generator().manual_seed(out)
    grads, rows = (torch.randint(-4, 5, (sum(counts) + tail, width), generator=generator).bfloat16() for width in (out, columns))
    grads[sum(counts) :], rows[sum(counts) :] = NAN, NAN
    sums = torch.randint(-9, 10, (len(counts), out, columns), generator=generator).float()
    return grads, rows, sums, sums + products_of(grads, rows, counts)


def products_of(grads, rows, counts):
    groups = [slice(start, end) for start, end in itertools.pairwise(itertools.accumulate(counts, initial=0))]
    return torch.stack([grads[group].float().t() @ rows[group].float() for group in groups])


def add_on(device, grads, rows, counts, sums):
    """Return the sums after a call of the kernel."""
    here, there = sums.to(device), [each.to(device) for each in (grads, rows)]
    groups = Groups(torch.tensor(counts, device=device), len(counts), there[1])
    assert grouped_products._add_products(*there, groups, here)
    return here


def test_by_hand(device):
    grads = torch.zeros(3, 8, dtype=torch.bfloat16)
    rows = torch.zeros(3, 8, dtype=torch.bfloat16)
    grads[:, 1], rows[:, 2] = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])
    expected = torch.full((2, 8, 8), 0.5)
    expected[0, 1, 2], expected[1, 1, 2] = 0.5 + 10 + 40, 0.5 + 90
    assert torch.equal(add_on(device, grads, rows, [2, 1], torch.full((2, 8, 8), 0.5)).cpu(), expected)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("out", "columns"), SHAPES)
def test_adds_products(device, counts, out, columns):
    grads, rows, sums, expected = case_of(counts, out, columns)
    assert torch.equal(add_on(device, grads, rows, counts, sums).cpu(), expected)


def test_many_tiles_of_uneven_groups(device):
    """More tiles than pairs of blocks, and more steps than stages."""
    counts = [700, 0, 1, 330]
    grads, rows, sums, expected = case_of(counts, 520, 776)
    assert torch.equal(add_on(device, grads, rows, counts, sums).cpu(), expected)


def test_memory_around_is_not_touched(device):
    grads, rows, sums, expected = case_of([5, 9], 136, 264)
    memory = torch.full((sums.numel() + 128,), NAN, device=device)
    here = memory[64:-64].view_as(sums).copy_(sums)
    groups = Groups([5, 9], 2, rows.to(device))
    grouped_products.weight_gradients(grads.to(device), rows.to(device), groups, here)
    assert torch.equal(here.cpu(), expected) and memory[:64].isnan().all() and memory[-64:].isnan().all()


@pytest.mark.parametrize("kind", ("bf16", "strided", "odd address", "other shape"))
def test_sums_that_the_kernel_declines(device, kind):
    grads, rows, sums, _ = case_of([5, 9], 16, 24)
    there, sums = [each.to(device) for each in (grads, rows)], sums.to(device)
    odd = sums.new_zeros(sums.numel() + 1)[1:].view_as(sums)
    into = {"bf16": sums.bfloat16(), "strided": sums.transpose(1, 2), "odd address": odd, "other shape": sums[:1]}[kind]
    assert not grouped_products._add_products(*there, Groups([5, 9], 2, there[1]), into)


def test_in_a_cuda_graph(device):
    """A graph takes other groups at its next replay."""
    counts, others = torch.tensor([100, 28], device=device), torch.tensor([3, 125], device=device)
    grads, rows, sums, expected = case_of([100, 28], 256, 256, tail=0)
    here, there, used = sums.to(device), [each.to(device) for each in (grads, rows)], counts.clone()
    add = grouped_products._add_products
    add(*there, Groups(used, 2, there[1]), torch.zeros_like(here))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert add(*there, Groups(used, 2, there[1]), here)
    graph.replay()
    assert torch.equal(here.cpu(), expected)
    used.copy_(others)
    graph.replay()
    assert torch.equal(here.cpu(), expected + products_of(grads, rows, [3, 125]))
