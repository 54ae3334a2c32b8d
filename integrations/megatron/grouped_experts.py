"""Megatron-Core's experts with the products of all experts made at once.

`SequentialMLP` runs one expert after another, `TEGroupedMLP` those of TransformerEngine at once; the host of both reads the counts.
`GroupedMLP` takes the place of either. It has its constructor, outputs and checkpoints, and runs `deepep_moe.ops.grouped_mlp`.
"""

import copy
import functools
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from torch import Tensor

from deepep_moe.integrations.common.patches import Patches, Stock
from deepep_moe.integrations.megatron.config_switches import is_ours
from deepep_moe.integrations.megatron.options import Config, Options
from deepep_moe.integrations.megatron.stacked_checkpoint import mark_stack, stack_sharded
from deepep_moe.nn.balance import Parts, Planned
from deepep_moe.ops.fp8_kept import KeptWeights, NothingKept, is_captured
from deepep_moe.ops.fp8_products import check_widths
from deepep_moe.ops.grouped_mlp import Activation, clear_tail, grouped_mlp
from deepep_moe.ops.grouped_products import why_not_grouped

_KINDS = ("weight", "bias")
_LAYERS = ("linear_fc1", "linear_fc2")
_REFUSED = {
    "fp4": "leave it out",
    "use_te_activation_func": "set it to False (drop --use-te-activation-func)",
    "activation_func_fp8_input_store": "set it to False",
    "overlap_dispatch_backward_with_experts_wgrad": "set it to False",
    "init_model_with_meta_device": "set it to False",
    "use_kitchen": "set it to False",
    "moe_mlp_glu_interleave_size": "leave it out",
}
"""Settings that GroupedMLP does not honour, and what to do."""
_REFUSED_FOR_TE = {
    "use_transformer_engine_op_fuser": "set it to False (drop --use-transformer-engine-op-fuser)",
    "quant_recipe": "leave it out",
}
"""Those that SequentialMLP does not honour either, but TEGroupedMLP does."""
_REFUSED_WITH_FP8 = {
    "fp8_param": "set it to False (drop --fp8-param-gather), as experts quantize their bf16 weights in each pass",
    "add_bias_linear": "set it to False (--disable-bias-linear)",
    "moe_apply_probs_on_input": "set it to False",
}


WeightGradient = Callable[[Tensor | None], Tensor]
"""Makes the gradient of a weight. Given a tensor, it adds the gradient there, and its result has no meaning."""


class GroupedMLP(SequentialMLP):
    """The experts of a MoELayer in grouped products.

    `linear_fc1` and `linear_fc2` hold one parameter each for all local experts, [num_local_experts, out, in]. That saves the host's time,
    because Megatron's DDP has a hook for each parameter. Views of one memory would not survive its buffers, which move parameters.

    State dicts nevertheless have the names and tensors of the class whose place this one takes, so checkpoints of either class load.
    SequentialMLP's own modules, without parameters, make sharded ones, in whichever form this Megatron-Core has. These modules are
    `local_experts` only while they do so. A search for modules to hook, to adapt or to quantize finds no experts that nobody calls.

    Biases have names that end with `.bias`, by which Megatron-Core leaves out weight decay. Optimizers for matrices only, such as Muon,
    see parameters of three dimensions.

    With fp8 it gets `QuantizedRows`, and all products of both passes take fp8. Megatron-Core's schedules call `set_is_first_microbatch()`
    of the model before the first micro-batch of a step, as for TransformerEngine's modules. From then on that forward quantizes the
    weights, and those of the other micro-batches use its copies.

    Raises ValueError for settings that it does not honour. While it is constructed, the experts of one layer are in memory twice.
    """

    takes_counts_on_device = True
    """For `sync_free`, and for rows that a dispatch has guessed, whose tail may hold anything."""

    is_first_microbatch: bool | None = None
    """Whether the next forward with fp8 is the first of a step. None: not set yet, and each forward quantizes. Forwards set it to False."""

    planned: Planned | None = None
    """The copies of the next forward, which the dispatcher has planned."""

    _frame: Any

    def __init__(
        self, num_local_experts: int, config: Config, submodules: Any, *args: Any, is_te: bool = False, fp8: bool = False, **kwargs: Any
    ):
        """`is_te`: this takes the place of a TEGroupedMLP, not of a SequentialMLP."""
        _check_config(config, is_te, fp8)
        if is_te:
            submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        of_frame = copy.copy(config)
        of_frame.gradient_accumulation_fusion = False  # with it the frame's unused layers would demand apex
        draws = is_te and config.perform_initialization and not config.use_cpu_initialization
        if draws:
            of_frame.init_method = of_frame.output_layer_init_method = _leave
        super().__init__(num_local_experts, of_frame, submodules, *args, **kwargs)
        self.config = config
        self._is_te, self.takes_fp8_rows = is_te, fp8
        self.kept_weights = KeptWeights()
        self.__dict__["_frame"] = self._modules.pop("local_experts")
        self.linear_fc1, self.linear_fc2 = (_Stacked([getattr(expert, name) for expert in self._frame], config) for name in _LAYERS)
        if draws:
            self._draw_as_te()
        # The order in which the class whose place this one takes has parameters: expert by expert, or layer by layer.
        for stack in (self.linear_fc1, self.linear_fc2) if is_te else (self,):
            mark_stack(stack.parameters())
        self._activation = _activation(config)
        modules = (config.recompute_modules or ()) if config.recompute_granularity == "selective" else ()
        self._recompute_activation = "moe_act" in modules
        self._delays = bool(getattr(config, "delay_wgrad_compute", False))
        self._due: deque[tuple[_Stacked, WeightGradient]] = deque()  # gradients that `backward_dw` is to make
        for linear in (self.linear_fc1, self.linear_fc2) if self._delays else ():
            weight: Any = linear.weight
            weight.skip_backward_post_hook = True  # Megatron's DDP then registers its hook with the layer

    @torch.no_grad()
    def _draw_as_te(self) -> None:
        """Draw the weights in the order of TEGroupedMLP, so that the same seed gives the same weights."""
        for linear, draw in ((self.linear_fc1, self.config.init_method), (self.linear_fc2, self.config.output_layer_init_method)):
            for weight in linear.weight:
                with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                    draw(weight)

    @property
    def is_fast(self) -> bool:
        """Return whether the products of all experts are made at once. Otherwise they need their counts on the host."""
        return _why_not_fast(self.config) is None

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor | list[int], permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Return the experts' outputs [R, H] times the probs, and no bias, as it is added already.

        Args:
            permuted_local_hidden_states: [R, H], grouped by local expert.
            tokens_per_expert: [num_local_experts], on the host, or on the device of the rows, where nothing waits for it. Rows behind their
                sum may hold anything, and so may those of the output and of the gradient, which no combine reads.
            permuted_probs: [R] fp32 or fp64.

        With copies of experts, `tokens_per_expert` counts their rows too, behind the others, and outputs of those rows are
        missing, unless the module has hooks.
        """
        rows = permuted_local_hidden_states
        probs: Tensor | None = permuted_probs
        if self.config.moe_apply_probs_on_input:
            scale = clear_tail(permuted_probs, tokens_per_expert).unsqueeze(-1)
            rows, probs = (scale * clear_tail(rows, tokens_per_expert)).to(rows.dtype), None
        (w1, b1), (w2, b2) = self.linear_fc1(), self.linear_fc2()
        planned, self.planned = self.planned, None
        tensors = (rows,) if probs is None else (rows, probs)
        if planned is not None:
            assert isinstance(tokens_per_expert, Tensor)  # as the dispatcher gives it
            return planned.run(self._product, tensors, tokens_per_expert, self._main_grads), None
        return self._product(tensors, tokens_per_expert, Parts(w1, w2), True, b1, b2), None

    def _product(
        self, rows: tuple[Tensor, ...], counts: Tensor | list[int], weights: Parts, is_home: bool,
        b1: Tensor | None = None, b2: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        how: dict[str, Any] = {"kept": NothingKept()}
        if is_home:
            delay = self._delay if self._delays else None
            how = {"main_grads": self._main_grads, "delay": delay, **self._copies_of_weights(*weights)}
        return grouped_mlp(
            rows[0], counts, *weights, b1=b1, b2=b2, probs=rows[1] if len(rows) > 1 else None, activation=self._activation,
            recompute_activation=self._recompute_activation, zero_tail=False, **how,
        )  # fmt: skip

    def weights(self) -> Parts:
        """Return the weights for a fetch, after the hooks that make them ready. Raises ValueError for Megatron's FSDP, which may take them
        apart before."""
        if hasattr(self.linear_fc1.weight, "get_main_grad"):
            raise ValueError("Megatron's FSDP wraps the experts, but balance is given; leave one of the two out")
        return Parts(self.linear_fc1()[0], self.linear_fc2()[0])

    @property
    def _main_grads(self) -> tuple[Tensor | None, Tensor | None]:
        return self.linear_fc1.main_grad, self.linear_fc2.main_grad

    def _copies_of_weights(self, w1: Tensor, w2: Tensor) -> dict[str, Any]:
        """Return the arguments of `grouped_mlp` that say whether this forward shares fp8 copies of the weights."""
        if self.takes_fp8_rows and is_captured(w1):
            self.kept_weights.release()  # of forwards before the capture
            return {}
        if not self.takes_fp8_rows or self.is_first_microbatch is None or getattr(self.config, "disable_parameter_transpose_cache", False):
            return {}
        is_first = self.is_first_microbatch or not self.kept_weights.has(w1, w2)
        self.is_first_microbatch = False
        return {"kept": self.kept_weights, "is_first_microbatch": is_first}

    def release_fp8_weights(self) -> None:
        """Drop the fp8 copies of the weights. The next forward makes new ones, if it shares them with others."""
        self.kept_weights.release()

    def _delay(self, name: str, compute: WeightGradient) -> None:
        self._due.append((self.linear_fc1 if name == "w1" else self.linear_fc2, compute))

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Make the gradients of the weights that backwards have left, as `delay_wgrad_compute` asks for."""
        while self._due:
            linear, compute = self._due.popleft()
            linear.add_delayed(compute)

    # ---- checkpoints ----

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        """Save what the class whose place this one takes does: an entry for each expert, in the stacked parameters' memory."""
        super()._save_to_state_dict(destination, prefix, keep_vars)  # what others have registered here
        for name, value in self._of_experts(self._is_te).items():
            destination[prefix + name] = value.detach() if isinstance(value, Tensor) and not keep_vars else value

    @torch.no_grad()
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Read the entries of either class, or of stacked parameters, which sharded checkpoints have."""
        self._modules["local_experts"] = self._frame  # so that its keys are expected
        try:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        finally:
            del self._modules["local_experts"]
        given = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        is_te = "linear_fc1.weight0" in given or (self._is_te and not any(name.startswith("local_experts.") for name in given))
        entries = dict(self.named_parameters()) if "linear_fc1.weight" in given else self._of_experts(is_te)
        for name, entry in entries.items():
            if entry is None or name.endswith("_extra_state"):
                continue
            if (loaded := given.get(name)) is None:
                missing_keys.append(prefix + name)
            elif loaded.shape != entry.shape:
                shapes = f"{list(loaded.shape)} in the checkpoint, {list(entry.shape)} here"
                error_msgs.append(f"size mismatch for {prefix}{name}: {shapes}")
            else:
                entry.copy_(loaded)
        others = [name for name in given if name not in entries and "._extra_state" not in name]
        unexpected_keys += [prefix + name for name in others if name.split(".")[0] in ("local_experts", *_LAYERS)]

    def _of_experts(self, is_te: bool) -> dict[str, Tensor | None]:
        """Return the entries of TEGroupedMLP's state dict, or of SequentialMLP's. Extra states say that there is none."""
        entries: dict[str, Tensor | None] = {}
        places = [(layer, index) for layer in _LAYERS for index in range(self.num_local_experts)]
        for layer, index in places if is_te else sorted(places, key=lambda place: place[1]):
            for kind, parameter in getattr(self, layer).named_parameters():
                entries[f"{layer}.{kind}{index}" if is_te else f"local_experts.{index}.{layer}.{kind}"] = parameter[index]
            if not is_te:
                entries[f"local_experts.{index}.{layer}._extra_state"] = getattr(self._frame[index], layer).get_extra_state()
            elif index == self.num_local_experts - 1:
                entries[f"{layer}._extra_state"] = torch.empty(0, dtype=torch.uint8)
        return entries

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: object = None) -> dict[str, Any]:
        """Return entries that save and load what SequentialMLP's do, one for each stacked parameter. The optimizer finds it by them."""
        stacked = [(layer, *named) for layer in _LAYERS for named in getattr(self, layer).named_parameters()]
        for layer, kind, parameter in stacked:
            for expert, view in zip(self._frame, parameter.detach(), strict=True):
                getattr(expert, layer)._parameters[kind] = torch.nn.Parameter(view, parameter.requires_grad)
        self._modules["local_experts"] = self._frame
        try:
            entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        finally:
            del self._modules["local_experts"]
            for layer, kind, _ in stacked:
                for expert in self._frame:
                    getattr(expert, layer)._parameters[kind] = None
        for layer, kind, parameter in stacked:
            of_experts = [entries.pop(f"{prefix}local_experts.{index}.{layer}.{kind}") for index in range(self.num_local_experts)]
            entries[f"{prefix}{layer}.{kind}"] = stack_sharded(of_experts, parameter, f"{prefix}experts.{layer}.{kind}")
        return entries


class _Stacked(torch.nn.Module):
    """The weights and biases of one linear layer of all experts. They are taken from the layers, which keep none. The module of the experts
    saves and loads them."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(self, linears: list[Any], config: Config):
        super().__init__()
        self._hooks: list[Callable[[], None]] = []
        # Megatron-Core's default is True. Without apex it must be False, but these products do not need apex.
        self._fuses = bool(config.gradient_accumulation_fusion) or not layers._grad_accum_fusion_available
        self._noting = 0  # the id of the weight that `_note_main_grad` is a hook of
        for kind in _KINDS:
            self.register_parameter(kind, _stack([linear._parameters.get(kind) for linear in linears]))
            for linear in linears:
                if kind in linear._parameters:
                    linear._parameters[kind] = None

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias. Frameworks hang on this call: Megatron's DDP gathers a bucket before the module that owns its parameters
        is called (`overlap_param_gather`)."""
        if self.main_grad is not None and self._noting != id(self.weight) and self.weight.requires_grad:
            self.weight.register_hook(self._note_main_grad)
            self._noting = id(self.weight)
        return self.weight, self.bias

    # ---- gradients ----

    @property
    def main_grad(self) -> Tensor | None:
        """Return the tensor to which backwards add the weight's gradient: that of Megatron's DDP, which asks `grad_added_to_main_grad`
        before it adds `grad` itself. None: they make `grad`, as without DDP, for Megatron's FSDP, whose parameters have `get_main_grad`
        or a `main_grad` of their class (0.13), and without `gradient_accumulation_fusion` where apex would serve it."""
        attributes = vars(self.weight)
        asks = self._fuses and "grad_added_to_main_grad" in attributes and "get_main_grad" not in attributes
        return attributes.get("main_grad") if asks else None

    def _note_main_grad(self, grad: Tensor | None) -> None:
        """Tell Megatron's DDP, before `grad` reaches the weight, that its values mean nothing. None is a delayed gradient."""
        if grad is not None and self.main_grad is not None:
            self.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Megatron's DDP gives what adds the weight's `grad` to its `main_grad`, to be called after a delayed gradient."""
        self._hooks.append(hook)

    def add_delayed(self, compute: WeightGradient) -> None:
        """Add a delayed gradient of the weight where the next step looks for it."""
        weight: Any = self.weight
        main_grad = self.main_grad if self._hooks else vars(weight).get("main_grad")  # without hooks DDP does not know of the delay
        grad = compute(main_grad)
        if main_grad is None:
            weight.grad = grad if weight.grad is None else weight.grad + grad
        elif self._hooks:
            weight.grad, weight.grad_added_to_main_grad = grad, True
        for hook in self._hooks:
            hook()

    def _save_to_state_dict(self, *args: object) -> None:
        pass

    def _load_from_state_dict(self, *args: object) -> None:
        pass


def _leave(weight: Tensor) -> Tensor:
    return weight


def _stack(parameters: list[Any]) -> torch.nn.Parameter | None:
    """Stack the parameters of all experts, with the attributes that Megatron-Core gives them."""
    first = parameters[0]
    if first is None:
        return None
    stacked = torch.nn.Parameter(torch.stack([parameter.detach() for parameter in parameters]), first.requires_grad)
    for name, value in vars(first).items():
        setattr(stacked, name, value + 1 if name == "partition_dim" and value >= 0 else value)
    return stacked


# ---- configuration ----


def _check_config(config: Config, is_te: bool, fp8: bool) -> None:
    """Raise ValueError for settings that grouped experts do not honour, and for a layer whose rows cannot travel as fp8."""
    if (reason := _why_not_honoured(config, is_te, fp8)) is not None:
        raise ValueError(f"{reason}, or keep Megatron-Core's experts: experts='framework' (--experts framework)")
    if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
        raise ValueError(f"moe_apply_probs_on_input is True with moe_router_topk={config.moe_router_topk}; it needs moe_router_topk=1")
    if not fp8:
        return
    if config.fp8 and config.fp8_recipe != "blockwise":
        raise ValueError(
            f"fp8_recipe is {config.fp8_recipe!r}, but deepep_moe's experts have scales of blocks; set it to 'blockwise' "
            "(--fp8-recipe blockwise), or leave out fp8 of enable()"
        )
    if getattr(config, "first_last_layers_bf16", False):
        raise ValueError("first_last_layers_bf16 is True, but fp8 of enable() is for all MoE layers; set it to False, or leave out fp8")
    if config.params_dtype != torch.bfloat16:
        raise ValueError(f"params_dtype is {config.params_dtype}, but fp8 experts take bf16 rows; train in bf16 (--bf16)")
    name = "moe_latent_size" if getattr(config, "moe_latent_size", None) else "hidden_size"
    check_widths(**{name: getattr(config, name)}, moe_ffn_hidden_size=config.moe_ffn_hidden_size or config.ffn_hidden_size)
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        raise ValueError(
            "overlap_moe_expert_parallel_comm is True, whose schedule frees rows that fp8 experts share; set it to False, or leave out fp8 "
            "of enable()"
        )


def _why_not_honoured(config: Config, is_te: bool, fp8: bool) -> str | None:
    """Return which setting grouped experts do not honour, and what to do."""
    refused = (_REFUSED_WITH_FP8 if fp8 else {"fp8": "leave it out"}) | _REFUSED | (_REFUSED_FOR_TE if is_te else {})
    for name, fix in refused.items():
        if getattr(config, name, None):
            return f"{name} is {getattr(config, name)!r}, which grouped experts do not support; {fix}"
    if getattr(config, "fine_grained_activation_offloading", False) and (names := {"expert_fc1", "moe_act"} & set(config.offload_modules)):
        return f"offload_modules has {sorted(names)}, which grouped experts do not offload; leave them out"
    for name in ("expert_tensor_parallel_size", "expert_gtp_weight_remat_size"):
        if (size := getattr(config, name, None) or 1) > 1:
            return f"{name} is {size}, but grouped experts are not split; set it to 1 (--{name.replace('_', '-')} 1)"
    return None


def _why_not_trained() -> str | None:
    """Return what Megatron-LM's command line, if it runs, asks for that is not the same for parameters [num_experts, out, in]."""
    arguments = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    if (optimizer := getattr(arguments, "optimizer", None) or "adam") not in ("adam", "sgd"):
        return f"--optimizer is {optimizer!r}, which may tell matrices from parameters of three dimensions"
    for name in ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2"):  # the second of 0.13
        if getattr(arguments, name, False):
            return f"--{name.replace('_', '-')} is given, with which grouped experts are not tested"
    return None


def _why_not_fast(config: Config) -> str | None:
    """Return why the products of this config's experts are not made at once."""
    hidden, inner = getattr(config, "moe_latent_size", None) or config.hidden_size, config.moe_ffn_hidden_size or config.ffn_hidden_size
    if config.params_dtype != torch.bfloat16:
        return f"params_dtype is {config.params_dtype}, and grouped products are fast in bf16 (--bf16)"
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return why_not_grouped(torch.empty(0, hidden, dtype=config.params_dtype, device=device), inner)


def _activation(config: Config) -> Activation:
    if not config.gated_linear_unit:
        activation: Activation = config.activation_func
        return activation
    clamp, offset = getattr(config, "activation_func_clamp_value", None), getattr(config, "glu_linear_offset", 0.0)
    if config.activation_func is torch.nn.functional.silu and clamp is None and not offset:
        return "swiglu"
    return functools.partial(_gated, function=config.activation_func, clamp=clamp, offset=offset)


def _gated(inner: Tensor, *, function: Callable[[Tensor], Tensor], clamp: float | None, offset: float) -> Tensor:
    gate, up = inner.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp)
    return function(gate) * (up + offset)


# ---- whose place they take ----


def serve_experts(patches: Patches, options: Options) -> None:
    """Let `SequentialMLP(...)` and `TEGroupedMLP(...)` construct grouped experts for configs that select this library.

    With `experts="own"` and with fp8 they do so always, and a config that grouped experts do not honour is ValueError. Otherwise they do so
    where grouped experts are fast and honour the config. `whose_experts` says which experts there are.

    Layer specs have the classes in several forms and were often made before. All of them call them. Their `__init__` is replaced and not
    their `__new__`, because Python does not forget a `__new__` that is taken back.
    """
    insists = options.experts == "own" or options.fp8

    def construct(
        stock_class: type, stock: Stock, module: Any, num_local_experts: int, config: Config, *args: object, **kwargs: object
    ) -> None:
        is_te, is_served = stock_class is TEGroupedMLP, type(module) is stock_class and is_ours(config)
        reason = None
        if is_served and not insists:
            reason = _why_not_honoured(config, is_te, fp8=False) or _why_not_trained() or _why_not_fast(config)
        if not is_served or reason is not None:
            stock(module, num_local_experts, config, *args, **kwargs)
            if reason is not None:
                module.why_not_grouped = reason
            return
        module.__class__ = GroupedMLP
        GroupedMLP.__init__(module, num_local_experts, config, *args, is_te=is_te, fp8=options.fp8, **kwargs)

    for stock_class in (SequentialMLP, TEGroupedMLP):
        patches.around(stock_class, "__init__")(functools.partial(construct, stock_class))


def serve_first_microbatches(patches: Patches) -> None:
    """Let `set_is_first_microbatch()` of a model reach fp8 experts whatever the config's `fp8` is, without which Megatron-Core does
    nothing in it."""

    @patches.around(MegatronModule, "set_is_first_microbatch")
    def set_in_all(stock: Stock, model: MegatronModule) -> None:
        stock(model)
        for module in model.modules():
            if isinstance(module, GroupedMLP):
                module.is_first_microbatch = True


def whose_experts(experts: object) -> str:
    """Return whose the experts of a layer are, and why they are not grouped."""
    if isinstance(experts, GroupedMLP):
        return f"deepep_moe's grouped experts in the place of {'TEGroupedMLP' if experts._is_te else 'SequentialMLP'}"
    reason = getattr(experts, "why_not_grouped", "")
    return f"experts are Megatron-Core's {type(experts).__name__}{reason and ': '}{reason}"
