"""Which experts can be grouped, why others cannot, and how their weights and rows come together without copies. No exchange."""

import copy
from pathlib import Path

import pytest
import torch
from deepspeed_cases import HIDDEN, Expert, logged
from torch import nn

from deepep_moe.integrations.deepspeed.expert_weights import ExpertWeights, read_known
from deepep_moe.integrations.deepspeed.options import Options, options_of
from deepep_moe.nn import SwiGLU
from deepep_moe.ops import grouped_mlp

pytest.importorskip("deepspeed")
from deepep_moe.integrations.deepspeed import plugin
from deepep_moe.integrations.deepspeed.native import grouped

INNER = 48


def sequential(activation: nn.Module | None = None, *, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(HIDDEN, INNER, bias=bias), activation or nn.GELU(), nn.Linear(INNER, HIDDEN, bias=bias))


def read(expert: nn.Module) -> ExpertWeights:
    """Of the `Expert` that the tests of DeepSpeed have."""
    return ExpertWeights(expert.up.weight, expert.up.bias, expert.down.weight, expert.down.bias, nn.functional.gelu)


def experts_of(expert: nn.Module, num: int = 3) -> list[nn.Module]:
    """As DeepSpeed makes them: copies."""
    return [copy.deepcopy(expert) for _ in range(num)]


# ---- options ----


def test_option():
    assert Options().grouped_experts is False
    assert options_of({"deepep_moe": {"grouped_experts": True}}) == Options(grouped_experts=True)
    assert Options(grouped_experts=read).grouped_experts is read


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("yes", "grouped_experts is 'yes'; it must be true or false, or in Python a function of an expert"),
        (1, "grouped_experts is 1; it must be true or false, or in Python a function of an expert"),
        (None, "grouped_experts is None; it must be true or false, or in Python a function of an expert"),
        (read, "grouped_experts is a function; pass it to replace_moe_layers, here only true or false"),
    ],
)
def test_option_refused(value, message):
    with pytest.raises(TypeError) as raised:
        options_of({"deepep_moe": {"grouped_experts": value}})
    assert str(raised.value) == f'"deepep_moe" of ds_config: {message}'
    if value is not read:
        with pytest.raises(TypeError) as raised:
            plugin.replace_moe_layers(nn.Linear(1, 1), grouped_experts=value)
        assert str(raised.value) == message


def test_layers_of_autoep_say_that_it_has_no_effect():
    with logged() as lines:
        plugin._report(nn.Linear(1, 1), [], 0, 2, Options(grouped_experts=True))
    assert lines == [
        "grouped_experts has no effect on 2 AutoEP layers, which have grouped products of their own",
        "2 MoE layers dispatch through deepep_moe (exact mode)",
    ]


def test_docs_name_the_option():
    page = (Path(__file__).parents[3] / "docs" / "deepspeed.md").read_text()
    assert "| `grouped_experts` |" in page and "ExpertWeights" in page


# ---- known experts ----


KNOWN = {
    "gelu": sequential(),
    "tanh gelu": sequential(nn.GELU(approximate="tanh")),
    "relu in place": sequential(nn.ReLU(inplace=True)),
    "silu in place, no biases": sequential(nn.SiLU(inplace=True), bias=False),
    "tanh": sequential(nn.Tanh()),
    "sigmoid": sequential(nn.Sigmoid()),
    "a bias in one": nn.Sequential(nn.Linear(HIDDEN, INNER), nn.ReLU(), nn.Linear(INNER, HIDDEN, bias=False)),
    "parts that do nothing": nn.Sequential(nn.Identity(), *sequential(), nn.Dropout(0.0)),
    "dropout in evaluation": nn.Sequential(*sequential(), nn.Dropout(0.5)).eval(),
    "swiglu": SwiGLU(HIDDEN, INNER),
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
    found = []
    for outputs in ([expert(part) for expert, part in zip(experts, parts, strict=True)], grouped.run_grouped(weights, parts)):
        leaves = [*parts, *(parameter for expert in experts for parameter in expert.parameters())]
        loss = sum((output * torch.arange(HIDDEN)).square().sum() for output in outputs)
        found.append([*outputs, *torch.autograd.grad(loss, leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


class Own(nn.Sequential):
    pass


UNKNOWN = {
    "Expert": Expert(),
    "Own(Linear, GELU, Linear)": Own(*sequential()),
    "Sequential(Linear, Softmax, Linear)": sequential(nn.Softmax(-1)),
    "Sequential(Linear, Linear)": nn.Sequential(nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)),
    "Sequential(Linear, GELU, Linear, LayerNorm)": nn.Sequential(*sequential(), nn.LayerNorm(HIDDEN)),
    "Sequential(Linear, GELU, Bilinear)": nn.Sequential(*list(sequential())[:2], nn.Bilinear(INNER, INNER, HIDDEN)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_classes_are_not_guessed(name):
    assert read_known(UNKNOWN[name]) is None
    assert grouped.weights_of(experts_of(UNKNOWN[name]), True) == (
        f"experts are {name}, whose weights deepep_moe cannot read; pass replace_moe_layers a function as grouped_experts that returns the "
        "ExpertWeights of an expert"
    )


# ---- why experts are called ----


def _hook(experts):
    experts[1][1].register_forward_hook(lambda *_: None)


def _backward_hook(experts):
    experts[0].register_full_backward_hook(lambda *_: None)


def _forward(experts):
    experts[2].forward = experts[2].forward


def _forward_of_a_part(experts):
    experts[2][0].forward = experts[2][0].forward


def _compiled(experts):
    experts[1].compile(backend="eager")


def _parametrized(experts):
    nn.utils.parametrizations.weight_norm(experts[1][0])


def _dropout(experts):
    experts[1].append(nn.Dropout(0.1))


def _partitioned(experts):
    experts[0][2].weight.ds_id = 3


def _shapes(experts):
    experts[1][0], experts[1][2] = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)


def _dtypes(experts):
    experts[2].bfloat16()


def _biases(experts):
    experts[1][2] = nn.Linear(INNER, HIDDEN, bias=False)


def _classes(experts):
    experts[1] = SwiGLU(HIDDEN, INNER)


def _activations(experts):
    experts[1][1] = nn.ReLU()


def _approximations(experts):
    experts[2][1] = nn.GELU(approximate="tanh")


def _subclasses(experts):
    class Quantized(torch.Tensor):
        pass

    del experts[0][0].weight
    experts[0][0].weight = torch.randn(INNER, HIDDEN).as_subclass(Quantized)


def _another_parameter(experts):
    experts[1].register_parameter("scale", nn.Parameter(torch.ones(1)))


CALLED = [
    (_hook, "GELU of local expert 1 has hooks, which would not run"),
    (_backward_hook, "Sequential of local expert 0 has hooks, which would not run"),
    (_forward, "Sequential of local expert 2 has a forward that was replaced or wrapped"),
    (_forward_of_a_part, "Linear of local expert 2 has a forward that was replaced or wrapped"),
    (_compiled, "Sequential of local expert 1 was compiled by itself"),
    (_parametrized, "ParametrizedLinear of local expert 1 has parametrizations"),
    (_dropout, "Dropout of local expert 1 drops with p=0.1 in training"),
    (_partitioned, "Linear of local expert 0 has parameters that ZeRO-3 partitions"),
    (
        _shapes,
        f"w1 of local expert 1 is [16, {HIDDEN}] torch.float32 on cpu, and [{INNER}, {HIDDEN}] torch.float32 on cpu in the first",
    ),
    (
        _dtypes,
        f"w1 of local expert 2 is [{INNER}, {HIDDEN}] torch.bfloat16 on cpu, and [{INNER}, {HIDDEN}] torch.float32 on cpu in the first",
    ),
    (_biases, f"b2 of local expert 1 is None, and [{HIDDEN}] torch.float32 on cpu in the first"),
    (_classes, "experts are of the classes ['Sequential', 'SwiGLU']; they must be of one"),
    (_activations, "local expert 1 has another activation than the first; it must be the same object"),
    (_approximations, "local expert 2 has another activation than the first; it must be the same object"),
    (_subclasses, "w1 of local expert 0 is a Quantized; it must be a plain tensor"),
    (_another_parameter, "parameters ['scale'] of local expert 1 are not among its ExpertWeights"),
]


@pytest.mark.parametrize(("change", "reason"), CALLED, ids=[change.__name__.strip("_") for change, _ in CALLED])
def test_reasons(change, reason):
    experts = experts_of(sequential())
    assert not isinstance(grouped.weights_of(experts, True), str)
    change(experts)
    assert grouped.weights_of(experts, True) == reason


def test_hooks_for_all_modules():
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert grouped.weights_of(experts_of(sequential()), True) == "PyTorch has hooks for all modules, which would not run"
    finally:
        hook.remove()
    assert isinstance(grouped.weights_of(experts_of(sequential()), True), list)


def test_functions_that_read_experts():
    experts = experts_of(Expert(bias=True))
    assert grouped.weights_of(experts, read) == [read(expert) for expert in experts]
    assert grouped.weights_of(experts, lambda expert: tuple(read(expert))) == [read(expert) for expert in experts], "any tuple of five"
    assert grouped.weights_of(experts, lambda _: None) == "the function grouped_experts returned None for Expert"
    with pytest.raises(TypeError, match="the function grouped_experts returned int; it must return ExpertWeights, or None"):
        grouped.weights_of(experts, lambda _: 3)
    reason = "local expert 1 has another activation than the first; it must be the same object"
    assert grouped.weights_of(experts, lambda expert: read(expert)._replace(activation=lambda x: x)) == reason
    experts[1].register_forward_hook(lambda *_: None)
    assert grouped.weights_of(experts, read) == "Expert of local expert 1 has hooks, which would not run"


def test_functions_that_leave_a_parameter_out():
    def computed(expert):
        return read(expert)._replace(w1=2 * expert.up.weight, b1=None)

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


@pytest.mark.parametrize(("gap", "begin", "is_view"), [(0, 0, True), (8, 4, True), (3, 0, False), (4, 1, False)])
def test_weights_at_equal_distances_are_not_copied(gap, begin, is_view):
    """But they are where matrices do not begin at multiples of 16 bytes."""
    tensors = flattened([nn.Parameter(torch.randn(4, 8)) for _ in range(3)], gap, begin)
    stacked = grouped.stack(tensors)
    assert torch.equal(stacked, torch.stack([tensor.detach() for tensor in tensors]))
    assert (stacked.data_ptr() == tensors[0].data_ptr()) == is_view
    assert grouped.stack([None, None]) is None
    grad = torch.randn(3, 4, 8)
    stacked.backward(grad)
    for tensor, own in zip(tensors, grad, strict=True):
        assert torch.equal(tensor.grad, own)


@pytest.mark.parametrize("change", ("apart", "two apart", "the same one", "backwards", "transposed"))
def test_weights_that_lie_otherwise_are_copied(change):
    tensors = [nn.Parameter(torch.randn(8, 8)) for _ in range(3)]
    if change == "two apart":  # at one distance, but not in one memory
        tensors = sorted(tensors[:2], key=torch.Tensor.data_ptr)
    if change == "the same one":
        tensors = [tensors[0]] * 3
    elif "apart" not in change:
        tensors = flattened(tensors)
    if change == "backwards":
        tensors.reverse()
    given = [tensor.t() for tensor in tensors] if change == "transposed" else tensors
    stacked = grouped.stack(given)
    assert stacked.data_ptr() not in {tensor.data_ptr() for tensor in tensors} and stacked.is_contiguous()
    assert torch.equal(stacked, torch.stack(given))
    stacked.sum().backward()
    assert torch.equal(tensors[0].grad, torch.full((8, 8), 3.0 if change == "the same one" else 1.0))


@pytest.mark.parametrize("in_one_memory", (True, False))
def test_weights_under_autocast_are_narrowed(in_one_memory):
    tensors = [nn.Parameter(torch.randn(4, 8)) for _ in range(3)]
    stacked = grouped.stack(flattened(tensors, gap=8) if in_one_memory else tensors, torch.bfloat16)
    assert stacked.is_contiguous() and torch.equal(stacked, torch.stack(tensors).bfloat16())
    (stacked * torch.arange(3).view(3, 1, 1)).sum().backward()
    assert torch.equal(tensors[2].grad, torch.full((4, 8), 2.0)), "in fp32"


def test_a_weight_that_changes_before_the_backward_is_seen():
    """As where each expert is called: not only in the first, whose memory the view is."""
    tensors = flattened([nn.Parameter(torch.randn(8, 8)) for _ in range(2)])
    y = grouped_mlp(torch.randn(4, 8), [2, 2], grouped.stack(tensors), torch.randn(2, 8, 8), activation=torch.tanh)
    with torch.no_grad():
        tensors[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_rows_that_lie_together_are_not_copied():
    rows = torch.randn(7, 4)
    parts = torch.split_with_sizes(rows.view(1, 1, 7, 4), [3, 0, 4], -2)
    assert grouped._joined(parts).data_ptr() == rows.data_ptr() and torch.equal(grouped._joined(parts), rows)
    assert torch.equal(grouped._joined((parts[2], parts[1], parts[0])), torch.cat((rows[3:], rows[:3])))
    assert torch.equal(grouped._joined([part * 2 for part in parts]), rows * 2)
    assert grouped._joined((parts[1], parts[1])).shape == (0, 4)
    assert grouped._joined((parts[1], parts[2])).data_ptr() == parts[2].data_ptr()
