"""A small DeepSeek-V3: the library's own SwiGLU, latent attention in plain PyTorch, and `deepspeed.moe.layer.MoE` layers.

Nothing here knows how tokens move.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepep_moe.nn import SwiGLU


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model. DeepSeek-V3 has hidden 7168, 61 layers, 128 heads, 256 experts of width 2048, top-8."""

    vocab_size: int = 256
    hidden: int = 128
    num_layers: int = 4
    """The first is dense, the others have experts."""
    num_heads: int = 4
    q_rank: int = 64
    kv_rank: int = 32
    head_dim: int = 32
    rope_dim: int = 16
    """Columns of a head that carry the position, beside `head_dim` that do not."""
    ffn_hidden: int = 384
    expert_hidden: int = 96
    num_experts: int = 16
    num_topk: int = 2


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434): queries, keys and values come from narrow latents, the position from a part apart."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        s, width = sizes, sizes.head_dim + sizes.rope_dim
        self.sizes = s
        self.q_down, self.q_norm = nn.Linear(s.hidden, s.q_rank, bias=False), nn.RMSNorm(s.q_rank, eps=1e-6)
        self.q_up = nn.Linear(s.q_rank, s.num_heads * width, bias=False)
        self.kv_down, self.kv_norm = nn.Linear(s.hidden, s.kv_rank + s.rope_dim, bias=False), nn.RMSNorm(s.kv_rank, eps=1e-6)
        self.kv_up = nn.Linear(s.kv_rank, s.num_heads * 2 * s.head_dim, bias=False)
        self.output = nn.Linear(s.num_heads * s.head_dim, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, length, hidden], and so the result."""
        s, (batch, length, _) = self.sizes, x.shape
        q = self.q_up(self.q_norm(self.q_down(x))).view(batch, length, s.num_heads, -1).transpose(1, 2)
        latent, k_rope = self.kv_down(x).split([s.kv_rank, s.rope_dim], dim=-1)
        k, v = self.kv_up(self.kv_norm(latent)).view(batch, length, s.num_heads, -1).transpose(1, 2).chunk(2, dim=-1)
        k_rope = rotate(k_rope[:, None]).expand(-1, s.num_heads, -1, -1)  # one for all heads
        q = torch.cat([q[..., : s.head_dim], rotate(q[..., s.head_dim :])], dim=-1)
        y = nn.functional.scaled_dot_product_attention(q, torch.cat([k, k_rope], dim=-1), v, is_causal=True)
        return self.output(y.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding of x [..., length, columns] (arXiv 2104.09864)."""
    length, half = x.shape[-2], x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(length, device=x.device)[:, None] * frequencies
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1).to(x.dtype)


class SparseFeedForward(nn.Module):
    """Routed experts of DeepSpeed and a shared expert that every token passes."""

    def __init__(self, sizes: Sizes, ep: int):
        super().__init__()
        from deepspeed.moe.layer import MoE

        expert = SwiGLU(sizes.hidden, sizes.expert_hidden)
        self.routed = MoE(
            sizes.hidden, expert, num_experts=sizes.num_experts, ep_size=ep, k=sizes.num_topk, capacity_factor=1.25,
            eval_capacity_factor=2.0, top2_2nd_expert_sampling=False,
        )  # fmt: skip
        self.shared = SwiGLU(sizes.hidden, sizes.expert_hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [batch, length, hidden] -> the same, the loss for the balance, tokens [num_experts] that chose each expert."""
        y, l_aux, counts = self.routed(x)
        return y + self.shared(x), l_aux, counts


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and beside a residual."""

    def __init__(self, sizes: Sizes, ep: int, *, sparse: bool):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(sizes.hidden, eps=1e-6), LatentAttention(sizes)
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-6)
        self.ffn: Any = SparseFeedForward(sizes, ep) if sparse else SwiGLU(sizes.hidden, sizes.ffn_hidden)
        self.sparse = sparse

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x = x + self.attention(self.attention_norm(x))
        if self.sparse:
            y, l_aux, counts = self.ffn(self.norm(x))
            return x + y, l_aux, counts
        return x + self.ffn(self.norm(x)), x.new_zeros(()), None


class Model(nn.Module):
    """Predicts the next byte. Weights are drawn from PyTorch's random state."""

    def __init__(self, sizes: Sizes, ep: int):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.hidden)
        self.blocks = nn.ModuleList([Block(sizes, ep, sparse=i > 0) for i in range(sizes.num_layers)])
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-6)
        self.head = nn.Linear(sizes.hidden, sizes.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens: [batch, length + 1] -> loss (nats per byte), loss for the balance, tokens of each expert [moe_layers, num_experts]."""
        x, l_aux, counts = self.embedding(tokens[:, :-1]), torch.zeros((), device=tokens.device), []
        for block in self.blocks:
            x, of_block, counted = block(x)
            l_aux = l_aux + of_block
            counts += [] if counted is None else [counted.to(tokens.device)]
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), l_aux, torch.stack(counts)
