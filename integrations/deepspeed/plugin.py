"""Swap the MoE layers of a model, and swap them back."""

import logging
import re
import weakref
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from deepep_moe.errors import EPError
from deepep_moe.integrations.deepspeed.buffers import Plan, shared
from deepep_moe.integrations.deepspeed.options import Options, options_of

_OLDEST, _NEWEST = (0, 14, 5), (0, 19, 8)
_log = logging.getLogger(__name__)
_swapped: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def replace_moe_layers(
    model: nn.Module,
    *,
    exact: bool = True,
    backend: str = "auto",
    num_max_tokens_per_rank: int | None = None,
    num_sms: int | None = None,
) -> int:
    """Let the `deepspeed.moe.layer.MoE` layers of `model` move packed tokens through deepep_moe. Returns how many.

    Before or after `deepspeed.initialize`, on every rank. Only the forward of the layers changes: parameters, state dict, hooks, gates
    and their random numbers, optimizer groups and checkpoints stay. Again with other options: those hold from the next forward on.
    Layers that share a group and a width of rows share one buffer, constructed at the first forward.

    Args:
        model: the module, or DeepSpeed's engine.
        exact: True: results repeat DeepSpeed's bits (fp32, top-1 and top-2, DeepSpeed 0.19.4 and newer; else within rounding).
            False: a token crosses a link once per rank and is weighed there; within rounding, with less to move.
        backend, num_sms: as for `deepep_moe.Buffer`.
        num_max_tokens_per_rank: on GPUs, the most tokens one rank ever has in a forward; None: the largest of the first forward over
            all ranks, rounded up to a multiple of 128. On CPUs there is no bound.

    Raises:
        ValueError, TypeError: wrong options. EPError: DeepSpeed is older than 0.14.5. ImportError: there is none.
    """
    return _replace(model, Options(exact, backend, num_max_tokens_per_rank, num_sms))


def _replace(model: nn.Module, options: Options) -> int:
    _check_version()
    from deepspeed.moe.sharded_moe import MOELayer

    from deepep_moe.integrations.deepspeed.layer import PackedMOELayer

    found = [module for module in model.modules() if isinstance(module, MOELayer)]
    layers: list[Any] = [module for module in found if type(module) in (MOELayer, PackedMOELayer)]
    plans = _plans(layers, options)
    for layer, plan in zip(layers, plans, strict=True):
        layer.__class__, layer.deepep_moe_plan = PackedMOELayer, plan
        _swapped.add(layer)
    others = sorted({type(module).__name__ for module in found} - {"MOELayer", "PackedMOELayer"})
    if others:
        _say(logging.WARNING, f"MoE layers of {others} keep their own forward: deepep_moe swaps deepspeed's MOELayer only")
    mode = "exact" if options.exact else "fast"
    _say(logging.INFO if layers else logging.WARNING, f"{len(layers)} MoE layers dispatch through deepep_moe ({mode} mode)")
    return len(layers)


def _plans(layers: Iterable[Any], options: Options) -> list[Plan]:
    """The plan of each layer: those of one group and width get the same, wide enough for all of them."""
    widest: dict[Any, tuple[int, int]] = {}
    keys = [(layer.ep_group_name, layer.gate.wg.in_features) for layer in layers]
    for key, layer in zip(keys, layers, strict=True):
        num_local_experts, num_topk = widest.get(key, (0, 0))
        widest[key] = max(num_local_experts, layer.num_local_experts), max(num_topk, layer.gate.k)
    return [Plan(options, *widest[key]) for key in keys]


def restore_moe_layers(model: nn.Module) -> int:
    """Give the layers that `replace_moe_layers` swapped their own forward back. Returns how many; without such layers nothing happens.

    With the last of them the shared buffers go, so call it on every rank, when no backward is under way, and before the process groups
    are destroyed.
    """
    from deepspeed.moe.sharded_moe import MOELayer

    from deepep_moe.integrations.deepspeed.layer import PackedMOELayer

    layers: list[Any] = [module for module in model.modules() if type(module) is PackedMOELayer]
    for layer in layers:
        layer.__class__ = MOELayer
        layer.__dict__.pop("deepep_moe_plan", None)
        _swapped.discard(layer)
    if not _swapped:
        shared.destroy()
    return len(layers)


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize`, same arguments and results, that honours the section "deepep_moe" of ds_config.

    `{"enabled": true}` and any of the options of `replace_moe_layers`: "exact", "backend", "num_max_tokens_per_rank", "num_sms". Without
    the section, or with `"enabled": false`, nothing else happens than in `deepspeed.initialize`.

    Raises as `deepspeed.initialize` and `replace_moe_layers`; ValueError for unknown keys of the section.
    """
    import deepspeed

    initialized = deepspeed.initialize(*args, **kwargs)
    engine = initialized[0]
    options = options_of(engine._config._param_dict)
    if options is not None:
        _replace(engine.module, options)
    return initialized


def _check_version() -> None:
    """Raises EPError for a DeepSpeed older than supported; warns about one newer than tested."""
    import deepspeed

    number = tuple(int(part) for part in re.findall(r"\d+", deepspeed.__version__)[:3])
    if number < _OLDEST:
        raise EPError(f"deepep_moe needs deepspeed 0.14.5 or newer, found {deepspeed.__version__}; pip install 'deepspeed>=0.14.5'")
    if number > _NEWEST:
        _say(logging.WARNING, f"deepspeed {deepspeed.__version__} is newer than the newest deepep_moe was tested with (0.19.8)")


def _say(level: int, message: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log.log(level, message)
