"""A decoder in the style of DeepSeek-V3, with random weights: what one rank does for one token of each of its sequences."""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from deepep_moe import LowLatencyBuffer
from deepep_moe.nn import Router, SwiGLU, Timeline, routed_experts

HEAD_SIZE = 64


@dataclass(frozen=True)
class Sizes:
    """`num_tokens` of a micro-batch on a rank; `context`: tokens that each of them attends to."""

    num_layers: int
    hidden: int
    intermediate: int
    num_experts: int
    num_topk: int
    num_tokens: int
    context: int


class Attention(nn.Module):
    """Attention of many query heads over one head of keys and values, as in decoding with multi-head latent attention."""

    def __init__(self, hidden: int):
        super().__init__()
        self.query, self.output = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        """x: [num_tokens, hidden]. cache: [2, num_tokens, context, HEAD_SIZE], keys and values of each token's own sequence."""
        heads = self.query(x).unflatten(1, (-1, HEAD_SIZE))[:, None]
        return self.output(scaled_dot_product_attention(heads, cache[0][:, None], cache[1][:, None]).flatten(1))


class Experts(nn.Module):
    """SwiGLU experts of this rank, on rows as `LowLatencyBuffer` delivers them."""

    def __init__(self, num_local_experts: int, hidden: int, intermediate: int):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(num_local_experts, hidden, 2 * intermediate) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(num_local_experts, intermediate, hidden) / intermediate**0.5)

    def forward(self, x: Tensor, num_rows_per_expert: Tensor) -> Tensor:
        """x: [num_local_experts, capacity, hidden]. Returns the same shape."""
        if x.is_cuda:  # all rows, also those that nothing came for: nobody waits for the counts
            gate, up = torch.bmm(x, self.gate_up).chunk(2, dim=-1)
            return torch.bmm(silu(gate) * up, self.down)
        y = torch.empty_like(x)
        for expert, count in enumerate(num_rows_per_expert.tolist()):
            gate, up = (x[expert, :count] @ self.gate_up[expert]).chunk(2, dim=-1)
            torch.mm(silu(gate) * up, self.down[expert], out=y[expert, :count])
        return y


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, rank: int, num_ranks: int, number: int):
        super().__init__()
        torch.manual_seed(number)  # the same attention, router and shared expert on every rank
        self.attention_norm, self.moe_norm = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.attention = Attention(sizes.hidden)
        self.router = Router(sizes.hidden, sizes.num_experts, sizes.num_topk, expert_bias=True, routed_scaling_factor=2.5)
        self.shared_expert = SwiGLU(sizes.hidden, sizes.intermediate)
        torch.manual_seed(1000 * (1 + rank) + number)  # other experts
        self.experts = Experts(sizes.num_experts // num_ranks, sizes.hidden, sizes.intermediate)

    def forward(self, buffer: LowLatencyBuffer, x: Tensor, cache: Tensor, timeline: Timeline) -> Generator[None, None, Tensor]:
        with timeline.span("attention"):
            x = x + self.attention(self.attention_norm(x), cache)
        with timeline.span("router"):
            rows = self.moe_norm(x)
            topk_idx, topk_weights, _ = self.router(rows)
        return x + (
            yield from routed_experts(
                buffer, self.experts, rows, topk_idx, topk_weights, shared_expert=self.shared_expert, timeline=timeline
            )
        )


class Decoder(nn.Module):
    """Layers that share a buffer."""

    def __init__(self, sizes: Sizes, rank: int, num_ranks: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer(sizes, rank, num_ranks, number) for number in range(sizes.num_layers))

    def forward(self, buffer: LowLatencyBuffer, x: Tensor, cache: Tensor, timeline: Timeline) -> Generator[None, None, Tensor]:
        """A micro-batch, for `overlapped`: yields while its rows fly."""
        for layer in self.layers:
            x = yield from layer(buffer, x, cache, timeline)
        return x
