"""Megatron-Core's TEGroupedMLP on CPUs: its own class, over layers that stand in for TransformerEngine's GroupedLinear.

They have the parameters, the state dict and the sharded entries of those layers. Experts are multiplied one after another.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron_cases import layer_of

TE = "TEGroupedMLP"


class GroupedLinear(torch.nn.Module):
    """`num_gemms` linear layers with parameters `weight0`, `bias0`, `weight1`, ..."""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, init_method: Any, bias: bool, skip_bias_add: bool, **_: Any
    ):
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name

        super().__init__()
        self.num_gemms, self._returns_bias, self._config = num_gemms, skip_bias_add and bias, config
        self._has_bias = bias
        for index in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            with torch.no_grad(), get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                init_method(weight)
            self.register_parameter(f"weight{index}", weight)
            if bias:
                self.register_parameter(f"bias{index}", torch.nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype)))
        for parameter in self.parameters():
            parameter.allreduce = config.expert_model_parallel_size <= 1

    def forward(self, x: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)] if self._has_bias else None
        parts = [rows @ getattr(self, f"weight{index}").t() for index, rows in enumerate(x.split(sizes))]
        if biases is not None and not self._returns_bias:
            parts = [part + bias for part, bias in zip(parts, biases, strict=True)]
        return torch.cat(parts), biases if self._returns_bias else None

    def backward_dw(self) -> None:
        """Do nothing: these layers delay nothing."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        assert state is None or state.numel() == 0

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for index in range(1, self.num_gemms):  # which sharded checkpoints have
            state_dict.pop(f"{prefix}_extra_state{index}", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """Entries of the model's experts: SequentialMLP's keys, an axis for the experts in front, a replica for each data-parallel rank."""
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

        rank, num_ranks = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_model_parallel_world_size()
        replica, total = (0, 0, parallel_state.get_expert_data_parallel_rank()), num_ranks * self.num_gemms
        is_single = (metadata or {}).get("singleton_local_shards", False)
        entries: dict[str, Any] = {}
        for index in range(self.num_gemms):
            number = rank * self.num_gemms + index
            offsets = sharded_offsets if is_single else (*sharded_offsets, (len(sharded_offsets), number, total))
            place = f"{number}.{prefix}" if is_single else prefix
            for kind in ("weight", "bias") if self._has_bias else ("weight",):
                entries[f"{prefix}{kind}{index}"] = ShardedTensor.from_rank_offsets(
                    f"{place}{kind}", getattr(self, f"{kind}{index}"), *offsets, replica_id=replica, prepend_axis_num=len(offsets)
                )
            shape, place_of = tuple(size for *_, size in offsets) or (1,), tuple(at for _, at, _ in offsets) or (0,)
            entries[f"{prefix}_extra_state{index or ''}"] = ShardedObject(
                f"{place}_extra_state", self.get_extra_state(), shape, place_of, replica
            )
        return entries


@contextlib.contextmanager
def te_experts() -> Iterator[None]:
    """Let Megatron-Core's specs of local layers build TEGroupedMLP, over these layers, where they have SequentialMLP else."""
    from megatron.core.models import backends
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import experts

    submodules = getattr(experts, "GroupedMLPSubmodules", MLPSubmodules)
    layers = submodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    has_partials = hasattr(experts, "GroupedMLPSubmodules")

    def grouped_mlp_modules(self: Any, *_: Any, **__: Any) -> Any:
        return functools.partial(experts.TEGroupedMLP, submodules=layers) if has_partials else (experts.TEGroupedMLP, layers)

    with mock.patch.object(backends.LocalSpecProvider, "grouped_mlp_modules", grouped_mlp_modules):
        yield


def expert_layer(sizes: dict, kind: str, grouped: bool, **changes: Any) -> Any:
    """A layer whose spec has experts of `kind`: with our dispatcher and grouped experts, or with alltoall's and its own."""
    with te_experts() if kind == TE else contextlib.nullcontext():
        built = layer_of(sizes, "deepep_moe" if grouped else "alltoall", **changes)
    assert type(built.experts).__name__ == ("GroupedMLP" if grouped else kind)
    return built
