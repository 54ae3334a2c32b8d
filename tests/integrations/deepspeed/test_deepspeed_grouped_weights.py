"""Tests without an exchange: experts that can be grouped, reasons of others, and joining weights and rows without copies."""

import copy

import pytest
import torch
from deepspeed_cases import HIDDEN, Expert, logged, read_expert, sequential
from torch import nn

from deepep_moe.exchange.by_expert import rows_of_all
from deepep_moe.integrations.deepspeed.expert_weights import read_known
from deepep_moe.integrations.deepspeed.options import Options
from deepep_moe.nn import SwiGLU
from deepep_moe.ops import grouped_mlp

pytest.importorskip("deepspeed")
from deepep_moe.integrations.deepspeed import plugin
from deepep_moe.integrations.deepspeed.native import grouped


def experts_of(expert: nn.Module, num: int = 3) -> list[nn.Module]:
    """Return experts that are copies, like DeepSpeed's."""
    return [copy.deepcopy(expert) for _ in range(num)]


def test_layers_of_autoep_say_that_it_has_no_effect():
    with logged() as lines:
        plugin._report(nn.Linear(1, 1), [], 0, 2, Options(grouped_experts=True))
    assert len(lines) == 1 and lines[0].startswith("grouped_experts has no effect on 2 AutoEP layers")


# ---- known experts ----


KNOWN = {
    "gelu": sequential(),
    "tanh gelu": sequential(nn.GELU(approximate="tanh")),
    "relu in place": sequential(nn.ReLU(inplace=True)),
    "silu in place, no biases": sequential(nn.SiLU(inplace=True), bias=False),
    "tanh": sequential(nn.Tanh()),
    "sigmoid": sequential(nn.Sigmoid()),
    "a bias in one": nn.Sequential(nn.Linear(HIDDEN, 48), nn.ReLU(), nn.Linear(48, HIDDEN, bias=False)),
    "parts that do nothing": nn.Sequential(nn.Identity(), *sequential(), nn.Dropout(0.0)),
    "dropout in evaluation": nn.Sequential(*sequential(), nn.Dropout(0.5)).eval(),
    "swiglu": SwiGLU(HIDDEN, 48),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_experts_compute_what_is_read(name):
    """Outputs and gradients of grouped products against calls, in fp64 where nothing but the formula matters."""
    torch.manual_seed(0)
    experts = experts_of(KNOWN[name].double())
    for parameter in (parameter for expert in experts for parameter in expert.parameters()):
        nn.init.normal_(parameter, std=0.3)
    parts = [torch.randn(1, 1, num_rows, HIDDEN, dtype=torch.float64, requires_grad=True) for num_rows in (5, 0, 3)]
    weights = grouped.weights_of(experts, True)
    assert not isinstance(weights, str), weights
    results = []
    for outputs in ([expert(part) for expert, part in zip(experts, parts, strict=True)], grouped.run_grouped(weights, parts)):
        leaves = [*parts, *(parameter for expert in experts for parameter in expert.parameters())]
        loss = sum((output * torch.arange(HIDDEN)).square().sum() for output in outputs)
        results.append([*outputs, *torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


class Own(nn.Sequential):
    pass


UNKNOWN = {
    "Expert": Expert(),
    "Own(Linear, GELU, Linear)": Own(*sequential()),
    "Sequential(Linear, Softmax, Linear)": sequential(nn.Softmax(-1)),
    "Sequential(Linear, Linear)": nn.Sequential(nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)),
    "Sequential(Linear, GELU, Linear, LayerNorm)": nn.Sequential(*sequential(), nn.LayerNorm(HIDDEN)),
    "Sequential(Linear, GELU, Bilinear)": nn.Sequential(*list(sequential())[:2], nn.Bilinear(48, 48, HIDDEN)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_classes_are_not_guessed(name):
    assert read_known(UNKNOWN[name]) is None
    assert grouped.weights_of(experts_of(UNKNOWN[name]), True).startswith(f"experts are {name}, whose weights deepep_moe cannot read; pass")


# ---- why experts are called ----


class Quantized(torch.Tensor):
    pass


def _subclasses(experts):
    del experts[0][0].weight
    experts[0][0].weight = torch.randn(48, HIDDEN).as_subclass(Quantized)


# The change to three experts, and the logged reason.
CALLED = {
    "hook": (lambda e: e[1][1].register_forward_hook(lambda *_: None), "GELU of local expert 1 has hooks"),
    "backward hook": (lambda e: e[0].register_full_backward_hook(lambda *_: None), "Sequential of local expert 0 has hooks"),
    "forward": (lambda e: setattr(e[2], "forward", e[2].forward), "Sequential of local expert 2 has a forward that was replaced"),
    "forward of a part": (lambda e: setattr(e[2][0], "forward", e[2][0].forward), "Linear of local expert 2 has a forward that was"),
    "compiled": (lambda e: e[1].compile(backend="eager"), "Sequential of local expert 1 was compiled by itself"),
    "parametrized": (lambda e: nn.utils.parametrizations.weight_norm(e[1][0]), "ParametrizedLinear of local expert 1 has parametrizations"),
    "dropout": (lambda e: e[1].append(nn.Dropout(0.1)), "Dropout of local expert 1 drops with p=0.1 in training"),
    "partitioned": (lambda e: setattr(e[0][2].weight, "ds_id", 3), "Linear of local expert 0 has parameters that ZeRO-3 partitions"),
    "shapes": (
        lambda e: e.__setitem__(1, nn.Sequential(nn.Linear(HIDDEN, 16), nn.GELU(), nn.Linear(16, HIDDEN))),
        f"w1 of local expert 1 is [16, {HIDDEN}] torch.float32 on cpu, and [48, {HIDDEN}] torch.float32 on cpu in the first",
    ),
    "dtypes": (lambda e: e[2].bfloat16(), f"w1 of local expert 2 is [48, {HIDDEN}] torch.bfloat16 on cpu"),
    "biases": (lambda e: e[1].__setitem__(2, nn.Linear(48, HIDDEN, bias=False)), "b2 of local expert 1 is None"),
    "classes": (lambda e: e.__setitem__(1, SwiGLU(HIDDEN, 48)), "experts are of the classes ['Sequential', 'SwiGLU']"),
    "activations": (lambda e: e[1].__setitem__(1, nn.ReLU()), "local expert 1 has another activation than the first"),
    "approximations": (lambda e: e[2].__setitem__(1, nn.GELU("tanh")), "local expert 2 has another activation than the first"),
    "subclasses": (_subclasses, "w1 of local expert 0 is a Quantized; it must be a plain tensor"),
    "another parameter": (
        lambda e: e[1].register_parameter("scale", nn.Parameter(torch.ones(1))),
        "parameters ['scale'] of local expert 1 are not among its ExpertWeights",
    ),
}


@pytest.mark.parametrize("name", CALLED)
def test_reasons(name):
    change, reason = CALLED[name]
    experts = experts_of(sequential())
    assert not isinstance(grouped.weights_of(experts, True), str)
    change(experts)
    assert grouped.weights_of(experts, True).startswith(reason)


def test_hooks_for_all_modules():
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert grouped.weights_of(experts_of(sequential()), True).startswith("PyTorch has hooks for all modules")
    finally:
        hook.remove()
    assert isinstance(grouped.weights_of(experts_of(sequential()), True), list)


def test_functions_that_read_experts():
    experts = experts_of(Expert(bias=True))
    want = [read_expert(expert) for expert in experts]
    assert grouped.weights_of(experts, read_expert) == want
    assert grouped.weights_of(experts, lambda expert: tuple(read_expert(expert))) == want, "any tuple of five"
    assert grouped.weights_of(experts, lambda _: None) == "the function grouped_experts returned None for Expert"
    with pytest.raises(TypeError, match="returned int; it must return ExpertWeights, or None"):
        grouped.weights_of(experts, lambda _: 3)
    different = grouped.weights_of(experts, lambda expert: read_expert(expert)._replace(activation=lambda x: x))
    assert different.startswith("local expert 1 has another activation than the first")
    experts[1].register_forward_hook(lambda *_: None)
    assert grouped.weights_of(experts, read_expert).startswith("Expert of local expert 1 has hooks")


def test_functions_that_leave_a_parameter_out():
    def computed(expert):
        return read_expert(expert)._replace(w1=2 * expert.up.weight, b1=None)

    experts = experts_of(Expert(bias=True))
    assert grouped.weights_of(experts, computed) == "parameters ['up.bias'] of local expert 0 are not among its ExpertWeights"
    for expert in experts:
        expert.up.bias.requires_grad_(False)
    assert isinstance(grouped.weights_of(experts, computed), list), "a frozen one wants no gradient, and w1 comes from up.weight"


# ---- memory ----


def flattened(tensors: list[torch.Tensor], gap: int = 0, begin: int = 0) -> list[torch.Tensor]:
    """The tensors in one memory, as ZeRO puts them, with `begin` entries before the first and `gap` behind each."""
    memory = torch.zeros(begin + len(tensors) * (tensors[0].numel() + gap))
    for i, tensor in enumerate(tensors):
        start = begin + i * (tensor.numel() + gap)
        tensor.data = memory[start : start + tensor.numel()].view(tensor.shape).copy_(tensor.data)
    return tensors


LAYOUTS = {
    "in one memory": (lambda tensors: flattened(tensors), True),
    "at equal distances": (lambda tensors: flattened(tensors, 8, 4), True),
    "not at multiples of 16 bytes": (lambda tensors: flattened(tensors, 3), False),
    "begins off a multiple": (lambda tensors: flattened(tensors, 4, 1), False),
    "apart": (lambda tensors: tensors, False),
    "two apart, which are at one distance": (lambda tensors: sorted(tensors[:2], key=torch.Tensor.data_ptr), False),
    "the same one": (lambda tensors: [tensors[0]] * 3, False),
    "backwards": (lambda tensors: flattened(tensors)[::-1], False),
    "transposed": (lambda tensors: [tensor.t() for tensor in flattened(tensors)], False),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_copied_only_where_they_must_be(name):
    tensors = [nn.Parameter(torch.randn(8, 8)) for _ in range(3)]
    arrange, is_view = LAYOUTS[name]
    arranged = arrange(tensors)
    stacked = grouped.stack(arranged)
    assert torch.equal(stacked, torch.stack([tensor.detach() for tensor in arranged]))
    assert (stacked.data_ptr() in {tensor.data_ptr() for tensor in tensors}) == is_view and (is_view or stacked.is_contiguous())
    grad = torch.randn(stacked.shape)
    want = torch.autograd.grad(torch.stack(arranged), tensors, grad, allow_unused=True)
    stacked.backward(grad)
    for tensor, grad_of in zip(tensors, want, strict=True):
        assert tensor.grad is grad_of is None or torch.equal(tensor.grad, grad_of)


@pytest.mark.parametrize("in_one_memory", (True, False))
def test_weights_under_autocast_are_narrowed(in_one_memory):
    assert grouped.stack([None, None]) is None
    tensors = [nn.Parameter(torch.randn(4, 8)) for _ in range(3)]
    stacked = grouped.stack(flattened(tensors, gap=8) if in_one_memory else tensors, torch.bfloat16)
    assert stacked.is_contiguous() and torch.equal(stacked, torch.stack(tensors).bfloat16())
    (stacked * torch.arange(3).view(3, 1, 1)).sum().backward()
    assert torch.equal(tensors[2].grad, torch.full((4, 8), 2.0)), "in fp32"


def test_a_weight_that_changes_before_the_backward_is_seen():
    """A change is seen in each expert's weight, not only in the first one's, whose memory the view has."""
    tensors = flattened([nn.Parameter(torch.randn(8, 8)) for _ in range(2)])
    y = grouped_mlp(torch.randn(4, 8), [2, 2], grouped.stack(tensors), torch.randn(2, 8, 8), activation=torch.tanh)
    with torch.no_grad():
        tensors[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_rows_that_lie_together_are_not_copied():
    rows = torch.randn(7, 4)
    parts = torch.split_with_sizes(rows.view(1, 1, 7, 4), [3, 0, 4], -2)
    assert rows_of_all(parts).data_ptr() == rows.data_ptr() and torch.equal(rows_of_all(parts), rows)
    assert torch.equal(rows_of_all((parts[2], parts[1], parts[0])), torch.cat((rows[3:], rows[:3])))
    assert torch.equal(rows_of_all([part * 2 for part in parts]), rows * 2)
    assert rows_of_all((parts[1], parts[1])).shape == (0, 4)
    assert rows_of_all((parts[1], parts[2])).data_ptr() == parts[2].data_ptr()
