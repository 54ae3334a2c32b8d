"""Flat states of Megatron-Core's distributed optimizer, which files have in the order of the parameters of Megatron-Core's experts.

Megatron-Core's DDP puts parameters one behind another into buckets. Two formats of the distributed optimizer store the buckets as they are:
`dp_reshardable`, and the gathered one of `dp_zero_gather_scatter` and `--ckpt-format torch`. A stacked parameter of grouped experts takes
the place of many, so buckets begin elsewhere and may hold another order. Files nevertheless have the buckets of the class whose place
grouped experts take, SequentialMLP or TEGroupedMLP: what is saved is moved there, and what is loaded is moved back. All other formats
store parameters by name.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from deepep_moe.errors import EPError
from deepep_moe.integrations.common.patches import Patches, Stock, meanwhile
from deepep_moe.integrations.megatron.stacked_checkpoint import by_expert, is_stacked

_START = 64  # elements: parameters begin at multiples of it


# ---- buckets ----


class _Buckets(NamedTuple):
    """The places of parameters in the buckets of one buffer."""

    places: list[tuple[int, int]]  # of each parameter: its bucket and where it begins in it
    numels: list[int]  # of each bucket, without the padding at its end

    def flat(self, bucket: int, start: int) -> int:
        """Return the index in all buckets, one behind another without padding."""
        return sum(self.numels[:bucket]) + start


def _fill_buckets(sizes: list[tuple[int, bool]], bucket_size: int | None) -> _Buckets:
    """Put parameters into buckets as Megatron-Core does.

    sizes: the elements of each parameter, and whether it has a bucket for itself, in the order of the buffer, which is that of backwards.
    """
    places: list[tuple[int, int]] = []
    numels: list[int] = []
    end, is_empty = 0, True
    for numel, is_alone in sizes:
        start = _padded(end, _START)
        if is_alone and not is_empty:
            numels.append(start)
            start = 0
        places.append((len(numels), start))
        end, is_empty = start + numel, False
        if is_alone or (bucket_size is not None and end >= bucket_size):
            numels.append(end)
            end, is_empty = 0, True
    return _Buckets(places, numels if is_empty else [*numels, end])


def _padded(index: int, divisor: int) -> int:
    return math.ceil(index / divisor) * divisor


class _Part(NamedTuple):
    """The parameter of one expert, or one that is not stacked: its elements, and its place here and in files."""

    numel: int
    bucket: int
    start: int
    bucket_in_file: int
    start_in_file: int


class _Order:
    """The order of a buffer here and in files.

    Raises EPError if this Megatron-Core fills its buckets in another way than the one that is known.
    """

    def __init__(self, buffer: Any, bucket_size: int | None):
        parts = [(parameter, expert) for parameter, expert in by_expert(buffer.params)][::-1]
        self.here = _fill_buckets([(parameter.numel(), _is_alone(parameter)) for parameter in buffer.params[::-1]], bucket_size)
        numels = [parameter.numel() if expert is None else parameter[0].numel() for parameter, expert in parts]
        self.in_file = _fill_buckets(
            [(numel, _is_alone(parameter)) for numel, (parameter, _) in zip(numels, parts, strict=True)], bucket_size
        )
        self._check(buffer)
        places = dict(zip(buffer.params[::-1], self.here.places, strict=True))
        self.parts = sorted(
            (
                _Part(numel, places[parameter][0], places[parameter][1] + (expert or 0) * numel, *place)
                for numel, (parameter, expert), place in zip(numels, parts, self.in_file.places, strict=True)
            ),
            key=lambda part: (part.bucket, part.start),
        )

    def _check(self, buffer: Any) -> None:
        begins = [bucket.offset for bucket in buffer.buckets]
        places = [(buffer.param_index_map[parameter][2], buffer.param_index_map[parameter][0]) for parameter in buffer.params[::-1]]
        places = [(bucket, start - begins[bucket]) for bucket, start in places]
        if places != self.here.places or [bucket.numel_unpadded for bucket in buffer.buckets] != self.here.numels:
            raise EPError(
                f"this megatron-core fills the {len(begins)} buckets of a buffer with grouped experts in a way that deepep_moe does not "
                "know; set distrib_optim_sharding_type to 'fully_reshardable', or keep Megatron-Core's experts (experts='framework')"
            )

    def spans(self, bucket: int, start: int, numel: int) -> Iterator[tuple[_Part, int, int]]:
        """Find the parts that lie in a range of a bucket, and which of their elements do."""
        for part in self.parts:
            begin, end = max(start, part.start), min(start + numel, part.start + part.numel)
            if part.bucket == bucket and begin < end:
                yield part, begin - part.start, end - part.start

    def gaps_in_file(self) -> Iterator[tuple[int, int, int]]:
        """Find what belongs to no parameter: bucket, start and end."""
        ends = dict.fromkeys(range(len(self.in_file.numels)), 0)
        for part in sorted(self.parts, key=lambda part: (part.bucket_in_file, part.start_in_file)):
            if ends[part.bucket_in_file] < part.start_in_file:
                yield part.bucket_in_file, ends[part.bucket_in_file], part.start_in_file
            ends[part.bucket_in_file] = part.start_in_file + part.numel
        yield from ((bucket, ends[bucket], numel) for bucket, numel in enumerate(self.in_file.numels) if ends[bucket] < numel)

    def moved(self, values: torch.Tensor, *, to_file: bool) -> torch.Tensor:
        """Return all buckets, one behind another without padding, in the other order."""
        target = self.in_file if to_file else self.here
        result = values.new_zeros(sum(target.numels))
        for part in self.parts:
            here = self.here.flat(part.bucket, part.start)
            in_file = self.in_file.flat(part.bucket_in_file, part.start_in_file)
            source, start = (here, in_file) if to_file else (in_file, here)
            result[start : start + part.numel] = values[source : source + part.numel]
        return result


def _is_alone(parameter: torch.Tensor) -> bool:
    return bool(getattr(parameter, "shared_embedding", False))


# ---- the optimizer ----


def serve_optimizers(patches: Patches) -> None:
    """Let distributed optimizers with stacked parameters save and load files in Megatron-Core's order, also after `disable()`."""

    @patches.around(DistributedOptimizer, "__init__")
    def construct(stock: Stock, optimizer: DistributedOptimizer, /, *args: object, **kwargs: object) -> None:
        stock(optimizer, *args, **kwargs)
        if any(is_stacked(parameter) for buffer in getattr(optimizer, "buffers", ()) for parameter in buffer.params):
            if type(optimizer) is not DistributedOptimizer:
                raise EPError(
                    f"{type(optimizer).__name__} is not DistributedOptimizer itself; use that one, or keep Megatron-Core's experts "
                    "(experts='framework')"
                )
            optimizer.__class__ = StackedDistributedOptimizer


class StackedDistributedOptimizer(DistributedOptimizer):
    """A distributed optimizer with stacked parameters, whose files have the order of Megatron-Core's experts."""

    _is_by_name = False  # while a format that stores parameters by name reads the flat buckets

    def _orders(self) -> dict[int, _Order]:
        """Return the order of each buffer with stacked parameters."""
        return {
            index: _Order(buffer, self.model_chunks[self.gbuf_idx_to_model_idx_map[index]].bucket_size)
            for index, buffer in enumerate(self.buffers)
            if any(is_stacked(parameter) for parameter in buffer.params)
        }

    # dp_reshardable

    def sharded_param_state_dp_reshardable(self, *args: object, **kwargs: object) -> Any:
        state = super().sharded_param_state_dp_reshardable(*args, **kwargs)
        for index, order in self._orders().items():
            for buckets in state[index].values():
                _split_entries(buckets, order, has_gaps=self.data_parallel_group.rank() == 0)
        for name, numels in self._numels_in_file().items():
            state[name].data = numels
        return state

    def load_parameter_state_from_dp_reshardable(self, state_dict: dict[str, Any]) -> None:
        ours = {"per_bucket_numel": self.per_bucket_numel, "per_bucket_numel_unpadded": self.per_bucket_numel_unpadded}
        for name, numels in self._numels_in_file().items():
            if name == "per_bucket_numel_unpadded" and state_dict.get(name, numels) != numels:
                raise ValueError(
                    f"the optimizer's buckets in the checkpoint have {state_dict[name]} elements, and this run's, in Megatron-Core's "
                    f"order, {numels}; resume with the same parallel sizes and bucket size (--ddp-bucket-size, --overlap-grad-reduce), "
                    "or save with distrib_optim_sharding_type 'fully_reshardable'"
                )
        super().load_parameter_state_from_dp_reshardable({**state_dict, **ours})

    def _numels_in_file(self) -> dict[str, list[dict[torch.dtype, list[int]]]]:
        """Return `per_bucket_numel` and `per_bucket_numel_unpadded` of files."""
        padded, unpadded = list(self.per_bucket_numel), list(self.per_bucket_numel_unpadded)
        for index, order in self._orders().items():
            buffer = self.buffers[index]
            high = 2**16 if getattr(buffer.ddp_config, "pad_buckets_for_high_nccl_busbw", False) else 1
            divisor = math.lcm(buffer.data_parallel_world_size, 128, high)
            unpadded[index] = {dtype: list(order.in_file.numels) for dtype in unpadded[index]}
            padded[index] = {dtype: [_padded(numel, divisor) for numel in order.in_file.numels] for dtype in padded[index]}
        return {"per_bucket_numel": padded, "per_bucket_numel_unpadded": unpadded}

    # the gathered format

    def get_parameter_state_dp_zero(self, *args: object, **kwargs: object) -> Any:
        state = super().get_parameter_state_dp_zero(*args, **kwargs)
        return state if state is None or self._is_by_name else self._moved(state, to_file=True)

    def load_parameter_state_from_dp_zero(self, state_dict: dict[int, Any] | None, *, update_legacy_format: bool = False) -> None:
        if update_legacy_format:
            raise ValueError(
                "update_legacy_format is True, but grouped experts do not read the optimizer's format of before February 2024; load the "
                "checkpoint with Megatron-Core's experts (experts='framework') and save it again"
            )
        if state_dict is not None:
            state_dict = self._moved(state_dict, to_file=False)
        super().load_parameter_state_from_dp_zero(state_dict)

    def _moved(self, state: dict[int, Any], *, to_file: bool) -> dict[int, Any]:
        state = dict(state)
        for index, order in self._orders().items():
            source, target = (order.here, order.in_file) if to_file else (order.in_file, order.here)
            for dtype, values in state.get(index, {}).items():
                if values["numel_unpadded"] == sum(source.numels):  # otherwise Megatron-Core refuses
                    moved = {key: order.moved(v, to_file=to_file) for key, v in values.items() if torch.is_tensor(v)}
                    state[index] = state[index] | {dtype: values | moved | {"numel_unpadded": sum(target.numels)}}
        return state

    # the format of flat buckets before Megatron-Core 0.14

    def sharded_param_state_fs_bucket_space(self, *args: object, **kwargs: object) -> Any:
        raise EPError(
            "distrib_optim_sharding_type is 'fully_sharded_bucket_space', which grouped experts do not store in Megatron-Core's order; set "
            "it to 'dp_zero_gather_scatter', or keep Megatron-Core's experts (experts='framework')"
        )

    # a format that stores parameters by name

    def sharded_param_state_fully_reshardable(self, *args: object, **kwargs: object) -> Any:
        with meanwhile(self, _is_by_name=True):
            return super().sharded_param_state_fully_reshardable(*args, **kwargs)


# ---- entries of dp_reshardable ----


def _split_entries(buckets: list[list[dict[str, Any]]], order: _Order, *, has_gaps: bool) -> None:
    """Replace the entries of this rank's parameters, of each bucket, by ones that save and load their parts where files have them."""
    gaps: list[dict[str, Any]] = []
    for index, bucket in enumerate(buckets):
        entries = [entry for entry in bucket if not entry["padding"].unwrap()]
        if has_gaps and not gaps:
            gaps = [_gap(entries[0], *gap, order) for gap in order.gaps_in_file()]
        bucket[:] = [{key: _split(value, index, order) for key, value in entry.items()} for entry in entries]
    buckets[0] += gaps


def _gap(entry: dict[str, object], bucket: int, start: int, end: int, order: _Order) -> dict[str, Any]:
    tensors = {key: value for key, value in entry.items() if isinstance(value, ShardedTensor)}
    empty = {key: _piece(value, value.key, value.data.new_zeros(end - start), bucket, start, order) for key, value in tensors.items()}
    return {**empty, "padding": LocalNonpersistentObject(True)}


def _split(tensor: object, bucket: int, order: _Order) -> Any:
    if not isinstance(tensor, ShardedTensor):
        return tensor
    if tensor.flattened_range is not None:
        raise EPError(
            f"this megatron-core stores {tensor.key} in a way that deepep_moe does not know; set distrib_optim_sharding_type to "
            "'fully_reshardable', or keep Megatron-Core's experts (experts='framework')"
        )
    spans = list(order.spans(bucket, tensor.global_offset[0], tensor.local_shape[0]))

    def build(key: str, data: torch.Tensor, replica_id: object, flattened_range: slice | None) -> list[ShardedTensor]:
        pieces, end = [], 0
        for part, first, last in spans:
            begin, end = end, end + last - first
            pieces.append(_piece(tensor, key, data[begin:end], part.bucket_in_file, part.start_in_file + first, order))
        return pieces

    return ShardedTensorFactory(tensor.key, tensor.data, build, torch.cat, tensor.replica_id)


def _piece(tensor: ShardedTensor, key: str, data: torch.Tensor, bucket: int, start: int, order: _Order) -> ShardedTensor:
    name, _, rest = key.rpartition(".bucket_idx_")
    key = f"{name}.bucket_idx_{bucket}.{rest.partition('.')[2]}"
    return replace(
        tensor, key=key, data=data, local_shape=tuple(data.shape), global_shape=(order.in_file.numels[bucket],), global_offset=(start,)
    )
