"""Load balancing of experts: the bias update without auxiliary loss, and the auxiliary losses of sequences and of the global batch."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe.arguments import as_int, check_tensor


@torch.no_grad()
def update_expert_bias(
    expert_bias: Tensor, num_tokens_per_expert: Tensor, update_rate: float, group: dist.ProcessGroup | None = None
) -> None:
    """Move the bias of overloaded experts down and of underloaded ones up, in place: `bias += rate * sign(mean(counts) - count)`.

    This is balancing without an auxiliary loss, Wang et al. 2024, arXiv 2408.15664, algorithm 1.

    Pass all layers of a model in one call, with stacked biases and counts: this needs one all-reduce, and a few launches on a GPU.

    Args:
        expert_bias: `[num_experts]` or `[num_layers, num_experts]` fp32, contiguous.
        num_tokens_per_expert: int64 or int32 counts since the last update, of the same shape. They are not changed.
        update_rate: the step of a bias. DeepSeek-V3 trains with 0.001.
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
    missing = counts.sum(-1, keepdim=True, dtype=torch.int64) - counts.long() * counts.shape[-1]
    expert_bias.add_(missing.sign(), alpha=update_rate)


def _check_counts(expert_bias: Tensor, num_tokens_per_expert: Tensor) -> None:
    check_tensor("expert_bias", expert_bias, expert_bias.shape, (torch.float32,), any_strides=True)
    if expert_bias.dim() not in (1, 2) or not expert_bias.is_contiguous():
        raise ValueError(
            f"expert_bias has shape {list(expert_bias.shape)}; it must be contiguous [num_experts] or [num_layers, num_experts]"
        )
    check_tensor(
        "num_tokens_per_expert", num_tokens_per_expert, expert_bias.shape, (torch.int64, torch.int32), expert_bias.device,
        any_strides=True, like="expert_bias",
    )  # fmt: skip


def sequence_aux_loss(shares: Tensor, topk_idx: Tensor, num_tokens_per_sequence: int | Sequence[int], *, coefficient: float) -> Tensor:
    """Return the complementary sequence-wise balance loss of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20), averaged over sequences.

    A sequence of T tokens has the loss `coefficient * sum_i f_i P_i` with `f_i = num_experts / (num_topk T) * (tokens that chose i)`.
    `P_i` is the mean over tokens of expert i's share of the token's scores. Balanced choices give `coefficient`.

    Args:
        shares: `[num_tokens, num_experts]` fp32, as `gate_full(..., shares=True)` returns them. The loss is differentiable in them.
        topk_idx: `[num_tokens, num_topk]` int64 or int32 experts that count as chosen. The paper's are the best by score, without bias
            and groups. Rows of -1 (masked tokens) do not count as tokens.
        num_tokens_per_sequence: tokens of each sequence, in order, with sum num_tokens, or one number.
        coefficient: the paper's alpha; DeepSeek-V3 trains with 0.0001.

    Returns:
        fp32 scalar, the same in every run: floats are added in a fixed order.

    Raises:
        TypeError: shares are None, which `gate_full` gives without `shares=True`.
        ValueError: the shapes do not match, or the lengths do not add up to num_tokens.
    """
    _check_shares(shares, topk_idx)
    (num_tokens, num_experts), num_topk = shares.shape, topk_idx.shape[1]
    sequence, num_sequences = _sequence_of_token(num_tokens_per_sequence, num_tokens, shares.device)
    is_chosen = topk_idx >= 0
    place = sequence[:, None] * num_experts + topk_idx.clamp(min=0)
    # Only integers are scattered: whatever the order of their additions, the sum is the same.
    counts = place.new_zeros(num_sequences * num_experts).scatter_add(0, place.flatten(), is_chosen.flatten().to(place.dtype))
    lengths = place.new_zeros(num_sequences).scatter_add(0, sequence, is_chosen.any(dim=1).to(place.dtype)).clamp(min=1)
    factors = counts.view(num_sequences, num_experts).float() / lengths[:, None].square().float() * (num_experts / num_topk)
    return coefficient / max(num_sequences, 1) * (shares * factors[sequence]).sum()


def global_aux_loss(
    shares: Tensor,
    topk_idx: Tensor,
    num_tokens_per_expert: Tensor,
    *,
    coefficient: float,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the balance loss of Switch Transformer (arXiv 2101.03961, equations 4 to 6) over the global batch (arXiv 2501.11873).

    The loss is `coefficient * num_experts * sum_i f_i P_i`. `f_i` is the fraction of the choices of all ranks that are expert i. `P_i` is
    the mean, over the tokens of this call, of expert i's share of the token's scores. Balanced choices give `coefficient`. Data parallelism
    averages gradients over ranks; that mean is the loss of the global batch if all ranks have equally many tokens.

    Args:
        shares: `[num_tokens, num_experts]` fp32, as `gate_full(..., shares=True)` returns them. The loss is differentiable in them, and
            in no tensor of other ranks.
        topk_idx: `[num_tokens, num_topk]` int64 or int32. Rows of -1 (masked tokens) do not count as tokens.
        num_tokens_per_expert: `[num_experts]` int64 or int32 choices of each expert, or their sum over the micro-batches of
            a step so far. They are not changed.
        coefficient: the weight of the loss. Switch Transformer trains with 0.01.
        group: choices are summed over its ranks, in one all-reduce. None: `num_tokens_per_expert` is complete.

    Returns:
        fp32 scalar, the same in every run: floats are added in a fixed order.

    Raises:
        TypeError: shares are None, which `gate_full` gives without `shares=True`.
        ValueError: the shapes do not match.
    """
    _check_shares(shares, topk_idx)
    num_experts = shares.shape[1]
    if list(num_tokens_per_expert.shape) != [num_experts]:
        raise ValueError(
            f"num_tokens_per_expert has shape {list(num_tokens_per_expert.shape)}; it must be [{num_experts}], as shares have it"
        )
    counts = num_tokens_per_expert.to(torch.int64, copy=True)
    if group is not None:
        dist.all_reduce(counts, group=group)
    fractions = counts.float() / counts.sum().clamp(min=1).float()
    num_tokens = (topk_idx >= 0).any(dim=1).sum().clamp(min=1)
    return coefficient * num_experts * (fractions * shares.sum(dim=0)).sum() / num_tokens


def _check_shares(shares: Tensor | None, topk_idx: Tensor) -> None:
    if not isinstance(shares, Tensor):
        raise TypeError(f"shares is {shares!r}; it must be a tensor, which gate_full(..., shares=True) gives")
    if shares.dim() != 2 or topk_idx.dim() != 2 or shares.shape[0] != topk_idx.shape[0]:
        raise ValueError(
            f"shares and topk_idx have shapes {list(shares.shape)} and {list(topk_idx.shape)}; they must be [num_tokens, num_experts] and "
            "[num_tokens, num_topk], as gate_full(..., shares=True) gives them"
        )


def _sequence_of_token(num_tokens_per_sequence: int | Sequence[int], num_tokens: int, device: torch.device) -> tuple[Tensor, int]:
    """Return `[num_tokens]` int64, the sequence of each token, and the number of sequences."""
    if not isinstance(num_tokens_per_sequence, Sequence):
        num_tokens_per_sequence = as_int("num_tokens_per_sequence", num_tokens_per_sequence)
        if num_tokens_per_sequence < 1 or num_tokens % num_tokens_per_sequence:
            raise ValueError(f"num_tokens_per_sequence is {num_tokens_per_sequence}; it must divide the {num_tokens} tokens")
        return torch.arange(num_tokens, device=device) // num_tokens_per_sequence, num_tokens // num_tokens_per_sequence
    if sum(num_tokens_per_sequence) != num_tokens:
        raise ValueError(f"num_tokens_per_sequence has a sum of {sum(num_tokens_per_sequence)}; it must be the {num_tokens} tokens")
    lengths = torch.tensor(num_tokens_per_sequence, dtype=torch.int64, device=device)
    sequences = torch.arange(len(lengths), device=device)
    return torch.repeat_interleave(sequences, lengths, output_size=num_tokens), len(lengths)
