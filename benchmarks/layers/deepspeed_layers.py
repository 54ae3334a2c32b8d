"""MoE layers that differ only in how they move tokens, to compare them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from deepep_moe.integrations.deepspeed.native.routing import route
from deepep_moe.integrations.deepspeed.plugin import replace_moe_layers

DEEPSPEED, EXACT, FAST, GROUPED = "deepspeed", "exact", "fast", "grouped"
KINDS = (EXACT, FAST, DEEPSPEED)


def feed_forward(hidden: int, ffn_hidden: int) -> nn.Module:
    """Return a plain expert: two matrices without biases around a GELU."""
    return nn.Sequential(nn.Linear(hidden, ffn_hidden, bias=False), nn.GELU(), nn.Linear(ffn_hidden, hidden, bias=False))


def into_one_memory(parameters: Sequence[nn.Parameter]) -> None:
    """Put parameters one behind another into one tensor, as ZeRO 1 and 2 do, where grouped products read those of all experts in place."""
    one = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, data in zip(parameters, one.split([parameter.numel() for parameter in parameters]), strict=True):
        parameter.data = data.view_as(parameter)


def sharing_layers(
    expert: nn.Module, *, hidden: int, num_experts: int, num_topk: int, ep: int, capacity_factor: float, device: torch.device,
    dtype: torch.dtype, backend: str, num_max_tokens_per_rank: int, grouped: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Build a `deepspeed.moe.layer.MoE` of each kind, with `grouped` also a fast one whose experts run in grouped products. All share one
    gate and one set of copies of `expert`. Collective."""
    from deepspeed.moe.layer import MoE

    layers: dict[str, Any] = {}
    for kind in (*KINDS, GROUPED) if grouped else KINDS:
        layer = MoE(hidden, expert, num_experts=num_experts, ep_size=ep, k=num_topk, capacity_factor=capacity_factor)
        first = layers.get(KINDS[0])
        if first is None:
            layer.to(device, dtype)
            layer.set_deepspeed_parallelism()
        else:
            moe, shared = layer.deepspeed_moe, first.deepspeed_moe
            moe.gate, moe.experts, moe.ep_group = shared.gate, shared.experts, shared.ep_group
        if kind != DEEPSPEED:
            settings: dict[str, Any] = {"backend": backend, "num_max_tokens_per_rank": num_max_tokens_per_rank}
            replace_moe_layers(layer, exact=kind == EXACT, grouped_experts=kind == GROUPED, **settings)
        layers[kind] = layer
    return layers


def autoep_layers(
    *, hidden: int, ffn_hidden: int, num_experts: int, num_topk: int, ep: int, device: torch.device, dtype: torch.dtype, backend: str,
    num_max_tokens_per_rank: int,
) -> dict[str, Any]:  # fmt: skip
    """Build a layer of each kind, as AutoEP makes them of a Mixtral's, with the same weights and AutoEP's own routers.

    Collective; needs transformers.
    """
    import deepspeed
    from transformers import MixtralConfig
    from transformers.models.auto import AutoModelForCausalLM

    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": ffn_hidden}
    sizes |= {"num_local_experts": num_experts, "num_experts_per_tok": num_topk}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            MixtralConfig(vocab_size=8, num_hidden_layers=len(KINDS), num_attention_heads=4, num_key_value_heads=4, **sizes)
        )
    config = {"train_micro_batch_size_per_gpu": 1, "expert_parallel": {"enabled": True, "autoep_size": ep}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    modules = [module.to(dtype) for module in engine.modules() if getattr(module, "_is_autoep_layer", False)]
    layers = dict(zip(KINDS, modules, strict=True))
    for kind, layer in layers.items():
        layer.load_state_dict(modules[0].state_dict())
        if kind != DEEPSPEED:
            replace_moe_layers(layer, exact=kind == EXACT, backend=backend, num_max_tokens_per_rank=num_max_tokens_per_rank, gate=False)
    return layers


def autoep_experts_of(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the experts that its router chooses for x [1, num_tokens, hidden], [num_tokens, num_topk]. Collective, as the layer runs."""
    from deepspeed.module_inject.auto_ep_layer import RouterOutput

    chosen: list[torch.Tensor] = []
    hook = layer.router.register_forward_hook(lambda _module, _inputs, output: chosen.append(RouterOutput(*output).selected_experts))
    with torch.no_grad():
        layer(x)
    hook.remove()
    return chosen[0]


def experts_of(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the experts that a layer's gate chooses for x [num_tokens, hidden], [num_tokens, num_topk], -1 = dropped."""
    with torch.no_grad():
        return route(layer.deepspeed_moe.gate, x, None).topk_idx.t()
