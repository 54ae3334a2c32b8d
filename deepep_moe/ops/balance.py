"""Load balancing of experts: the bias update without auxiliary loss, and the sequence-wise auxiliary loss."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe import _C
from deepep_moe.ops.dense import to_dense
from deepep_moe.ops.gate import check_score_function
from deepep_moe.ops.gate_operators import GPU, on_device


@torch.no_grad()
def update_expert_bias(
    expert_bias: Tensor, num_tokens_per_expert: Tensor, update_rate: float, group: dist.ProcessGroup | None = None
) -> None:
    """Moves the bias of overloaded experts down and of underloaded ones up, in place: `bias += rate * sign(mean(counts) - count)`.

    Balancing without an auxiliary loss, Wang et al. 2024, arXiv 2408.15664, algorithm 1.

    All layers of a model go in one call, with their biases and counts stacked: one all-reduce, and on a GPU one launch after it.

    Args:
        expert_bias: `[num_experts]` or `[num_layers, num_experts]` fp32, contiguous.
        num_tokens_per_expert: int64 or int32 counts since the last update, of the same shape; not changed.
        update_rate: step; DeepSeek-V3 trains with 0.001.
        group: counts are summed over its ranks. None: the counts are complete.

    Raises:
        TypeError: another dtype.
        ValueError: the shapes or devices differ, or there are more than two dimensions.
    """
    _check_counts(expert_bias, num_tokens_per_expert)
    counts = num_tokens_per_expert.contiguous()
    if group is not None:
        counts = counts.to(torch.int64, copy=True)
        dist.all_reduce(counts, group=group)
    if expert_bias.device.type != GPU:
        expert_bias.add_(torch.sign(counts.sum(-1, keepdim=True, dtype=torch.int64) - counts.long() * counts.shape[-1]), alpha=update_rate)
        return
    num_experts = counts.shape[-1]
    with on_device(expert_bias):
        _C.gpu_update_expert_bias(
            num_layers=counts.numel() // max(num_experts, 1), num_experts=num_experts, num_tokens_per_expert=counts.data_ptr(),
            is_int64=counts.dtype == torch.int64, expert_bias=expert_bias.data_ptr(), update_rate=update_rate,
            stream=torch.cuda.current_stream(expert_bias.device).cuda_stream,
        )  # fmt: skip


def _check_counts(expert_bias: Tensor, num_tokens_per_expert: Tensor) -> None:
    if expert_bias.shape != num_tokens_per_expert.shape:
        raise ValueError(
            f"num_tokens_per_expert must have the shape of expert_bias {list(expert_bias.shape)}, got {list(num_tokens_per_expert.shape)}"
        )
    if expert_bias.dtype != torch.float32:
        raise TypeError(f"expert_bias must be torch.float32, got {expert_bias.dtype}")
    if num_tokens_per_expert.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"num_tokens_per_expert must be torch.int64 or torch.int32, got {num_tokens_per_expert.dtype}")
    if expert_bias.dim() not in (1, 2) or not expert_bias.is_contiguous():
        raise ValueError(f"expert_bias must be contiguous [num_experts] or [num_layers, num_experts], got shape {list(expert_bias.shape)}")
    if expert_bias.device != num_tokens_per_expert.device:
        raise ValueError(f"num_tokens_per_expert must be on {expert_bias.device} as expert_bias is, got {num_tokens_per_expert.device}")


def sequence_aux_loss(
    logits: Tensor,
    topk_idx: Tensor,
    num_tokens_per_sequence: int | Sequence[int],
    *,
    coefficient: float,
    score_function: str = "sigmoid",
) -> Tensor:
    """Complementary sequence-wise balance loss of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20), averaged over the sequences.

    For each sequence of T tokens, `coefficient * sum_i f_i P_i` with `f_i = num_experts / (num_topk T) * (tokens that chose i)` and
    `P_i` the mean over tokens of expert i's share of the token's scores.

    Args:
        logits: `[num_tokens, num_experts]`; the loss is differentiable in them.
        topk_idx: `[num_tokens, num_topk]` experts that count as chosen. The paper's are the best by score without bias. Rows of -1
            (masked tokens) count neither as tokens nor in shares; their logits may hold anything.
        num_tokens_per_sequence: tokens of each sequence, in order, with sum num_tokens; or one number for all.
        coefficient: the paper's alpha; DeepSeek-V3 trains with 0.0001.
        score_function: as in `gate`; both softmax variants mean the softmax over all experts.

    Returns:
        fp32 scalar.

    Raises:
        ValueError: the lengths do not add up to num_tokens, or the score function is unknown.
    """
    check_score_function(score_function)
    num_experts, num_topk = logits.shape[1], topk_idx.shape[1]
    sequence = _sequence_of_token(num_tokens_per_sequence, logits)
    num_sequences = int(sequence[-1]) + 1 if len(sequence) else 1
    is_token = (topk_idx >= 0).any(dim=1)
    _, chosen = to_dense(topk_idx, torch.zeros_like(topk_idx, dtype=torch.float32), num_experts)

    logits = logits.float().masked_fill(~is_token[:, None], 0)
    match score_function:
        case "sigmoid":
            scores = logits.sigmoid()
        case "sqrtsoftplus":
            scores = torch.nn.functional.softplus(logits).sqrt()
        case _:
            scores = logits.softmax(dim=1)
    shares = scores / (scores.sum(dim=1, keepdim=True) + 1e-20) * is_token[:, None]

    def per_sequence(values: Tensor) -> Tensor:
        return values.new_zeros(num_sequences, *values.shape[1:]).index_add(0, sequence, values)

    num_tokens = per_sequence(is_token.float()).clamp(min=1)[:, None]
    frequencies = per_sequence(chosen.float()) * (num_experts / num_topk) / num_tokens
    return coefficient * (frequencies * per_sequence(shares) / num_tokens).sum() / num_sequences


def _sequence_of_token(num_tokens_per_sequence: int | Sequence[int], logits: Tensor) -> Tensor:
    """[num_tokens] int64: which sequence a token belongs to."""
    num_tokens = logits.shape[0]
    if isinstance(num_tokens_per_sequence, int):
        if num_tokens_per_sequence < 1 or num_tokens % num_tokens_per_sequence:
            raise ValueError(f"num_tokens_per_sequence must divide the {num_tokens} tokens, got {num_tokens_per_sequence}")
        return torch.arange(num_tokens, device=logits.device) // num_tokens_per_sequence
    lengths = torch.as_tensor(num_tokens_per_sequence, device=logits.device)
    if int(lengths.sum()) != num_tokens:
        raise ValueError(f"num_tokens_per_sequence must add up to the {num_tokens} tokens, got a sum of {int(lengths.sum())}")
    return torch.repeat_interleave(torch.arange(len(lengths), device=logits.device), lengths)
