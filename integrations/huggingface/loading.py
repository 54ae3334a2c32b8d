"""Load a checkpoint of transformers so that each rank reads its own experts only."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from deepep_moe.group.rendezvous import agree, join
from deepep_moe.integrations.huggingface.blocks import spread_experts
from deepep_moe.integrations.huggingface.proof import WEIGHTS
from deepep_moe.integrations.huggingface.saving import holding, together


def load_spread(
    auto_class: Any,
    path: Any,
    *args: Any,
    num_topk: int | None = None,
    group: "dist.ProcessGroup | None" = None,
    num_max_tokens_per_rank: int = 4096,
    backend: str = "auto",
    **kwargs: Any,
) -> Any:
    """Return `auto_class.from_pretrained(path, *args, **kwargs)` with spread experts. Each rank reads and holds only its own experts.

    Collective over the group. The model may be larger than the memory of a rank; its parts other than experts may not. The checkpoint has
    safetensors files, with any names of experts that `from_pretrained` reads.

    Args:
        auto_class: such as `transformers.AutoModelForCausalLM`, or the class of a model.
        path, args, kwargs: those of `from_pretrained`. `device_map` is one device, or a dict with one; without it
            the weights lie on the CPU, or on PyTorch's default device.
        num_topk, group, num_max_tokens_per_rank, backend: as for `spread_experts`.

    Raises:
        ValueError: the ranks do not divide a number of experts, or `spread_experts` refuses the model.
        EPPeerError: a peer has raised an error.
        Exception: what `from_pretrained` raises.
    """
    members, num_ranks, _ = join(group, "spread model")
    agree("load_spread, which every rank calls", None, members, num_ranks)  # before anybody waits for a disk
    with together("load_spread", members, num_ranks):
        with contextlib.nullcontext() if members is None else _shares(members, num_ranks, _device_type(kwargs.get("device_map"))):
            loaded = auto_class.from_pretrained(path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
    spread_experts(model, num_topk=num_topk, group=group, num_max_tokens_per_rank=num_max_tokens_per_rank, backend=backend)
    return loaded


@contextlib.contextmanager
def _shares(group: dist.ProcessGroup, num_ranks: int, device_type: str) -> Iterator[None]:
    """Let experts that are made on the device meta be DTensors, of which transformers loads this rank's part."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(group, device_type)

    def share(module: nn.Module, name: str, weight: Tensor | None) -> nn.Parameter | None:
        if weight is None or name not in WEIGHTS or weight.dim() != 3 or not weight.is_meta or isinstance(weight, DTensor):
            return None
        if len(weight) % num_ranks:
            raise ValueError(f"{type(module).__name__} has {len(weight)} experts, which {num_ranks} ranks do not divide; choose others")
        part = weight.new_empty((len(weight) // num_ranks, *weight.shape[1:]))
        return nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False), requires_grad=weight.requires_grad)

    from transformers import core_model_loading

    operation: Any = core_model_loading.Transpose
    transpose = operation.convert

    def by_share(self: Any, *args: Any, **kwargs: Any) -> Any:
        model, name = kwargs["model"], kwargs["full_layer_name"]
        if self.check_dims and isinstance(weight := model.get_parameter(name), DTensor):  # to be compared with the part that was read
            kwargs["model"] = holding(model, {name: weight.to_local()})
        return transpose(self, *args, **kwargs)

    hook = register_module_parameter_registration_hook(share)  # type: ignore[arg-type]
    operation.convert = by_share
    try:
        yield
    finally:
        hook.remove()
        operation.convert = transpose


def _device_type(device_map: Any) -> str:
    device = next(iter(device_map.values())) if isinstance(device_map, dict) else device_map
    return torch.device(torch.get_default_device() if device is None else device).type
