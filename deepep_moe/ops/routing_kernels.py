"""Convert a dense routing to `topk_idx` and `topk_weights` in one Triton kernel, and back in another.

PyTorch's operators take a dozen launches for it. One program serves a few tokens. A chosen expert's lane is the number of chosen experts
before it.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_TOKENS = 4  # tokens of one program


@triton.jit
def _gather(
    map_ptr,  # [num_tokens, E] uint8
    probs_ptr,  # [num_tokens, E]
    idx_ptr,  # [num_tokens, K] out
    weights_ptr,  # [num_tokens, K] fp32, out
    num_tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    E_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    experts = tl.arange(0, E_BLOCK)[None, :]
    inside = (tokens < num_tokens) & (experts < E)
    chosen = (tl.load(map_ptr + tokens * E + experts, mask=inside, other=0) != 0).to(tl.int32)
    lane = tl.cumsum(chosen, axis=1) - 1
    count = tl.sum(chosen, axis=1)[:, None]
    # A token with more than K experts gets an invalid one. The dispatch refuses it and tells the peers.
    expert = tl.where((lane == 0) & (count > K), E, experts + tl.zeros_like(chosen))
    weight = tl.load(probs_ptr + tokens * E + experts, mask=inside, other=0.0).to(tl.float32)
    kept = (chosen != 0) & (lane < K)
    tl.store(idx_ptr + tokens * K + lane, expert.to(tl.int64), mask=kept)
    tl.store(weights_ptr + tokens * K + lane, weight, mask=kept)
    lanes = tl.arange(0, K_BLOCK)[None, :]
    empty = (tokens < num_tokens) & (lanes < K) & (lanes >= count)
    tl.store(idx_ptr + tokens * K + lanes, tl.full((TOKENS, K_BLOCK), -1, tl.int64), mask=empty)
    tl.store(weights_ptr + tokens * K + lanes, tl.zeros((TOKENS, K_BLOCK), tl.float32), mask=empty)


@triton.jit
def _scatter(
    idx_ptr,  # [num_tokens, K]
    grad_ptr,  # [num_tokens, K] fp32
    grad_probs_ptr,  # [num_tokens, E] out
    num_tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    E_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    experts = tl.arange(0, E_BLOCK)[None, :]
    grad_probs = tl.zeros((TOKENS, E_BLOCK), tl.float32)
    for k in tl.static_range(K):
        expert = tl.load(idx_ptr + tokens * K + k, mask=tokens < num_tokens, other=-1)
        grad = tl.load(grad_ptr + tokens * K + k, mask=tokens < num_tokens, other=0.0)
        grad_probs = tl.where(experts == expert, grad, grad_probs)
    tl.store(grad_probs_ptr + tokens * E + experts, grad_probs, mask=(tokens < num_tokens) & (experts < E))


def gather(routing_map: torch.Tensor, probs: torch.Tensor, num_topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return topk_idx [num_tokens, num_topk] int64 and topk_weights fp32 of `routing_map` [num_tokens, num_experts] bool and `probs`."""
    num_tokens, num_experts = probs.shape
    topk_idx = torch.empty(num_tokens, num_topk, dtype=torch.int64, device=probs.device)
    topk_weights = torch.empty(num_tokens, num_topk, dtype=torch.float32, device=probs.device)
    if num_tokens:
        _gather[(triton.cdiv(num_tokens, _TOKENS),)](
            routing_map.contiguous().view(torch.uint8), probs.contiguous(), topk_idx, topk_weights, num_tokens, num_experts, num_topk,
            triton.next_power_of_2(num_experts), triton.next_power_of_2(num_topk), _TOKENS,
        )  # fmt: skip
    return topk_idx, topk_weights


def scatter(topk_idx: torch.Tensor, values: torch.Tensor, num_experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [num_tokens, num_experts] of `dtype`: `values` [num_tokens, num_topk] fp32 in the columns of their experts, 0 elsewhere."""
    num_tokens, num_topk = topk_idx.shape
    dense = torch.empty(num_tokens, num_experts, dtype=dtype, device=topk_idx.device)
    if num_tokens:
        _scatter[(triton.cdiv(num_tokens, _TOKENS),)](
            topk_idx.contiguous(),
            values.contiguous(),
            dense,
            num_tokens,
            num_experts,
            num_topk,
            triton.next_power_of_2(num_experts),
            _TOKENS,
        )
    return dense


class TopkFromDense(torch.autograd.Function):
    """routing_map [num_tokens, num_experts] bool, probs the same -> topk_idx [num_tokens, num_topk] int64, topk_weights fp32."""

    @staticmethod
    def forward(ctx: Any, routing_map: torch.Tensor, probs: torch.Tensor, num_topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        topk_idx, topk_weights = gather(routing_map, probs, num_topk)
        ctx.mark_non_differentiable(topk_idx)
        ctx.save_for_backward(topk_idx)
        ctx.num_experts, ctx.dtype = probs.shape[1], probs.dtype
        return topk_idx, topk_weights

    @staticmethod
    def backward(ctx: Any, _: Any, grad_topk_weights: torch.Tensor | None) -> tuple[None, torch.Tensor | None, None]:
        if grad_topk_weights is None:
            return None, None, None
        (topk_idx,) = ctx.saved_tensors
        return None, scatter(topk_idx, grad_topk_weights, ctx.num_experts, ctx.dtype), None
