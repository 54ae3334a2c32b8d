"""GroupedExperts against a module for each expert, alone and in a MoELayer."""

import copy

import pytest
import torch
from torch import nn

from deepep_moe.nn import GroupedExperts, LocalExperts, SwiGLU

HIDDEN, INTERMEDIATE, NUM_EXPERTS = 16, 24, 4


def swiglus(num_experts):
    torch.manual_seed(3)
    return [SwiGLU(HIDDEN, INTERMEDIATE) for _ in range(num_experts)]


def grouped_of(modules):
    """GroupedExperts with the weights of these."""
    grouped = GroupedExperts(len(modules), HIDDEN, INTERMEDIATE)
    with torch.no_grad():
        for index, module in enumerate(modules):
            grouped.up[index] = module.gate_up.weight
            grouped.down[index] = module.down.weight
    return grouped


def plain_of(grouped, index):
    """One expert of GroupedExperts with biases and without a gate, as a module."""
    first, second = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)
    with torch.no_grad():
        for linear, weight, bias in ((first, grouped.up, grouped.up_bias), (second, grouped.down, grouped.down_bias)):
            linear.weight.copy_(weight[index])
            linear.bias.copy_(bias[index])
    return nn.Sequential(first, nn.ReLU(), second)


@pytest.mark.parametrize("gated", (True, False), ids=("SwiGLU", "ReLU with biases"))
def test_like_local_experts(gated):
    torch.manual_seed(1)
    if gated:
        modules = swiglus(3)
        grouped, places = grouped_of(modules), (("up", "gate_up.weight"), ("down", "down.weight"))
    else:
        grouped = GroupedExperts(3, HIDDEN, INTERMEDIATE, gated=False, activation=nn.functional.relu, bias=True)
        modules = [plain_of(grouped, index) for index in range(3)]
        places = (("up", "0.weight"), ("up_bias", "0.bias"), ("down", "2.weight"), ("down_bias", "2.bias"))
    local, x = LocalExperts(copy.deepcopy(modules)), torch.randn(9, HIDDEN)
    for experts in (grouped, local):
        experts(x, [4, 0, 5]).square().sum().backward()
    torch.testing.assert_close(grouped(x, [4, 0, 5]), local(x, [4, 0, 5]))
    for name, place in places:
        expected = torch.stack([expert.get_parameter(place).grad for expert in local.experts])
        torch.testing.assert_close(getattr(grouped, name).grad, expected, msg=name)


def test_initialization_is_that_of_linear():
    experts = GroupedExperts(8, 64, 16, bias=True)
    for weight, bias, columns in ((experts.up, experts.up_bias, 64), (experts.down, experts.down_bias, 16)):
        for values in (weight, bias):
            assert 0.9 * columns**-0.5 < values.abs().max() <= columns**-0.5


REFUSED = {
    "hidden is 0; it must be at least 1": {"hidden": 0},
    "but gated experts use SwiGLU; pass gated=False, or leave activation out": {"activation": torch.relu},
    "bias is 1; it must be a bool": {"bias": 1},
    "num_local_experts is 2.0; it must be an int": {"num_local_experts": 2.0},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    with pytest.raises((TypeError, ValueError)) as raised:
        GroupedExperts(**({"num_local_experts": 2, "hidden": 4, "intermediate": 4} | REFUSED[message]))
    assert message in str(raised.value)
