"""State dicts and sharded entries of experts, to compare two classes of them. Runs in workers."""

from multiprocessing import dummy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


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


def sharded_tensors(entries: Any) -> list[tuple]:
    """Return the identity of each saved piece, and its values."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    apply_factories(entries)
    places = [(v.key, *_place(v)) if isinstance(v, ShardedTensor) else (v.unique_key,) for v in nested_values(entries)]
    return sorted(places, key=repr)


def _place(value: Any) -> tuple:
    places = value.local_shape, value.global_shape, value.global_offset, value.axis_fragmentations, value.replica_id
    return *places, value.prepend_axis_num, value.dtype, value.data.sum().item()


def metadata(**switches: Any) -> dict[str, Any]:
    from megatron.core import parallel_state

    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True), **switches}


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


def save(entries: dict[str, Any], folder: Path) -> None:
    """Save sharded entries as Megatron-LM does with `--ckpt-format torch_dist`, but with threads, because to start its processes takes
    longer than the steps of a test."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    with mock.patch.object(filesystem_async, "mp", SimpleNamespace(get_context=lambda _: dummy)):
        dist_checkpointing.save(entries, str(folder))
