"""The token dispatcher that takes the place of Megatron-Core's flex dispatcher.

A dispatch delivers rows grouped by local expert, so no permutation follows it and none precedes combine. The experts apply the probs, so
combine is an unweighted sum; with sums by lanes combine applies them.
"""

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher, MoETokenDispatcher

from deepep_moe._C import MAX_TOPK, ROW_ALIGNMENT
from deepep_moe.errors import EPCapacityError
from deepep_moe.exchange.buffer import Buffer, new_layer
from deepep_moe.exchange.calls import notify_peers, notify_peers_on_failure
from deepep_moe.exchange.checks import BLOCKWISE, GUESS
from deepep_moe.exchange.growing import GrowingBuffer
from deepep_moe.exchange.handle import DispatchHandle, DispatchOutput
from deepep_moe.integrations.common.warn_once import say_on
from deepep_moe.integrations.megatron.buffers import LayerBuffers
from deepep_moe.integrations.megatron.cuda_graphs import ITERATION, check_graphs, graphed_parts, holds_calls
from deepep_moe.integrations.megatron.gating import choice_for, stage_group
from deepep_moe.integrations.megatron.grouped_experts import whose_experts
from deepep_moe.integrations.megatron.options import Config
from deepep_moe.integrations.megatron.recompute import Dispatched, record, recorded, take_recorded, trains
from deepep_moe.integrations.megatron.recv_capacity import FACTOR_FIELD, HOW_TO_GO_ON, RecvCapacity, is_judged_at_end
from deepep_moe.integrations.megatron.shared_experts import SharedExperts, check_shared_overlap
from deepep_moe.nn.balance import CALLS_OF_PLAN, Copies, Planned, has_hooks
from deepep_moe.nn.metrics import LayerMetrics
from deepep_moe.ops.fp8_products import check_products
from deepep_moe.ops.lanes import LanesOfMap, weights_at

_NO_PADDING = (
    "moe_pad_expert_input_to_capacity is True, but deepep_moe sends no padding to reach a capacity; set it to False, also in inference "
    "(moe_pad_experts_for_cuda_graph_inference sets it). enable(expert_alignment=...) pads the rows of each expert"
)


class _CommManager(SimpleNamespace):
    """The fields of a flex dispatcher's communication manager that Megatron-Core reads and writes.

    Its 1F1B schedule writes the two kinds of probs and reads the count; nothing here reads what it writes. Its PagedStashRunner sets the
    factor to None before it runs a step again, and back afterwards.
    """

    def __init__(self, capacity: RecvCapacity | None, count_rows: Callable[[], object]):
        super().__init__(token_probs=None, dispatched_probs=None, get_number_of_tokens_per_expert=count_rows)
        self._capacity = capacity

    @property
    def moe_expert_rank_capacity_factor(self) -> float | None:
        if self._capacity is None or not self._capacity.has_runner:
            raise AttributeError(FACTOR_FIELD)  # Megatron-Core sees by this that a layer has no bound
        return self._capacity.factor

    @moe_expert_rank_capacity_factor.setter
    def moe_expert_rank_capacity_factor(self, factor: float | None) -> None:
        if self._capacity is not None:
            self._capacity.factor = factor


@dataclass
class _Forward:
    """The state of one forward between its calls, except `topk_idx` and `hidden_shape`, which a CUDA graph of its first part hands over."""

    buffer: Buffer
    num_calls: int
    """Calls that `buffer` has seen when the forward's last call returned. If the forward fails while this number stays, it failed outside
    of a call, and the peers have to be told."""
    out: DispatchOutput | None = None
    """The result of the dispatch, kept until the combine."""
    tokens_per_expert: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    """The weights of the rows, if combine applies them."""
    counting: LayerMetrics | None = None
    """The metrics to which this forward adds."""
    planned: Planned | None = None
    """Its copies of experts, until the combine."""
    settle: Callable[[], tuple[Buffer, DispatchOutput]] | None = None
    """`Buffer.settle` of a dispatch that has guessed its rows, until the combine. If a peer has had no room for its tokens, all ranks
    dispatch again into a larger buffer, which is returned then."""


class NativeTokenDispatcher(MoEFlexTokenDispatcher):
    """Dispatch and combine through a shared `deepep_moe.Buffer` over the group of all expert shards (TP x EP).

    Everything differentiable goes through arguments and returns. Raises ValueError for configurations that it does not serve.
    """

    def __init__(self, num_local_experts: int, local_expert_indices: list[int], config: Config, *, buffers: LayerBuffers, **groups: Any):
        _check_config(config, buffers.options.expert_alignment)
        if buffers.options.sums != "ranks" and getattr(config, "moe_apply_probs_on_input", False):
            raise ValueError(
                f"moe_apply_probs_on_input is True, but sums={buffers.options.sums!r} applies the probs to outputs; set it to False"
            )
        # Not the flex dispatcher's own constructor: it would demand DeepEP and build its communication manager.
        MoETokenDispatcher.__init__(self, config=config, **groups)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        self.buffers = buffers
        self._capacity = buffers.capacity_for(config)
        if buffers.options.balance is not None:
            _check_balance(config)
        self._fp8: str | bool = BLOCKWISE if buffers.options.fp8 else False
        check_graphs(config, buffers.options, self._capacity is not None)
        self.hidden_shape = torch.Size()
        self.topk_idx: torch.Tensor | None = None
        self._forward: _Forward | None = None
        self._shared: SharedExperts | None = None
        self._layer: Callable[[], Any] = lambda: None
        self._layer_number = new_layer()
        self._guesses_rows = False
        self._asked: tuple[Any, ...] = ()  # `_growing` was found for it
        self._growing: GrowingBuffer | None = None  # it replaces its buffer when a rank has more tokens
        self._copies: Callable[[], Copies | None] = lambda: None  # those of the latest forward, while the buffers hold them
        self._runs_layer = False
        balance = buffers.options.balance
        self._num_slots = balance.num_slots if balance is not None and self.ep_size > 1 else 0  # of this rank, for copies of experts
        self._hidden = getattr(config, "moe_latent_size", None) or config.hidden_size  # width of a row, as far as the config tells
        # A CUDA graph of the preprocessing must hand this over. Dotted names crash the local graphs of 0.16 and 0.17.
        self.cudagraph_attrs = ["topk_idx"]
        self._comm_manager = _CommManager(self._capacity, lambda: self._forward and self._forward.tokens_per_expert)
        # Local graphs write the choices of later micro batches into the tensor of the first one, whose backward still needs it.
        self._choice_is_overwritten = getattr(config, "cuda_graph_impl", None) == "local"

    def set_shared_experts(self, shared_experts: object) -> None:
        """Let the shared experts [T, H] -> [T, H] run beside the calls, on their own stream. `moe_shared_expert_overlap` asks for it."""
        self._shared = SharedExperts(shared_experts)

    def join(self, layer: Any) -> None:
        """See the whole layer, once it is there. Raises ValueError for experts that are not those that options ask for."""
        name, is_ours = type(layer.experts).__name__, hasattr(type(layer.experts), "takes_counts_on_device")
        takes_counts = getattr(layer.experts, "takes_counts_on_device", False)
        says_why = "call enable(experts='own') (--experts own), which says why grouped experts do not take its place"
        if self._capacity is not None and not takes_counts:
            raise ValueError(f"sync_free is asked for, but {name} reads its counts on the host; {says_why}, or leave out sync_free")
        if self._fp8 and not getattr(layer.experts, "takes_fp8_rows", False):
            raise ValueError(
                f"fp8 is asked for, but {name} takes no fp8 rows; build the layer with SequentialMLP or TEGroupedMLP, whose place "
                "grouped experts take, or leave out fp8"
            )
        if self._num_slots > 0 and not is_ours:
            raise ValueError(
                f"balance is given, but the layer has Megatron-Core's {name}, which runs no copies of experts; {says_why}, or leave out "
                "balance"
            )
        if self.buffers.options.experts == "own" and not is_ours:
            raise ValueError(
                f"experts is 'own', but the layer has {name}, whose place grouped experts do not take; build it with SequentialMLP or "
                "TEGroupedMLP, or keep Megatron-Core's experts: experts='framework' (--experts framework)"
            )
        self._layer = weakref.ref(layer)
        self.buffers.layers.add(layer)
        # Work beside the experts, and work that keeps their inputs, would have to run again with them.
        runs_apart = self._shared is not None or getattr(self.config, "overlap_moe_expert_parallel_comm", False)
        is_plain = self._capacity is None and not self._fp8 and not runs_apart
        self._guesses_rows = bool(is_plain and takes_counts and getattr(layer.experts, "is_fast", True))

    @property
    def _is_training(self) -> bool:
        return bool(getattr(self._layer(), "training", True))

    def _metrics_of_forward(self) -> LayerMetrics | None:
        """Return what this forward is to be counted in: None without metrics, and for forwards that do not train."""
        layer = self._layer()
        if self.buffers.metrics is None or layer is None or not (self._is_training and trains()):
            return None
        return self.buffers.metrics.of(layer)

    # ---- more rows than there is room for: recv_capacity.py ----

    def follow_runner(self) -> None:
        """Leave it to a PagedStashRunner to run steps again that have brought more rows than there is room for."""
        if self._capacity is not None and getattr(self.config, FACTOR_FIELD, None) is not None:
            self._capacity.has_runner = True

    def check_over_budget(self) -> torch.Tensor | None:
        """Return [1] bool, on the device of the rows: since the last reset more rows have come than there was room for. None where nothing
        of the kind is noted, as the dispatch raises EPCapacityError. Megatron-Core 0.19 asks."""
        return self._capacity.over_budget if self._capacity is not None and self._capacity.has_runner else None

    def reset_over_budget(self) -> None:
        if self._capacity is not None:
            self._capacity.reset()

    @property
    def _notes_excess(self) -> bool:
        """Are rows without room only noted, for somebody to ask at the end of the step?"""
        capacity = self._capacity
        if capacity is None or capacity.has_runner:
            return capacity is not None
        return capacity.factor is not None and self._is_training and is_judged_at_end(self.config, self.tp_ep_group)

    def run_layer(
        self, forward: Callable[..., object], layer: object, hidden_states: torch.Tensor | None, *args: object, **kwargs: object
    ) -> Any:
        """Run `forward(layer, hidden_states [S/TP, B, H], ...)`, which makes a dispatch and a combine.

        If it fails on this rank between these calls, in the router or an expert, the peers raise EPPeerError with its error in their next
        call. A call that fails tells the peers itself.
        """
        if hidden_states is None:  # a later part of a forward whose first part is a CUDA graph
            return forward(layer, hidden_states, *args, **kwargs)
        buffer = self._buffer_for(hidden_states)
        self._forward = _Forward(buffer, buffer.num_calls)
        copies = self._copies()
        last_call = 0 if copies is None else copies.slots.num_calls + (CALLS_OF_PLAN if recorded() is None else 1)
        self._runs_layer = True
        try:
            return forward(layer, hidden_states, *args, **kwargs)
        except BaseException as error:
            if copies is not None:
                self._layer().experts.planned = None
                copies.tell(error, last_call)
            notify_peers(self.buffer, error, self._current.num_calls)
            self._forward = _Forward(self._current.buffer, self._current.num_calls)  # without the rows and the graph of this forward
            if isinstance(error, EPCapacityError):
                error.add_note(HOW_TO_GO_ON)
                if (metrics := self._metrics_of_forward()) is not None:
                    metrics.num_over_capacity += 1
            if self._shared is not None:
                self._shared.forget()
            raise
        finally:
            self._runs_layer = False

    def run_part(self, part: Callable[..., object], *args: object, **kwargs: object) -> Any:
        """Run `part(...)`, which makes no call of the buffer. If it fails on this rank, the peers are told.

        These are methods of the layer. A recomputation of it, and the 1F1B schedule, run its parts only, so `run_layer` cannot tell them.
        """
        if self._growing is None:
            return part(*args, **kwargs)
        buffer = self._growing.buffer
        num_calls = buffer.num_calls
        try:
            return part(*args, **kwargs)
        except BaseException as error:
            # Megatron-Core leaves a layer that it captures by this signal; `run_layer` tells of the rest.
            if type(error).__name__ != "MoECudaGraphPartialCaptureSignal" and not self._runs_layer:
                copies = self._copies()
                if copies is not None and recorded() is not None:  # a second run, before its dispatch
                    copies.tell(error, copies.slots.num_calls + 1)
                notify_peers(buffer, error, num_calls)
            raise

    def run_first_part(self, part: Callable[..., object], hidden_states: torch.Tensor, *args: object) -> Any:
        """Run `part(hidden_states [S/TP, B, H], ...)`, which comes before the dispatch, as `run_part` does. Collective at first."""
        self._buffer_for(hidden_states)
        return self.run_part(part, hidden_states, *args)

    def _buffer_for(self, hidden_states: torch.Tensor) -> Buffer:
        """Return the buffer of a forward of hidden_states [S/TP, B, H], before its dispatch. Collective at first."""
        buffer = self._find(hidden_states.shape[:-1].numel(), self._hidden, hidden_states.device).buffer
        if self._num_slots > 0 and buffer.num_calls >= 0:  # a buffer that cannot be used raises here
            self._copies_for(buffer)
        return buffer

    def _copies_for(self, buffer: Buffer) -> Copies:
        """Return the copies of the layer's experts. Collective at first, and after `suspend` and `recover`."""
        copies = self._copies()
        if copies is None or copies.is_over:
            balance = self.buffers.options.balance
            assert balance is not None  # layers without it have no slots
            copies = self.buffers.copies_of(balance, self._layer().experts.weights(), buffer)
            self._copies = weakref.ref(copies)
        return copies

    @property
    def _current(self) -> _Forward:
        assert self._forward is not None, "a forward begins with its dispatch at the latest"
        return self._forward

    @property
    def buffer(self) -> Any:
        """The `Buffer` of the last forward, or None before the first."""
        return self._forward and self._forward.buffer

    def _find(self, num_tokens: int, hidden: int, device: torch.device) -> GrowingBuffer:
        """Return the buffer that the layers share. Collective where it is constructed."""
        num_sms = getattr(self.config, "moe_flex_dispatcher_num_sms", None)  # from 0.19
        asked = hidden, device, num_sms, self._notes_excess
        if self._growing is not None and asked == self._asked and not self._growing.is_destroyed:
            return self._growing  # several calls of each forward come here
        num_ranks, num_topk = self.ep_size * self.tp_size, self.config.moe_router_topk * self.tp_size
        num_experts = (self.num_local_experts + self._num_slots) * num_ranks
        self._growing = self.buffers.ready(
            self.tp_ep_group, num_tokens, hidden, num_experts, num_topk, device=device, num_sms=num_sms,
            is_bounded=self._capacity is not None, allows_excess=asked[-1],
        )  # fmt: skip
        self._asked = asked
        layers = self.buffers.layers
        say_on(len(layers), self._growing.buffer.backend, {whose_experts(layer.experts) for layer in layers}, stage_group())
        return self._growing

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take hidden_states [S/TP, B, H], routing_map [T, E] bool, probs [T, E]. Return x [T, H], topk_weights [T, TP * topk] fp32. Local.

        With fp8 it raises BackendUnavailableError on a GPU without fp8 products, before anything is sent.
        """
        if self.config.moe_pad_expert_input_to_capacity:  # switched on since the construction
            raise ValueError(_NO_PADDING)
        if self._fp8:
            check_products(hidden_states.device)
        self.hidden_shape = hidden_states.shape
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        num_experts, num_topk = self.num_local_experts * self.ep_size, self.config.moe_router_topk
        choice, first_run = choice_for(routing_map), recorded()
        if first_run is not None and first_run.choice is not None:
            topk_idx = first_run.choice[1]
            topk_weights = weights_at(probs.reshape(-1, num_experts), topk_idx)
        elif first_run is not None:
            sent = first_run.handle.topk_idx.view(-1, num_topk * self.tp_size)  # one by one with sums by lanes
            topk_idx = choice_of_shards(sent, self.num_local_experts, self.tp_size)
            topk_weights = weights_at(probs.reshape(-1, num_experts), topk_idx)
        elif choice is not None:
            topk_idx, topk_weights = choice.topk_idx, choice.weights_for(probs)
        else:
            topk_idx, topk_weights = LanesOfMap.apply(routing_map.reshape(-1, num_experts), probs.reshape(-1, num_experts), num_topk)
        topk_idx, topk_weights = repeat_for_tp(topk_idx, topk_weights, self.num_local_experts, self.tp_size)
        self.topk_idx = topk_idx.clone() if self._choice_is_overwritten else topk_idx
        return x, topk_weights

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Dispatch x [T, H] with topk_weights [T, TP * topk]. Return recv_x [R, H] grouped by local expert, recv_topk_weights [R] fp32."""
        if self._shared is not None:
            self._shared.before_dispatch(hidden_states)
        first_run, counting = take_recorded(), self._metrics_of_forward()
        with _timed(counting, hidden_states):
            forward = self._dispatch(hidden_states, probs) if first_run is None else self._dispatch_again(hidden_states, probs, first_run)
        self._forward, forward.counting = forward, counting  # before anything else can fail
        out, planned = forward.out, forward.planned
        assert out is not None and out.recv_topk_weights is not None and self.topk_idx is not None  # they were sent
        forward.tokens_per_expert = self._counts_for_experts(out, planned)
        if first_run is None and forward.settle is None:
            self._record(out.handle)
        if counting is not None:
            counting.count(forward.tokens_per_expert if planned is None else planned.copies.rows_of_experts())
            counting.count_nodes(self.topk_idx if planned is None else planned.plan.topk_idx, forward.buffer)
        if self._shared is not None:
            self._shared.after_dispatch(hidden_states, out.recv_x)
        return out.recv_x, out.recv_topk_weights

    def _dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> _Forward:
        num_tokens, self._hidden = hidden_states.shape
        growing = self._find(num_tokens, self._hidden, hidden_states.device)
        x, topk_idx, alignment = hidden_states.contiguous(), self.topk_idx, self.buffers.options.expert_alignment
        assert topk_idx is not None  # dispatch_preprocess has set it
        planned = None
        if self._num_slots > 0:
            experts = self._layer().experts
            most = None if self._capacity is None else self._capacity.num_rows(growing.buffer, 1)
            planned = self._copies_for(growing.buffer).plan(topk_idx, experts.weights(), has_hooks(experts), most)
            topk_idx = planned.plan.topk_idx
        noting = self._capacity if self._notes_excess else None

        def send_rows(buffer: Buffer, every_routing: bool) -> DispatchOutput:
            num_rows: int | str | None = GUESS if self._guesses_rows and not (planned is not None and planned.is_whole) else None
            if self._capacity is not None:
                num_rows = self._capacity.num_rows(buffer, alignment, every_routing=every_routing)
            how: dict[str, Any] = {"expert_alignment": alignment, "num_recv_rows": num_rows, "fp8": self._fp8}
            return buffer.dispatch(x, topk_idx, probs, layer=self._layer_number, **how)

        def send(buffer: Buffer) -> DispatchOutput:  # naming itself, it would keep x until Python's garbage collector runs
            try:
                out = send_rows(buffer, every_routing=False)
            except EPCapacityError:  # on all ranks of the group, before any row was sent; not on GPUs
                if noting is None:
                    raise
                noting.note_excess(x.device)
                return send_rows(buffer, every_routing=True)
            if noting is not None and noting.factor is not None:
                noting.note(out.handle)
            return out

        def explained(call: Callable[..., tuple[Buffer, DispatchOutput]], *dispatched: object) -> tuple[Buffer, DispatchOutput]:
            try:
                return call(num_tokens, send, *dispatched)
            except ValueError as error:
                # This is not checked before the call, because the call tells the peers, which would otherwise wait for this rank.
                if bool((topk_idx >= growing.buffer.num_experts).any()):
                    raise ValueError(
                        f"a token is routed to more than moe_router_topk={self.config.moe_router_topk} of {self.config.num_moe_experts} "
                        "experts; set moe_router_topk to the largest count"
                    ) from error
                raise

        buffer, out = explained(growing.dispatch)
        settle = partial(explained, growing.settle, buffer, out) if out.handle.is_late else None
        return _Forward(buffer, buffer.num_calls, out, planned=planned, settle=settle)

    def _dispatch_again(self, hidden_states: torch.Tensor, probs: torch.Tensor, first_run: Dispatched) -> _Forward:
        x, buffer, planned = hidden_states.contiguous(), first_run.buffer, None
        if first_run.choice is not None:
            experts = self._layer().experts
            follow = self._copies_for(buffer).follow
            how = first_run.choice[0], experts.weights(), has_hooks(experts), self._capacity is not None
            planned = notify_peers_on_failure(buffer, follow, *how)
        out = buffer.dispatch(x, None, probs, handle=first_run.handle, fp8=self._fp8)
        return _Forward(buffer, buffer.num_calls, out, planned=planned)

    def _record(self, handle: DispatchHandle) -> None:
        planned = self._current.planned
        assert self.topk_idx is not None  # dispatch_preprocess has set it
        record(Dispatched(self._current.buffer, handle, None if planned is None else (planned.plan, self.topk_idx)))

    def _counts_for_experts(self, out: DispatchOutput, planned: Planned | None) -> torch.Tensor:
        waits = not self._guesses_rows or (planned is not None and planned.is_whole)
        return out.handle.num_rows_per_expert_on_host if self._capacity is None and waits else out.handle.num_rows_per_expert

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return recv_x [R, H], rows per local expert [L] and probs [R]. The rows are in the experts' order already.

        The counts are on the host, or if `sync_free`, and for guessed rows, on the rows' device. Rows behind their sum are zeros, or may
        hold anything where they were guessed.
        """
        if self.buffers.options.sums != "ranks":
            self._current.weights, probs = probs, torch.ones_like(probs)
        if self.config.moe_router_dtype == "fp64":
            probs = probs.double()
        if self._current.planned is not None:
            self._layer().experts.planned = self._current.planned
        return hidden_states, self._current.tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the rows as they are, as there is no permutation to undo."""
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Return the sum of expert outputs [R, H] for each token [T, H], accumulated in fp32, plus the output of shared experts that ran
        beside the calls."""
        forward = self._current
        out, forward.out = forward.out, None
        assert out is not None  # a combine follows each dispatch
        if forward.settle is not None:
            hidden_states, out = self._of_all_rows(hidden_states, out)
        planned, forward.planned = forward.planned, None
        hidden_states = hidden_states.contiguous()
        if planned is not None:
            hidden_states = notify_peers_on_failure(forward.buffer, planned.end, hidden_states, out.handle)
        if self._shared is not None:
            self._shared.before_combine()
        with _timed(forward.counting, hidden_states):
            combined: torch.Tensor = forward.buffer.combine(hidden_states, out.handle, forward.weights, fp8=self._fp8)
        forward.weights = None
        forward.num_calls = forward.buffer.num_calls
        if planned is not None:
            combined = planned.fetch_in_backward(combined)
        # Not in combine_postprocess, which may be a CUDA graph of its own, while the shared experts began outside of it.
        return combined if self._shared is None else self._shared.add_to(combined)

    def _of_all_rows(self, hidden_states: torch.Tensor, out: DispatchOutput) -> tuple[torch.Tensor, DispatchOutput]:
        """Return the experts' outputs and the dispatch's. If the rows did not fit into those that the dispatch had guessed, both are new.
        The host waits here for the counts of the rows, while the GPU has the experts to do."""
        forward = self._current
        settle, forward.settle = forward.settle, None
        assert settle is not None  # the dispatch has guessed
        forward.num_calls = -1  # if it raises, the dispatch has failed, which the peers know
        forward.buffer, settled = settle()
        forward.num_calls = forward.buffer.num_calls
        self._record(settled.handle)
        if settled is out:
            return hidden_states, out
        forward.tokens_per_expert = self._counts_for_experts(settled, forward.planned)
        if forward.counting is not None:
            forward.counting.num_repeats += 1
        layer = self._layer()
        assert settled.recv_topk_weights is not None  # they were sent
        output, _ = layer.experts(*self.dispatch_postprocess(settled.recv_x, settled.recv_topk_weights))
        return self.combine_preprocess(output), settled

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return [T, H] as [S/TP, B, H]."""
        return hidden_states.view(self.hidden_shape)

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        """Return no buffers: experts write where they like. Megatron-Core 0.19 and newer ask."""
        return None, None


def _timed(counting: LayerMetrics | None, rows: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if counting is None else counting.timed(rows.device)


# ---- experts that are split over tensor-parallel ranks: choices of experts as choices of their shards ----


def repeat_for_tp(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_local_experts: int, tp_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Address every tensor-parallel shard of each chosen expert as an expert of its own.

    Rank `e * tp_size + t` of the group of all shards holds shard `t` of the experts of expert-parallel rank `e`. So the expert
    `e * num_local_experts + i` becomes experts `(e * tp_size + t) * num_local_experts + i` for all `t`. Combine then adds up the
    shards' partial outputs.

    topk_idx, topk_weights [num_tokens, num_topk] -> both [num_tokens, num_topk * tp_size].
    """
    if tp_size == 1:
        return topk_idx, topk_weights
    first = topk_idx + topk_idx.div(num_local_experts, rounding_mode="floor") * num_local_experts * (tp_size - 1)
    shards = torch.arange(tp_size, device=topk_idx.device) * num_local_experts
    repeated = torch.where(topk_idx.unsqueeze(2) < 0, -1, first.unsqueeze(2) + shards)
    weights = topk_weights.unsqueeze(2).expand(-1, -1, tp_size)
    return repeated.flatten(1), weights.flatten(1)


def choice_of_shards(topk_idx: torch.Tensor, num_local_experts: int, tp_size: int) -> torch.Tensor:
    """Return the chosen experts of which `repeat_for_tp` has made topk_idx: [num_tokens, num_topk * tp_size] -> [num_tokens, num_topk]."""
    first = topk_idx[:, ::tp_size].to(torch.int64)
    if tp_size == 1:
        return first
    choice = first.div(num_local_experts * tp_size, rounding_mode="floor") * num_local_experts + first % num_local_experts
    return torch.where(first < 0, -1, choice)


# ---- configuration ----


def _check_config(config: Config, expert_alignment: int) -> None:
    """Raise ValueError for switches that the dispatcher would not honour."""
    check_shared_overlap(config)
    _check_rows(config)
    lanes = config.moe_router_topk * (config.expert_tensor_parallel_size or 1)
    if lanes > MAX_TOPK:
        raise ValueError(
            f"moe_router_topk is {config.moe_router_topk} and expert_tensor_parallel_size {config.expert_tensor_parallel_size}, but "
            f"deepep_moe counts each tensor-parallel shard of an expert as an expert and serves {MAX_TOPK} per token; make one of the two "
            "smaller"
        )
    if config.moe_pad_expert_input_to_capacity:
        raise ValueError(_NO_PADDING)
    if getattr(config, "moe_paged_stash", False):
        raise ValueError(
            "moe_paged_stash is True, but the experts keep no rows in its pages; set it to False. moe_expert_rank_capacity_factor works "
            "without it"
        )
    pads = getattr(config, "moe_router_padding_for_quantization", False) or getattr(config, "moe_router_padding_for_fp8", False)
    if pads and expert_alignment % _quantized_alignment(config):
        raise ValueError(
            f"expert_alignment is {expert_alignment}, but with moe_router_padding_for_quantization or moe_router_padding_for_fp8 the "
            f"experts expect padded rows; call enable(expert_alignment={_quantized_alignment(config)}), or switch that padding off and let "
            "the experts pad"
        )


def _check_balance(config: Config) -> None:
    """Raise ValueError for switches that copies of experts do not go with."""
    if holds_calls(config) and ITERATION not in graphed_parts(config)[1]:
        raise ValueError(
            "a CUDA graph of layers would hold the dispatch, but balance is given; capture whole steps (full_iteration), name only parts "
            "without it in cuda_graph_scope (0.19: cuda_graph_modules), or leave balance out"
        )
    for name in ("delay_wgrad_compute", "overlap_moe_expert_parallel_comm", "moe_shared_expert_overlap", "add_bias_linear"):
        if getattr(config, name, False):
            raise ValueError(f"{name} is True, but balance is given, which does not go with it; leave one of the two out")


def _check_rows(config: Config) -> None:
    """Raise ValueError for rows that no buffer takes. (The width of a latent row is that of a smaller projection.)"""
    name = "moe_latent_size" if getattr(config, "moe_latent_size", None) else "hidden_size"
    hidden, dtype = getattr(config, name), config.params_dtype
    if hidden * dtype.itemsize % ROW_ALIGNMENT:
        raise ValueError(
            f"{name} is {hidden}, so a row in {dtype} has {hidden * dtype.itemsize} bytes, but deepep_moe moves rows of a multiple of "
            f"{ROW_ALIGNMENT} bytes; set {name} to a multiple of {ROW_ALIGNMENT // dtype.itemsize}"
        )


def _quantized_alignment(config: Config) -> int:
    """Return the multiple of rows that an expert's matrix products need in the config's fp8 or fp4."""
    try:
        from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
    except ImportError:  # 0.13
        return 32 if config.fp8_recipe == "mxfp8" else 16
    return get_align_size_for_quantization(config) or 16
