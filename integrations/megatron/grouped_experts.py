"""Megatron-Core's SequentialMLP with the products of all experts made at once.

`SequentialMLP` runs one expert after another, and its host reads the counts. `GroupedMLP` has the same constructor, the same weights from
the same seeds, the same outputs and the same checkpoints, and runs `deepep_moe.ops.grouped_mlp`. It needs no TransformerEngine.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from deepep_moe.integrations.megatron.patches import Patches
from deepep_moe.integrations.megatron.stacked_checkpoint import mark_stack, stack_sharded
from deepep_moe.ops.grouped_mlp import Activation, clear_tail, grouped_mlp

_KINDS = ("weight", "bias")
REFUSED = {
    "gradient_accumulation_fusion": "set it to False (--no-gradient-accumulation-fusion)",
    "fp8": "leave it out",
    "fp4": "leave it out",
    "use_te_activation_func": "set it to False (drop --use-te-activation-func)",
    "activation_func_fp8_input_store": "set it to False",
    "overlap_dispatch_backward_with_experts_wgrad": "set it to False",
    "init_model_with_meta_device": "set it to False",
    "use_kitchen": "set it to False",
}
"""Settings that GroupedMLP does not honour, and what to do."""


class GroupedMLP(SequentialMLP):
    """The experts of a MoELayer in grouped products.

    `linear_fc1` and `linear_fc2` hold one parameter each for all local experts, [num_local_experts, out, in], because the host's time is
    what it saves: a parameter for each expert has a hook of Megatron's DDP each, and views of one memory do not survive its buffers, which
    move parameters. State dicts nevertheless have SequentialMLP's names and tensors, so checkpoints go both ways. SequentialMLP's own
    modules, without parameters, are the frame that makes and reads them, in whichever form this Megatron-Core has. The frame is
    `local_experts` only while it does so. Whoever looks for modules to hook, to adapt or to quantize does not find experts that nobody
    calls.

    Biases have names that end with `.bias`, by which Megatron-Core leaves out weight decay. Optimizers for matrices only, such as Muon,
    see parameters of three dimensions.

    Raises ValueError for settings that it does not honour. While it is constructed, the experts of one layer are in memory twice.
    """

    takes_counts_on_device = True
    """For `sync_free`."""

    takes_fp8_rows = False

    _frame: Any

    def __init__(self, num_local_experts: int, config: Any, *args: Any, **kwargs: Any):
        self.check_config(config)
        super().__init__(num_local_experts, config, *args, **kwargs)
        self.__dict__["_frame"] = self._modules.pop("local_experts")
        self.linear_fc1 = _Stacked([expert.linear_fc1 for expert in self._frame])
        self.linear_fc2 = _Stacked([expert.linear_fc2 for expert in self._frame])
        mark_stack(self.parameters())
        self._activation = _activation(config)
        modules = (config.recompute_modules or ()) if config.recompute_granularity == "selective" else ()
        self._recompute_activation = "moe_act" in modules
        self._delays = bool(getattr(config, "delay_wgrad_compute", False))
        self._due: deque[tuple[_Stacked, Callable[[], Tensor]]] = deque()  # gradients that `backward_dw` is to make
        for linear in (self.linear_fc1, self.linear_fc2) if self._delays else ():
            weight: Any = linear.weight
            weight.skip_backward_post_hook = True  # Megatron's DDP then registers its hook with the layer
        self.register_load_state_dict_post_hook(_collapse)

    @staticmethod
    def check_config(config: Any) -> None:
        """Raise ValueError for settings that these experts do not honour."""
        check_config(config, REFUSED)

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor | list[int], permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Return the experts' outputs [R, H] times the probs, and no bias, as it is added already.

        Args:
            permuted_local_hidden_states: [R, H], grouped by local expert.
            tokens_per_expert: [num_local_experts], on the host, or on the device of the rows, where nothing waits for it. Rows behind their
                sum may hold anything, and so may those of the output and of the gradient, which no combine reads.
            permuted_probs: [R] fp32 or fp64.
        """
        rows = permuted_local_hidden_states
        probs: Tensor | None = permuted_probs
        if self.config.moe_apply_probs_on_input:
            scale = clear_tail(permuted_probs, tokens_per_expert).unsqueeze(-1)
            rows, probs = (scale * clear_tail(rows, tokens_per_expert)).to(rows.dtype), None
        (w1, b1), (w2, b2) = self.linear_fc1(), self.linear_fc2()
        output = grouped_mlp(
            rows, tokens_per_expert, w1, w2, b1=b1, b2=b2, probs=probs, activation=self._activation,
            recompute_activation=self._recompute_activation, zero_tail=False, delay=self._delay if self._delays else None,
            **self._copies_of_weights(w1, w2),
        )  # fmt: skip
        return output, None

    def _copies_of_weights(self, w1: Tensor, w2: Tensor) -> dict[str, Any]:
        """Return the arguments of `grouped_mlp` that say whether this forward shares copies of the weights. Here it has none."""
        return {}

    def _delay(self, name: str, compute: Callable[[], Tensor]) -> None:
        self._due.append((self.linear_fc1 if name == "w1" else self.linear_fc2, compute))

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Make the gradients of the weights that backwards have left, as `delay_wgrad_compute` asks for."""
        while self._due:
            linear, compute = self._due.popleft()
            linear.add_gradient(compute())

    # ---- checkpoints ----

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return what SequentialMLP does: an entry for each expert, in the stacked parameters' memory."""
        with self._expanded():
            return super().state_dict(*args, **kwargs)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None) -> dict[str, Any]:
        """Return entries that save and load what SequentialMLP's do, one for each stacked parameter. The optimizer finds it by them."""
        with self._expanded():
            entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for name, kind, parameter in self._stacked_parameters():
            of_experts = [entries.pop(f"{prefix}local_experts.{index}.{name}.{kind}") for index in range(self.num_local_experts)]
            entries[f"{prefix}{name}.{kind}"] = stack_sharded(of_experts, parameter, f"{prefix}experts.{name}.{kind}")
        return entries

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}linear_fc1.weight" not in state_dict:  # which sharded checkpoints have
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

    def __init__(self, linears: list[Any]):
        super().__init__()
        self._hooks: list[Callable[[], None]] = []
        for kind in _KINDS:
            self.register_parameter(kind, _stack([linear._parameters.get(kind) for linear in linears]))
            for linear in linears:
                if kind in linear._parameters:
                    linear._parameters[kind] = None

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias. Frameworks hang on this call: Megatron's DDP gathers a bucket before the module that owns its parameters
        is called (`overlap_param_gather`)."""
        return self.weight, self.bias

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Megatron's DDP gives what adds the weight's `grad` to its `main_grad`, to be called after a delayed gradient."""
        self._hooks.append(hook)

    def add_gradient(self, grad: Tensor) -> None:
        """Add a delayed gradient of the weight where the next step looks for it."""
        weight = self.weight
        if not self._hooks and hasattr(weight, "main_grad"):  # of a DDP that does not know of the delay
            weight.main_grad.add_(grad)
            return
        weight.grad = grad if weight.grad is None else weight.grad + grad
        for hook in self._hooks:
            hook()

    def _save_to_state_dict(self, *args: Any) -> None:
        """Save nothing: the frame does."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        with torch.no_grad():
            for kind, parameter in self.named_parameters():
                if (loaded := state_dict.get(prefix + kind)) is not None:
                    parameter.copy_(loaded)


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


def check_config(config: Any, refused: dict[str, str]) -> None:
    """Raise ValueError for settings among `refused`, which says what to do, and for some values of others."""
    found = [(name, fix) for name, fix in refused.items() if getattr(config, name, None)]
    for name, fix in found:
        raise ValueError(f"{name} is {getattr(config, name)!r}, which grouped experts do not support; {fix}, or leave out grouped_experts")
    if (size := config.expert_tensor_parallel_size or 1) > 1:
        raise ValueError(
            f"expert_tensor_parallel_size is {size}, but grouped experts are not split; set it to 1 (--expert-tensor-parallel-size 1), or "
            "leave out grouped_experts"
        )
    if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
        raise ValueError(f"moe_apply_probs_on_input is True with moe_router_topk={config.moe_router_topk}; it needs moe_router_topk=1")


def _activation(config: Any) -> Activation:
    if not config.gated_linear_unit:
        return config.activation_func
    clamp, offset = getattr(config, "activation_func_clamp_value", None), getattr(config, "glu_linear_offset", 0.0)
    if config.activation_func is torch.nn.functional.silu and clamp is None and not offset:
        return "swiglu"
    return functools.partial(_gated, function=config.activation_func, clamp=clamp, offset=offset)


def _gated(inner: Tensor, *, function: Callable[[Tensor], Tensor], clamp: float | None, offset: float) -> Tensor:
    gate, up = inner.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp)
    return function(gate) * (up + offset)


def serve_experts(patches: Patches, is_ours: Callable[[Any], bool], experts: type[GroupedMLP] = GroupedMLP) -> None:
    """Let `SequentialMLP(...)` construct `experts` for the configs of which `is_ours` is true.

    Layer specs have the class in several forms and were often made before. All of them call it. Its `__init__` is replaced and not its
    `__new__`, because Python does not forget a `__new__` that is taken back.
    """
    stock = SequentialMLP.__init__

    @functools.wraps(stock)
    def __init__(self: Any, num_local_experts: int, config: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is SequentialMLP and is_ours(config):
            self.__class__ = experts
            experts.__init__(self, num_local_experts, config, *args, **kwargs)
        else:
            stock(self, num_local_experts, config, *args, **kwargs)

    patches.set(SequentialMLP, "__init__", __init__)
