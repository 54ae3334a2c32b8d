"""Many low-latency calls of random sizes and routings over nodes, whose sums are made again on the GPU in the order of the contract.

A round is three calls in two: the long run is five splits of 2,001 calls, under MPS:
`DEEPEP_MOE_STRESS_ROUNDS=1334 pytest -m gpu tests/low_latency/test_low_latency_nodes_random.py`
"""

import random

import emulated_gpu
import pytest
import torch
from exchange_cases import device_of
from random_routings import ROUNDS

from benchmarks.low_latency.operations import expected_combine, expected_dispatch, expert_rows, received
from deepep_moe import LowLatencyBuffer
from deepep_moe.testing import run_ranks
from deepep_moe.tune.workload import Shape, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MAX_TOKENS, NUM_EXPERTS = 16, 24


def is_same(actual, expected):
    return actual.shape == expected.shape and torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def draw(shape, number, device):
    sizes = random.Random(number)
    first = number * shape.num_ranks
    return [make_inputs(shape, sizes.randint(0, MAX_TOKENS), first + source, device) for source in range(shape.num_ranks)]


def check_dispatch(out, expected, number):
    there = received(out.recv_x, out.num_recv_tokens_per_expert)
    assert is_same(out.num_recv_tokens_per_expert, expected["num_recv_tokens_per_expert"]), number
    assert is_same(out.recv_x.view(torch.uint8)[there], expected["recv_x"].view(torch.uint8)), number
    if out.recv_x_scales is not None:
        assert is_same(out.recv_x_scales[there], expected["recv_x_scales"]), number


def one_round(buffer, shape, rank, number, device):
    """A dispatch in fp8, or one in bf16 and its combine over either wire, whole or in halves."""
    everyone = draw(shape, number, device)
    mine, wire, split = everyone[rank], ("fp8", "bf16")[number % 2], number % 3 != 0
    out = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, fp8=wire == "fp8", return_hook=split)
    if split:
        out.hook()
    check_dispatch(out, expected_dispatch(everyone, shape, rank, wire), number)
    if wire == "fp8":
        return
    rows = expert_rows(out.recv_x, out.num_recv_tokens_per_expert, shape, rank, buffer.combine_input())
    back = ("fp8", "bf16")[number // 2 % 2]
    combined = buffer.combine(rows, out.handle, wire="fp8" if back == "fp8" else None, return_hook=split)
    if split:
        combined, hook = combined
        hook()
    assert is_same(combined, expected_combine(mine, shape, back, rank)), number


def rounds(rank, num_ranks, per_node, num_rounds):
    device = device_of("nvshmem", rank)
    shape = Shape(num_ranks, 256, NUM_EXPERTS, 4, 1, per_node)
    sizes = MAX_TOKENS, shape.hidden, shape.num_experts, shape.num_topk
    buffer = LowLatencyBuffer(None, *sizes, backend="nvshmem", ranks_per_node=per_node)
    for number in range(num_rounds):
        one_round(buffer, shape, rank, number, device)
    torch.cuda.synchronize()
    buffer.check()
    buffer.destroy()


@pytest.mark.parametrize("num_ranks, per_node", ((2, 1), (4, 2), (4, 1), (6, 2), (8, 4)))
def test_random_calls_over_nodes(num_ranks, per_node):
    num_rounds = ROUNDS // num_ranks if emulated_gpu.is_chosen() else ROUNDS  # there one takes up to a second, by ranks
    run_ranks(rounds, num_ranks, per_node, num_rounds, timeout_s=600 + ROUNDS / 10)
