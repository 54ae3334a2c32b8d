"""Grouped experts against SequentialMLP: weights, outputs and gradients."""

from typing import Any

import pytest
import torch
from megatron_cases import (
    ACTIVATION_RECOMPUTED,
    BF16,
    HIDDEN,
    RECOMPUTED,
    SOFTMAX,
    assert_same,
    draw,
    expert_biases,
    forward_backward,
    layer_config,
    layer_of,
    on_megatron,
)
from megatron_states import assert_equal_states

from benchmarks.layers.megatron_steps import by_expert

pytest.importorskip("megatron.core")


def pair(sizes: dict, changes: dict) -> tuple[Any, Any]:
    """A layer with grouped experts and one with SequentialMLP, both with our dispatcher and drawn from the same seed."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    from deepep_moe.integrations.megatron.grouped_experts import GroupedMLP

    ours, theirs = (layer_of(sizes, **changes) for _ in range(2))
    theirs.experts = layer_of(sizes, "alltoall", **changes).experts
    assert (type(ours.experts), type(theirs.experts)) == (GroupedMLP, SequentialMLP)
    return ours, theirs


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


CASES: dict[str, dict] = {
    "SwiGLU": {},
    "biases": {},
    "GELU without a gate, biases": {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu},
    "clamp and offset": {"activation_func": quick_gelu, "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
    "probs on the input": SOFTMAX | {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "recomputed activation": ACTIVATION_RECOMPUTED,
    "recomputed layer": RECOMPUTED,
    "same size as a dense layer": {"moe_ffn_hidden_size": 64},
    "bf16": BF16,
    "fp64 router": {"moe_router_dtype": "fp64"},
}


@pytest.mark.parametrize("num_ranks", (1, 2))
@on_megatron(experts="own")
def test_equals_sequential_experts(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Cases with biases are left out on one rank, where SequentialMLP itself fails with them."""
    on_one = [name for name in CASES if "biases" not in name]
    for name in on_one if num_ranks == 1 else ("SwiGLU", "biases", "GELU without a gate, biases", "bf16"):
        changes = CASES[name] | (expert_biases() if "biases" in name else {})
        if not all(hasattr(layer_config(), field) for field in changes):  # older versions
            continue
        ours, theirs = pair(sizes, changes)
        assert_equal_states(ours.experts.state_dict(), theirs.experts.state_dict())
        for layer in (ours, theirs):
            if getattr(layer.router, "bias", None) is not None:  # not initialized in 0.15
                torch.nn.init.ones_(layer.router.bias)
        inputs = [tensor.to(ours.config.params_dtype) for tensor in draw(rank, 5, 2)]
        passes = [by_expert(forward_backward(layer, *inputs)) for layer in (ours, theirs)]
        assert passes[0].keys() == passes[1].keys()
        assert_same(*passes, f"{name}, rank {rank}", tolerance=0.02 if "bf16" in changes else 2e-6)


@on_megatron(2, experts="own")
def test_parameters_have_the_attributes_of_expert_parallelism(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    ours, theirs = pair(sizes, expert_biases())
    shapes = {name: list(parameter.shape) for name, parameter in ours.experts.named_parameters() if "weight" in name}
    assert shapes == {"linear_fc1.weight": [4, 96, 32], "linear_fc2.weight": [4, 32, 48]}
    for name, parameter in ours.experts.named_parameters():
        of_expert = vars(theirs.experts.local_experts[3].get_parameter(name))
        expected = of_expert | ({"partition_dim": of_expert["partition_dim"] + 1} if of_expert.get("partition_dim", -1) >= 0 else {})
        marks = {key: value for key, value in vars(parameter).items() if key != "deepep_moe_stack"}
        assert marks == expected and parameter.allreduce == (num_ranks == 1), name


# ---- the interface of experts ----


@on_megatron(1, experts="own")
def test_rows_behind_the_counts(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Rows behind the counts are NaN; results are those without them. Only the gradient of probs, which others add up, is zero there."""
    for changes in ({}, CASES["probs on the input"]):
        ours, theirs = pair(sizes, changes)
        counts = torch.tensor([0, 3, 0, 0, 2, 1, 0, 0])
        results = []
        for experts, num_rows in ((ours.experts, 9), (theirs.experts, 6)):
            generator = torch.Generator().manual_seed(1)
            rows, probs, grad = torch.randn(9, HIDDEN, generator=generator), torch.rand(9, generator=generator), torch.ones(9, HIDDEN)
            for values in (rows, probs, grad):
                values[6:] = torch.nan
            leaves = [values[:num_rows].requires_grad_() for values in (rows, probs)]
            output, bias = experts(leaves[0], counts, leaves[1])
            output.backward(grad[:num_rows])
            assert bias is None and not leaves[1].grad[6:].any()
            parts = {"output": output[:6], "rows": leaves[0].grad[:6], "probs": leaves[1].grad[:6]}
            results.append(by_expert(parts | {f"experts.{name}": p.grad for name, p in experts.named_parameters() if p.grad is not None}))
        assert_same(*results, "tail")


@on_megatron(1, experts="own")
def test_modules_that_own_parameters_are_called(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Frameworks hang on calls of the modules that own parameters: here a hook brings the weights, as Megatron's DDP does."""
    for name in ("SwiGLU", "recomputed layer"):
        ours, _ = pair(sizes, CASES[name])
        x, grad = draw(1, 5, 2)
        want = forward_backward(ours, x, grad)
        for linear in (ours.experts.linear_fc1, ours.experts.linear_fc2):
            weight = linear.weight.detach().clone()
            linear.weight.data.fill_(torch.nan)
            linear.register_forward_pre_hook(lambda module, _, weight=weight: setattr(module.weight, "data", weight))
        assert_same(forward_backward(ours, x, grad), want, name)
        assert [name for name, _ in ours.experts.named_modules()] == ["", "linear_fc1", "linear_fc2"]
        ours.experts.state_dict()
        assert "local_experts" not in dict(ours.experts.named_children())
