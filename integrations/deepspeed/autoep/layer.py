"""DeepSpeed's AutoEPMoELayer with expert-sorted rows through a shared `Buffer`."""

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any

import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer, RouterOutput
from torch import Tensor

from deepep_moe._C import MAX_TOPK
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.calls import notify_peers, notify_peers_on_failure
from deepep_moe.exchange.handle import DispatchOutput
from deepep_moe.integrations.common.patches import meanwhile
from deepep_moe.integrations.common.warn_once import warn_once
from deepep_moe.integrations.deepspeed.autoep.router import BIAS, check_bias, has_moving_bias, move_with, restore_router, swap_router
from deepep_moe.integrations.deepspeed.buffers import Plan, Swapped, groups_of, ready, unswap, why_not_served
from deepep_moe.integrations.deepspeed.native.layer import lengthened, widened, with_gradient
from deepep_moe.integrations.deepspeed.options import Layer
from deepep_moe.library import untraced
from deepep_moe.nn.metrics import count_rows
from deepep_moe.ops.weighted import weighted_sum

# 0.19.7 and newer route tokens in a method, so that a library can take over between router and shared experts.
_ROUTE, _BACKEND = "_deepep_route", "deepep"


class PackedAutoEPMoELayer(Swapped, AutoEPMoELayer):
    """An AutoEPMoELayer whose forward dispatches and combines; everything else is DeepSpeed's.

    `replace_moe_layers` gives this class to layers that were made as AutoEPMoELayers, so modules, parameters, hooks and state dict are
    the same objects. Where our dispatch cannot serve, DeepSpeed's own one runs, and one log line says why.
    """

    @untraced
    def forward(self, hidden_states: Tensor) -> Any:
        """Take hidden_states [batch, sequence, hidden] in fp32, bf16 or fp16, and return what the replaced block of the model returns.

        Collective over the layer's expert-parallel group, in which numbers of tokens may differ. Under activation checkpointing the
        recomputation dispatches once more, on all ranks alike. Raises what `Buffer.dispatch`, the router and the experts raise. When one
        of these fails on this rank, the peers raise EPPeerError.
        """
        if not isinstance(self, PackedAutoEPMoELayer):  # the layer was restored, and a caller kept this method
            return AutoEPMoELayer.forward(self, hidden_states)
        reason = why_own(self, hidden_states)
        if reason is not None:
            self.deepep_moe_plan.options.refuse_lanes(reason)
            warn_once(f"AutoEP's own dispatch is used, without deepep_moe: {reason}", *groups_of(self))
            return super().forward(hidden_states)
        buffer = ready(self.ep_group, hidden_states.reshape(-1, hidden_states.shape[-1]), self.deepep_moe_plan).buffer
        num_calls = buffer.num_calls
        try:
            if not hasattr(AutoEPMoELayer, _ROUTE):
                return _forward_around(self, hidden_states, self._route)
            # So it calls `_deepep_route`, whichever backend is configured, also on one rank with all experts.
            with meanwhile(self, comm_backend=_BACKEND, ep_size=max(self.ep_size, 2)):
                return super().forward(hidden_states)
        except BaseException as error:
            notify_peers(buffer, error, num_calls)
            raise

    def _deepep_route(self, tokens: Tensor, router_output: object) -> Tensor:
        """Send tokens [num_tokens, hidden] to the experts, and return the same shape. AutoEP calls this between the router and the shared
        experts."""
        if why_own(self, tokens) is not None:
            return super()._deepep_route(tokens, router_output)
        return self._route(tokens, router_output)

    def _route(self, tokens: Tensor, router_output: Any) -> Tensor:
        route = self._route_exact if self.deepep_moe_plan.options.exact else self._route_fast
        return route(with_gradient(tokens), router_output.selected_experts, router_output.top_scores)

    def _route_exact(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """Send a row per (token, expert) there and back, and weight and sum the rows here as AutoEP does.

        Experts see rows in AutoEP's order.
        """
        num_tokens, num_topk = topk_idx.shape
        rows = x.unsqueeze(1).expand(-1, num_topk, -1)
        if self.score_apply == "pre":
            rows = (rows.float() * topk_weights.unsqueeze(-1)).to(x.dtype)
        buffer, out = self._dispatch(rows.reshape(-1, x.shape[1]).contiguous(), topk_idx.reshape(-1, 1), None, num_tokens)
        y = notify_peers_on_failure(buffer, self._run_experts, out.recv_x, out)
        sent_back: Tensor = buffer.combine(y, out.handle)
        combined = sent_back.view(num_tokens, num_topk, x.shape[1])
        if self.score_apply == "pre":
            return combined.sum(1)
        return weighted_sum(combined.transpose(0, 1), topk_weights.t())

    def _route_fast(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """Send a row per (token, rank) there, and weight and sum the rows as the buffer does."""
        topk_idx, topk_weights = lengthened(topk_idx, topk_weights, self.deepep_moe_plan.num_topk)
        buffer, out = self._dispatch(x.contiguous(), topk_idx, topk_weights, len(x))
        rows, weights = out.recv_x, out.recv_topk_weights
        assert weights is not None  # they were sent
        if self.score_apply == "pre":
            rows, weights = (rows.float() * weights.unsqueeze(-1)).to(rows.dtype), None
        combined: Tensor = buffer.combine(notify_peers_on_failure(buffer, self._run_experts, rows, out), out.handle, weights)
        return combined

    def _dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, num_tokens: int) -> tuple[Buffer, DispatchOutput]:
        """Dispatch x [num_rows, hidden] with topk_idx and topk_weights [num_rows, lanes]."""
        plan = self.deepep_moe_plan
        idx = widened(topk_idx, self.num_local_experts, plan.num_local_experts)
        send = methodcaller("dispatch", x, idx, topk_weights, layer=self.deepep_moe_number)
        buffer, out = ready(self.ep_group, x, plan).dispatch(num_tokens, send)
        count_rows(self, lambda: out.handle.num_rows_per_expert)
        return buffer, out

    def _run_experts(self, rows: Tensor, out: DispatchOutput) -> Tensor:
        """Run the experts, also without rows, so that their parameters get a gradient and the dispatch its backward on every rank."""
        counts, num_rows = out.num_recv_tokens_per_expert[: self.num_local_experts], len(rows)  # a larger buffer's other experts are empty
        if num_rows == 0:  # grouped matrix products then have no backward, so the first expert gets a row of zeros, which is dropped
            rows, counts = torch.nn.functional.pad(rows, (0, 0, 0, 1)), counts.clone()
            counts[0] = 1
        y: Tensor = self.experts(rows, counts)
        return y[:num_rows].contiguous()


def _forward_around(layer: Layer, hidden_states: Tensor, route: Callable[[Tensor, Any], Tensor]) -> Any:
    """Run the router, `route(tokens [num_tokens, hidden], router_output)` and the shared experts; return what the layer's forward does.

    For DeepSpeed 0.19.2 to 0.19.6, whose own forward has no place for another dispatch.
    """
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


def why_own(layer: PackedAutoEPMoELayer, x: Tensor) -> str | None:
    """Return the reason why our dispatch cannot serve this layer and x [..., hidden], or None. It is the same on all ranks of its group."""
    options = layer.deepep_moe_plan.options
    if options.sums != "ranks" and layer.score_apply == "pre":
        return "score_apply is 'pre', which applies scores before the experts, not to their outputs"
    if layer.ep_size == 1 and options.sums == "ranks":
        return "autoep_size is 1, every rank has all experts"
    folding = getattr(layer, "folding_group_handles", None)
    if folding is not None and folding.spec.tp_size > 1:
        return f"the model is tensor parallel over {folding.spec.tp_size} ranks (autotp_size), which share their tokens"
    if layer.combine_impl != "weighted_sum":
        return f"combine_impl is {layer.combine_impl!r}, which this dispatch would bypass; leave it out"
    if getattr(layer, "row_weighting_impl", "eager") != "eager":
        return f"row_weighting_impl is {layer.row_weighting_impl!r}, which this dispatch would bypass; leave it out"
    return why_not_served(layer, x, layer.top_k, MAX_TOPK)


def swap(layers: Sequence[Layer], plans: Sequence[Plan], engine: Any | None) -> None:
    """Give AutoEPMoELayers our dispatch, and their routers our gate and a bias that moves with the steps of `engine`.

    `plans` has the plan of each layer. Raises ValueError, before anything is swapped, for a bias to move without an engine, or one that is
    a parameter.
    """
    if any(plan.options.expert_bias_update_rate is not None for plan in plans):
        if engine is None:
            raise ValueError("expert_bias_update_rate needs the steps of DeepSpeed's engine; pass the engine to replace_moe_layers")
        for layer in layers:
            check_bias(layer.router)
        num_new = sum(getattr(layer.router, BIAS, None) is None for layer in layers)
        if num_new:
            warn_once(
                f"routers of {num_new} AutoEP layers are given an e_score_correction_bias, as they have none: checkpoints contain it "
                "from now on, and the model without deepep_moe loads them only with strict=False and does not route by it",
                *groups_of(layers[0]),
            )
    for layer, plan in zip(layers, plans, strict=True):
        swap_router(layer.router, plan.options, *groups_of(layer))
        layer.__class__, layer.deepep_moe_plan = PackedAutoEPMoELayer, plan
    if engine is not None:
        move_with(engine, [layer.router for layer in layers if has_moving_bias(layer.router)])


def restore(layers: Sequence[Layer]) -> None:
    """Make the layers DeepSpeed's AutoEPMoELayers again, with its routers. Biases keep their values and no longer move."""
    for layer in layers:
        restore_router(layer.router)
        unswap(layer, AutoEPMoELayer)
