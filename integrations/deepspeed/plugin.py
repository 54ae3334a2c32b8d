"""Swap the MoE layers of a model for ours, and swap them back."""

import functools
import logging
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from deepep_moe._C import MAX_TOPK
from deepep_moe.exchange.buffer import new_layer
from deepep_moe.integrations.common.warn_once import check_version
from deepep_moe.integrations.deepspeed.buffers import Plan, unswap
from deepep_moe.integrations.deepspeed.expert_weights import Reader
from deepep_moe.integrations.deepspeed.options import Layer, Options
from deepep_moe.nn.balance import Balance
from deepep_moe.ops.fp8_kept import check_is_first_microbatch

_OLDEST, _NEWEST = (0, 14, 5), (0, 19, 8)
_log = logging.getLogger(__name__)


def replace_moe_layers(
    model: nn.Module,
    *,
    exact: bool = True,
    backend: str = "auto",
    num_max_tokens_per_rank: int | None = None,
    num_sms: int | None = None,
    gate: bool = True,
    expert_bias_update_rate: float | None = None,
    grouped_experts: bool | Reader | None = None,
    ranks_per_node: int | None = None,
    fp8: bool = False,
    sums: str = "ranks",
    balance: Balance | None = None,
) -> int:
    """Let the MoE layers of `model` move packed tokens through deepep_moe, and return how many layers that are.

    The layers are those of `deepspeed.moe.layer.MoE` and those that AutoEP made. Call this on every rank, before or after
    `deepspeed.initialize`, which makes AutoEP's layers. Only the forward of the layers changes: parameters, state dict, hooks, gates and
    their random numbers, optimizer groups and checkpoints stay. A call with other options, when no backward is under way, changes them
    from the next forward on. Layers of one call that have a group and a width of rows in common share one buffer, which the first
    forward constructs.

    Args:
        model: the module, or DeepSpeed's engine.
        exact: True: everything outside the experts repeats DeepSpeed's bits (fp32, top-1 and top-2, DeepSpeed 0.19.4 and newer). Experts
            do too if they run one by one, and their products do not depend on zeros between the rows. Else results are equal within
            rounding. False: a token crosses a link once per rank and is weighted there. Results are equal within rounding, and less data
            moves.

        backend, num_sms, ranks_per_node: as for `deepep_moe.Buffer`.
        num_max_tokens_per_rank: the most tokens that a rank ever has in a forward. More are an error, on CPUs too. None: on GPUs
            it is the most of any rank in the first forward, rounded up to a multiple of 128. Buffers are replaced by larger ones when a
            rank has more. On CPUs there is no bound.

        gate: let `deepep_moe.ops.gate` choose the experts for AutoEP's routers, in one pass. Where it cannot, a log line says why and the
            routers choose by themselves, as with False. The choice is the same up to rounding.
        expert_bias_update_rate: balance AutoEP's experts without auxiliary loss. After each optimizer step the routers' bias
            `e_score_correction_bias` moves by this much towards equal load (DeepSeek-V3: 0.001). `model` must be the engine. Routers
            without such a bias get one of zeros, which checkpoints contain from then on. None: no bias moves.

        grouped_experts: run the local experts of `deepspeed.moe.layer.MoE` in grouped products instead of one after another. True: where
            experts are `deepep_moe.nn.SwiGLU` or `torch.nn.Sequential` of a Linear, an activation and a Linear. A function: it takes an
            expert in each forward, and returns its `ExpertWeights`, or None for experts that must be called. Results are equal within
            rounding. Parameters stay the experts' own. Without ZeRO 1 or 2 each forward copies the weights. Where experts cannot be
            grouped, they run one by one, and a log line says why. None: as True for bf16 rows on GPUs that PyTorch has grouped products
            for, where no copy is needed.

        fp8: with `exact=False` and grouped experts, rows travel as fp8 in both passes. The products of `deepspeed.moe.layer.MoE`'s
            experts take them (docs/design/fp8_training.md). For bf16 tokens, experts without biases, and widths that are multiples of 128;
            a forward with others is a ValueError or TypeError before it sends anything. Not for AutoEP's layers.
        balance: with `exact=False`, plan copies of hot experts in each forward (`deepep_moe.nn.Balance`). Layers with equal experts share
            their memory. Experts run in grouped products, on CPUs too. They have no biases; a forward of others is a ValueError. Not
            for AutoEP's layers.
        sums: as for `deepep_moe.Buffer`; by lanes only with `exact=False`. A forward that DeepSpeed's own dispatch would serve, and one of
            an AutoEP layer that applies its scores before the experts, is a ValueError.

    Raises:
        ValueError, TypeError: an option is wrong, a bias to move is a parameter, or `model` is no engine.
        EPError: DeepSpeed is older than 0.14.5.
        ImportError: DeepSpeed is not installed.
    """
    options = Options(
        exact, backend, num_max_tokens_per_rank, num_sms, gate, expert_bias_update_rate, grouped_experts, ranks_per_node, fp8, sums, balance
    )
    return replace_with(model, options)


def replace_with(model: nn.Module, options: Options) -> int:
    """Swap the MoE layers of `model`, as `replace_moe_layers` does with its arguments."""
    import deepspeed

    check_version("deepspeed", deepspeed.__version__, _OLDEST, _NEWEST)
    from deepspeed.moe.sharded_moe import MOELayer, TopKGate

    from deepep_moe.integrations.deepspeed.native.layer import PackedMOELayer

    moe_layers: list[Layer] = [module for module in model.modules() if isinstance(module, MOELayer)]
    native = [layer for layer in moe_layers if type(layer) in (MOELayer, PackedMOELayer) and isinstance(layer.gate, TopKGate)]
    native = [layer for layer in native if not _has_own_forward(layer)]
    of_autoep = _autoep_layers(model)
    for name in ("fp8", "balance"):
        if of_autoep and getattr(options, name):
            raise ValueError(
                f"{name} is given, but {len(of_autoep)} MoE layers are AutoEP's, which have products of their own; leave it out"
            )
    autoep = [layer for layer in of_autoep if not _has_own_forward(layer)]
    layers = native + autoep
    plans, before = _plans(layers, options), _plans_of(layers)
    if autoep:
        from deepep_moe.integrations.deepspeed.autoep.layer import swap

        swap(autoep, plans[len(native) :], model if hasattr(model, "was_step_applied") else None)
    for layer, plan in zip(native, plans, strict=False):
        layer.__class__, layer.deepep_moe_plan = PackedMOELayer, plan
    for layer, plan in zip(layers, plans, strict=True):
        plan.layers.add(layer)
        layer.deepep_moe_number = new_layer()
    for plan in before:
        plan.release(layers)
    left = [layer for layer in moe_layers + of_autoep if layer not in layers]
    _report(model, left, len(native), len(autoep), options)
    return len(layers)


def _has_own_forward(layer: Layer) -> bool:
    """Return whether a layer's forward was replaced before it was swapped. Another class would then change nothing, or too much."""
    from deepep_moe.integrations.deepspeed.native.watched import is_replaced

    return getattr(layer, "deepep_moe_plan", None) is None and is_replaced(layer)


def _autoep_layers(model: nn.Module) -> list[Any]:
    """Return the layers that AutoEP made, swapped or not. DeepSpeed older than 0.19.2 has none."""
    layers = [module for module in model.modules() if getattr(module, "_is_autoep_layer", False)]
    if not layers:
        return []
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    from deepep_moe.integrations.deepspeed.autoep.layer import PackedAutoEPMoELayer

    others = sorted({type(module).__name__ for module in layers} - {"AutoEPMoELayer", "PackedAutoEPMoELayer"})
    if others:
        say_on_first_rank(
            logging.WARNING, f"MoE layers of {others} keep their own forward: deepep_moe swaps deepspeed's AutoEPMoELayer only"
        )
    return [module for module in layers if type(module) in (AutoEPMoELayer, PackedAutoEPMoELayer)]


def _report(model: nn.Module, left: list[Any], num_native: int, num_autoep: int, options: Options) -> None:
    from deepep_moe.integrations.deepspeed.native.routing import is_gate_unknown

    say = functools.partial(say_on_first_rank, model=model)
    replaced = sum(_has_own_forward(layer) for layer in left)
    if replaced:
        say(
            logging.WARNING,
            f"{replaced} MoE layers keep their forward, which was replaced on the layer or its class; swap layers before that",
        )
    others = sorted({f"{type(layer).__name__} with {type(layer.gate).__name__}" for layer in left if not _has_own_forward(layer)})
    if others:
        say(logging.WARNING, f"MoE layers {others} keep their own forward: deepep_moe swaps deepspeed's MOELayer with TopKGate only")
    if num_native and options.expert_bias_update_rate is not None:
        say(logging.WARNING, f"expert_bias_update_rate has no effect on {num_native} native MoE layers, whose gates have no bias")
    if num_autoep and options.grouped_experts:
        say(logging.WARNING, f"grouped_experts has no effect on {num_autoep} AutoEP layers, which have grouped products of their own")
    if not (num_native or num_autoep or left) and getattr(model, "num_stages", 1) == 1:  # else another stage of the pipeline has them
        where = "those of AutoEP are there after deepspeed.initialize"
        if hasattr(model, "was_step_applied"):  # an engine, which AutoEP has finished with
            where = 'use deepspeed.moe.layer.MoE, or let AutoEP make some: "expert_parallel" in ds_config'
        say(logging.WARNING, f"this model has no MoE layers of DeepSpeed; {where}")
    if num_native and is_gate_unknown():
        say(
            logging.INFO,
            "DeepSpeed's gates are called, which takes longer: deepep_moe knows those of 0.19.4 to 0.19.8 only, and these differ",
        )


def _plans(layers: Iterable[Layer], options: Options) -> list[Plan]:
    """Return the plan of each layer. Layers of one group and width get the same plan, which is large enough for all of them."""
    sizes = [_size(layer) for layer in layers]
    num_slots, plans = 0 if options.balance is None else options.balance.num_slots, dict[object, Plan]()
    for key in dict.fromkeys(key for key, _, _ in sizes):  # all ranks make plans in one order
        alike = [(num_local_experts, num_topk) for other, num_local_experts, num_topk in sizes if other == key]
        served = [num_topk for _, num_topk in alike if options.exact or num_topk <= MAX_TOPK]  # others keep their own dispatch
        plans[key] = Plan(options, max(alike)[0] + num_slots, max(served, default=1))
    return [plans[key] for key, _, _ in sizes]


def _plans_of(layers: Iterable[Layer]) -> set[Plan]:
    return {layer.deepep_moe_plan for layer in layers if getattr(layer, "deepep_moe_plan", None) is not None}


def _size(layer: Layer) -> tuple[tuple[str, int], int, int]:
    """Return ((group, width of rows), experts of a rank, experts of a token) of a layer of either kind."""
    is_autoep = getattr(layer, "_is_autoep_layer", False)
    hidden, num_topk = (layer.hidden_size, layer.top_k) if is_autoep else (layer.gate.wg.in_features, layer.gate.k)
    return (layer.ep_group_name, hidden), layer.num_local_experts, num_topk


def restore_moe_layers(model: nn.Module) -> int:
    """Give the layers that `replace_moe_layers` swapped their own forward back, and return how many layers that are.

    AutoEP's routers choose by themselves again. Biases that have moved stay, as the experts were trained with them. A buffer is destroyed
    with the last layer that shares it. So call this on every rank, when no backward is under way, and before the process groups are
    destroyed.
    """
    from deepspeed.moe.sharded_moe import MOELayer

    from deepep_moe.integrations.deepspeed.native.layer import PackedMOELayer

    native: list[Any] = [module for module in model.modules() if type(module) is PackedMOELayer]
    autoep = [layer for layer in _autoep_layers(model) if hasattr(layer, "deepep_moe_plan")]
    before = _plans_of(native + autoep)
    for layer in native:
        unswap(layer, MOELayer)
    if autoep:
        from deepep_moe.integrations.deepspeed.autoep.layer import restore

        restore(autoep)
    for plan in before:
        plan.release(native + autoep)
    return len(native) + len(autoep)


def set_is_first_microbatch(model: nn.Module, value: bool | None) -> int:
    """Say which forward of an optimizer step comes next, and return the number of swapped layers with `fp8` that learn it.

    Call this before every forward. True: the first one after an optimizer step. It quantizes the experts' weights and keeps the copies, 2
    bytes a parameter. False: another one, which uses them. None: from now on each forward quantizes for itself, and nothing is kept.

        for batch in batches:
            set_is_first_microbatch(engine, engine.micro_steps % engine.gradient_accumulation_steps() == 0)
            engine.backward(engine(batch))
            engine.step()

    Copies are kept where ZeRO 1 or 2 has the weights of all experts in one memory. Elsewhere each forward copies the weights and quantizes
    them. With optimizers that write weights while forwards run (ZenFlow) leave it at None.

    Raises:
        TypeError: another value.
    """
    from deepep_moe.integrations.deepspeed.native.layer import PackedMOELayer

    check_is_first_microbatch(value)
    layers = [module for module in model.modules() if type(module) is PackedMOELayer and module.is_fp8]
    for layer in layers:
        layer.is_first_microbatch = value
        if value is None:
            layer.kept_weights = None
    return len(layers)


def say_on_first_rank(level: int, message: str, model: nn.Module | None = None) -> None:
    """Log a message on the first rank, or on the first rank of each stage of a pipelined `model`."""
    grid = getattr(model, "grid", None) or getattr(model, "_grid", None)  # an engine has `grid`, a PipelineModule `_grid`
    is_first = grid.get_data_parallel_rank() == 0 if grid is not None else not dist.is_initialized() or dist.get_rank() == 0
    if is_first:
        _log.log(level, message)
