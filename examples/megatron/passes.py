"""Forward and backward of a step's micro batches: one after another, by Megatron-Core's 1F1B schedule, or from a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch


def one_after_another(model: Any, batches: list[dict[str, Any]]) -> torch.Tensor:
    """The mean loss of the micro batches; parameters have their gradients."""
    losses = []
    model.set_is_first_microbatch()  # as Megatron-Core's schedules do: fp8 experts then quantize their weights once a step
    for batch in batches:
        loss = model(**batch).mean()
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def interleaved(model: Any, batches: list[dict[str, Any]]) -> torch.Tensor:
    """The same, with each micro batch's forward beside the backward of the one before: exchange of one under computation of the other."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
    from megatron.core.pipeline_parallel.utils import set_streams

    set_streams()  # a second one, for the exchange
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


class Captured:
    """Run forward and backward of all micro batches from one CUDA graph. The first steps run eagerly, for one-time allocations."""

    _WARMUP = 3

    def __init__(self, model: Any, batches_of: Callable[[torch.Tensor], list[dict[str, Any]]]):
        """`batches_of` makes the micro batches of tokens, as views of them."""
        self._model, self._batches_of = model, batches_of
        self._num_calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss. The current stream must not be the default one: what was made on that cannot be captured."""
        self._num_calls += 1
        if self._num_calls <= self._WARMUP:
            return one_after_another(self._model, self._batches_of(tokens))
        if self._graph is None:
            self._tokens = tokens.clone()
            batches = self._batches_of(self._tokens)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream()):
                self._loss = one_after_another(self._model, batches)
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._loss.clone()
