"""MoE layers that differ only in their dispatcher, to compare dispatchers."""

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.layers.megatron_steps import te_version
from deepep_moe.integrations.common.patches import Patches
from deepep_moe.integrations.megatron.config_switches import selection
from deepep_moe.library import Function


def build_moe_layer(config: Any, *, seed: int, use_te: bool = False) -> Any:
    """Build a MoELayer on the current device, with weights drawn from `seed`: of plain PyTorch modules, or with TransformerEngine's grouped
    experts."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    torch.manual_seed(seed)  # routers draw their weights on the CPU
    model_parallel_cuda_manual_seed(seed)
    spec = get_moe_module_spec(use_te=use_te, num_experts=config.num_moe_experts, moe_grouped_gemm=use_te)
    layer = build_module(spec, config=config) if isinstance(spec, ModuleSpec) else spec(config=config)
    layer.set_layer_number(1)
    return layer.to(torch.cuda.current_device())


def layer_config(
    dispatcher: str, *, ep: int, hidden: int, ffn_hidden: int, num_experts: int, num_topk: int, dtype: torch.dtype, **others: Any
) -> Any:
    """Return the config of a layer with SwiGLU experts, no shared one, and a dispatcher: "deepep_moe", "alltoall", "allgather"."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1, num_attention_heads=1, hidden_size=hidden, ffn_hidden_size=ffn_hidden, moe_ffn_hidden_size=ffn_hidden,
        num_moe_experts=num_experts, moe_router_topk=num_topk, moe_router_dtype="fp32", moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0, gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        bias_activation_fusion=False, gradient_accumulation_fusion=False, moe_permute_fusion=te_version() is not None,
        expert_model_parallel_size=ep, params_dtype=dtype, bf16=dtype == torch.bfloat16, **selection(dispatcher), **others,
    )  # fmt: skip


def sharing_layers(dispatchers: Sequence[str], *, seed: int, **sizes: Any) -> dict[str, Any]:
    """Build a MoELayer of each dispatcher, with `sizes` of `layer_config`. All share one router and one set of experts (SequentialMLP)."""
    layers: dict[str, Any] = {}
    for dispatcher in dispatchers:
        layers[dispatcher] = build_moe_layer(layer_config(dispatcher, **sizes), seed=seed)
        first = layers[dispatchers[0]]
        layers[dispatcher].router, layers[dispatcher].experts = first.router, first.experts
    return layers


def grouped_layer(like: Any, *, seed: int, is_sync_free: bool, **sizes: Any) -> Any:
    """Build a layer with our dispatcher and grouped experts. Its weights are copies of those of the layer `like`, whose experts are a
    SequentialMLP."""
    from deepep_moe.integrations.megatron.grouped_experts import serve_experts
    from deepep_moe.integrations.megatron.options import Options

    config, patches = layer_config("deepep_moe", **sizes), Patches()
    if is_sync_free:
        config.moe_expert_rank_capacity_factor = float(sizes["ep"])  # room for every routing
    serve_experts(patches, Options(experts="own"))
    try:
        layer = build_moe_layer(config, seed=seed)
    finally:
        patches.restore()
    layer.router.load_state_dict(like.router.state_dict())
    layer.experts.load_state_dict(like.experts.state_dict())
    return layer


def te_layer(dispatcher: str, like: Any, *, seed: int, **sizes: Any) -> Any:
    """Build a layer with TransformerEngine's grouped experts, and its fused router unless the dispatcher is ours. Weights are those of the
    layer `like`, whose experts are a SequentialMLP."""
    layer = build_moe_layer(layer_config(dispatcher, moe_router_fusion=dispatcher != "deepep_moe", **sizes), seed=seed, use_te=True)
    with torch.no_grad():
        layer.router.weight.copy_(like.router.weight)
        for index, expert in enumerate(like.experts.local_experts):
            for name in ("linear_fc1", "linear_fc2"):
                getattr(getattr(layer.experts, name), f"weight{index}").copy_(getattr(expert, name).weight)
    return layer


def te_fp8_layer(*, seed: int, **sizes: Any) -> Any:
    """Build a layer with the dispatcher `alltoall`, TransformerEngine's grouped experts, its fused router, and its blockwise fp8 recipe.
    SwiGLU and its prob are one kernel, which `torch.compile` makes."""
    config = layer_config("alltoall", moe_router_fusion=True, fp8="e4m3", fp8_recipe="blockwise", **sizes)
    config.bias_activation_fusion = True
    return build_moe_layer(config, seed=seed, use_te=True)


def run_te_layer(layer: Any, x: torch.Tensor, is_first_microbatch: bool | None) -> torch.Tensor:
    """Run a layer in the fp8 context that a transformer block gives it. False: TransformerEngine uses the copies of weights that it has."""
    from megatron.core.fp8_utils import get_fp8_context

    if is_first_microbatch:
        layer.set_is_first_microbatch()
    with get_fp8_context(layer.config):
        return layer(x)[0]


def release_te_copies(layer: Any) -> None:
    """Drop TransformerEngine's copies of weights. The next forward quantizes."""
    for module in layer.modules():
        copies = getattr(module, "_fp8_workspaces", None)
        if isinstance(copies, dict):
            copies.clear()
    layer.set_is_first_microbatch()


def exchange(dispatcher: Any, x: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Do what a MoELayer does between its router and its output, through a dispatcher of Megatron-Core, with experts that cost nothing.

    x [S, B, H], routing_map [T, E] bool, probs [T, E] -> [S, B, H].
    """
    sent = dispatcher.dispatch_preprocess(x, routing_map, probs)
    rows, _, row_probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*sent))
    rows = dispatcher.combine_preprocess(_Echo.apply(rows, row_probs))
    return dispatcher.combine_postprocess(dispatcher.token_combine(rows))


class _Echo(Function):
    """Returns the rows as they came. The first column of their gradient is the probs' gradient."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, row_probs: torch.Tensor) -> torch.Tensor:
        ctx.dtype = row_probs.dtype
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, grad[:, 0].to(ctx.dtype)
