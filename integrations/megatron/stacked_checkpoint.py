"""Checkpoints of a parameter that holds those of several experts."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

_STACK = "deepep_moe_stack"  # an attribute of a stacked parameter: a number that it shares with those that alternate with it in `by_expert`
_numbers = itertools.count()


def mark_stack(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Mark the parameters [num_experts, ...], each of which holds those of all experts of a layer. Megatron-Core's experts have those of
    expert 0 first, then those of expert 1, and so on."""
    number = next(_numbers)
    for parameter in parameters:
        setattr(parameter, _STACK, number)


def is_stacked(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, _STACK)


def by_expert(parameters: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int | None]]:
    """Find what Megatron-Core's experts have in the place of `parameters`, in their order: a stacked parameter and the index of
    an expert, or any other parameter and None."""
    for number, alike in itertools.groupby(parameters, lambda parameter: getattr(parameter, _STACK, None)):
        layer = list(alike)
        experts = [None] if number is None else range(len(layer[0]))
        yield from ((parameter, expert) for expert in experts for parameter in layer)


def stack_sharded(of_experts: list[ShardedTensor | ShardedTensorFactory], parameter: torch.Tensor, key: str) -> ShardedTensorFactory:
    """Return an entry for a stacked parameter [num_experts, ...] that saves and loads the entries of the experts.

    The optimizer calls it with its own states of that parameter, which have the parameter's shape. `key` stands for the experts' keys,
    which may differ from one another, and the optimizer puts a name before it.
    """

    def build(full_key: str, data: torch.Tensor, replica_id: object, flattened_range: slice | None) -> list[Any]:
        if flattened_range is not None:
            raise ValueError(
                f"{full_key}: the optimizer saves a flattened range of grouped experts, which cannot be split by expert; choose another "
                "distrib_optim_sharding_type than 'fully_sharded_model_space', such as 'dp_reshardable' or 'fully_reshardable'"
            )
        entries = []
        for entry, of_expert in zip(of_experts, data, strict=True):
            place: dict[str, Any] = {"key": full_key.replace(key, entry.key), "data": of_expert, "replica_id": replica_id}
            is_factory = isinstance(entry, ShardedTensorFactory)
            entries.append(replace(entry, **place).build() if is_factory else replace(entry, **place, dtype=of_expert.dtype))
        return entries

    @torch.no_grad()
    def merge(loaded: list[Any]) -> torch.Tensor:
        pairs = zip(of_experts, loaded, strict=True)
        return torch.stack([entry.merge_fn(part) if isinstance(entry, ShardedTensorFactory) else part for entry, part in pairs])

    return ShardedTensorFactory(key, parameter, build, merge, of_experts[0].replica_id)
