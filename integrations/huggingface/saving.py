"""Save a spread model as transformers saves the plain one: one tensor at a time goes to rank 0, which writes one file at a time."""

import contextlib
import copy
import inspect
import json
import os
import sys
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepep_moe.group.rendezvous import agree, check_same, hanging_up, moves_cpu_tensors
from deepep_moe.integrations.common.patches import Patches
from deepep_moe.integrations.huggingface.proof import WEIGHTS
from deepep_moe.nn.rank_parameters import RankExperts

# Functions that take the state dict of one rank for that of the model.
_SAVERS = {
    ("accelerate.accelerator", "get_state_dict"),
    ("safetensors.torch", "save_model"),
    ("torch.distributed.checkpoint.state_dict", "get_model_state_dict"),
    ("torch.distributed.checkpoint.state_dict", "get_state_dict"),
}
_ADAPTER_SAVERS = {("peft.utils.save_and_load", "get_peft_model_state_dict")}
_DISK_TIMEOUT_S = 86_400.0  # peers wait for a rank that writes or reads a checkpoint


@contextlib.contextmanager
def together(what: str, group: "dist.ProcessGroup | None", num_ranks: int) -> Iterator[None]:
    """Raise on all ranks if the body, which may read or write files, has failed on one. Collective."""
    error: Exception | None = None
    try:
        yield
    except Exception as failed:
        error = failed
    agree(what, error, group, num_ranks, timeout_s=_DISK_TIMEOUT_S)


class _WholeState:
    """The state dict of a spread model, as transformers saves that of the plain model. All ranks make it alike.

    Attributes:
        tensors: the names, each with its tensor. Experts have tensors on the device meta, with the storages of the plain model's.
    """

    def __init__(self, model: nn.Module, in_original_format: bool = True):
        layers = _layers(model)
        if not _layers(model, are_spread=True):
            raise ValueError(f"{type(model).__name__} has no spread experts; call spread_experts first, or take its state_dict()")
        buffer = layers[0].buffer
        if len({layer.buffer._group for layer in layers}) > 1:
            raise ValueError("the experts of the model are spread over several groups; take the state_dict() of each rank")
        self.group, self.num_ranks, self.rank = buffer._group, buffer.num_ranks, buffer.rank
        self._convert, self._shares, tensors = _conversion(model, in_original_format), dict[str, Tensor](), dict[str, Tensor]()
        leaves = {
            f"{name}.experts.{ours}".removeprefix("."): f"{name}.{theirs}".removeprefix(".")
            for name, module in model.named_modules(remove_duplicate=False)
            if hasattr(module, "is_spread")
            for ours, theirs in zip(("up", "down"), WEIGHTS, strict=True)
        }
        of_experts = {id(parameter) for layer in layers for parameter in layer.expert_parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in of_experts and name not in leaves:
                raise ValueError(
                    f"{name} differs from rank to rank, and is no weight that spread_experts makes; take the state_dict() of each"
                )
            if hasattr(parameter, "full_tensor"):
                raise ValueError(f"{name} is a DTensor, as FSDP makes them; save before fully_shard, or take the state_dict() of each rank")
        state = model.state_dict()
        plain = _without_tied({name: tensor for name, tensor in state.items() if name not in leaves}, model)
        for name, tensor in state.items():
            if name in leaves:
                self._shares[leaves[name]] = tensor
                tensors[leaves[name]] = tensor.new_empty((len(tensor) * self.num_ranks, *tensor.shape[1:]), device="meta")
            elif name in plain:
                tensors[name] = plain[name]
        self.tensors: dict[str, Tensor] = self._convert(tensors)
        self._places: dict[str, tuple[str, list[tuple[int, int]]]] = {}
        for leaf in self._shares:
            self._places.update(self._place(leaf, tensors[leaf]))
        self._converted: tuple[str, list[Tensor]] = "", []

    def meet(self) -> None:
        """Raise EPMismatchError unless all ranks have the same names, shapes and dtypes. Collective."""
        forms = repr([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()])
        checksums = agree("save_pretrained", None, self.group, self.num_ranks, zlib.crc32(forms.encode()))
        check_same([{"the checksum of tensors and dtypes": checksum} for checksum in checksums], "give all ranks one model")

    def _place(self, leaf: str, whole: Tensor) -> Iterator[tuple[str, tuple[str, list[tuple[int, int]]]]]:
        """Yield each name of a weight's tensors, with the ranks that have them and their places in what these ranks' shares convert to.

        A weight stays one tensor, or several, of all experts; or becomes tensors of single experts, in the order of the experts.
        """
        share = self._shares[leaf]
        names, parts = list(self._convert({leaf: whole})), list(self._convert({leaf: share.to("meta")}).items())
        is_whole = len(names) == len(parts)
        for index, name in enumerate(names):
            matrix, expert = divmod(index, len(whole))
            owner, row = divmod(expert, len(share))
            places = [(rank, index) for rank in range(self.num_ranks)] if is_whole else [(owner, matrix * len(share) + row)]
            part_name, part = parts[places[0][1]] if places[0][1] < len(parts) else ("", whole)
            shape = [len(part) * self.num_ranks, *part.shape[1:]] if is_whole else list(part.shape)
            is_first = is_whole or owner == 0
            if (is_first and part_name != name) or name not in self.tensors or shape != list(self.tensors[name].shape):
                raise ValueError(f"transformers saves {leaf} as {name}, which is not made of the experts in their order")
            yield name, (leaf, places)

    def fetch(self, name: str) -> Tensor | None:
        """Return the whole tensor on rank 0, None on the others. Collective over the ranks of the experts."""
        tensor = self.tensors[name]
        if name not in self._places:
            return tensor if self.rank == 0 else None
        leaf, places = self._places[name]
        with torch.no_grad(), hanging_up(self.group):
            if self._converted[0] != leaf:
                self._converted = "", []
                self._converted = leaf, list(self._convert({leaf: self._shares[leaf]}).values())
            device = "cpu" if self.group is None or moves_cpu_tensors(self.group) else self._shares[leaf].device
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if self.rank == 0 else None
            for number, (owner, place) in enumerate(places):
                if whole is not None:
                    target = whole.chunk(len(places))[number]
                    if owner == 0:
                        target.copy_(self._converted[1][place])
                    else:
                        dist.recv(target, group=self.group, group_src=owner)
                elif self.rank == owner:
                    dist.send(self._converted[1][place].to(device).contiguous(), group=self.group, group_dst=0)
        return None if whole is None else whole.cpu()


def gathered_state_dict(model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the names and whole tensors of a spread model, one by one, under the names that transformers gives to saved tensors.

    Collective over the ranks of the experts: each of them iterates to the end. Rank 0 gets the tensors, those of experts on the CPU; the
    others get None. An expert's weights travel alone, or with those of the other experts where transformers saves them as one tensor.

    `model` is the one that `spread_experts` got, without a wrapper. With a group of NCCL alone each step has to end in the group's timeout.

    Raises:
        ValueError: `model` has no spread experts or others beside them, is sharded by FSDP, or transformers saves the experts in an order
            that is not known here.
        EPMismatchError: the ranks have different models.
    """
    state = _WholeState(model)
    state.meet()
    for name in state.tensors:
        yield name, state.fetch(name)


def _save_pretrained(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Save the whole model, as `PreTrainedModel.save_pretrained` saves the plain one. Collective over the ranks of the experts.

    Global rank 0 writes the files, and gathers a file's tensors at a time; groups without it are taken for copies of its group. The files
    are complete when the ranks of its group return. With a group of NCCL alone a file has to be written in the group's timeout. A
    `state_dict` of whole weights is saved without the others' help. Arguments are those of the plain method, `stock`.

    Raises:
        ValueError: `state_dict` has experts of one rank, the model is quantized, or `push_to_hub` or `distributed_checkpoint` is set.
        EPPeerError: a peer has failed, as its disk is full, say.
        EPTimeoutError: a peer did not call it.
    """
    if not (layers := _layers(self, are_spread=True)):
        return stock(self, *args, **kwargs)
    call = inspect.signature(stock).bind(self, *args, **kwargs)
    call.apply_defaults()
    arguments = call.arguments
    of_experts = {id(parameter) for layer in layers for parameter in layer.expert_parameters()}
    names = tuple(name for name, parameter in self.named_parameters(remove_duplicate=False) if id(parameter) in of_experts)
    # A wrapper puts its name before those of the model.
    is_whole = arguments["state_dict"] is not None and not any(name.endswith(names) for name in arguments["state_dict"])
    if is_whole or getattr(self, "_hf_peft_config_loaded", False):
        return stock(self, *args, **kwargs)
    buffer = layers[0].buffer
    agree("save_pretrained, which every rank calls", None, buffer._group, buffer.num_ranks)  # before anybody waits for a disk
    with together("save_pretrained", buffer._group, buffer.num_ranks):
        if arguments["state_dict"] is not None:
            raise ValueError("state_dict has the experts of one rank; leave it out, and save_pretrained gathers those of all ranks")
        refused = [name for name in ("push_to_hub", "distributed_checkpoint") if arguments.get(name)]
        if refused or getattr(self, "hf_quantizer", None) is not None:
            raise ValueError(
                f"save_pretrained of a spread model does not take {refused[0] if refused else 'quantized weights'}; save plain weights "
                "to a directory, and go on from there"
            )
        is_written = buffer._group is None or dist.get_process_group_ranks(buffer._group)[0] == 0  # other groups have the same weights
        arguments.update(state_dict={}, is_main_process=is_written and buffer.rank == 0 and arguments["is_main_process"])
        stock(*call.args, **call.kwargs)  # everything but the weights
        state = _WholeState(self, arguments.get("save_original_format", True))
        split, filename = _split(state.tensors, arguments["variant"], arguments["max_shard_size"])
    if not is_written:
        return None
    state.meet()
    for file, members in split.filename_to_tensors.items():
        shard: dict[str, Tensor] = {}
        for name in members:
            tensor = state.fetch(name)
            if tensor is not None and arguments["is_main_process"]:
                shard[name] = tensor.contiguous()
        with together("save_pretrained", state.group, state.num_ranks):
            if shard:
                from safetensors.torch import save_file

                save_file(shard, os.path.join(arguments["save_directory"], file), metadata={"format": "pt"})
    with together("save_pretrained", state.group, state.num_ranks):
        if split.is_sharded and arguments["is_main_process"]:
            total = self.num_parameters() + (state.num_ranks - 1) * sum(share.numel() for share in state._shares.values())
            index = {"metadata": {"total_parameters": total, **split.metadata}, "weight_map": split.tensor_to_filename}
            with open(os.path.join(arguments["save_directory"], filename), "w", encoding="utf-8") as out:
                out.write(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return None


def _push_to_hub(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if _layers(self, are_spread=True) and not getattr(self, "_hf_peft_config_loaded", False):
        raise ValueError("every rank would upload a part of the model; let all save_pretrained to a directory, and one upload that")
    return stock(self, *args, **kwargs)


def _split(tensors: dict[str, Tensor], variant: str | None, max_shard_size: int | str) -> tuple[Any, str]:
    """Return the files of the tensors, and the name of their index. Tensors of one storage share a file, as with transformers."""
    from huggingface_hub import get_torch_storage_id, get_torch_storage_size, split_state_dict_into_shards_factory
    from transformers.modeling_utils import _add_variant
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

    def storage_of(tensor: Tensor) -> Any:
        return tensor.untyped_storage()._cdata if tensor.is_meta else get_torch_storage_id(tensor)

    split = split_state_dict_into_shards_factory(
        tensors, get_storage_size=get_torch_storage_size, get_storage_id=storage_of, max_shard_size=max_shard_size,
        filename_pattern=_add_variant(SAFE_WEIGHTS_NAME, variant).replace(".safetensors", "{suffix}.safetensors"),
    )  # fmt: skip
    return split, _add_variant(SAFE_WEIGHTS_INDEX_NAME, variant)


def _is_of_transformers(model: nn.Module) -> bool:
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def _conversion(model: Any, in_original_format: bool) -> Any:
    """Return the function that gives weights the names and shapes of a checkpoint."""
    if not (in_original_format and _is_of_transformers(model)):
        return dict
    from transformers.core_model_loading import revert_weight_conversion

    return lambda tensors: revert_weight_conversion(holding(model, tensors), tensors)


def holding(model: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the model as transformers looks at it to convert `tensors`: these are its parameters."""
    shown = copy.copy(model)
    shown.get_parameter = tensors.__getitem__
    return shown


def _without_tied(state: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint has: those of tied weights once, and none that the model's class leaves out."""
    if not _is_of_transformers(model):
        return state
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    return remove_tied_weights_from_state_dict({name: tensor for name, tensor in state.items() if name not in ignored}, model)


def refuse_state_dict(layer: RankExperts, *_: Any) -> None:
    """Raise ValueError where a library asks for the state dict of the model. A caller's own `state_dict()` is that of its rank."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_globals.get("__name__"), frame.f_code.co_name
        if caller in _SAVERS or (caller in _ADAPTER_SAVERS and _is_trained(layer)):
            raise ValueError(
                f"{caller[1]} would take the experts of one rank for those of the model; call model.save_pretrained(directory) on every "
                "rank, or read the tensors from gathered_state_dict(model)"
            )
        frame = frame.f_back  # type: ignore[assignment]
    _saved.add(layer)
    from torch.distributed.checkpoint import state_dict_saver

    _around(state_dict_saver, "_stateful_to_state_dict", _refuse_experts)  # both kinds of saving call it first


_saved: "weakref.WeakSet[RankExperts]" = weakref.WeakSet()
"""Layers whose `state_dict()` somebody has."""


def _refuse_experts(flatten: Any, state_dict: Any) -> Any:
    """Refuse one rank's experts, which `save` and `async_save` of torch.distributed.checkpoint would keep for those of all."""
    from torch.utils._pytree import tree_leaves

    state, options = flatten(state_dict), sys._getframe(2).f_locals
    layers = [layer for layer in _saved if layer.buffer.num_ranks > 1]
    of_experts = {parameter.untyped_storage().data_ptr() for layer in layers for parameter in layer.expert_parameters()} - {0}
    tensors = (leaf for leaf in tree_leaves(state) if type(leaf) in (Tensor, nn.Parameter))
    is_shared = not options.get("no_dist") and dist.is_initialized() and dist.get_world_size(options.get("process_group")) > 1
    if is_shared and any(tensor.untyped_storage().data_ptr() in of_experts for tensor in tensors):
        raise ValueError(
            "torch.distributed.checkpoint would keep the experts of one rank for those of all; call model.save_pretrained(directory) "
            "on every rank, read the tensors from gathered_state_dict(model), or save with no_dist=True to a directory for each rank"
        )
    return state


def install() -> None:
    """Let `save_pretrained` of models with spread experts, wherever in them these are, and `Trainer` save whole experts, or refuse it."""
    for module, owner, name, call in (
        ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained", _save_pretrained),
        ("transformers.modeling_utils", "PreTrainedModel", "push_to_hub", _push_to_hub),
        ("transformers.trainer", "Trainer", "save_model", _save_on_all_ranks),
        ("transformers.trainer", "Trainer", "train", _train_whole),
    ):
        _around(getattr(sys.modules.get(module), owner, None), name, call)


def _around(owner: Any, name: str, call: Any) -> None:
    """Let `owner.name` do `call(stock, ...)` from now on, with what it was as `stock`."""
    stock = getattr(owner, name, None)
    if stock is not None and not hasattr(stock, "knows_spread_models"):
        Patches().around(owner, name)(call)  # for good
        getattr(owner, name).knows_spread_models = True


def _save_on_all_ranks(save_model: Any, self: Any, output_dir: str | None = None, _internal_call: bool = False) -> Any:
    layers = _layers(self.model)
    if not layers or hasattr(self.model, "get_base_model"):
        if any(map(_is_trained, layers)):
            raise ValueError("Trainer.save_model of a PEFT model would lose the trained experts of the other ranks; freeze the experts")
        return save_model(self, output_dir, _internal_call)
    if not (_is_of_transformers(self.model) and _layers(self.model, are_spread=True)):
        raise ValueError("Trainer.save_model would save the experts of one rank; write the tensors of gathered_state_dict(model)")
    if self.args.should_save:
        self._save(output_dir)
    else:
        self.model.save_pretrained(output_dir or self.args.output_dir)
    if self.args.push_to_hub and not _internal_call:
        self.push_to_hub(commit_message="Model save")


def _train_whole(train: Any, self: Any, resume_from_checkpoint: object = None, *args: object, **kwargs: object) -> Any:
    layers, arguments = _layers(self.model), self.args
    saves = getattr(arguments.save_strategy, "value", arguments.save_strategy) != "no"
    if saves and not arguments.save_only_model and any(map(_is_trained, layers)):
        raise ValueError(
            "Trainer would save the optimizer's state of rank 0 for the experts of all ranks; pass save_only_model=True, and "
            "load_spread the model to go on with a new optimizer"
        )
    if layers and not hasattr(self.model, "get_base_model") and (resume_from_checkpoint or arguments.load_best_model_at_end):
        raise ValueError(
            "Trainer cannot load the experts of a spread model; load_spread the checkpoint, and train without resume_from_checkpoint "
            "and load_best_model_at_end"
        )
    return train(self, resume_from_checkpoint, *args, **kwargs)


def _layers(model: nn.Module, are_spread: bool = False) -> list[RankExperts]:
    return [m for m in model.modules() if isinstance(m, RankExperts) and (hasattr(m, "is_spread") or not are_spread)]


def _is_trained(layer: RankExperts) -> bool:
    return any(parameter.requires_grad for parameter in layer.expert_parameters())
