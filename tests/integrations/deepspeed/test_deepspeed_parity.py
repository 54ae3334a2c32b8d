"""Swapped layers against DeepSpeed's own: losses, every gradient, ten optimizer steps; ranks with other numbers of tokens, more
than there is room for, or none."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from deepspeed_cases import (
    HIDDEN,
    STEPS,
    Case,
    assert_equal,
    build_engine,
    logged,
    make_moe,
    most_experts,
    on_deepspeed_ranks,
    run_layer,
    run_steps,
    serves,
)
from torch import nn

from deepep_moe.errors import EPPeerError
from deepep_moe.exchange import growing
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


@on_deepspeed_ranks()
def test_layers_of_several_sizes_share_buffers_with_a_bound(rank):
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

    # A chosen bound holds on CPUs too, where none is needed.
    layer = make_moe(4, k=2)
    for exact in (True, False):
        replace_moe_layers(layer, exact=exact, num_max_tokens_per_rank=16)
        layer(torch.randn(16, HIDDEN))
        with pytest.raises(EPPeerError if rank else ValueError, match="17 tokens, .* room for 16; set num_max_tokens_per_rank"):
            layer(torch.randn(16 if rank else 17, HIDDEN))
        layer(torch.randn(16, HIDDEN))


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


# ---- other numbers of tokens on every rank ----


def _layer(rank: int, ep: int) -> nn.Module:
    """A layer of 4 experts, of which each has weights of its own, the same for every `ep`."""
    torch.manual_seed(3)
    layer = make_moe(4, k=2, ep=ep, drop_tokens=False)
    experts = layer.deepspeed_moe.experts.deepspeed_experts
    for number, expert in enumerate(experts, rank * len(experts) if ep > 1 else 0):
        torch.manual_seed(number)
        for parameter in expert.parameters():
            nn.init.normal_(parameter, std=0.2)
    return layer


def _pass(layer: nn.Module, x: torch.Tensor, cotangent: torch.Tensor) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_(len(x) > 0)  # where there are no tokens, nobody may have asked for their gradient
    torch.manual_seed(5)  # gates draw the second expert
    y = layer(x)[0]
    (y * cotangent).sum().backward()
    return {"output": y.detach(), "input gradient": x if x.grad is None else x.grad}


@on_deepspeed_ranks(exact=(True, False))
def test_uneven_tokens_equal_layers_with_all_experts(rank, exact):
    """Outputs and every gradient, against DeepSpeed's own layers that exchange nothing; a rank without tokens too."""
    layer, alone = _layer(rank, 2), _layer(rank, 1)
    replace_moe_layers(layer, exact=exact)
    for num_tokens in ((5, 9), (11, 0), (0, 7), (1, 6), (1, 1)):
        x, cotangent = torch.randn(2, num_tokens[rank], HIDDEN, generator=torch.Generator().manual_seed(rank))
        actual = _pass(layer, x, cotangent)
        alone.zero_grad()
        expected = _pass(alone, x, cotangent) if len(x) else {"output": x, "input gradient": x}
        both = layer.deepspeed_moe, alone.deepspeed_moe
        gates = [torch.zeros(4, HIDDEN) if moe.gate.wg.weight.grad is None else moe.gate.wg.weight.grad for moe in both]
        actual["gate"], expected["gate"] = gates
        local = layer.deepspeed_moe.experts.deepspeed_experts
        for number, expert in enumerate(alone.deepspeed_moe.experts.deepspeed_experts):
            for name, parameter in expert.named_parameters():
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(grad)
                if number // 2 == rank:
                    expected[f"expert {number} {name}"] = grad
                    actual[f"expert {number} {name}"] = local[number % 2].get_parameter(name).grad
        assert_equal(actual, expected, f"{num_tokens}, exact {exact}, rank {rank}", tolerance=1e-5)


# ---- room ----


@on_deepspeed_ranks(device=("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(2))))
def test_room_grows_with_the_tokens(rank, device):
    """If there is no bound, the first forward that needs more room gets it, while earlier forwards still wait for their backward."""
    growing._is_bounded = lambda device: True
    layer = make_moe(4, k=2, drop_tokens=False).to(device)
    runs, room = [], []
    for ours in (False, True):
        layer.zero_grad()
        with logged() as messages:
            if ours:
                replace_moe_layers(layer)
            outputs = []
            for num_tokens in ((100, 120), (100, 120), (30, 129), (140, 500), (100, 120)):
                if not ours:
                    num_tokens = (max(num_tokens),) * 2  # DeepSpeed wants as many on all ranks
                x = torch.randn(500, HIDDEN, generator=torch.Generator().manual_seed(rank)).to(device)[: num_tokens[rank]]
                torch.manual_seed(0)
                outputs.append(layer(x)[0][: min(30, len(x))])
                room.extend([all_buffers()[0].num_max_tokens_per_rank] if ours else [])
        torch.cat(outputs).sum().backward()
        runs.append(torch.cat(outputs).detach())
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())
    assert room == [2 * bound for bound in (128, 128, 256, 512, 256 * 2)], room
    assert_equal({"outputs": runs[1]}, {"outputs": runs[0]}, f"rank {rank}", tolerance=1e-5)
    grown = [line.split(",")[0] for line in messages if "make room" in line]
    assert grown == [f"a buffer makes room for {bound} tokens of a rank" for bound in (256, 512)] * (rank == 0), messages
    assert restore_moe_layers(layer) == 1 and not all_buffers()
