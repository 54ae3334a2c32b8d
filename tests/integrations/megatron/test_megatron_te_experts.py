"""Grouped experts in the place of TEGroupedMLP, which stands here over layers of plain PyTorch: which experts a config gets, their results,
and gradients that backwards add to `main_grad`."""

import contextlib
import functools
import sys
import types
from typing import Any

import pytest
import torch
from megatron_cases import ACTIVATION_RECOMPUTED, BF16, assert_same, build_layer, draw, expert_biases, layer_config, layer_of, on_megatron
from megatron_states import assert_equal_states, change
from te_experts import TE, expert_layer, te_experts

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

from deepep_moe.integrations.megatron.config_switches import selection
from deepep_moe.integrations.megatron.grouped_experts import GroupedMLP, whose_experts


def by_name(experts: Any, gradients: bool = False) -> dict[str, torch.Tensor]:
    """The parameters of each expert, or their gradients, by TEGroupedMLP's names."""
    values_of: dict[str, torch.Tensor] = {}
    for name, parameter in experts.named_parameters():
        values = parameter.grad if gradients else parameter.detach()
        values_of |= {f"{name}{index}": one for index, one in enumerate(values)} if isinstance(experts, GroupedMLP) else {name: values}
    return values_of


def run(experts: Any, rows: torch.Tensor, counts: list[int], probs: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    leaves = [values.clone().requires_grad_() for values in (rows, probs)]
    output, bias = experts(leaves[0], torch.tensor(counts), leaves[1])
    assert bias is None
    output.backward(grad)
    return {"output": output.detach(), "rows": leaves[0].grad, "probs": leaves[1].grad}


def inputs(config: Any, counts: list[int]) -> tuple[torch.Tensor, list[int], torch.Tensor, torch.Tensor]:
    rows, grad = (tensor.flatten(0, 1).to(config.params_dtype) for tensor in draw(3, sum(counts)))
    return rows, counts, torch.rand(sum(counts), generator=torch.Generator().manual_seed(4)), grad


COUNTS = [2, 0, 3, 1, 0, 0, 4, 1]


@on_megatron(1, experts="own")
def test_equals_te_experts(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """The same seed gives the same weights, and they give the same results."""
    cases = {
        "SwiGLU": {},
        "bf16": BF16,
        "biases": expert_biases(),
        "GELU": {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu},
    }
    for name, changes in cases.items():
        ours, theirs = (expert_layer(sizes, TE, grouped, **changes).experts for grouped in (True, False))
        of_theirs = by_name(theirs)
        assert_equal_states(by_name(ours), {name: of_theirs[name] for name in by_name(ours)})
        if changes == cases["biases"]:
            change(ours, 5)
            theirs.load_state_dict(ours.state_dict())
        results = [run(experts, *inputs(ours.config, COUNTS)) | by_name(experts, gradients=True) for experts in (ours, theirs)]
        assert_same(results[0], {name: results[1][name] for name in results[0]}, name, tolerance=0.02 if name == "bf16" else 2e-6)


# ---- which experts a config gets ----

CHOICES: list[tuple[dict, dict, type, str]] = [
    (BF16, {}, GroupedMLP, "deepep_moe's grouped experts in the place of {}"),
    (BF16, {"gradient_accumulation_fusion": True}, GroupedMLP, "deepep_moe's grouped experts"),
    ({}, {}, TEGroupedMLP, "experts are Megatron-Core's {}: params_dtype is torch.float32, and grouped products are fast in bf16"),
    (
        BF16 | {"moe_ffn_hidden_size": 44},
        {},
        TEGroupedMLP,
        "an expert's matrix has 44 rows and 32 columns; grouped products need multiples of 8",
    ),
    (BF16, {"use_kitchen": True}, TEGroupedMLP, "use_kitchen is True, which grouped experts do not support; set it to False"),
    (BF16, {"expert_tensor_parallel_size": 2}, TEGroupedMLP, "expert_tensor_parallel_size is 2, but grouped experts are not split"),
    (BF16, {"quant_recipe": "any"}, TEGroupedMLP, "quant_recipe is 'any', which grouped experts do not support; leave it out"),
]


@pytest.mark.parametrize("is_te", (True, False), ids=("TEGroupedMLP", "SequentialMLP"))
@on_megatron(1)
def test_choice_of_auto(rank: int, num_ranks: int, sizes: dict[str, int], is_te: bool) -> None:
    for changes, late, expected, message in CHOICES:
        if "quant_recipe" in late and not is_te:  # SequentialMLP does not know of it
            continue
        config = layer_config(**sizes, **selection(), **changes)
        vars(config).update(late)
        with te_experts() if is_te else contextlib.nullcontext():
            experts = built_experts(config)
        assert type(experts) is (SequentialMLP if expected is TEGroupedMLP and not is_te else expected), (changes, late)
        assert message.format("TEGroupedMLP" if is_te else "SequentialMLP") in whose_experts(experts)


@on_megatron(1)
def test_auto_asks_megatron_lm(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """The options of its command line for the optimizer and for FSDP count too."""
    config = layer_config(**sizes, **selection(), **BF16)
    for arguments, expected in (
        ({"optimizer": "adam"}, GroupedMLP), ({"optimizer": "muon"}, SequentialMLP), ({"use_megatron_fsdp": True}, SequentialMLP),
    ):  # fmt: skip
        with pytest.MonkeyPatch.context() as monkeypatch:
            module = types.SimpleNamespace(_GLOBAL_ARGS=types.SimpleNamespace(**arguments))
            monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
            assert type(built_experts(config)) is expected


def built_experts(config: Any) -> Any:
    """Experts alone: the other parts of a layer would need what some configs ask for."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    spec = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
    submodules = spec.submodules if isinstance(spec, ModuleSpec) else spec.keywords["submodules"]
    groups = ProcessGroupCollection.use_mpu_process_groups()
    arguments = (submodules.experts, 8, config) if isinstance(submodules.experts, ModuleSpec) else (8, config)
    make = build_module if isinstance(submodules.experts, ModuleSpec) else submodules.experts
    return make(*arguments, pg_collection=groups)


@on_megatron(1, experts="own")
def test_own_insists(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    for is_te, late in ((True, {"quant_recipe": "any"}), (True, {"use_kitchen": True}), (False, {"expert_tensor_parallel_size": 2})):
        config = layer_config(**sizes, **selection())
        vars(config).update(late)
        with (
            te_experts() if is_te else contextlib.nullcontext(),
            pytest.raises(ValueError, match=r"experts='framework' \(--experts framework\)"),
        ):
            built_experts(config)


@on_megatron(1, experts="framework")
def test_framework_keeps_megatrons(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    with te_experts():
        assert type(layer_of(sizes, **BF16).experts) is TEGroupedMLP
    assert type(layer_of(sizes, **BF16).experts) is SequentialMLP


@on_megatron(1, experts="own")
def test_other_classes_are_refused(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    class Experts(TEGroupedMLP):
        pass

    config = layer_config(**sizes, **selection())
    built = layer_of(sizes)
    built.experts = Experts.__new__(Experts)
    with pytest.raises(ValueError, match="experts is 'own', but the layer has Experts"):
        built.token_dispatcher.join(built)
    build_layer(config)


# ---- gradients that backwards add to `main_grad` ----


ALONE = {"moe_shared_expert_intermediate_size": None}  # shared experts would need apex


@pytest.mark.parametrize("delays", (False, True), ids=("at once", "delayed"))
@on_megatron(1, experts="own")
def test_gradients_are_added_to_main_grad(rank: int, num_ranks: int, sizes: dict[str, int], delays: bool) -> None:
    late = {"gradient_accumulation_fusion": True, "delay_wgrad_compute": delays}
    for changes in ({}, BF16, expert_biases(), ACTIVATION_RECOMPUTED):
        alike = changes | ALONE
        fused, plain = (layer_of(sizes, late=late if is_fused else {}, **alike).experts for is_fused in (True, False))
        batch = inputs(plain.config, COUNTS)
        run(plain, *batch)
        weights = [linear.weight for linear in (fused.linear_fc1, fused.linear_fc2)]
        calls: list[torch.Tensor] = []
        for linear in (fused.linear_fc1, fused.linear_fc2) if delays else ():
            linear.register_wgrad_accumulation_and_reduce_hooks(functools.partial(calls.append, linear.weight))
        for weight in weights:  # as Megatron's DDP does
            weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False
        for number in (1, 2):
            result = run(fused, *batch)
            assert not calls and all(weight.grad_added_to_main_grad is not delays for weight in weights)
            fused.backward_dw()
            assert [any(one is weight for one in calls) for weight in weights] == [delays, delays]
            for weight, expected in zip(weights, (plain.linear_fc1.weight, plain.linear_fc2.weight), strict=True):
                assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape and weight.grad.dtype == weight.dtype
                torch.testing.assert_close(weight.main_grad, 1 + number * expected.grad.float(), rtol=1e-6, atol=1e-6)
                weight.grad, weight.grad_added_to_main_grad = None, False
            calls.clear()
        assert_same(result, run(plain, *batch), "the other gradients")


@on_megatron(1, experts="own")
def test_gradients_without_main_grad(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Gradients are in `grad` without DDP, and with a wrapper that makes `main_grad` later."""
    for has_getter in (False, True):
        fused, plain = (layer_of(sizes, late={"gradient_accumulation_fusion": fuses}, **ALONE).experts for fuses in (True, False))
        if has_getter:
            for linear in (fused.linear_fc1, fused.linear_fc2):
                linear.weight.get_main_grad = lambda: None
                linear.weight.main_grad = torch.full(linear.weight.shape, torch.nan)
        batch = inputs(plain.config, COUNTS)
        for experts in (fused, plain):
            run(experts, *batch)
        assert_same(by_name(fused, gradients=True), by_name(plain, gradients=True), "grad")
        assert not any(getattr(linear.weight, "grad_added_to_main_grad", False) for linear in (fused.linear_fc1, fused.linear_fc2))
