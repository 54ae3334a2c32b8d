"""Checkpoints of grouped experts and of those that they replace, SequentialMLP and TEGroupedMLP, are the same and load into either."""

from pathlib import Path

import pytest
import torch
from megatron_cases import expert_biases, on_megatron
from megatron_states import assert_equal_states, change, metadata, optimizer_pieces, save, sharded_tensors
from te_experts import TE, expert_layer

pytest.importorskip("megatron.core")

SEQUENTIAL = "SequentialMLP"
CLASSES = (SEQUENTIAL, TE)
WAYS = ((True, False), (False, True), (True, True))  # whether the experts that save are grouped, and those that load
OF_BOTH = pytest.mark.parametrize("kind", CLASSES)


def name_of(kind: str, matrix: int, expert: int) -> str:
    of_expert = f"experts.local_experts.{expert}.linear_fc{matrix}.weight"
    return of_expert if kind == SEQUENTIAL else f"experts.linear_fc{matrix}.weight{expert}"


@on_megatron(1, experts="own")
def test_state_dicts(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """Each class reads what the other saves, and grouped experts read the names of both classes."""
    alike = [((kind, source), (kind, target)) for kind in CLASSES for source, target in WAYS]
    others = [((SEQUENTIAL, False), (TE, True)), ((SEQUENTIAL, True), (TE, True)), ((TE, False), (SEQUENTIAL, True))]
    for (kind, is_grouped), (target_kind, target_is_grouped) in alike + others:
        source = expert_layer(sizes, kind, is_grouped, **expert_biases())
        target = expert_layer(sizes, target_kind, target_is_grouped, **expert_biases())
        for assign in (False, True):
            change(source.experts, seed=10 + assign)
            saved = {name: value if value is None else value.clone() for name, value in source.state_dict().items()}
            result = target.load_state_dict(dict(saved), assign=assign)
            assert not result.missing_keys and not result.unexpected_keys
            again = target.state_dict()
            if kind == target_kind:
                assert_equal_states(again, saved)
            for expert in range(8):
                assert torch.equal(saved[name_of(kind, 2, expert)], again[name_of(target_kind, 2, expert)]), (kind, target_kind, expert)
            kept = [name for name, _ in target.experts.named_parameters()]
            assert ("linear_fc1.weight" in kept) is target_is_grouped
            children = ["linear_fc1", "linear_fc2"] if target_is_grouped or target_kind == TE else ["local_experts"]
            assert sorted(name for name, _ in target.experts.named_children()) == children


@OF_BOTH
@on_megatron(1, experts="own")
def test_what_does_not_fit_is_named_as_by_megatron(rank: int, num_ranks: int, sizes: dict[str, int], kind: str) -> None:
    ours, hooked = expert_layer(sizes, kind, True), []
    ours.experts.register_load_state_dict_pre_hook(lambda *arguments: hooked.append(arguments[4]))
    ours.experts.register_buffer("others", torch.ones(2))
    state = ours.state_dict()
    assert state["experts.others"].tolist() == [1, 1]
    missing = name_of(kind, 2, 3)
    del state[missing]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{missing}"'):
        ours.load_state_dict(state)
    state[missing] = torch.zeros(1, 1)
    with pytest.raises(RuntimeError, match=f"size mismatch for {missing}"):
        ours.load_state_dict(state)
    with pytest.raises(RuntimeError, match=f'Unexpected key.*"{name_of(kind, 2, 8)}"'):
        ours.load_state_dict(ours.state_dict() | {name_of(kind, 2, 8): torch.zeros(1)})
    with pytest.raises(RuntimeError, match=f'Missing key.*"{name_of(kind, 1, 0)}"'):
        ours.load_state_dict({name: value for name, value in ours.state_dict().items() if "linear_fc" not in name or "shared" in name})
    ours.load_state_dict({name: value for name, value in ours.state_dict().items() if "_extra_state" not in name or "shared" in name})
    assert hooked == [True] * 5 and [name for name, _ in ours.experts.named_parameters()] == ["linear_fc1.weight", "linear_fc2.weight"]


@OF_BOTH
@on_megatron(2, experts="own")
def test_pieces_of_sharded_checkpoints(rank: int, num_ranks: int, sizes: dict[str, int], kind: str) -> None:
    for changes in ({}, expert_biases(), {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu}):
        ours, theirs = (expert_layer(sizes, kind, grouped, **changes).experts for grouped in (True, False))
        for switches in ({}, {"singleton_local_shards": True}):
            for place in (("", ()), ("decoder.layers.0.mlp.experts.", ((0, 1, 3),))):
                entries = [experts.sharded_state_dict(*place, metadata(**switches)) for experts in (ours, theirs)]
                assert sharded_tensors(entries[0]) == sharded_tensors(entries[1])
        pieces = [sharded_tensors(optimizer_pieces(experts, rank)[0]["state"]) for experts in (ours, theirs)]
        assert len(pieces[0]) > 0 and pieces[0] == pieces[1]


@OF_BOTH
@on_megatron(2, experts="own")
def test_sharded_checkpoints(rank: int, num_ranks: int, sizes: dict[str, int], kind: str, tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    for number, ways in enumerate(WAYS):
        source, target = (expert_layer(sizes, kind, grouped, **expert_biases()).experts for grouped in ways)
        change(source, seed=100 * rank)
        path = tmp_path / str(number)
        save(source.sharded_state_dict("e.", (), metadata()), path)
        loaded = dist_checkpointing.load(target.sharded_state_dict("e.", (), metadata()), str(path), strict="raise_all")
        result = target.load_state_dict({name.removeprefix("e."): value for name, value in loaded.items()})
        assert not result.missing_keys and not result.unexpected_keys
        assert_equal_states(target.state_dict(), source.state_dict())


def test_a_flattened_range_is_refused():
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from deepep_moe.integrations.megatron.stacked_checkpoint import stack_sharded

    stacked = torch.zeros(2, 3)
    entries = [ShardedTensor.from_rank_offsets("w", one, (0, index, 2), prepend_axis_num=1) for index, one in enumerate(stacked)]
    factory = stack_sharded(entries, stacked, "w")
    with pytest.raises(ValueError, match="the optimizer saves a flattened range .* 'dp_reshardable' or 'fully_reshardable'"):
        factory.build_fn("optimizer.w", stacked, 0, slice(0, 1))
