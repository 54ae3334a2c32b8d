"""Checkpoints of grouped experts and of SequentialMLP are the same and load into either."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cases import build_layer, expert_biases, layer_config, model_parallel
from on_ranks import on_ranks

from deepep_moe.integrations.megatron.plugin import selection
from deepep_moe.testing.launch import run_ranks

pytest.importorskip("megatron.core")

WAYS = ((True, False), (False, True), (True, True))  # whether the experts that save are grouped, and those that load


def layer(sizes: dict, *, grouped: bool, **changes: Any) -> Any:
    """A layer whose experts are grouped, with our dispatcher, or not, with alltoall's."""
    built = build_layer(layer_config(**sizes, **(selection() if grouped else selection("alltoall")), **changes))
    assert (type(built.experts).__name__ == "GroupedMLP") is grouped
    return built


def change(module: torch.nn.Module, seed: int) -> None:
    with torch.no_grad():
        for values in module.state_dict().values():
            if values is not None:
                values.copy_(torch.randn(values.shape, generator=torch.Generator().manual_seed(seed)))
                seed += 1


def assert_equal_states(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert value is None or torch.equal(actual[name], value), name


# ---- plain state dicts ----


@on_ranks(1)
def test_state_dicts(rank: int, num_ranks: int) -> None:
    with model_parallel(ep=num_ranks, grouped_experts=True) as sizes:
        for source_is_grouped, target_is_grouped in WAYS:
            for assign in (False, True):
                source, target = (layer(sizes, grouped=grouped, **expert_biases()) for grouped in (source_is_grouped, target_is_grouped))
                change(source, seed=rank)
                saved = {name: value if value is None else value.clone() for name, value in source.state_dict().items()}
                assert "experts.local_experts.7.linear_fc2.weight" in saved
                result = target.load_state_dict(saved, assign=assign)
                assert not result.missing_keys and not result.unexpected_keys
                assert_equal_states(target.state_dict(), saved)
                kept = [name for name, _ in target.experts.named_parameters()]
                assert ("linear_fc1.weight" in kept) is target_is_grouped
                assert any(name.startswith("local_experts") for name in kept) is not target_is_grouped


@on_ranks(1)
def test_what_does_not_fit_is_named_as_by_megatron(rank: int, num_ranks: int) -> None:
    with model_parallel(ep=1, grouped_experts=True) as sizes:
        ours = layer(sizes, grouped=True)
        state = ours.state_dict()
        missing = "experts.local_experts.3.linear_fc1.weight"
        del state[missing]
        with pytest.raises(RuntimeError, match=f'Missing key.*"{missing}"'):
            ours.load_state_dict(state)
        state[missing] = torch.zeros(1, 1)
        with pytest.raises(RuntimeError, match=f"size mismatch for {missing}"):
            ours.load_state_dict(state)
        with pytest.raises(RuntimeError, match='Unexpected key.*"experts.local_experts.8.linear_fc1.weight"'):
            ours.load_state_dict(ours.state_dict() | {"experts.local_experts.8.linear_fc1.weight": torch.zeros(1)})
        assert [name for name, _ in ours.experts.named_parameters()] == ["linear_fc1.weight", "linear_fc2.weight"]


# ---- sharded checkpoints ----


def sharded_tensors(entries: Any) -> list[tuple]:
    """What identifies each saved piece, and its values."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    apply_factories(entries)
    found = [(v.key, *_place(v)) if isinstance(v, ShardedTensor) else (v.unique_key,) for v in nested_values(entries)]
    return sorted(found, key=repr)


def _place(value: Any) -> tuple:
    places = value.local_shape, value.global_shape, value.global_offset, value.axis_fragmentations, value.replica_id
    return *places, value.prepend_axis_num, value.dtype, value.data.sum().item()


def metadata(**switches: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True), **switches}


@on_ranks(2)
def test_pieces_of_sharded_checkpoints(rank: int, num_ranks: int) -> None:
    with model_parallel(ep=num_ranks, grouped_experts=True) as sizes:
        for changes in ({}, expert_biases(), {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu}):
            ours, theirs = (layer(sizes, grouped=grouped, **changes) for grouped in (True, False))
            for switches in ({}, {"singleton_local_shards": True}):
                for place in (("", ()), ("decoder.layers.0.mlp.experts.", ((0, 1, 3),))):
                    entries = [module.experts.sharded_state_dict(*place, metadata(**switches)) for module in (ours, theirs)]
                    assert sharded_tensors(entries[0]) == sharded_tensors(entries[1])


def _round_trips(rank: int, num_ranks: int, folder: str) -> None:
    from megatron.core import dist_checkpointing

    with model_parallel(ep=num_ranks, grouped_experts=True) as sizes:
        for number, (source_is_grouped, target_is_grouped) in enumerate(WAYS):
            both = (source_is_grouped, target_is_grouped)
            source, target = (layer(sizes, grouped=grouped, **expert_biases()).experts for grouped in both)
            change(source, seed=100 * rank)
            path = Path(folder) / str(number)
            if rank == 0:
                path.mkdir()
            dist.barrier()
            dist_checkpointing.save(source.sharded_state_dict("e.", (), metadata()), str(path))
            loaded = dist_checkpointing.load(target.sharded_state_dict("e.", (), metadata()), str(path))
            result = target.load_state_dict({name.removeprefix("e."): value for name, value in loaded.items()})
            assert not result.missing_keys and not result.unexpected_keys
            assert_equal_states(target.state_dict(), source.state_dict())


def test_sharded_checkpoints(tmp_path):
    run_ranks(_round_trips, 2, str(tmp_path))


# ---- the optimizer ----


def optimizer_pieces(experts: torch.nn.Module, seed: int) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    """Sharded states of an Adam that has made a step."""
    from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state

    parameters = list(experts.parameters())
    optimizer = torch.optim.Adam(parameters)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1.0 + seed)
    optimizer.step()
    state = optimizer.state_dict()
    by_id = get_param_id_to_sharded_param_map(experts.sharded_state_dict("", (), metadata()), parameters)
    assert sorted(by_id) == list(range(len(parameters)))
    optim_state_to_sharding_state(state, by_id, exclude_keys=("step",))
    return state, optimizer


@on_ranks(2)
def test_states_of_the_optimizer(rank: int, num_ranks: int) -> None:
    with model_parallel(ep=num_ranks, grouped_experts=True) as sizes:
        ours, theirs = (layer(sizes, grouped=grouped, **expert_biases()).experts for grouped in (True, False))
        pieces = [sharded_tensors(optimizer_pieces(experts, rank)[0]["state"]) for experts in (ours, theirs)]
        assert len(pieces[0]) > 0 and pieces[0] == pieces[1]


def test_a_flattened_range_is_refused():
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from deepep_moe.integrations.megatron.stacked_checkpoint import stack_sharded

    stacked = torch.zeros(2, 3)
    entries = [ShardedTensor.from_rank_offsets("w", one, (0, index, 2), prepend_axis_num=1) for index, one in enumerate(stacked)]
    factory = stack_sharded(entries, stacked, "w")
    with pytest.raises(ValueError, match="the optimizer saves a flattened range .* 'dp_reshardable' or 'fully_reshardable'"):
        factory.build_fn("optimizer.w", stacked, 0, slice(0, 1))
