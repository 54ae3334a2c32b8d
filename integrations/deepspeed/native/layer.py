"""DeepSpeed's MOELayer with packed rows through a shared `Buffer` instead of padded slots."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from deepspeed.moe.experts import Experts
from deepspeed.moe.sharded_moe import FIRST_ALLTOALL_TIMER, MOE_TIMER, SECOND_ALLTOALL_TIMER, MOELayer
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import Tensor

from deepep_moe._C import MAX_TOPK
from deepep_moe.device import is_gpu
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.by_expert import combine_by_expert, dispatch_by_expert, split_rows
from deepep_moe.exchange.calls import notify_peers_on_failure
from deepep_moe.exchange.checks import BLOCKWISE, GUESS
from deepep_moe.exchange.growing import GrowingBuffer
from deepep_moe.exchange.handle import DispatchHandle, DispatchOutput
from deepep_moe.exchange.operators import joined
from deepep_moe.integrations.common.warn_once import warn_once
from deepep_moe.integrations.deepspeed.buffers import Swapped, groups_of, ready, why_not_served
from deepep_moe.integrations.deepspeed.expert_weights import ExpertWeights
from deepep_moe.integrations.deepspeed.native.grouped import (
    check_fp8,
    check_no_biases,
    product_of,
    run_grouped,
    run_joined,
    stacked,
    weights_of,
    why_not_by_default,
)
from deepep_moe.integrations.deepspeed.native.routing import Routing, route
from deepep_moe.integrations.deepspeed.native.watched import has_hooks, is_replaced
from deepep_moe.library import untraced
from deepep_moe.nn.balance import Copies, Parts, Planned
from deepep_moe.nn.metrics import count_repeat, count_rows, timed
from deepep_moe.ops.fp8_kept import KeptWeights
from deepep_moe.ops.fp8_products import GROUP_ALIGNMENT
from deepep_moe.ops.grouped_products import has_kernels
from deepep_moe.ops.lanes import nodes_per_token


class PackedMOELayer(Swapped, MOELayer):
    """A MOELayer whose forward dispatches and combines; everything else, its state included, is DeepSpeed's.

    `replace_moe_layers` gives this class to layers that were made as MOELayers, so modules, parameters, hooks and state dict are the same
    objects. Where packed rows cannot serve, DeepSpeed's forward runs, and one log line says why.
    """

    deepep_moe_topk_idx: Tensor | None = None
    """[num_topk, num_tokens] choice of the last forward."""
    is_first_microbatch: bool | None = None
    """True if the next forward is the first of an optimizer step, as `set_is_first_microbatch` says; None if it was not called."""
    kept_weights: KeptWeights | None = None
    """fp8 copies of the experts' weights, once forwards share some."""

    @untraced
    def forward(self, *inputs: Tensor, **kwargs: Tensor | None) -> Tensor:
        """Take x [..., hidden] in fp32, bf16 or fp16, and used_token [num_tokens] or None.

        Returns the experts' outputs in the shape of x, in their dtype, and sets `l_aux` and `exp_counts`. Collective over the layer's
        expert-parallel group, in which numbers of tokens may differ. Raises what `Buffer.dispatch`, the gate and the experts raise. When
        one of these fails on this rank, the peers raise EPPeerError.
        """
        if not isinstance(self, PackedMOELayer):  # the layer was restored, and a caller kept this method
            return MOELayer.forward(self, *inputs, **kwargs)
        reason = why_stock(self, inputs[0])
        if reason is not None:
            self.deepep_moe_plan.options.refuse_lanes(reason)
            warn_once(f"DeepSpeed's own MoE forward runs, without deepep_moe: {reason}", *groups_of(self))
            return super().forward(*inputs, **kwargs)
        used_token = inputs[1] if len(inputs) > 1 else kwargs.get("used_token")
        with self._timed(MOE_TIMER, "time_moe"):
            x = with_gradient(inputs[0].reshape(-1, inputs[0].shape[-1]))
            growing = ready(self.ep_group, x, self.deepep_moe_plan)
            if self.deepep_moe_plan.options.balance is not None and self.ep_size > 1:
                return self._forward_with_copies(growing, x, used_token).view(inputs[0].shape)
            routing = notify_peers_on_failure(growing.buffer, self._choose, x, used_token)
            return self._exchange(growing, x, routing).view(inputs[0].shape)

    def _choose(self, x: Tensor, used_token: Tensor | None) -> Routing:
        routing = route(self.gate, x, used_token)
        # Faster than `self.l_aux = ...`, which calls `Module.__setattr__`.
        self.__dict__.update(l_aux=routing.l_aux, exp_counts=routing.exp_counts, deepep_moe_topk_idx=routing.topk_idx)
        return routing

    def _forward_with_copies(self, growing: GrowingBuffer, x: Tensor, used_token: Tensor | None) -> Tensor:
        """Run the layer with copies of hot experts. Collective."""
        of_layer, buffer = self.deepep_moe_plan, growing.buffer
        balance, last = of_layer.options.balance, of_layer.copies.get(self)
        assert balance is not None

        def prepare() -> tuple[list[ExpertWeights], Parts, Copies]:
            weights = self._weights_to_group(x)
            assert weights is not None  # it raises with balance
            check_no_biases(weights, "balance")
            parts, _ = stacked(weights, None if self.is_fp8 else x.device)
            return weights, parts, of_layer.buffers.copies_of(balance, parts, buffer, growing.meet)

        tell = partial(notify_peers_on_failure, buffer) if last is None or last.is_over else last.telling(buffer)
        weights, parts, copies = tell(prepare)
        of_layer.copies[self] = copies

        def plan() -> tuple[Tensor, Tensor, Planned]:
            topk_idx, topk_weights = self._lanes(x, self._choose(x, used_token))
            planned = copies.plan(topk_idx.contiguous(), parts, False)
            return planned.plan.topk_idx, topk_weights, planned

        tell = copies.telling(buffer)
        topk_idx, topk_weights, planned = tell(plan)
        combined = tell(self._exchange_joined, growing, x, topk_idx, topk_weights, weights, planned)
        output: Tensor = planned.fetch_in_backward(combined)
        return output

    @property
    def is_fp8(self) -> bool:
        return self.deepep_moe_plan.options.fp8

    def nodes_per_token(self, num_nodes: int) -> Tensor:
        """Return how many of `num_nodes` nodes, which have consecutive ranks of the layer's group, the tokens of the last forward went to.

        [num_tokens] int64. The own node counts too; dropped top-k entries count no node. Local. Raises ValueError before the first
        forward, and for a number that does not divide the experts.
        """
        if self.deepep_moe_topk_idx is None:
            raise ValueError("this layer has not run through deepep_moe yet; call it first")
        return nodes_per_token(self.deepep_moe_topk_idx.t(), self.num_local_experts * self.ep_size, num_nodes)

    def _exchange(self, growing: GrowingBuffer, x: Tensor, routing: Routing) -> Tensor:
        """Send x [num_tokens, hidden] to the experts, and return the weighted sums of their outputs, shaped as x.

        Exact mode sends a row per (lane, token) there and back, copied as it is, and weights and sums the rows here as DeepSpeed does.
        Gates fill an expert's slots in the order (lane, token) for k = 1 and 2, so experts see rows in DeepSpeed's order. Otherwise there
        is a row per (rank, token), and the experts' rank weights and sums the rows of a token; by lanes the token's rank does.
        """
        if self.deepep_moe_plan.options.exact:
            return self._exchange_by_expert(growing, x, routing.topk_idx.reshape(-1, 1), None, routing.topk_weights)
        weights = notify_peers_on_failure(growing.buffer, self._weights_to_group, x)
        lanes = self._lanes(x, routing)
        if weights is None and self.deepep_moe_plan.options.sums == "ranks":
            return self._exchange_by_expert(growing, x, *lanes, None)
        return self._exchange_joined(growing, x, *lanes, weights)

    def _lanes(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Return experts and weights [num_tokens, lanes of the buffer], with different experts for each token."""
        idx, weights = routing.topk_idx.t(), routing.topk_weights.t()
        if self.gate.k == 2 and x.dtype == torch.float16:  # an overflow to logits of -inf: the first expert is also the best of the others
            idx = torch.stack((idx[:, 0], idx[:, 1].masked_fill(idx[:, 1] == idx[:, 0], -1)), 1)
        return lengthened(idx, weights, self.deepep_moe_plan.num_topk)

    def _exchange_by_expert(
        self, growing: GrowingBuffer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, source_weights: Tensor | None
    ) -> Tensor:
        """Exchange rows in a tensor for each expert. topk_idx, topk_weights and source_weights are those of `dispatch_by_expert`."""
        x, plan = x.contiguous(), self.deepep_moe_plan
        idx = widened(topk_idx, self.num_local_experts, plan.num_local_experts)

        def send(buffer: Buffer) -> tuple[tuple[Tensor, ...], Tensor | None, DispatchHandle]:
            return dispatch_by_expert(buffer, x, idx, topk_weights, (1, 1), source_weights, self.deepep_moe_number)

        with self._timed(FIRST_ALLTOALL_TIMER, "time_falltoall", x):
            buffer, (parts, recv_topk_weights, handle) = growing.dispatch(x.shape[0], send)
        count_rows(self, lambda: handle.num_rows_per_expert)
        outputs = notify_peers_on_failure(buffer, self._run_experts, parts)
        with self._timed(SECOND_ALLTOALL_TIMER, "time_salltoall", x):
            return combine_by_expert(buffer, outputs, recv_topk_weights, handle, source_weights)

    def _exchange_joined(
        self,
        growing: GrowingBuffer,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        weights: Sequence[ExpertWeights] | None,
        planned: Planned | None = None,
    ) -> Tensor:
        """Exchange rows in one tensor, for grouped products of `weights`. On GPUs the host does not wait for the counts before these are
        queued. Without `weights` the experts run one by one.

        planned: the copies of experts, which topk_idx chooses as the experts behind those of their rank."""
        num_experts = self.num_local_experts + (0 if planned is None else planned.copies.num_slots)
        x, idx = x.contiguous(), widened(topk_idx, num_experts, self.deepep_moe_plan.num_local_experts)
        fp8: bool | str = BLOCKWISE if self.is_fp8 else False
        alignment, bound = GROUP_ALIGNMENT if fp8 else 1, None if fp8 or weights is None else GUESS

        def send(buffer: Buffer) -> DispatchOutput:
            number = self.deepep_moe_number
            return buffer.dispatch(x, idx, topk_weights, expert_alignment=alignment, num_recv_rows=bound, fp8=fp8, layer=number)

        with self._timed(FIRST_ALLTOALL_TIMER, "time_falltoall", x):
            buffer, out = growing.dispatch(len(x), send)
        outputs = notify_peers_on_failure(buffer, self._run_joined, weights, out, planned)
        if out.handle.is_late:
            buffer, settled = growing.settle(len(x), send, buffer, out)
            if settled is not out:
                out, outputs = settled, notify_peers_on_failure(buffer, self._run_joined, weights, settled, planned)
                count_repeat(self)
        if planned is not None:
            outputs = notify_peers_on_failure(buffer, planned.end, outputs, out.handle)
        count_rows(self, lambda: out.handle.num_rows_per_expert if planned is None else planned.copies.rows_of_experts())
        with self._timed(SECOND_ALLTOALL_TIMER, "time_salltoall", x):
            combined: Tensor = buffer.combine(outputs, out.handle, None if fp8 else out.recv_topk_weights, fp8=fp8)
            return combined

    def _run_joined(self, weights: Sequence[ExpertWeights] | None, out: DispatchOutput, planned: Planned | None) -> Tensor:
        if weights is None:
            parts = split_rows(out.recv_x, out.handle.num_rows_per_expert_list, (1, 1))
            return joined(run_one_by_one(list(self.experts.deepspeed_experts), parts), out.handle, out.recv_x.shape[1])
        if self.is_fp8 and self.is_first_microbatch is not None and self.kept_weights is None:
            self.kept_weights = KeptWeights()
        # Experts of the buffer beyond those of this layer have no rows.
        counts = out.handle.num_rows_per_expert[: self.num_local_experts + (0 if planned is None else planned.copies.num_slots)]
        rows: tuple[Tensor, ...] = (out.recv_x,)
        kept = None
        if self.is_fp8 and out.recv_topk_weights is not None:
            rows, kept = (out.recv_x, out.recv_topk_weights), self.kept_weights
        if planned is None:
            return run_joined(weights, rows, counts, kept, self.is_first_microbatch)
        return planned.run(product_of(weights, kept, self.is_first_microbatch), rows, counts)

    def _run_experts(self, parts: tuple[Tensor, ...]) -> list[Tensor]:
        """Run every local expert, so that each has a gradient on every rank, in grouped products where the options ask for them.

        parts: [1, 1, num_rows, hidden] for each expert, as are the outputs. Those beyond this layer's experts are empty.
        """
        weights = self._weights_to_group(parts[0]) if self.deepep_moe_plan.options.exact else None
        return run_one_by_one(list(self.experts.deepspeed_experts), parts) if weights is None else run_grouped(weights, parts)

    def _weights_to_group(self, rows: Tensor) -> list[ExpertWeights] | None:
        """Return the experts' weights if they are to run in grouped products of such rows [..., hidden], or None. Raises for fp8 rows and
        copies of experts that cannot be served."""
        options = self.deepep_moe_plan.options
        option, needs = options.grouped_experts, "fp8" if self.is_fp8 else "balance" if options.balance is not None else None
        is_default = option is None and needs is None
        if is_default and not (is_gpu(rows.device) and has_kernels(rows.device) and rows.dtype == torch.bfloat16):
            option = False
        if option is False:
            return None
        weights = weights_of(list(self.experts.deepspeed_experts), option or True)
        if is_default and not isinstance(weights, str):
            weights = why_not_by_default(weights, rows.dtype) or weights
        if not isinstance(weights, str):
            if self.is_fp8:
                check_fp8(weights, rows)
            return weights
        if needs is not None:
            raise ValueError(f"{needs} is given, but experts cannot run in grouped products: {weights}; leave {needs} out")
        warn_once(f"experts of a MoE layer run one by one, without grouped products: {weights}", on_all_ranks=True)
        return None

    def _timed(self, timer: str, attribute: str, rows: Tensor | None = None) -> contextlib.AbstractContextManager[object]:
        """Write the milliseconds of a block to `attribute`, where the engine reads them, under `wall_clock_breakdown`. Else time the parts
        of the exchange, which have `rows`, for metrics."""
        if self.wall_clock_breakdown:
            return self._timing(timer, attribute)
        return contextlib.nullcontext() if rows is None else timed(self, rows)

    @contextlib.contextmanager
    def _timing(self, timer: str, attribute: str) -> Iterator[None]:
        self.timers(timer).start()
        try:
            yield
        finally:
            self.timers(timer).stop()
        setattr(self, attribute, self.timers(timer).elapsed(reset=False))


def run_one_by_one(experts: list[torch.nn.Module], parts: tuple[Tensor, ...]) -> list[Tensor]:
    """Call each expert with its rows. One without rows gets a row of zeros, because experts that always see padded slots may rely on
    having a row."""
    outputs: list[Tensor] = []
    for expert, rows in zip(experts, parts, strict=False):
        has_rows = rows.numel() > 0
        y = expert(rows if has_rows else torch.nn.functional.pad(rows, (0, 0, 0, 1)))
        y = y[0] if isinstance(y, tuple) else y  # (output, bias) of Megatron's layers, whose bias DeepSpeed leaves out
        outputs.append(y if has_rows else y[..., :0, :])
    for rows in parts[len(outputs) :]:
        outputs.append(outputs[0].new_empty(*outputs[0].shape[:-2], 0, rows.shape[-1]))
    return outputs


def with_gradient(x: Tensor) -> Tensor:
    """Return x with a gradient, so that every rank takes part in the backward, also a rank whose x needs none, say for lack of tokens."""
    return x.detach().requires_grad_() if torch.is_grad_enabled() and not x.requires_grad else x


def widened(topk_idx: Tensor, num_local_experts: int, num_buffer_experts: int) -> Tensor:
    """Renumber experts for a buffer with `num_buffer_experts` per rank. A layer with fewer uses the first ones of each rank."""
    if num_local_experts == num_buffer_experts:
        return topk_idx
    idx = topk_idx.div(num_local_experts, rounding_mode="floor") * num_buffer_experts + topk_idx % num_local_experts
    return torch.where(topk_idx < 0, topk_idx, idx)


def lengthened(topk_idx: Tensor, topk_weights: Tensor, num_topk: int) -> tuple[Tensor, Tensor]:
    """Return both as [num_tokens, num_topk], with empty lanes added where the layer shares the buffer with one that has more."""
    num_missing = num_topk - topk_idx.shape[1]
    if num_missing > 0:
        topk_idx = torch.nn.functional.pad(topk_idx, (0, num_missing), value=-1)
        topk_weights = torch.nn.functional.pad(topk_weights, (0, num_missing))
    return topk_idx, topk_weights


def why_stock(layer: PackedMOELayer, x: Tensor) -> str | None:
    """Return the reason why packed rows cannot serve this layer, or None. It is the same on every rank of the layer's group."""
    tensor_parallel = bwc_tensor_model_parallel_world_size(groups.mpu)
    if tensor_parallel > 1:
        return f"the model is tensor parallel over {tensor_parallel} ranks (mpu), which share their tokens"
    if layer.use_tutel:
        return "the layer was made with use_tutel=True; leave it out"
    if type(layer.experts) is not Experts:  # a subclass may have a forward of its own
        return f"experts are {type(layer.experts).__name__}, not deepspeed.moe.experts.Experts"
    if is_replaced(layer.experts):
        return "the forward of the Experts module was replaced; replace the forwards of single experts"
    if has_hooks(layer.experts):
        warn_once(
            "hooks on the Experts of a MoE layer do not run, as each expert is called by itself; put them on those", on_all_ranks=True
        )
    return why_not_served(layer, x, layer.gate.k, min(MAX_TOPK, layer.num_local_experts * layer.ep_size))
