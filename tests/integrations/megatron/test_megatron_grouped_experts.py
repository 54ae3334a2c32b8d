"""Grouped experts in the place of SequentialMLP and of TEGroupedMLP: what a config gets, results, gradients, checkpoints."""

import contextlib
import functools
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron_cases import (
    ACTIVATION_RECOMPUTED,
    BF16,
    HIDDEN,
    RECOMPUTED,
    SOFTMAX,
    assert_same,
    build_layer,
    draw,
    expert_biases,
    forward_backward,
    layer_config,
    layer_of,
    on_megatron,
)
from megatron_states import assert_equal_states, change, metadata, optimizer_pieces, save, sharded_tensors
from te_experts import TE, expert_layer, te_experts

from benchmarks.layers.megatron_steps import by_expert
from deepep_moe.integrations.megatron.config_switches import selection

pytest.importorskip("megatron.core")

from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

from deepep_moe.integrations.megatron.grouped_experts import GroupedMLP, whose_experts


def pair(sizes: dict, changes: dict) -> tuple[Any, Any]:
    """A layer with grouped experts and one with SequentialMLP, both with our dispatcher and drawn from the same seed."""
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


# ---- in the place of TEGroupedMLP, which stands here over layers of plain PyTorch ----


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
def test_own_insists_and_refuses_other_classes(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    for is_te, late in ((True, {"quant_recipe": "any"}), (True, {"use_kitchen": True}), (False, {"expert_tensor_parallel_size": 2})):
        config = layer_config(**sizes, **selection())
        vars(config).update(late)
        with (
            te_experts() if is_te else contextlib.nullcontext(),
            pytest.raises(ValueError, match=r"experts='framework' \(--experts framework\)"),
        ):
            built_experts(config)

    class Experts(TEGroupedMLP):
        pass

    config = layer_config(**sizes, **selection())
    built = layer_of(sizes)
    built.experts = Experts.__new__(Experts)
    with pytest.raises(ValueError, match="experts is 'own', but the layer has Experts"):
        built.token_dispatcher.join(built)
    build_layer(config)


@on_megatron(1, experts="framework")
def test_framework_keeps_megatrons(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    with te_experts():
        assert type(layer_of(sizes, **BF16).experts) is TEGroupedMLP
    assert type(layer_of(sizes, **BF16).experts) is SequentialMLP


# ---- gradients that backwards add to `main_grad` ----


ALONE = {"moe_shared_expert_intermediate_size": None}  # shared experts would need apex


@pytest.mark.parametrize("delays", (False, True), ids=("at once", "delayed"))
@on_megatron(1, experts="own")
def test_gradients_are_added_to_main_grad(rank: int, num_ranks: int, sizes: dict[str, int], delays: bool) -> None:
    """Where apex is missing they are so without `gradient_accumulation_fusion` too, which cannot be on there."""
    for fuses, changes in ((True, {}), (False, BF16), (True, expert_biases()), (False, ACTIVATION_RECOMPUTED)):
        late = {"gradient_accumulation_fusion": fuses, "delay_wgrad_compute": delays}
        fused, plain = (layer_of(sizes, late=changed, **(changes | ALONE)).experts for changed in (late, {}))
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
    """Gradients are in `grad` for wrappers whose `main_grad` is made later, or which do not ask whether they were added there, and where
    somebody who has apex leaves `gradient_accumulation_fusion` off."""
    plain = layer_of(sizes, late={"gradient_accumulation_fusion": True}, **ALONE).experts
    batch = inputs(plain.config, COUNTS)
    run(plain, *batch)
    for name in ("get_main_grad", "of the class", "does not ask", "off"):
        with mock.patch.object(layers, "_grad_accum_fusion_available", name == "off"), contextlib.ExitStack() as undo:
            wrapped = layer_of(sizes, **ALONE).experts
            weights = [linear.weight for linear in (wrapped.linear_fc1, wrapped.linear_fc2)]
            if name == "of the class":
                undo.enter_context(mock.patch.object(torch.nn.Parameter, "main_grad", torch.full((), torch.nan), create=True))
            for weight in weights:
                if name != "of the class":
                    weight.main_grad = torch.full(weight.shape, torch.nan)
                if name != "does not ask":
                    weight.grad_added_to_main_grad = False
                if name == "get_main_grad":
                    weight.get_main_grad = lambda: None
            run(wrapped, *batch)
        assert_same(by_name(wrapped, gradients=True), by_name(plain, gradients=True), name)
        assert not any(getattr(weight, "grad_added_to_main_grad", False) for weight in weights)


# ---- checkpoints of grouped experts and of those that they replace are the same and load into either ----

SEQUENTIAL = "SequentialMLP"
CLASSES = (SEQUENTIAL, TE)
WAYS = ((True, False), (False, True), (True, True))  # whether the experts that save are grouped, and those that load
OF_BOTH = pytest.mark.parametrize("kind", CLASSES)


def name_of(kind: str, matrix: int, expert: int) -> str:
    of_expert = f"experts.local_experts.{expert}.linear_fc{matrix}.weight"
    return of_expert if kind == SEQUENTIAL else f"experts.linear_fc{matrix}.weight{expert}"


@on_megatron(1, experts="own")
def test_state_dicts(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Each class reads what the other saves, and grouped experts read the names of both classes."""
    alike = [((kind, source), (kind, target)) for kind in CLASSES for source, target in WAYS]
    others = [((SEQUENTIAL, False), (TE, True)), ((SEQUENTIAL, True), (TE, True)), ((TE, False), (SEQUENTIAL, True))]
    for (kind, is_grouped), (target_kind, target_is_grouped) in alike + others:
        source = expert_layer(sizes, kind, is_grouped, **expert_biases())
        target = expert_layer(sizes, target_kind, target_is_grouped, **expert_biases())
        for assign in (False, True):
            change(source.experts, seed=10 + assign)
            saved = {name: value if value is None else value.clone() for name, value in source.state_dict().items()}
            result = target.load_state_dict(dict(saved), assign=assign)
            assert not result.missing_keys and not result.unexpected_keys
            again = target.state_dict()
            if kind == target_kind:
                assert_equal_states(again, saved)
            for expert in range(8):
                assert torch.equal(saved[name_of(kind, 2, expert)], again[name_of(target_kind, 2, expert)]), (kind, target_kind, expert)
            kept = [name for name, _ in target.experts.named_parameters()]
            assert ("linear_fc1.weight" in kept) is target_is_grouped
            children = ["linear_fc1", "linear_fc2"] if target_is_grouped or target_kind == TE else ["local_experts"]
            assert sorted(name for name, _ in target.experts.named_children()) == children


@OF_BOTH
@on_megatron(1, experts="own")
def test_what_does_not_fit_is_named_as_by_megatron(rank: int, num_ranks: int, sizes: dict[str, int], kind: str) -> None:
    ours, hooked = expert_layer(sizes, kind, True), []
    ours.experts.register_load_state_dict_pre_hook(lambda *arguments: hooked.append(arguments[4]))
    ours.experts.register_buffer("others", torch.ones(2))
    state = ours.state_dict()
    assert state["experts.others"].tolist() == [1, 1]
    missing = name_of(kind, 2, 3)
    del state[missing]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{missing}"'):
        ours.load_state_dict(state)
    state[missing] = torch.zeros(1, 1)
    with pytest.raises(RuntimeError, match=f"size mismatch for {missing}"):
        ours.load_state_dict(state)
    with pytest.raises(RuntimeError, match=f'Unexpected key.*"{name_of(kind, 2, 8)}"'):
        ours.load_state_dict(ours.state_dict() | {name_of(kind, 2, 8): torch.zeros(1)})
    with pytest.raises(RuntimeError, match=f'Missing key.*"{name_of(kind, 1, 0)}"'):
        ours.load_state_dict({name: value for name, value in ours.state_dict().items() if "linear_fc" not in name or "shared" in name})
    ours.load_state_dict({name: value for name, value in ours.state_dict().items() if "_extra_state" not in name or "shared" in name})
    assert hooked == [True] * 5 and [name for name, _ in ours.experts.named_parameters()] == ["linear_fc1.weight", "linear_fc2.weight"]


def test_a_flattened_range_is_refused():
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from deepep_moe.integrations.megatron.stacked_checkpoint import stack_sharded

    stacked = torch.zeros(2, 3)
    entries = [ShardedTensor.from_rank_offsets("w", one, (0, index, 2), prepend_axis_num=1) for index, one in enumerate(stacked)]
    factory = stack_sharded(entries, stacked, "w")
    with pytest.raises(ValueError, match="the optimizer saves a flattened range .* 'dp_reshardable' or 'fully_reshardable'"):
        factory.build_fn("optimizer.w", stacked, 0, slice(0, 1))


@OF_BOTH
@on_megatron(2, experts="own")
def test_sharded_checkpoints(rank: int, num_ranks: int, sizes: dict[str, int], kind: str, tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    for number, ways in enumerate(WAYS):
        source, target = (expert_layer(sizes, kind, grouped, **expert_biases()).experts for grouped in ways)
        change(source, seed=100 * rank)
        path = tmp_path / str(number)
        save(source.sharded_state_dict("e.", (), metadata()), path)
        loaded = dist_checkpointing.load(target.sharded_state_dict("e.", (), metadata()), str(path), strict="raise_all")
        result = target.load_state_dict({name.removeprefix("e."): value for name, value in loaded.items()})
        assert not result.missing_keys and not result.unexpected_keys
        assert_equal_states(target.state_dict(), source.state_dict())

    for changes in ({}, expert_biases(), {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu}):
        ours, theirs = (expert_layer(sizes, kind, grouped, **changes).experts for grouped in (True, False))
        for switches in ({}, {"singleton_local_shards": True}):
            for place in (("", ()), ("decoder.layers.0.mlp.experts.", ((0, 1, 3),))):
                entries = [experts.sharded_state_dict(*place, metadata(**switches)) for experts in (ours, theirs)]
                assert sharded_tensors(entries[0]) == sharded_tensors(entries[1])
        pieces = [sharded_tensors(optimizer_pieces(experts, rank)[0]["state"]) for experts in (ours, theirs)]
        assert len(pieces[0]) > 0 and pieces[0] == pieces[1]
