"""Many random routings one after another: sizes from none to the bound, skewed, with lanes that choose nobody; in all types and layouts.

`DEEPEP_MOE_STRESS_ROUNDS=10000 pytest -m gpu tests/exchange/test_stress.py` is the long run; the tests of every day make fewer rounds.
"""

import random
import time
from dataclasses import replace

import pytest
import torch
from exchange_cases import NVLINK, ROUNDS, Case, check_cases, device_of, on_cpus_and_gpus, random_case
from on_ranks import on_ranks

from deepep_moe import Buffer
from deepep_moe.exchange.by_expert import combine_by_expert, dispatch_by_expert

NUM_RANKS = 4 if torch.cuda.device_count() >= 4 else 2


@on_cpus_and_gpus
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_random_routings(num_ranks, backends):
    """Ten times as many with the ranks that machines have."""
    num_rounds = ROUNDS if num_ranks == NUM_RANKS else ROUNDS // 10
    check_cases([random_case(seed, num_ranks, backends) for seed in range(num_rounds)], timeout_s=600 + ROUNDS / 10)


def delay(device, kind):
    """A host, or a GPU, that is late now and then."""
    if kind == 0:
        time.sleep(2e-4)
    elif kind == 1 and device.type == "cuda":
        torch.cuda._sleep(200_000)


@on_ranks(NUM_RANKS, timeout_s=600 + ROUNDS / 10, backend=("shm", NVLINK))
def test_random_passes(rank, num_ranks, backend):
    """Forward and backward of layers whose rows by expert are weighted at the source; expert e multiplies by e + 1. Rows are looked
    at every ten rounds, so that hosts and GPUs run ahead of each other as they do in training."""
    device = device_of(backend, rank)
    num_experts = 3 * num_ranks
    buffer = Buffer(None, 2 * 96, 64, num_experts, 1, backend=backend, timeout_s=60)
    scales = torch.arange(1.0, num_experts + 1, device=device)
    differ = torch.zeros(3, dtype=torch.int64, device=device)  # rounds
    for seed in range(ROUNDS):
        draw = random.Random(seed)
        case = Case([draw.choice((0, 96, 1, 32, 49)) for _ in range(num_ranks)], num_experts=num_experts, num_topk=2, seed=seed)
        idx = replace(case, pattern=draw.choice(("uniform", "skewed", "masked", "one_expert"))).routing(rank).to(device)
        generator = torch.Generator(device=device).manual_seed(seed)
        x = torch.randint(-8, 9, (len(idx), 64), generator=generator, device=device).float()  # whose sums are exact
        lanes = idx.t().contiguous()  # [2, num_tokens]
        weights = torch.randint(1, 8, lanes.shape, generator=generator, device=device) / 8 * (lanes >= 0)
        cotangent = torch.randint(-4, 5, x.shape, generator=generator, device=device).float()
        late = torch.randint(0, 6, (3,), generator=torch.Generator().manual_seed(seed * 17 + rank)).tolist()
        leaf, weighed = x.clone().requires_grad_(), weights.clone().requires_grad_()
        delay(device, late[0])
        parts, recv_weights, handle = dispatch_by_expert(buffer, leaf, lanes.reshape(-1, 1), None, (), weighed)
        delay(device, late[1])
        y = combine_by_expert(buffer, [rows * scales[3 * rank + i] for i, rows in enumerate(parts)], recv_weights, handle, weighed)
        delay(device, late[2])
        y.backward(cotangent)
        factor = scales[lanes.clamp(min=0)] * (lanes >= 0)
        factors = (factor * weights).sum(0).unsqueeze(1)
        for i, (got, want) in enumerate(
            ((y, x * factors), (leaf.grad, cotangent * factors), (weighed.grad, factor * (x * cotangent).sum(1)))
        ):
            differ[i] += (got != want).any()
        if seed % 10 == 9 or seed == ROUNDS - 1:
            assert not differ.any(), f"to round {seed}: {differ.tolist()} outputs, gradients of x and of weights differ"
