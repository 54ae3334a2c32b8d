"""Shared parts of the Megatron-Core tests, which run in workers: process groups, configs, one MoE layer, comparison of two dispatchers."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from on_ranks import assert_close, on_ranks

from deepep_moe.integrations.megatron import disable, enable
from deepep_moe.integrations.megatron.config_switches import selection

HIDDEN = 32
NUM_EXPERTS = 8
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "moe_router_dtype": "fp32"}
NO_GROUPS = {"moe_router_num_groups": None, "moe_router_group_topk": None, "moe_router_topk_scaling_factor": None}
SOFTMAX = NO_GROUPS | {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
ACTIVATION_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"], "moe_grouped_gemm": True}
SYNC_FREE = {"experts": "own", "sync_free": True}
# Rank r is on GPU r.
ON_GPUS = pytest.mark.parametrize("num_ranks", (pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.multi_gpu(2))))


def layer_config(**switches: Any) -> Any:
    """A config with DeepSeek-V3's routing (top-4 of 8 experts in 2 of 4 groups) that `switches` change."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    defaults = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "num_moe_experts": NUM_EXPERTS,
        "moe_ffn_hidden_size": 48,
        "moe_shared_expert_intermediate_size": 40,
        "moe_router_topk": 4,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**(defaults | switches))


def expert_biases() -> dict[str, Any]:
    """Switches for experts with biases; none where this Megatron-Core has no such experts."""
    switches = {"add_bias_linear": True, "moe_shared_expert_intermediate_size": None}  # shared experts have no biases
    try:
        layer_config(**switches)
    except AssertionError:  # 0.13
        return {}
    return switches


@contextlib.contextmanager
def model_parallel(device_type: str = "cpu", *, ep: int = 1, tp: int = 1, etp: int = 1, **options: Any) -> Iterator[dict[str, int]]:
    """Megatron-Core with these groups and deepep_moe enabled; yields the sizes as config fields. Undoes everything."""
    import megatron_ranks as ranks

    sizes = {"tensor_model_parallel_size": tp, "expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    with ranks.model_parallel(device_type, ep=ep, tp=tp, etp=etp, seed=7, options=options):
        yield sizes | {"sequence_parallel": tp > 1}


@contextlib.contextmanager
def enabled(**options: Any) -> Iterator[None]:
    """`enable()` with these options, until the end."""
    enable(**options)
    try:
        yield
    finally:
        disable()


def on_megatron(number: int | None = None, device_type: str = "cpu", **options: Any) -> Callable[[Callable[..., None]], Any]:
    """Make a test of a function of (rank, num_ranks, sizes, ...) as `on_ranks` does, which runs in `model_parallel` of all ranks."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def in_groups(rank: int, num_ranks: int, **parameters: Any) -> None:
            with model_parallel(device_type, **({"ep": num_ranks} | options)) as sizes:
                body(rank, num_ranks, sizes, **parameters)

        rank, num_ranks, _, *others = inspect.signature(body).parameters.values()
        in_groups.__signature__ = inspect.Signature([rank, num_ranks, *others])
        return on_ranks(number)(in_groups)

    return decorate


def build_layer(config: Any) -> torch.nn.Module:
    """A MoELayer of plain PyTorch modules, weights drawn from the same random states every time."""
    from benchmarks.layers.megatron_layers import build_moe_layer

    return build_moe_layer(config, seed=7)


def layer_of(sizes: dict[str, int], dispatcher: str = "deepep_moe", late: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A layer with our dispatcher, or another one of `selection`. `late` changes its config past the config's own checks."""
    config = layer_config(**sizes, **(selection(dispatcher) | changes))
    vars(config).update(late or {})
    return build_layer(config)


def draw(seed: int, num_rows: int, batch: int = 1, hidden: int = HIDDEN) -> list[torch.Tensor]:
    """An input and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_rows, batch, hidden, generator=generator) for _ in range(2)]


def gradients(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters' gradients; an expert that got no token has none or zeros, both read as zeros."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in layer.named_parameters()
    }


def forward_backward(layer: torch.nn.Module, hidden_states: torch.Tensor, cotangent: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output, input gradient and every parameter gradient of one pass."""
    layer.zero_grad()
    x = hidden_states.clone().requires_grad_()
    output, bias = layer(x)
    assert bias is None
    output.backward(cotangent)
    return {"output": output.detach().clone(), "input gradient": x.grad} | gradients(layer)


def assert_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], context: str) -> None:
    """Check that all entries are equal to the bit."""
    assert actual.keys() == expected.keys(), context
    different = [name for name, want in expected.items() if not torch.equal(actual[name], want)]
    assert not different, f"{context}: {different}"


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], context: str, *, tolerance: float = 2e-6) -> float:
    """Check that all entries agree up to a few roundings (by default in fp32), and return the largest difference relative to its scale.

    The dispatchers add the same up to 8 terms in different orders (per rank first, or all in a row), once in forward and once in backward.
    Each order is off by a few times 2^-24 = 6e-8 of the terms' scale, and the matrix products after it do not increase the error. The
    tolerance of 2e-6 of the largest entry leaves room for 30 roundings, and is far below the effect of any wrong row.
    """
    return assert_close(actual, expected, context, tolerance, 1e-3)
