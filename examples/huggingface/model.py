"""A small language model with random weights: Qwen3 MoE of transformers, or a stand-in of its shape where transformers is not installed."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def build(*, stand_in: bool = False) -> nn.Module:
    """Called as `model(input_ids=tokens).logits`."""
    if stand_in or importlib.util.find_spec("transformers") is None:
        return StandIn(SimpleNamespace(**SIZES))
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **heads, intermediate_size=64, norm_topk_prob=True))


class Experts(nn.Module):
    """All experts of a block, one after the other."""

    def __init__(self, config: Any):
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.randn(config.num_experts, 2 * inner, hidden) * 0.02)
        self.down_proj = nn.Parameter(torch.randn(config.num_experts, hidden, inner) * 0.02)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            token, lane = torch.where(top_k_index == expert)
            gate, up = nn.functional.linear(hidden_states[token], gate_up).chunk(2, dim=-1)
            y = nn.functional.linear(self.act_fn(gate) * up, down)
            total = total.index_add(0, token, y * top_k_weights[token, lane, None])
        return total


class Block(nn.Module):
    """A router and its experts, without attention."""

    def __init__(self, config: Any):
        super().__init__()
        self.norm, self.gate = nn.RMSNorm(config.hidden_size), nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts, self.num_topk = Experts(config), config.num_experts_per_tok

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(self.num_topk)
        return x + self.experts(rows, chosen, weights / weights.sum(-1, keepdim=True)).view(x.shape)


class StandIn(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.num_hidden_layers)])
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(logits=self.head(x))
