"""The forward of AutoEP layers for DeepSpeed 0.19.2 to 0.19.6, whose own forward has no place for another dispatch."""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.module_inject.auto_ep_layer import RouterOutput
from torch import Tensor

from deepep_moe.integrations.deepspeed.options import Layer


def forward_around(layer: Layer, hidden_states: Tensor, route: Callable[[Tensor, Any], Tensor]) -> Any:
    """Run the router, `route(tokens [num_tokens, hidden], router_output)` and the shared experts; return what the layer's forward does."""
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    router_output = RouterOutput(*layer.router(tokens, layer.expert_bias))
    with torch.no_grad():
        layer.tokens_per_expert.add_(router_output.num_tokens_per_expert)
    output = route(tokens, router_output)
    if layer.moe_output_shape != "flat":
        output = output.view(hidden_states.shape)
    if layer.shared_experts is not None:
        output = output + _shared_output(layer, tokens, hidden_states).reshape(output.shape)
    # A hook on the router has stored its logits there for models that want them.
    logits, layer._cached_router_logits = layer._cached_router_logits, None
    return (output, logits) if layer.return_router_logits else output


def _shared_output(layer: Layer, tokens: Tensor, hidden_states: Tensor) -> Tensor:
    """Return the output of the shared experts, whose input has the shape that the model gives them."""
    gate = layer.shared_experts_gate
    x = tokens if layer.moe_output_shape == "flat" or gate is not None else hidden_states
    output: Tensor = layer.shared_experts(x)
    return output if gate is None else gate(x).sigmoid() * output
