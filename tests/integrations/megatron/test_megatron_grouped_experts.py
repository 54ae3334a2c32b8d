"""Grouped experts against SequentialMLP: weights, outputs, gradients, and a data-parallel optimizer step."""

from typing import Any

import pytest
import torch
from megatron_cases import HIDDEN, assert_same, build_layer, expert_biases, forward_backward, layer_config, model_parallel
from on_ranks import on_ranks

from benchmarks.layers.megatron_steps import by_expert
from deepep_moe.integrations.megatron import disable, enable
from deepep_moe.integrations.megatron.plugin import selection
from deepep_moe.testing.launch import run_ranks

pytest.importorskip("megatron.core")


def pair(sizes: dict, changes: dict) -> tuple[Any, Any]:
    """A layer with grouped experts and one with SequentialMLP, both with our dispatcher and drawn from the same seed."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    from deepep_moe.integrations.megatron.grouped_experts import GroupedMLP

    ours, theirs = (build_layer(layer_config(**sizes, **selection(), **changes)) for _ in range(2))
    theirs.experts = build_layer(layer_config(**sizes, moe_token_dispatcher_type="alltoall", **changes)).experts
    assert (type(ours.experts), type(theirs.experts)) == (GroupedMLP, SequentialMLP)
    return ours, theirs


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


ONE_EXPERT = {
    "moe_router_topk": 1,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_pre_softmax": True,
    "moe_router_topk_scaling_factor": None,
}
CASES: dict[str, dict] = {
    "SwiGLU": {},
    "biases": {},
    "GELU without a gate, biases": {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu},
    "clamp and offset": {"activation_func": quick_gelu, "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
    "probs on the input": {"moe_apply_probs_on_input": True, **ONE_EXPERT},
    "recomputed activation": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"], "moe_grouped_gemm": True},
    "recomputed layer": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "same size as a dense layer": {"moe_ffn_hidden_size": 64},
    "bf16": {"bf16": True, "params_dtype": torch.bfloat16, "moe_router_dtype": "fp32"},
    "fp64 router": {"moe_router_dtype": "fp64"},
}


def _known(changes: dict) -> bool:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return set(changes) <= set(TransformerConfig.__dataclass_fields__)


def _compare(rank: int, num_ranks: int, names: tuple[str, ...]) -> None:
    with model_parallel(ep=num_ranks, grouped_experts=True) as sizes:
        for name in names:
            changes = CASES[name] | (expert_biases() if "biases" in name else {})
            if not _known(changes):  # older versions
                continue
            ours, theirs = pair(sizes, changes)
            assert_same_weights(ours.experts, theirs.experts)
            for layer in (ours, theirs):
                if getattr(layer.router, "bias", None) is not None:  # not initialized in 0.15
                    torch.nn.init.ones_(layer.router.bias)
            generator = torch.Generator().manual_seed(rank)
            x, grad = (torch.randn(5, 2, HIDDEN, generator=generator).to(ours.config.params_dtype) for _ in range(2))
            passes = [by_expert(forward_backward(layer, x, grad)) for layer in (ours, theirs)]
            assert passes[0].keys() == passes[1].keys()
            assert_same(*passes, f"{name}, rank {rank}", tolerance=0.02 if "bf16" in changes else 2e-6)


def assert_same_weights(ours: Any, theirs: Any) -> None:
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert value is ours[name] is None or torch.equal(ours[name], value), name


def test_one_rank():
    """Without biases, with which SequentialMLP itself fails on one rank."""
    run_ranks(_compare, 1, tuple(name for name in CASES if "biases" not in name))


def test_two_ranks():
    run_ranks(_compare, 2, ("SwiGLU", "biases", "GELU without a gate, biases", "bf16"))


@on_ranks(2)
def test_parameters_have_the_attributes_of_expert_parallelism(rank: int, num_ranks: int) -> None:
    with model_parallel(ep=num_ranks, grouped_experts=True) as sizes:
        ours, theirs = pair(sizes, expert_biases())
        shapes = {name: list(parameter.shape) for name, parameter in ours.experts.named_parameters() if "weight" in name}
        assert shapes == {"linear_fc1.weight": [4, 96, 32], "linear_fc2.weight": [4, 32, 48]}
        for name, parameter in ours.experts.named_parameters():
            of_expert = vars(theirs.experts.local_experts[3].get_parameter(name))
            expected = of_expert | ({"partition_dim": of_expert["partition_dim"] + 1} if of_expert.get("partition_dim", -1) >= 0 else {})
            marks = {key: value for key, value in vars(parameter).items() if key != "deepep_moe_stack"}
            assert marks == expected and parameter.allreduce == (num_ranks == 1), name


@on_ranks(1)
def test_other_configurations_keep_their_experts(rank: int, num_ranks: int) -> None:
    from megatron.core.transformer.moe.experts import SequentialMLP

    stock = SequentialMLP.__init__
    with model_parallel(ep=1, grouped_experts=True) as sizes:
        other = build_layer(layer_config(**sizes, moe_token_dispatcher_type="alltoall"))
        assert type(other.experts) is SequentialMLP
        disable()
        assert SequentialMLP.__init__ is stock
        assert type(build_layer(layer_config(**sizes, moe_token_dispatcher_type="allgather")).experts) is SequentialMLP


# ---- the interface of experts ----


@on_ranks(1)
def test_rows_behind_the_counts(rank: int, num_ranks: int) -> None:
    """Rows behind the counts are NaN; results are those without them. Only the gradient of probs, which others add up, is zero there."""
    with model_parallel(ep=1, grouped_experts=True) as sizes:
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
                results.append(parts | {name: p.grad for name, p in experts.named_parameters() if p.grad is not None})
            assert_same(*({n.removeprefix("experts."): t for n, t in by_expert(_prefixed(r)).items()} for r in results), "tail")


def _prefixed(results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"experts.{name}" if "linear" in name else name: value for name, value in results.items()}


@on_ranks(1)
def test_no_rows_give_zero_gradients(rank: int, num_ranks: int) -> None:
    with model_parallel(ep=1, grouped_experts=True) as sizes:
        experts = pair(sizes, {})[0].experts
        for counts in (torch.zeros(8, dtype=torch.int64), [0] * 8):
            rows = torch.empty(0, HIDDEN, requires_grad=True)
            output, _ = experts(rows, counts, torch.empty(0))
            output.sum().backward()
            assert output.shape == (0, HIDDEN) and all(p.grad is not None and not p.grad.any() for p in experts.parameters())


@on_ranks(1)
def test_modules_that_own_parameters_are_called(rank: int, num_ranks: int) -> None:
    """Frameworks hang on calls of the modules that own parameters: here a hook brings the weights, as Megatron's DDP does."""
    with model_parallel(ep=1, grouped_experts=True) as sizes:
        for name in ("SwiGLU", "recomputed layer"):
            ours, _ = pair(sizes, CASES[name])
            generator = torch.Generator().manual_seed(1)
            x, grad = (torch.randn(5, 2, HIDDEN, generator=generator) for _ in range(2))
            want = forward_backward(ours, x, grad)
            for linear in (ours.experts.linear_fc1, ours.experts.linear_fc2):
                weight = linear.weight.detach().clone()
                linear.weight.data.fill_(torch.nan)
                linear.register_forward_pre_hook(_bring(weight))
            assert_same(forward_backward(ours, x, grad), want, name)
            assert [name for name, _ in ours.experts.named_modules()] == ["", "linear_fc1", "linear_fc2"]
            ours.experts.state_dict()
            assert "local_experts" not in dict(ours.experts.named_children())


def _bring(weight: torch.Tensor) -> Any:
    def hook(module: Any, args: Any) -> None:
        module.weight.data.copy_(weight)

    return hook


# ---- what is refused ----

REFUSED = {
    "gradient_accumulation_fusion is True, which grouped experts do not support; set it to False": {"gradient_accumulation_fusion": True},
    "activation_func_fp8_input_store is True": {"activation_func_fp8_input_store": True},
    "use_te_activation_func is True": {"use_te_activation_func": True},
    "fp8 is 'hybrid', which grouped experts do not support; leave it out, or leave out grouped_experts": {"fp8": "hybrid"},
    "expert_tensor_parallel_size is 2, but grouped experts are not split": {"expert_tensor_parallel_size": 2},
    "moe_apply_probs_on_input is True with moe_router_topk=4; it needs moe_router_topk=1": {"moe_apply_probs_on_input": True},
}


@on_ranks(1)
def test_settings_that_are_not_honoured(rank: int, num_ranks: int) -> None:
    from deepep_moe.integrations.megatron.grouped_experts import GroupedMLP

    with model_parallel(ep=1, grouped_experts=True) as sizes:
        for message, changes in REFUSED.items():
            config = layer_config(**sizes)
            for name, value in changes.items():  # set afterwards, as Megatron-Core refuses some of these without a GPU
                setattr(config, name, value)
            with pytest.raises(ValueError) as raised:
                GroupedMLP(8, config, None)
            assert message in str(raised.value)


def test_the_option_is_checked():
    with pytest.raises(ValueError, match="grouped_experts is 1; it must be True or False"):
        enable(grouped_experts=1)
