"""Megatron-Core's 1F1B schedule (`overlap_moe_expert_parallel_comm`), which runs a layer in parts, beside the backward of another batch.

The schedule frees the inputs of a part that has run, by the name of the dispatcher. It cannot know ours. Two of them must stay. The
tokens of the dispatch are a view of what router and shared experts keep for their backward. Experts keep the rows they are given, as no
permutation follows the dispatch. But experts that compute in fp8 or fp4 keep quantized rows instead, and the rows may go.

The experts' outputs may go: a combine keeps its handle only.
"""

import functools
from typing import Any

from deepep_moe.integrations.common.patches import Patches, Stock

_FIRST_PARTS = ("attn", "pre_dispatch_computation")  # before 0.19, and from then on
_OTHER_PARTS = ("post_attn", "mlp")  # 0.14 and 0.15; all


def serve_schedule(patches: Patches) -> None:
    """Let the schedule's nodes of a layer with our dispatcher keep what its backward needs, and tell the peers where they fail."""
    try:
        from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
    except ImportError:  # 0.13
        return
    from deepep_moe.integrations.megatron.dispatcher import NativeTokenDispatcher

    @patches.around(TransformerLayerSchedulePlan, "_build_callable_nodes")
    def build(stock: Stock, plan: TransformerLayerSchedulePlan, /, *args: object, **kwargs: object) -> None:
        stock(plan, *args, **kwargs)
        dispatcher = _dispatcher_of(plan.layer)
        if isinstance(dispatcher, NativeTokenDispatcher):
            _adapt(plan, dispatcher)


def _dispatcher_of(layer: object) -> Any:
    """Return the dispatcher of a transformer layer, or of the one in a layer for multi-token prediction. None for dense layers."""
    for name in ("transformer_layer", "mtp_model_layer"):
        layer = getattr(layer, name, layer)
    return getattr(getattr(layer, "mlp", None), "token_dispatcher", None)


def _adapt(plan: Any, dispatcher: Any) -> None:
    config = dispatcher.config
    plan.moe_dispatch.free_input = False
    plan.mlp.free_input = plan.mlp.free_input and bool(config.fp8 or getattr(config, "fp4", None))
    for name in (*_FIRST_PARTS, *_OTHER_PARTS):
        node = getattr(plan, name, None)
        if node is None:
            continue
        run = dispatcher.run_first_part if name in _FIRST_PARTS else dispatcher.run_part
        node.forward_func = functools.partial(run, node.forward_func)
        node.backward_func = functools.partial(dispatcher.run_part, node.backward_func)
