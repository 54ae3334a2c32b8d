"""`Buffer`: dispatch and combine over a group of ranks."""

import itertools
import logging
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe import config
from deepep_moe.arguments import check_is_tensor, check_plain
from deepep_moe.device import making_on
from deepep_moe.event import Event
from deepep_moe.exchange import native, operators
from deepep_moe.exchange.backends.base import Backend, CachedDispatchArgs, DispatchArgs
from deepep_moe.exchange.backends.select import BACKENDS, agree_on_profile, make_backend
from deepep_moe.exchange.calls import Calls
from deepep_moe.exchange.checks import (
    BLOCKWISE,
    GUESS,
    check_beside_handle,
    check_blockwise,
    check_blockwise_combine,
    check_fp8_mode,
    check_max_sms,
    check_num_sms,
    check_owner,
    check_quantizable,
    check_routing,
    check_tensors,
)
from deepep_moe.exchange.handle import DispatchHandle, DispatchOutput, Layout
from deepep_moe.group.reach import find_nodes
from deepep_moe.group.rendezvous import gather_objects, hanging_up, introduce, join
from deepep_moe.group.settings import Settings, Sizes, check_settings, one_by_one
from deepep_moe.group.suspension import Memory
from deepep_moe.library import call, untraced
from deepep_moe.ops.quant import quantize_fp8
from deepep_moe.ops.quantized import QuantizedRows
from deepep_moe.tuning import Loaded, Profile, load

logger = logging.getLogger("deepep_moe")
_Error = TypeVar("_Error", bound=BaseException)
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_layers = itertools.count(1)


def new_layer() -> int:
    """Return a number for `layer` of `Buffer.dispatch` that no other layer of this process has."""
    return next(_layers)


class Buffer(Sizes):
    """Moves tokens between the ranks of a group and their experts.

    Rank r of R holds experts r * E / R to (r + 1) * E / R - 1. Every rank of the group must create the buffer, and then make the same
    calls in the same order; token counts may differ from rank to rank and from call to call. Calls of one buffer must not overlap
    (one thread at a time). Several buffers may be alive; on GPUs all ranks must order their calls alike, by one stream or by events.

    Args:
        group: the process group. None: the default group where torch.distributed is initialized, else this process alone.
        num_max_tokens_per_rank: most tokens one rank may dispatch in a call.
        hidden: columns of a row. A row must be a multiple of 16 bytes.
        num_experts: experts of all ranks together. Their number is a multiple of the group's size.
        num_topk: experts per token, at most 32.

        backend: "auto", or the name of a backend. If every rank sees a GPU and the group has NCCL, "auto" takes `nvlink` for one node
            (GPUs that reach each other) and `nvshmem` for several nodes. That needs the module `deepep_moe._nvshmem`. Otherwise "auto"
            takes `shm` (ranks of one host, CPU tensors). If that backend cannot serve, "auto" takes `collective` (`all_to_all_single`
            of the group, in two hops over several nodes) and logs the reason on rank 0. `buffer.backend` is the name of the backend in
            use. A process without a group serves the device of its first dispatch. On a GPU it switches to `nvlink` then.

        num_sms: SMs of a GPU that send rows, 1 to all. With 0 the copy engines move rows, so no SM is busy during the transfer. The host
            first waits until all peers have entered the call; such a call cannot be captured in a CUDA graph. None: the value from this
            machine's profile. If there is no profile, the GPU decides (docs/tuning.md): 12 on an H100 or H200, and 14 in a combine from
            the expert layout among three ranks or more. A call may override it. Results never depend on it. CPU backends ignore it. It
            must not be 0 with sums by lanes.

        max_sms: most SMs of a GPU that a call takes, at least 2, including those that send. Other kernels may run on the rest.
            None: all SMs. Results never depend on it. CPU backends ignore it.

        timeout_s: deadline of every wait for a peer, in seconds. None: `DEEPEP_MOE_TIMEOUT_S`, else 300.
        ranks_per_node: how many consecutive ranks are a node, a divisor of the group's size. Combine sums a token's rows node by node, so
            this value changes the rounding of results (docs/design/contract.md). None: the ranks of one host are a node. Set it on one
            host to get the bits that several nodes would compute.

        sums: how combine adds a token's rows. With "ranks" it adds on each expert's rank, then over the ranks; the fewest rows cross. With
            "lanes" it adds over the lanes of top-k, ascending, in fp32 with one rounding to the rows' dtype. Results and gradients then do
            not depend on ranks, nodes, backend or the placement of experts. "lanes_fma": likewise, but a weight's product is not rounded
            before it is added. In a combine each (token, lane) crosses as a row of its own, and memory grows up to num_topk times
            (docs/rollout.md). There is no rank layout, and the handle's `topk_idx` is [num_tokens * num_topk, 1].

    Raises:
        ValueError: a bad argument, or a file of `DEEPEP_MOE_PROFILE` that cannot be read; the peers raise EPPeerError. All ranks raise
            it if `ranks_per_node` is None and hosts have different numbers of ranks, or ranks of a host are not consecutive.
        EPMismatchError: ranks gave different settings, or have different profiles; the message names them.
        BackendUnavailableError: the named backend cannot serve here; the message says why and what to do.
    """

    backend: str
    """The name of the backend in use."""
    profile: Profile | None
    """The tuned settings in use on GPUs, which num_sms and max_sms override; None: the settings are fitted to the GPU."""
    num_channels: int
    """CPU threads of a rank that move rows; 1 on GPUs."""
    calls: Calls
    """The object that runs the calls; for the modules of this library."""

    def __init__(
        self,
        group: "dist.ProcessGroup | None",
        num_max_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        backend: str = "auto",
        num_sms: int | None = None,
        max_sms: int | None = None,
        timeout_s: float | None = None,
        ranks_per_node: int | None = None,
        sums: str = "ranks",
    ):
        group, num_ranks, rank = join(group, "Buffer")
        self._settings = Settings(num_ranks, rank, num_max_tokens_per_rank, hidden, num_experts, num_topk, 300.0, sums=sums)
        num_threads: int = 1
        loaded = Loaded()
        error: Exception | None = None
        try:
            self._settings = check_settings(self._settings, backend, BACKENDS, timeout_s, ranks_per_node)
            num_sms, max_sms = check_num_sms(num_sms), check_max_sms(max_sms)
            if num_sms == 0 and self._settings.is_by_lane:
                raise ValueError(f"num_sms is 0; with sums={sums!r} it must be 1 or more: copy engines do not send rows one by one")
            num_threads = config.num_threads(num_ranks)
            loaded = load()
        except Exception as refused:
            error = refused
        peers = introduce(self._settings, backend, num_threads, error, group)
        self._settings = find_nodes(self._settings, peers)
        self._is_by_lane = self._settings.is_by_lane
        self._group, self._peers, self._loaded, self._max_sms, self._allows_excess = group, peers, loaded, max_sms, False
        chosen = make_backend(backend, self._settings, peers, group)
        self._use(chosen)
        is_open = backend == "auto" and group is None and peers[0].has_gpu
        self.calls = Calls(chosen, self._settings, num_sms, weakref.WeakMethod(self._make_for_gpu) if is_open else None)

    def _use(self, backend: Backend) -> None:
        """Make a new backend ready for calls, and log its name."""
        self.profile = agree_on_profile(backend, self._settings, self._loaded, self._group)
        if self._max_sms is not None:
            backend.limit_sms(self._max_sms)
        self.backend = backend.name
        self.num_channels = backend.capabilities.num_channels
        self._log_backend(backend.name, backend.workspace_bytes)

    def _make_for_gpu(self, x: Tensor) -> Backend:
        """Make a backend for the GPU of `x`, the first rows that a process without a group dispatches."""
        with making_on(x):
            backend = make_backend("auto", self._settings, self._peers, None, has_gpu_tensors=True)
            try:
                self._use(backend)
                if self._allows_excess:
                    backend.allow_excess()
            except BaseException:
                backend.destroy()
                raise
        return backend

    # ---- properties ----

    @property
    def ranks_per_node(self) -> int:
        """Return how many consecutive ranks are a node."""
        return self._settings.ranks_per_node

    @property
    def num_calls(self) -> int:
        """Return the number of calls that this rank has begun or refused."""
        return self.calls.num_calls

    @property
    def workspace_bytes(self) -> int:
        """Bytes of exchange memory that this rank owns; docs/design/shm.md, nvlink.md and nvshmem.md have the formulas."""
        return self.calls.backend.workspace_bytes

    def __repr__(self) -> str:
        state = "destroyed" if self.calls.is_destroyed else "suspended" if self.calls.is_suspended else self.backend
        what = f"{self.num_experts} experts, top-{self.num_topk}, hidden {self.hidden}"
        return f"Buffer({state}, rank {self.rank} of {self.num_ranks}, {what})"

    # ---- operations ----

    def layout(self, topk_idx: Tensor) -> Layout:
        """Count this rank's tokens for each rank and each expert. Not collective.

        topk_idx: [num_tokens, num_topk] int32 or int64, -1 = no expert.

        Raises:
            TypeError: another dtype.
            ValueError: another shape, an index out of range or a duplicate.
        """
        check_is_tensor("topk_idx", topk_idx)
        check_plain("topk_idx", topk_idx)
        return Layout(*call("layout", (topk_idx,), self.num_topk, self.num_experts, self.num_ranks))

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        x_scales: Tensor | None = None,
        layout: str = "expert",
        expert_alignment: int = 1,
        handle: DispatchHandle | None = None,
        num_recv_rows: int | str | None = None,
        fp8: bool | str = False,
        num_sms: int | None = None,
        layer: int = 0,
        async_op: bool = False,
        return_hook: bool = False,
    ) -> DispatchOutput:
        """Send every token to the ranks of its experts. Collective; differentiable in `x` and `topk_weights`.

        Args:
            x: [num_tokens, hidden] contiguous, fp32, bf16, fp16, or fp8 with `x_scales`.
            topk_idx: [num_tokens, num_topk] int64 or int32, any strides. An index of -1 means no expert. A row must not name an expert
                twice, which GPUs of several nodes do not check with sums by lanes. Not allowed with `handle`.
            topk_weights: [num_tokens, num_topk] fp32, any strides. They are sent with the rows.
            x_scales: [num_tokens, ceil(hidden / 128)] fp32. Required for fp8 rows, not allowed otherwise.

            layout: "expert": one row per (token, local expert), grouped by local expert. In a group rows are ordered by source rank, then
                token. Zero rows pad each group to a multiple of `expert_alignment`. With "rank" it is one row per (token, this rank), in
                that order; not with sums by lanes.
            handle: the handle of an earlier dispatch of this buffer. The call repeats its routing, layout and alignment, and exchanges no
                counts.

            num_recv_rows: an upper bound on the rows received. The outputs have exactly that many, zero behind the last group. On a GPU the
                host then does not wait, and CUDA graphs may capture the call. With "guess" a GPU's outputs may have the rows that the host
                predicts. Queue the work of the experts, with counts on the GPU (`handle.num_rows_per_expert`), then ask `settle`. Rows
                behind the last group may hold anything, all rows if they did not fit. It is the same as None on CPUs, without a prediction,
                with `async_op` or `return_hook`, in the rank layout, with "blockwise" rows, under activation checkpointing, and in compiled
                functions.

            fp8: True quantizes rows to float8_e4m3fn (`deepep_moe.ops.quantize_fp8`), without gradient. One scale is for 128 columns.
                With "blockwise", which is for training, scales are powers of two in fp32 (`deepep_moe.ops.ue8m0.pack` packs them). Then
                recv_x is `deepep_moe.ops.QuantizedRows`, which `deepep_moe.ops.grouped_mlp` multiplies in fp8. Its gradient is bf16.
                Rows must be bf16, in the expert layout. The sizes hidden, `expert_alignment` and `num_recv_rows` must be multiples of 128
                (docs/design/fp8_training.md).
            num_sms: overrides the buffer's `num_sms` for this call. Gradients use the buffer's.

            layer: which of the layers that share the buffer makes the call. Any number serves. Peers may use others. On a GPU the host
                predicts the rows received from the last two dispatches of the layer, and waits for the count if it cannot. With more than
                4096 layers it forgets them now and then.

            async_op: return at once. Read the results, or change the arguments, only after `output.event.wait()`. A call with `async_op`
                or `return_hook` breaks the graph of a compiled function.
            return_hook: return at once. Read the results, or change the arguments, only after `output.hook()`. On a GPU the rows travel
                meanwhile. `hook`, or the buffer's next call if it comes first, enqueues the rest on the stream that is current then.

        Raises:
            TypeError: an argument has another type or dtype.
            ValueError: an argument has another shape, device or value.
            EPPeerError: a peer has raised an error, or has left.
            EPMismatchError: ranks are in different operations.
            EPCapacityError: a rank would receive more than its `num_recv_rows`.
            EPTimeoutError: a peer died or stalled.
            BufferDestroyedError: the buffer was destroyed.
        """
        is_late = isinstance(num_recv_rows, str) and num_recv_rows == GUESS
        bound: Any = None if is_late else num_recv_rows
        is_traced = torch.compiler.is_compiling()
        if is_traced and (async_op or return_hook or fp8 == BLOCKWISE):
            return _call_outside_graph(  # without the layer's number, for which PyTorch would compile again
                self.dispatch, x, topk_idx, topk_weights, x_scales=x_scales, layout=layout, expert_alignment=expert_alignment,
                handle=handle, num_recv_rows=bound, fp8=fp8, num_sms=num_sms, async_op=async_op, return_hook=return_hook,
            )  # fmt: skip
        calls, is_blockwise = self.calls, False
        if fp8 is not False:
            calls.refuse_on_failure(check_fp8_mode, fp8)
            is_blockwise = fp8 == BLOCKWISE
            if not is_blockwise and fp8:
                calls.refuse_on_failure(check_quantizable, x, x_scales)
                x, x_scales = calls.refuse_on_failure(quantize_fp8, x)
        if not is_blockwise and not is_traced:
            how = num_sms, async_op, return_hook
            if handle is None:
                routed = layout, expert_alignment, bound
                output = native.dispatch(calls, x, x_scales, topk_idx, topk_weights, *routed, *how, layer, is_late)
            elif topk_idx is None and bound is None and layout == "expert" and expert_alignment == 1:
                output = native.dispatch_along(calls, x, x_scales, topk_weights, handle, *how)
            else:
                output = None  # arguments that contradict the handle are refused below
            if output is not None:
                return output
        if self._is_by_lane and isinstance(x, Tensor) and x.dim() == 2:
            topk_idx = calls.refuse_on_failure(one_by_one, "topk_idx", topk_idx, len(x), self._settings)
            topk_weights = calls.refuse_on_failure(one_by_one, "topk_weights", topk_weights, len(x), self._settings)
        mode = calls.mode_of(num_sms, async_op, return_hook, layer)
        tensors = {"x_scales": x_scales, "topk_idx": topk_idx, "topk_weights": topk_weights}
        calls.refuse_on_failure(check_tensors, x, is_operator=not is_blockwise, **tensors)
        if handle is not None:
            calls.refuse_on_failure(check_owner, handle, calls.number)
            calls.refuse_on_failure(check_beside_handle, handle, topk_idx, layout, expert_alignment, bound)
            routed = handle.layout, handle.expert_alignment, handle.num_rows
        else:
            routed = calls.refuse_on_failure(check_routing, topk_idx, layout, expert_alignment, bound)
        if is_blockwise:
            calls.refuse_on_failure(check_blockwise, x, x_scales, *routed)
        args: DispatchArgs | CachedDispatchArgs
        if handle is not None:
            args = CachedDispatchArgs(mode, x, x_scales, topk_weights, handle)
        else:
            assert topk_idx is not None  # checked
            args = DispatchArgs(mode, x, x_scales, topk_idx, topk_weights, *routed, calls.number)
        recv_x, scales, weights, handle = operators.dispatch(calls, args, quantizes=is_blockwise)
        scales = recv_x.scales if isinstance(recv_x, QuantizedRows) else scales
        event = calls.event(mode, x)
        hook = event.wait if event is not None and return_hook else None
        return DispatchOutput(recv_x, scales, handle.recv_topk_idx, weights, handle.counts(), handle, event, hook)

    def settle(self, output: DispatchOutput) -> DispatchOutput:
        """Return `output` of a dispatch with `num_recv_rows="guess"` if its rows fit, else another output with all rows, for which the
        experts must run again.

        Not collective: peers learn nothing of it. The host waits until the GPU has counted the rows. Call it once, before the combine. If
        another call of this buffer comes first, that does the waiting. A combine of guessed rows that did not fit is a ValueError. The
        gradients of the arguments come from the output that is used.

        Raises:
            EPError: what `dispatch` raises while its host waits for counts.
            RuntimeError: the counts are lost, as this rank has refused a call since, or a failure of the dispatch was raised elsewhere.
        """
        return output if torch.compiler.is_compiling() else native.settle(self.calls, output)

    def combine(
        self,
        x: Tensor,
        handle: DispatchHandle,
        topk_weights: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        fp8: bool | str = False,
        num_sms: int | None = None,
        async_op: bool = False,
        return_hook: bool = False,
    ) -> Any:
        """Sum each token's expert outputs on the token's rank. Collective; differentiable in `x`, `topk_weights`, `bias`.

        The sum is defined to the bit. By ranks, an expert's rank first adds a token's rows in ascending lane of top-k, in fp32, and rounds
        once to the dtype of `x`. The token's rank adds these over ascending ranks in fp32, adds `bias`, and rounds once. With several
        nodes, each node's ranks are added first, rounded if the node is not the token's own, and then the nodes (docs/design/contract.md).
        `Buffer(sums=)` has other sums.

        Args:
            x: [num_rows, hidden] contiguous, fp32, bf16 or fp16, rows as the dispatch of `handle` returned them.
            handle: the handle of a dispatch of this buffer.
            topk_weights: [num_rows] fp32. The rows' weights, `recv_topk_weights` of the expert layout. None: a plain sum. With sums by
                lanes all ranks give weights, or none does.
            bias: [num_tokens, hidden], dtype of `x`. It is added on the token's rank.

            fp8: "blockwise": the backward dispatches its gradient as a dispatch with `fp8="blockwise"` does. The gradient of `x` is then
                `QuantizedRows`. The forward sends rows unchanged. Needs the handle of a blockwise dispatch and no `topk_weights`.
            num_sms: overrides the buffer's `num_sms` for this call.
            async_op, return_hook: return at once with an Event or a hook, as in `dispatch`.

        Returns:
            combined_x [num_tokens, hidden], dtype of `x`. With `async_op` it is (combined_x, Event), with `return_hook` (combined_x, hook).
            The row of a token without expert is 0 (+ bias).

        Raises: as `dispatch`.
        """
        is_traced = torch.compiler.is_compiling()
        if is_traced and (async_op or return_hook or fp8 == BLOCKWISE):
            return _call_outside_graph(
                self.combine, x, handle, topk_weights, bias=bias, fp8=fp8, num_sms=num_sms, async_op=async_op, return_hook=return_hook
            )
        calls = self.calls
        if fp8 is not False:
            calls.refuse_on_failure(check_fp8_mode, fp8)
            if fp8 != BLOCKWISE:
                raise calls.refuse(ValueError(f"fp8 is {fp8!r}; combine takes False, or {BLOCKWISE!r} for its gradient"))
        elif not is_traced:
            output = native.combine_rows(calls, x, handle, topk_weights, bias, num_sms, async_op, return_hook)
            if output is not None:
                return _with_event(output.combined_x, calls.in_flight, return_hook) if async_op or return_hook else output.combined_x
        mode = calls.mode_of(num_sms, async_op, return_hook)
        calls.refuse_on_failure(check_tensors, x, is_operator=fp8 is False, topk_weights=topk_weights, bias=bias)
        calls.refuse_on_failure(check_owner, handle, calls.number)
        if fp8:
            calls.refuse_on_failure(check_blockwise_combine, x, topk_weights, handle)
        combined_x, _ = operators.combine(calls, mode, x, topk_weights, bias, None, handle, quantizes=bool(fp8))
        return _with_event(combined_x, calls.event(mode, x), return_hook)

    def check(self) -> None:
        """Look at what a GPU has reported of earlier calls. Not collective; does not wait for the GPU.

        Calls in a CUDA graph, and calls whose host waits for nothing (such as with `num_recv_rows`), fail only here or in the buffer's
        next call.

        Raises:
            EPError: what `dispatch` raises.
            ValueError: a bad routing, or this process's gate has seen a logit or expert bias that is not finite.
        """
        self.calls.check()

    def allow_excess(self) -> None:
        """Let later dispatches on GPUs drop rows beyond `num_recv_rows` without an error, here or at the peers.

        The caller must compare `handle.num_rows_per_expert`, which also counts dropped rows, with the bound, and repeat the step. With CPU
        backends the dispatch still raises EPCapacityError, on all ranks, before it moves any row.
        """
        self._allows_excess = True
        self.calls.backend.allow_excess()

    def recover(self) -> None:
        """Bring the ranks back into step after an error, whatever calls each of them has made since. Failures are forgotten, and a
        call whose hook was not called is dropped. Handles of dispatches that succeeded stay valid.

        Collective: every rank of the group calls it once it has caught its error. Waits for the GPU and for the peers.

        Raises:
            EPTimeoutError: a rank does not come; the message names it.
            EPError: only a new Buffer recovers from this failure (docs/design/failures.md).
        """
        s = self._settings
        with hanging_up(self._group):
            self.calls.recover(lambda number: gather_objects(number, self._group, s.num_ranks, "recovery of a Buffer", s.timeout_s, int))

    def refuse(self, error: _Error) -> _Error:
        """Tell the peers that this rank does not make its next call; they raise EPPeerError with the same reason. Wrappers with their own
        checks may use it too. Return `error`, for the caller to raise."""
        return self.calls.refuse(error)

    def memory(self) -> Memory:
        """Return the bytes of exchange memory that this rank holds, and that `suspend` has given back. Not collective."""
        return self.calls.memory

    def suspend(self) -> None:
        """Give the exchange memory back until `resume`. Calls raise BufferSuspendedError meanwhile.

        Collective: every rank of the group calls it after the same number of calls. It finishes this rank's calls and returns once the
        memory is free. Settle a dispatch with `num_recv_rows="guess"` before. Does nothing if the buffer is suspended. Handles stay valid,
        so a backward may follow after `resume`. A failure that a GPU has reported is raised by the first call after `resume`. GPUs give the
        workspace back to the driver, and keep the addresses and some MiB of scratch. So earlier CUDA graphs may be replayed after `resume`;
        a replay before it faults. `shm` gives its pages back, and `collective` suspends the group's backend if PyTorch can.

        Raises:
            EPError: `nvshmem` cannot give its memory back.
            EPMismatchError: ranks have made different numbers of calls.
            EPPeerError: a rank cannot suspend.
            EPTimeoutError: a peer died or does not come; the buffer can then only be destroyed.
        """
        self.calls.suspend(self._group)

    def resume(self) -> None:
        """Make the memory again that `suspend` has given back. Collective. Does nothing if the buffer is not suspended.

        Raises:
            BufferSuspendedError: a rank, which the message names, has no memory. All raise it, and may call `resume` again.
            EPTimeoutError: a peer died or does not come; the buffer can then only be destroyed.
        """
        self.calls.resume(self._group)

    def destroy(self) -> None:
        """Free the workspace and threads. Not collective, may be repeated. Peers in a call get an error that says so. On GPUs the
        driver frees the memory once all peers have destroyed their buffers or ended."""
        self.calls.destroy()
        self._group = None  # a process group that outlives destroy_process_group may abort the process as it ends


def _with_event(combined_x: Tensor, event: Event | None, return_hook: bool) -> Any:
    if event is None:
        return combined_x
    return combined_x, event.wait if return_hook else event


@untraced
def _call_outside_graph(call: Callable[_Given, _Result], *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
    """Make a call outside the graphs of a compiled function: events, hooks and `QuantizedRows` cannot be part of a graph. With
    `fullgraph=True` PyTorch raises an error that names this function."""
    return call(*args, **kwargs)
