"""Load balancing of experts: the bias update without auxiliary loss, and the sequence-wise auxiliary loss."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe.ops.gate import check_score_function, to_dense


@torch.no_grad()
def update_expert_bias(
    expert_bias: Tensor, num_tokens_per_expert: Tensor, update_rate: float, group: dist.ProcessGroup | None = None
) -> None:
    """Moves the bias of overloaded experts down and of underloaded ones up, in place: `bias += rate * sign(mean(counts) - count)`.

    Balancing without an auxiliary loss, Wang et al. 2024, arXiv 2408.15664, algorithm 1.

    Args:
        expert_bias: `[num_experts]` fp32.
        num_tokens_per_expert: `[num_experts]` integer counts since the last update; not changed.
        update_rate: step; DeepSeek-V3 trains with 0.001.
        group: counts are summed over its ranks. None: the counts are complete.

    Raises:
        ValueError: the shapes differ.
    """
    if expert_bias.shape != num_tokens_per_expert.shape:
        raise ValueError(
            f"num_tokens_per_expert must have the shape of expert_bias {list(expert_bias.shape)}, got {list(num_tokens_per_expert.shape)}"
        )
    counts = num_tokens_per_expert.long().clone()
    if group is not None:
        dist.all_reduce(counts, group=group)
    expert_bias.add_(torch.sign(counts.sum() - counts * counts.numel()), alpha=update_rate)


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
    scores = logits.sigmoid() if score_function == "sigmoid" else logits.softmax(dim=1)
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
