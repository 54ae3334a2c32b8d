"""Megatron-Core's experts with the products of all experts made at once.

`SequentialMLP` runs one expert after another, `TEGroupedMLP` those of TransformerEngine at once; the host of both reads the counts.
`GroupedMLP` takes the place of either. It has its constructor, outputs and checkpoints, and runs `deepep_moe.ops.grouped_mlp`.
"""

import contextlib
import copy
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from torch import Tensor

from deepep_moe.integrations.megatron.options import Config
from deepep_moe.integrations.megatron.patches import Patches, Stock
from deepep_moe.integrations.megatron.stacked_checkpoint import mark_stack, stack_sharded
from deepep_moe.nn.balance import Parts, Planned
from deepep_moe.ops.fp8_kept import NothingKept
from deepep_moe.ops.grouped_mlp import Activation, clear_tail, grouped_mlp
from deepep_moe.ops.grouped_products import why_not_grouped

_KINDS = ("weight", "bias")
REFUSED = {
    "fp8": "leave it out",
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


WeightGradient = Callable[[Tensor | None], Tensor]
"""Makes the gradient of a weight. Given a tensor, it adds the gradient there, and its result has no meaning."""


class GroupedMLP(SequentialMLP):
    """The experts of a MoELayer in grouped products.

    `linear_fc1` and `linear_fc2` hold one parameter each for all local experts, [num_local_experts, out, in]. That saves the host's time,
    because Megatron's DDP has a hook for each parameter. Views of one memory would not survive its buffers, which move parameters.

    State dicts nevertheless have the names and tensors of the class whose place this one takes, so checkpoints of either class load.
    SequentialMLP's own modules, without parameters, make and read sharded ones, in whichever form this Megatron-Core has. These modules
    are `local_experts` only while they do so. A search for modules to hook, to adapt or to quantize finds no experts that nobody calls.

    Biases have names that end with `.bias`, by which Megatron-Core leaves out weight decay. Optimizers for matrices only, such as Muon,
    see parameters of three dimensions.

    Raises ValueError for settings that it does not honour. While it is constructed, the experts of one layer are in memory twice.
    """

    takes_counts_on_device = True
    """For `sync_free`, and for rows that a dispatch has guessed, whose tail may hold anything."""

    takes_fp8_rows = False

    planned: Planned | None = None
    """The copies of the next forward, which the dispatcher has planned."""

    _frame: Any

    def __init__(self, num_local_experts: int, config: Config, submodules: Any, *args: Any, is_te: bool = False, **kwargs: Any):
        """`is_te`: this takes the place of a TEGroupedMLP, not of a SequentialMLP."""
        self.check_config(config, is_te)
        if is_te:
            submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        of_frame = copy.copy(config)
        of_frame.gradient_accumulation_fusion = False  # with it the frame's unused layers would demand apex
        draws = is_te and config.perform_initialization and not config.use_cpu_initialization
        if draws:
            of_frame.init_method = of_frame.output_layer_init_method = _leave
        super().__init__(num_local_experts, of_frame, submodules, *args, **kwargs)
        self.config = config
        self._is_te = is_te
        self.__dict__["_frame"] = self._modules.pop("local_experts")
        self.linear_fc1, self.linear_fc2 = (
            _Stacked([getattr(expert, name) for expert in self._frame], config, is_te) for name in ("linear_fc1", "linear_fc2")
        )
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
        self.register_load_state_dict_post_hook(_collapse)

    @torch.no_grad()
    def _draw_as_te(self) -> None:
        """Draw the weights in the order of TEGroupedMLP, so that the same seed gives the same weights."""
        for linear, draw in ((self.linear_fc1, self.config.init_method), (self.linear_fc2, self.config.output_layer_init_method)):
            for weight in linear.weight:
                with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                    draw(weight)

    @classmethod
    def check_config(cls, config: Config, is_te: bool) -> None:
        """Raise ValueError for settings that these experts do not honour."""
        if (reason := why_not_honoured(config, cls.refused(is_te))) is not None:
            raise ValueError(f"{reason}, or keep Megatron-Core's experts: experts='framework' (--experts framework)")
        if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
            raise ValueError(f"moe_apply_probs_on_input is True with moe_router_topk={config.moe_router_topk}; it needs moe_router_topk=1")

    @staticmethod
    def refused(is_te: bool) -> dict[str, str]:
        """Return the settings that these experts do not honour, and what to do."""
        return REFUSED | (_REFUSED_FOR_TE if is_te else {})

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
        if planned is not None:
            assert isinstance(tokens_per_expert, Tensor)  # as the dispatcher gives it
            tensors = (rows,) if probs is None else (rows, probs)
            return planned.run(self._product, tensors, tokens_per_expert, self._main_grads), None
        output = grouped_mlp(
            rows, tokens_per_expert, w1, w2, b1=b1, b2=b2, probs=probs, delay=self._delay if self._delays else None,
            main_grads=self._main_grads, **self._how(), **self._copies_of_weights(w1, w2),
        )  # fmt: skip
        return output, None

    def _product(self, rows: tuple[Tensor, ...], counts: Tensor, weights: Parts, is_home: bool) -> Tensor:
        x, probs = rows if len(rows) == 2 else (rows[0], None)
        how = {"main_grads": self._main_grads, **self._copies_of_weights(*weights)} if is_home else {"kept": NothingKept()}
        return grouped_mlp(x, counts, weights.up, weights.down, probs=probs, **how, **self._how())

    def weights(self) -> Parts:
        """Return the weights for a fetch, after the hooks that make them ready. Raises ValueError for Megatron's FSDP, which may take them
        apart before."""
        if hasattr(self.linear_fc1.weight, "get_main_grad"):
            raise ValueError("Megatron's FSDP wraps the experts, but balance is given; leave one of the two out")
        return Parts(self.linear_fc1()[0], self.linear_fc2()[0])

    @property
    def _main_grads(self) -> tuple[Tensor | None, Tensor | None]:
        return self.linear_fc1.main_grad, self.linear_fc2.main_grad

    def _how(self) -> dict[str, Any]:
        return {"activation": self._activation, "recompute_activation": self._recompute_activation, "zero_tail": False}

    def _copies_of_weights(self, w1: Tensor, w2: Tensor) -> dict[str, Any]:
        """Return the arguments of `grouped_mlp` that say whether this forward shares copies of the weights. Here it has none."""
        return {}

    def _delay(self, name: str, compute: WeightGradient) -> None:
        self._due.append((self.linear_fc1 if name == "w1" else self.linear_fc2, compute))

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Make the gradients of the weights that backwards have left, as `delay_wgrad_compute` asks for."""
        while self._due:
            linear, compute = self._due.popleft()
            linear.add_delayed(compute)

    # ---- checkpoints ----

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the class whose place this one takes does: an entry for each expert, in the stacked parameters' memory."""
        with contextlib.nullcontext() if self._is_te else self._expanded():
            return super().state_dict(*args, **kwargs)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: object = None) -> dict[str, Any]:
        """Return entries that save and load what SequentialMLP's do, one for each stacked parameter. The optimizer finds it by them."""
        with self._expanded():
            entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for name, kind, parameter in self._stacked_parameters():
            of_experts = [entries.pop(f"{prefix}local_experts.{index}.{name}.{kind}") for index in range(self.num_local_experts)]
            entries[f"{prefix}{name}.{kind}"] = stack_sharded(of_experts, parameter, f"{prefix}experts.{name}.{kind}")
        return entries

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *args: object) -> None:
        is_stacked = f"{prefix}linear_fc1.weight" in state_dict  # sharded checkpoints have them
        has_frame = any(name.startswith(f"{prefix}local_experts.") for name in state_dict)
        is_te = not is_stacked and (f"{prefix}linear_fc1.weight0" in state_dict or (self._is_te and not has_frame))
        for linear in (self.linear_fc1, self.linear_fc2):
            linear.reads_te = is_te
        if not is_te:
            if not is_stacked:
                self._expand()
            self._modules["local_experts"] = self._frame
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _stacked_parameters(self) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
        for name in ("linear_fc1", "linear_fc2"):
            for kind, parameter in getattr(self, name).named_parameters():
                yield name, kind, parameter

    def _expand(self) -> None:
        """Give the frame the parameters of each expert, which are views."""
        for name, kind, parameter in self._stacked_parameters():
            for expert, view in zip(self._frame, parameter.detach(), strict=True):
                getattr(expert, name)._parameters[kind] = torch.nn.Parameter(view, parameter.requires_grad)

    @contextlib.contextmanager
    def _expanded(self) -> Iterator[None]:
        self._expand()
        self._modules["local_experts"] = self._frame
        try:
            yield
        finally:
            _collapse(self)


def _collapse(experts: GroupedMLP, incompatible_keys: Any = None) -> None:
    """Take the parameters from the frame. Those that a load has put there instead of filling the views are copied."""
    for name, kind, parameter in experts._stacked_parameters():
        for expert, view in zip(experts._frame, parameter.detach(), strict=True):
            linear = getattr(expert, name)
            loaded = linear._parameters[kind]
            if loaded is not None and loaded.data_ptr() != view.data_ptr():
                view.copy_(loaded.detach())
            linear._parameters[kind] = None
    experts._modules.pop("local_experts", None)


class _Stacked(torch.nn.Module):
    """The weights and biases of one linear layer of all experts. They are taken from the layers, which keep none."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    reads_te = False
    """The state dict that is being loaded has TEGroupedMLP's names."""

    def __init__(self, linears: list[Any], config: Config, is_te: bool):
        super().__init__()
        self._hooks: list[Callable[[], None]] = []
        self._is_te, self._fuses = is_te, bool(config.gradient_accumulation_fusion)
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
        """Return the tensor to which backwards add the weight's gradient (`gradient_accumulation_fusion`). None: they make `grad`, as
        without DDP. Megatron's FSDP, whose parameters have `get_main_grad`, gets `grad` too."""
        has_buffer = self._fuses and not hasattr(self.weight, "get_main_grad")
        return getattr(self.weight, "main_grad", None) if has_buffer else None

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
        main_grad = self.main_grad if self._hooks else getattr(weight, "main_grad", None)  # without hooks DDP does not know of the delay
        grad = compute(main_grad)
        if main_grad is None:
            weight.grad = grad if weight.grad is None else weight.grad + grad
        elif self._hooks:
            weight.grad, weight.grad_added_to_main_grad = grad, True
        for hook in self._hooks:
            hook()

    # ---- checkpoints ----

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        """Save TEGroupedMLP's entries, or nothing, as the frame does."""
        if not self._is_te:
            return
        for index in range(len(self.weight)):
            for kind, parameter in self.named_parameters():
                destination[f"{prefix}{kind}{index}"] = (parameter if keep_vars else parameter.detach())[index]
        destination[f"{prefix}_extra_state"] = torch.empty(0, dtype=torch.uint8)  # it says that there is none

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        if not self.reads_te:
            with torch.no_grad():
                for kind, parameter in self.named_parameters():
                    if (loaded := state_dict.get(prefix + kind)) is not None:
                        parameter.copy_(loaded)
            return
        views = {
            f"{prefix}{kind}{index}": view
            for kind, parameter in self.named_parameters()
            for index, view in enumerate(parameter.detach())
        }  # fmt: skip
        for name, view in views.items():
            if (loaded := state_dict.get(name)) is None:
                missing_keys.append(name)
            elif loaded.shape != view.shape:
                error_msgs.append(f"size mismatch for {name}: {list(loaded.shape)} in the checkpoint, {list(view.shape)} here")
            else:
                view.copy_(loaded.detach())
        unexpected_keys += [name for name in state_dict if name.startswith(prefix) and name not in views and "._extra_state" not in name]


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


def why_not_honoured(config: Config, refused: dict[str, str]) -> str | None:
    """Return which setting among `refused`, or which value of another one, grouped experts do not honour, and what to do."""
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
    for name in ("use_megatron_fsdp", "use_torch_fsdp2"):
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


def serve_experts(
    patches: Patches, is_ours: Callable[[Config], bool], experts: type[GroupedMLP] = GroupedMLP, *, insists: bool = True
) -> None:
    """Let `SequentialMLP(...)` and `TEGroupedMLP(...)` construct `experts` for the configs of which `is_ours` is true.

    With `insists` they do so always, and a config that grouped experts do not honour is ValueError. Otherwise they do so where grouped
    experts are fast and honour the config. `whose_experts` says which experts there are.

    Layer specs have the classes in several forms and were often made before. All of them call them. Their `__init__` is replaced and not
    their `__new__`, because Python does not forget a `__new__` that is taken back.
    """
    for stock_class in (SequentialMLP, TEGroupedMLP):
        patches.around(stock_class, "__init__")(functools.partial(_construct, stock_class, is_ours, experts, insists))


def _construct(
    stock_class: type, is_ours: Callable[[Config], bool], experts: type[GroupedMLP], insists: bool, stock: Stock, module: Any,
    num_local_experts: int, config: Config, *args: object, **kwargs: object,
) -> None:  # fmt: skip
    is_te, is_served = stock_class is TEGroupedMLP, type(module) is stock_class and is_ours(config)
    reason = None
    if is_served and not insists:
        reason = why_not_honoured(config, experts.refused(is_te)) or _why_not_trained() or _why_not_fast(config)
    if not is_served or reason is not None:
        stock(module, num_local_experts, config, *args, **kwargs)
        if reason is not None:
            module.why_not_grouped = reason
        return
    module.__class__ = experts
    experts.__init__(module, num_local_experts, config, *args, is_te=is_te, **kwargs)


def whose_experts(experts: object) -> str:
    """Return whose the experts of a layer are, and why they are not grouped."""
    if isinstance(experts, GroupedMLP):
        return f"deepep_moe's grouped experts in the place of {'TEGroupedMLP' if experts._is_te else 'SequentialMLP'}"
    reason = getattr(experts, "why_not_grouped", "")
    return f"experts are Megatron-Core's {type(experts).__name__}{reason and ': '}{reason}"
