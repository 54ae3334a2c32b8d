"""Swapped layers against DeepSpeed's own: losses, every gradient, ten optimizer steps."""

from dataclasses import replace

import pytest
import torch
from deepspeed_cases import (
    HIDDEN,
    STEPS,
    Case,
    assert_equal,
    build_engine,
    make_moe,
    most_experts,
    on_deepspeed_ranks,
    run_layer,
    run_steps,
    serves,
)
from torch import nn

from deepep_moe.integrations.common.registry import all_buffers
from deepep_moe.integrations.deepspeed import replace_moe_layers, restore_moe_layers

pytest.importorskip("deepspeed")

# With k = 4, sums of four in fp32 are added in another order in the backward; ten steps of AdamW repeat such an error. In bf16 a rounding
# is 2^-8, and matrix products of other shapes round other bits.
REORDERED, BF16 = 2e-5, 0.1
ON_GPUS = 1e-3  # there DeepSpeed does not repeat its own bits with k = 4: two of its runs were 7e-5 apart after ten steps
STEPS_APART = 4e-3  # after ten steps of a DeepSpeed that rounds otherwise in each

TWO_RANKS = [
    Case(zero=0, k=1),
    Case(zero=1, k=1, drop_tokens=False, use_residual=True),
    Case(zero=2, k=2, use_residual=True, accumulation=2),
    Case(zero=2, k=2, drop_tokens=False, exact=False, tolerance=REORDERED),
    Case(zero=1, k=4, tolerance=REORDERED),
    Case(zero=0, k=4, drop_tokens=False, ep=1, tolerance=REORDERED),
    Case(zero=2, k=1, ep=1, noisy_gate_policy="RSample"),
    Case(zero=2, k=4, use_residual=True, tolerance=REORDERED),
    Case(zero=2, k=2, dtype="bf16", tolerance=BF16),
    Case(zero=1, k=1, dtype="bf16", exact=False, drop_tokens=False, tolerance=BF16),
    Case(zero=0, k=2, dtype="bf16", use_residual=True, tolerance=BF16),
    Case(zero=2, k=4, dtype="bf16", drop_tokens=False, tolerance=BF16),
    Case(zero=2, k=2, dtype="fp16", tolerance=BF16),
    Case(zero=1, k=1, dtype="fp16", exact=False, tolerance=BF16),
]
FOUR_RANKS = [
    Case(zero=2, k=2, ep=4),
    Case(zero=1, k=1, ep=2, drop_tokens=False, use_residual=True),
    Case(zero=0, k=4, ep=4, exact=False, drop_tokens=False, tolerance=REORDERED),
    Case(zero=2, k=1, ep=4, dtype="bf16", use_residual=True, tolerance=BF16),
]


def _run_cases(rank: int, cases: list[Case], num_tokens: int) -> None:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # PyTorch computes in it on CPUs too
    for case in filter(serves, cases):
        runs = [run_steps(build_engine(case, ours), rank, num_tokens=num_tokens) for ours in (True, False)]
        assert len(runs[0]["losses"]) == STEPS * case.accumulation and runs[0]["losses"].std() > 0
        assert_equal(*runs, f"{case}, rank {rank}", tolerance=case.tolerance, rounding=STEPS_APART)


@on_deepspeed_ranks(device=("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(2))))
def test_ten_steps_equal_deepspeed(rank, device):
    cases = TWO_RANKS
    if device.type == "cuda":
        cases = [replace(case, tolerance=max(case.tolerance, ON_GPUS)) for case in TWO_RANKS if case.noisy_gate_policy is None]
    _run_cases(rank, cases, 64)


@pytest.mark.slow
@on_deepspeed_ranks(4)
def test_ten_steps_equal_deepspeed_on_four_ranks(rank):
    _run_cases(rank, FOUR_RANKS, 32)


@on_deepspeed_ranks()
def test_passes_repeat_the_bits(rank):
    """Outputs, losses, counts, every gradient, exact mode: gates of all kinds, masked tokens, nearly everything dropped, evaluation."""
    generator = torch.Generator().manual_seed(rank)
    x, cotangent = (torch.randn(3, 40, HIDDEN, generator=generator) for _ in range(2))
    used = torch.rand(120, generator=generator) < 0.7
    for k, options, extra in (
        (1, {}, ()),
        (1, {}, (used,)),
        (1, {"use_rts": False, "noisy_gate_policy": "Jitter"}, ()),
        (2, {"capacity_factor": 0.3}, ()),
        (2, {"top2_2nd_expert_sampling": False, "drop_tokens": False}, ()),
    ):
        torch.manual_seed(1)
        layer = make_moe(k=k, **options)
        for training in (True, False):
            layer.train(training)
            passes = []
            for change in (restore_moe_layers, replace_moe_layers):
                change(layer)
                passes.append(run_layer(layer, x, cotangent, *extra))
            assert_equal(*passes, f"k {k}, {options}, training {training}, rank {rank}")


class Doubling(nn.Module):
    """An expert whose bits do not depend on how many rows it gets. Returns a pair, as Megatron's layers do."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((HIDDEN,), 1.5))

    def forward(self, x):
        return torch.tanh(x * self.scale), None


@on_deepspeed_ranks()
def test_bf16_rows_are_weighed_like_deepspeed_does(rank):
    x, cotangent = torch.randn(2, 300, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
    for k in (k for k in (1, 2, 4) if k <= most_experts()):
        layer = make_moe(k=k, expert=Doubling()).bfloat16()
        passes = [run_layer(layer, x, cotangent)]
        replace_moe_layers(layer)
        passes.append(run_layer(layer, x, cotangent))
        same = ("output", "l_aux", "counts", "deepspeed_moe.gate.wg.weight") + (("input gradient",) if k < 4 else ())
        assert_equal(*({name: run[name] for name in same} for run in passes), f"bf16, k {k}, rank {rank}", rounding=2e-2)
        assert_equal(*passes, f"bf16, k {k}, rank {rank}", tolerance=2e-2)


@on_deepspeed_ranks()
def test_layers_of_several_sizes_share_buffers(rank):
    """Layers of other expert counts, top-k and group sizes in one model share what they can."""
    x, cotangent = torch.randn(2, 2, 30, HIDDEN, generator=torch.Generator().manual_seed(rank))
    torch.manual_seed(1)
    k = min(3, most_experts())
    layers = nn.ModuleList([make_moe(8, k=2), make_moe(4, k=1), make_moe(12, k=k), make_moe(4, k=1, ep=1)])
    want = [run_layer(layer, x, cotangent) for layer in layers]
    for exact in (True, False):
        assert replace_moe_layers(layers, exact=exact) == 4
        for i, layer in enumerate(layers):
            assert_equal(run_layer(layer, x, cotangent), want[i], f"layer {i}, exact {exact}, rank {rank}", tolerance=2e-6)
        assert len({layer.deepspeed_moe.deepep_moe_number for layer in layers}) == 4, "each layer names itself"
    assert len(all_buffers()) == 2, "a buffer per group, those of the other mode are gone"
    assert restore_moe_layers(layers) == 4 and not all_buffers()


@on_deepspeed_ranks(device=("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(2))))
def test_autocast(rank, device):
    """Gates then have weights in bf16, in which DeepSpeed multiplies. With k = 2 the gate's gradient, a difference of sums much larger than
    it, is off by more than its size in DeepSpeed too, against the same pass in fp32."""
    x, cotangent = torch.randn(2, 80, HIDDEN, generator=torch.Generator().manual_seed(rank)).to(device)
    for k in (1, 2):
        layer = make_moe(k=k).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            want = run_layer(layer, x, cotangent)
            for exact in (True, False):
                replace_moe_layers(layer, exact=exact)
                got = run_layer(layer, x, cotangent)
                if k == 2:
                    got["deepspeed_moe.gate.wg.weight"] = want["deepspeed_moe.gate.wg.weight"]
                assert_equal(got, want, f"k {k}, exact {exact}, rank {rank}", tolerance=5e-2)
            restore_moe_layers(layer)
