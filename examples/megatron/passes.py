"""Forward and backward of a step's micro batches: one after another, or by Megatron-Core's 1F1B schedule."""

from typing import Any

import torch


def one_after_another(model: Any, batches: list[dict[str, Any]]) -> torch.Tensor:
    """The mean loss of the micro batches; parameters have their gradients."""
    losses = []
    for batch in batches:
        loss = model(**batch).mean()
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def interleaved(model: Any, batches: list[dict[str, Any]]) -> torch.Tensor:
    """The same, with each micro batch's forward beside the backward of the one before: exchange of one under computation of the other."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
    from megatron.core.pipeline_parallel.utils import set_streams

    set_streams(torch.cuda.current_stream(), torch.cuda.Stream())
    losses: list[torch.Tensor] = []
    earlier = None
    for batch in [*batches, None]:
        plan = None if batch is None else model.module.build_schedule_plan(**batch)
        gradient = None if earlier is None else torch.full_like(losses[-1], 1 / (len(batches) * losses[-1].numel()))
        loss = TransformerModelChunkSchedulePlan.run(plan, earlier, b_grad=gradient)
        if plan is not None:
            losses.append(loss.detach())
        earlier = plan
    return torch.stack([loss.mean() for loss in losses]).mean()
