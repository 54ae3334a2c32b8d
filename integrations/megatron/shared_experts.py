"""Megatron-Core's shared experts beside the exchange: in parts, on their own stream, between the calls of the dispatcher.

`moe_shared_expert_overlap` asks for it. Megatron-Core itself knows it with its alltoall dispatcher, from 0.18 also with flex dispatchers.
"""

from typing import Any

import torch
from torch import Tensor

from deepep_moe.integrations.megatron.options import Config

SWITCH = "moe_shared_expert_overlap"
_BETWEEN_CALLS = ("cached_fc1_input", "cached_fc2_input", "cached_fc2_output", "cached_output", "gate_score")


class SharedExperts:
    """The parts of a `SharedExpertMLP`, in the order in which Megatron-Core's flex dispatcher runs them.

    The first product runs under the dispatch, the second one under the combine. On the stream of the calls nothing waits for them before
    their sum.
    """

    def __init__(self, module: Any):
        self._module = module
        self._follows_the_call = hasattr(module, "wait_current_stream")  # 0.18: the input's all-gather is enqueued after the dispatch

    def before_dispatch(self, x: Tensor) -> None:
        """Run what comes before the dispatch of x [T, H]: hooks of the gate, and communication."""
        takes_kwargs = self._module._forward_pre_hooks_with_kwargs
        for key, hook in self._module._forward_pre_hooks.items():  # Megatron's DDP gathers the gate's weight in one, and nobody calls us
            hook(self._module, (x,), *([{}] if key in takes_kwargs else []))
        if self._follows_the_call:
            self._module.wait_current_stream()
        else:
            self._module.pre_forward_comm(x)

    def after_dispatch(self, x: Tensor, recv_x: Tensor) -> None:
        """Run the first product. `recv_x` of the dispatch decides the order of the backward."""
        if self._follows_the_call:
            self._module.pre_forward_comm(x, wait_current_stream=False)
        self._module.linear_fc1_forward_and_act(recv_x)

    def before_combine(self) -> None:
        """The second product waits for the routed experts, with which it would share the SMs."""
        if self._follows_the_call:
            self._module.wait_current_stream()
        else:
            self._module.stream.wait_stream(torch.cuda.current_stream())

    def add_to(self, combined_x: Tensor) -> Tensor:
        """Add the output to combined_x [T, H], in place."""
        self._module.linear_fc2_forward(combined_x)
        self._module.post_forward_comm()
        return combined_x.add_(self._module.get_output())

    def forget(self) -> None:
        """Forget a forward that failed between the parts."""
        for name in _BETWEEN_CALLS:
            setattr(self._module, name, None)
        if hasattr(self._module, "_overlap_state"):
            self._module._overlap_state = type(self._module._overlap_state).IDLE


def check_shared_overlap(config: Config) -> None:
    """Raise ValueError for what cannot be with `moe_shared_expert_overlap`."""
    if not getattr(config, SWITCH):
        return
    for name in ("overlap_moe_expert_parallel_comm", "moe_latent_size"):
        if getattr(config, name, None):
            raise ValueError(f"{SWITCH} is True and {name} {getattr(config, name)}, which exclude each other; set one of them")
    if config.recompute_granularity == "selective" and "shared_experts" in (config.recompute_modules or ()):
        raise ValueError(f"{SWITCH} is True and recompute_modules has 'shared_experts', which exclude each other; leave one of them out")
