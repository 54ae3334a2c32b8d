"""MoE layers that differ in how they move tokens only, to compare them with each other."""

from typing import Any

import torch
from torch import nn

from deepep_moe.integrations.deepspeed.plugin import replace_moe_layers
from deepep_moe.integrations.deepspeed.routing import route

DEEPSPEED, EXACT, FAST = "deepspeed", "exact", "fast"
KINDS = (EXACT, FAST, DEEPSPEED)


class FeedForward(nn.Module):
    """A plain expert: two matrices without biases around a GELU."""

    def __init__(self, hidden: int, ffn_hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, ffn_hidden, bias=False), nn.Linear(ffn_hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def sharing_layers(
    expert: nn.Module, *, hidden: int, num_experts: int, num_topk: int, ep: int, capacity_factor: float, device: torch.device,
    dtype: torch.dtype, backend: str, num_max_tokens_per_rank: int,
) -> dict[str, Any]:  # fmt: skip
    """A `deepspeed.moe.layer.MoE` of each kind, with one gate and one set of copies of `expert` for all. Collective."""
    from deepspeed.moe.layer import MoE

    layers: dict[str, Any] = {}
    for kind in KINDS:
        layer = MoE(hidden, expert, num_experts=num_experts, ep_size=ep, k=num_topk, capacity_factor=capacity_factor)
        first = layers.get(KINDS[0])
        if first is None:
            layer.to(device, dtype)
            layer.set_deepspeed_parallelism()
        else:
            moe, shared = layer.deepspeed_moe, first.deepspeed_moe
            moe.gate, moe.experts, moe.ep_group = shared.gate, shared.experts, shared.ep_group
        if kind != DEEPSPEED:
            replace_moe_layers(layer, exact=kind == EXACT, backend=backend, num_max_tokens_per_rank=num_max_tokens_per_rank)
        layers[kind] = layer
    return layers


def experts_of(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The experts that a layer's gate chooses for x [num_tokens, hidden]: [num_tokens, num_topk], -1 = dropped."""
    with torch.no_grad():
        return route(layer.deepspeed_moe.gate, x, None).topk_idx.t()
