"""`Buffer`: dispatch and combine over a group of ranks."""

import itertools
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe import config
from deepep_moe.arguments import check_tensor
from deepep_moe.device import current_stream
from deepep_moe.errors import BufferDestroyedError, EPError
from deepep_moe.event import Event
from deepep_moe.exchange import by_expert, operators  # noqa: F401 (by_expert: gradients of calls from C++)
from deepep_moe.exchange.backends.base import LAYOUTS, Backend, CachedDispatchArgs, CombineArgs, DispatchArgs, Mode, Move, Rows, Weighing
from deepep_moe.exchange.backends.select import BACKENDS, make_backend
from deepep_moe.exchange.checks import (
    MAX_ALIGNMENT,
    check_beside_handle,
    check_cached_dispatch,
    check_combine,
    check_device,
    check_dispatch,
    check_handle,
    check_num_sms,
    check_owner,
    check_quantizable,
    check_routing,
    check_tensors,
)
from deepep_moe.exchange.handle import DispatchHandle, DispatchOutput, Layout, PackedHandle
from deepep_moe.exchange.routing import is_token_in_rank, num_tokens_per_expert, refuse_bad_routing
from deepep_moe.group.rendezvous import introduce, join
from deepep_moe.group.settings import Settings, Sizes, check_settings
from deepep_moe.ops.quant import quantize_fp8

logger = logging.getLogger("deepep_moe")
_numbers = itertools.count()
_Args = TypeVar("_Args", DispatchArgs, CachedDispatchArgs, CombineArgs)
_Result = TypeVar("_Result")


_num_forks = 0  # between the first process and this one


def _forked() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_forked)


def _second_half(move: Move, _keep_alive: Any) -> None:
    move()


class Buffer(Sizes):
    """Moves tokens between the ranks of a group and their experts.

    Rank r of R holds experts r * E / R to (r + 1) * E / R - 1. Every rank of the group must create the buffer, and then make the same
    calls in the same order; token counts may differ from rank to rank and from call to call. Calls of one buffer must not overlap
    (one thread at a time); several buffers may be alive.

    Args:
        group: the process group; None means the default group where torch.distributed is initialized, else this process alone.
        num_max_tokens_per_rank: most tokens one rank may dispatch in a call.
        hidden: columns of a row; a row must be a multiple of 16 bytes.
        num_experts: of all ranks together, a multiple of the group's size.
        num_topk: experts per token, at most 32.
        backend: "auto", or one by name. "auto" takes the first that can serve of `nvlink` (GPUs of one host that reach each other, with
            an NCCL group), `shm` (ranks of one host, CPU tensors) and `collective` (`all_to_all_single` of the group).
            `buffer.backend` says which; so does one log line on rank 0.
        num_sms: multiprocessors of a GPU that send rows, 1 to all; 0: copy engines send, and no multiprocessor while rows fly, but the
            host waits for the peers to enter the call, which so cannot be part of a CUDA graph. A call may say otherwise; results never
            depend on it. None: 12, in a combine from the expert layout among three ranks or more 14, or all where there are fewer. CPU
            backends have none and do not look.
        timeout_s: deadline of every wait for a peer, seconds; default `DEEPEP_MOE_TIMEOUT_S`, else 300.

    Raises:
        ValueError: a bad argument. The peers raise EPPeerError.
        EPMismatchError: ranks gave different settings; the message names them.
        BackendUnavailableError: the named backend cannot serve here; the message says why and what to do.
    """

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
        timeout_s: float | None = None,
    ):
        group, num_ranks, rank = join(group, "Buffer")
        self._settings = Settings(num_ranks, rank, num_max_tokens_per_rank, hidden, num_experts, num_topk, 300.0)
        num_threads: int = 1
        error: Exception | None = None
        try:
            self._settings = check_settings(self._settings, backend, BACKENDS, timeout_s)
            check_num_sms(num_sms)
            num_threads = config.num_threads(num_ranks)
        except (TypeError, ValueError) as refused:
            error = refused
        peers = introduce(self._settings, backend, num_threads, error, group)
        self._backend: Backend | None = make_backend(backend, self._settings, peers, group)
        self.backend: str = self._backend.name
        self.num_channels: int = self._backend.num_channels
        self.num_handle_numbers: int = self._backend.num_handle_numbers
        self._number = next(_numbers)
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Event | None = None
        self._earlier_failure: Exception | None = None  # of another call, to be raised once the present one is made
        self._process_id, self._num_forks = os.getpid(), _num_forks
        self._mode = self._own_mode = Mode(num_sms=num_sms)
        self._native_calls = self._backend.native_calls(self._number, self._own_mode)
        operators.register_buffer(self._number, self)
        if rank == 0:
            logger.info(
                "Buffer: backend %s, %d ranks, %d experts, top-%d, hidden %d, workspace of %.1f MiB per rank",
                self.backend, num_ranks, num_experts, num_topk, hidden, self._backend.workspace_bytes / 2**20,
            )  # fmt: skip

    # ---- what it is ----

    @property
    def num_calls(self) -> int:
        """That this rank has entered or refused."""
        return self._alive().num_calls

    @property
    def workspace_bytes(self) -> int:
        """Memory for the exchange that this rank owns, bytes; docs/design.md has the formula."""
        return self._alive().workspace_bytes

    def __deepcopy__(self, memo: dict[int, Any]) -> "Buffer":
        return self  # copies of a layer share it

    def __reduce__(self) -> Any:
        raise TypeError("a Buffer is memory of running processes and cannot be saved; save the state_dict() of what holds it")

    def __repr__(self) -> str:
        state = self.backend if self._backend is not None else "destroyed"
        what = f"{self.num_experts} experts, top-{self.num_topk}, hidden {self.hidden}"
        return f"Buffer({state}, rank {self.rank} of {self.num_ranks}, {what})"

    # ---- what it does ----

    def layout(self, topk_idx: Tensor) -> Layout:
        """Count this rank's tokens. Not collective.

        topk_idx: [num_tokens, num_topk] int32 or int64, -1 = no expert. Raises ValueError for another shape, an index out of range or a
        duplicate, TypeError for another dtype.
        """
        num_tokens = len(topk_idx) if isinstance(topk_idx, Tensor) and topk_idx.dim() > 0 else 0
        check_tensor("topk_idx", topk_idx, (num_tokens, self.num_topk), (torch.int64, torch.int32), any_strides=True)
        refuse_bad_routing(topk_idx, self.num_experts)
        in_rank = is_token_in_rank(topk_idx, self.num_ranks, self.num_local_experts)
        per_expert = num_tokens_per_expert(topk_idx, self.num_experts)
        return Layout(in_rank.sum(0, dtype=torch.int32), per_expert.to(torch.int32), in_rank)

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
        num_recv_rows: int | None = None,
        fp8: bool = False,
        num_sms: int | None = None,
        async_op: bool = False,
        return_hook: bool = False,
    ) -> DispatchOutput:
        """Send every token to the ranks of its experts. Collective; differentiable in `x` and `topk_weights`.

        Args:
            x: [num_tokens, hidden] contiguous, fp32, bf16, fp16, or fp8 with `x_scales`.
            topk_idx: [num_tokens, num_topk] int64 or int32, -1 = no expert, no expert twice in a row; of any strides. Not with `handle`.
            topk_weights: [num_tokens, num_topk] fp32, of any strides; travel along.
            x_scales: [num_tokens, ceil(hidden / 128)] fp32; required for fp8 rows and only there.
            layout: "expert": one row per (token, local expert), grouped by local expert, inside a group by (source rank, token), each
                group padded with zero rows to a multiple of `expert_alignment`. "rank": one row per (token, this rank), by (source
                rank, token).
            handle: of an earlier dispatch of this buffer: repeats its routing, layout and alignment, with no exchange of counts.
            num_recv_rows: a bound on the rows received; the outputs have exactly that many, the rest, behind the last group, zero. On a
                GPU the host then waits for nothing, and the call may be captured in a CUDA graph.
            fp8: send rows as float8_e4m3fn with one scale for 128 columns, made here (`deepep_moe.ops.quantize_fp8`); without gradient.
            num_sms: as the buffer's, for this call.
            async_op: return at once; the results may be read, and the arguments changed, after `output.event.wait()`.
            return_hook: return at once; the results may be read, and the arguments changed, after `output.hook()`. On a GPU rows fly
                meanwhile, and `hook` enqueues the rest on the stream that is current then; so does the buffer's next call.

        Raises:
            TypeError, ValueError: bad arguments; the peers raise EPPeerError instead of waiting.
            EPMismatchError: ranks are in different operations. EPCapacityError: more rows than a rank's `num_recv_rows`.
            EPTimeoutError: a peer died or stalled. BufferDestroyedError: after `destroy`.
        """
        if fp8:
            x, x_scales = self._quantized(x, x_scales)
        if not (async_op or return_hook or torch.compiler.is_compiling()):
            made = self._dispatch_natively(x, x_scales, topk_idx, topk_weights, layout, expert_alignment, handle, num_recv_rows, num_sms)
            if made is not None:
                return made
        call = (x, x_scales, topk_idx, topk_weights, layout, expert_alignment, handle, num_recv_rows)
        self._enter_mode(async_op, return_hook, num_sms)
        try:
            output = self._dispatch_now(*call)
            event = self._event(*output[:4], output.handle, x, x_scales, topk_idx, topk_weights)
        finally:
            self._mode = self._own_mode
        return output if event is None else output._replace(event=event, hook=event.wait if return_hook else None)

    def combine(
        self,
        x: Tensor,
        handle: DispatchHandle,
        topk_weights: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        num_sms: int | None = None,
        async_op: bool = False,
        return_hook: bool = False,
    ) -> Any:
        """Bring the experts' outputs back to the tokens' ranks, summed. Collective; differentiable in `x`, `topk_weights`, `bias`.

        The sum is defined to the bit: on the expert side over a token's rows in ascending lane of top-k, in fp32, rounded once to the
        dtype of `x`; at the source over ranks ascending, in fp32, plus `bias`, rounded once.

        Args:
            x: [num_rows, hidden] contiguous, fp32, bf16 or fp16, rows as the dispatch of `handle` returned them.
            handle: of a dispatch of this buffer.
            topk_weights: [num_rows] fp32: weigh each row (`recv_topk_weights` of the expert layout); None: a plain sum.
            bias: [num_tokens, hidden], dtype of `x`: added at the source.
            num_sms: as the buffer's, for this call.
            async_op: return at once with an Event.
            return_hook: return at once with a hook, as `dispatch`.

        Returns:
            combined_x [num_tokens, hidden], dtype of `x`; with `async_op`, (combined_x, Event); with `return_hook`, (combined_x, hook).
            Tokens without expert are 0 (+ bias).

        Raises: as `dispatch`.
        """
        native = None if async_op or return_hook or torch.compiler.is_compiling() else self._native()
        if native is not None and (num_sms is None or (type(num_sms) is int and num_sms >= 0)) and isinstance(handle, PackedHandle):
            combined_x = native.combine(x, handle, topk_weights, bias, -1 if num_sms is None else num_sms)
            if combined_x is not None:
                return combined_x
        self._enter_mode(async_op, return_hook, num_sms)
        try:
            combined_x = self._combine_now(x, handle, topk_weights, bias)
            event = self._event(combined_x, x, topk_weights, bias, handle)
        finally:
            self._mode = self._own_mode
        if event is None:
            return combined_x
        return combined_x, event.wait if return_hook else event

    def check(self) -> None:
        """Raise what a GPU has reported of earlier calls: those of a CUDA graph, and those whose host waits for nothing, as with
        `num_recv_rows`, fail without a word until then or until the buffer's next call. Not collective; does not wait for the GPU.

        Raises EPCapacityError, EPTimeoutError, EPPeerError, EPMismatchError, or ValueError for a bad routing or, found by this process's
        gate, a logit or expert bias that is not finite.
        """
        failure, self._earlier_failure = self._earlier_failure, None
        if failure is not None:
            raise failure
        self._alive().check()

    def refused(self, error: Exception) -> Exception:
        """Tell the peers, who are or will be in a call, that this rank does not make it, also for wrappers with checks of their own;
        they raise EPPeerError with the same reason. Returns `error`, to be raised."""
        if not self._is_capturing():
            self._wait_for_pending()
        self._alive().abort(f"{type(error).__name__}: {error}")
        return error

    def destroy(self) -> None:
        """Free the workspace and threads. Not collective, may be repeated. Peers in a call get an error that says so. On GPUs memory
        stays until all peers have destroyed their buffers too, or ended: they may still write to it. Where that takes longer than a second,
        it goes with the next buffer that this process makes or destroys."""
        if self._backend is None:
            return
        if self._executor is not None and os.getpid() == self._process_id:
            self._executor.shutdown(wait=True)
        self._executor = None
        if self._native_calls is not None:
            self._native_calls.release()
        backend, self._backend, self._native_calls = self._backend, None, None
        backend.destroy()

    # ---- calls from C++, where the module that links PyTorch is there: with the same bits, and less work for the host ----

    def _dispatch_natively(
        self, x: Any, x_scales: Any, topk_idx: Any, topk_weights: Any, layout: Any, expert_alignment: Any, handle: Any, num_recv_rows: Any,
        num_sms: Any,
    ) -> DispatchOutput | None:  # fmt: skip
        """None where Python is to make the call, and to say what is wrong with it."""
        native = self._native()
        if native is None or not all(type(value) is int and value >= 0 for value in (num_sms, num_recv_rows) if value is not None):
            return None
        senders = -1 if num_sms is None else num_sms
        if handle is not None:
            is_plain = topk_idx is None and num_recv_rows is None and layout == "expert" and expert_alignment == 1
            if not is_plain or not isinstance(handle, PackedHandle):
                return None
            made = native.dispatch_cached(x, x_scales, topk_weights, handle, senders)
            if made is None:
                return None
            recv_x, scales, weights = made
            return DispatchOutput(recv_x, scales, handle.recv_topk_idx, weights, handle.num_recv_tokens_per_expert, handle, None, None)
        if layout not in LAYOUTS or type(expert_alignment) is not int or not 1 <= expert_alignment <= MAX_ALIGNMENT or topk_idx is None:
            return None
        bound = -1 if num_recv_rows is None else num_recv_rows
        made = native.dispatch(x, x_scales, topk_idx, topk_weights, layout == "expert", expert_alignment, bound, senders)
        if made is None:
            return None
        recv_x, scales, recv_topk_idx, weights, counts, shape, num_rows, memory, numbers = made
        handle = PackedHandle(self._number, layout, expert_alignment, num_rows, shape, memory, numbers)
        handle.complete(num_rows, recv_topk_idx, current_stream(x.device))
        handle.__dict__["num_recv_tokens_per_expert"] = counts
        return DispatchOutput(recv_x, scales, recv_topk_idx, weights, counts, handle, None, None)

    # ---- calls through the operators ----

    def _dispatch_now(
        self, x: Tensor, x_scales: Tensor | None, topk_idx: Tensor | None, topk_weights: Tensor | None, layout: str, expert_alignment: int,
        handle: DispatchHandle | None, num_recv_rows: int | None,
    ) -> DispatchOutput:  # fmt: skip
        self._alive()
        self._or_refuse(check_tensors, x, x_scales=x_scales, topk_idx=topk_idx, topk_weights=topk_weights)
        if handle is not None:
            self._or_refuse(check_owner, handle, self._number)
            self._or_refuse(check_beside_handle, handle, topk_idx, layout, expert_alignment, num_recv_rows)
            recv_x, scales, weights = operators.dispatch_cached(self, x, x_scales, topk_weights, handle)
        else:
            self._or_refuse(check_routing, topk_idx, layout, expert_alignment, num_recv_rows)
            assert topk_idx is not None  # checked
            bound = -1 if num_recv_rows is None else num_recv_rows
            recv_x, scales, weights, handle = operators.dispatch(self, x, x_scales, topk_idx, topk_weights, layout, expert_alignment, bound)
        return DispatchOutput(recv_x, scales, handle.recv_topk_idx, weights, handle.num_recv_tokens_per_expert, handle, None, None)

    def _combine_now(self, x: Tensor, handle: DispatchHandle, topk_weights: Tensor | None, bias: Tensor | None) -> Tensor:
        self._alive()
        self._or_refuse(check_tensors, x, topk_weights=topk_weights, bias=bias)
        self._or_refuse(check_owner, handle, self._number)
        return operators.combine(self, x, topk_weights, bias, None, handle)[0]

    def _quantized(self, x: Tensor, x_scales: Tensor | None) -> tuple[Tensor, Tensor]:
        self._or_refuse(check_quantizable, x, x_scales)
        return self._or_refuse(quantize_fp8, x)

    # ---- implementation of the operators ----

    def _alive(self) -> Backend:
        if self._backend is None:
            raise BufferDestroyedError("this buffer was destroyed; create a new Buffer")
        return self._backend

    def _native(self) -> Any:
        """`_torch.Calls` for a call that is like any other: nothing is in flight or to be raised, and the mode is the buffer's."""
        is_plain = (
            self._pending is None and self._earlier_failure is None and self._mode is self._own_mode and self._num_forks == _num_forks
        )
        return self._native_calls if is_plain else None

    def _refuse_other_process(self) -> None:
        """The thread and the GPU of a buffer are not there in a process forked from its owner."""
        if self._num_forks != _num_forks:
            raise BufferDestroyedError(
                f"this buffer belongs to process {self._process_id}, this is process {os.getpid()}, forked from it; "
                "create a Buffer in each process"
            )

    def _or_refuse(self, function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
        """The function's result. Wrong types and values that it finds, or memory it lacks, are told to the peers. (A context manager takes
        longer.)"""
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError, torch.OutOfMemoryError) as error:
            raise self.refused(error) from None

    def _check_handle(self, handle: DispatchHandle) -> None:
        """Of a handle that an operator was given as tensors."""
        self._or_refuse(check_handle, handle, self._settings)

    def _checked(self, check: Callable[[Any, Settings], None], args: _Args) -> Backend:
        """The backend, to make a call with `args`, which are right."""
        backend = self._alive()
        self._refuse_other_process()
        self._wait_for_pending()
        self._or_refuse(check_device, args.x, backend)
        self._or_refuse(check, args, self._settings)
        try:
            failure = backend.take_failure()
        except EPError as error:
            raise self.refused(error) from None
        if failure is not None and isinstance(args, (CachedDispatchArgs, CombineArgs)) and args.handle.has_failed:
            raise self.refused(failure)  # which is that of this handle, so no call can be made that it would be raised after
        self._earlier_failure = failure or self._earlier_failure
        return backend

    def _or_tell(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """The function's result. Whatever fails before this rank has entered its call (memory, an interrupt) is told to the peers there."""
        backend = self._alive()
        before = backend.num_calls
        try:
            return function(*args)
        except BaseException as error:
            if backend.num_calls == before:
                backend.abort(f"{type(error).__name__}: {error}")
            raise

    def _dispatch(
        self, x: Tensor, x_scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None, layout: str, expert_alignment: int,
        num_recv_rows: int, repeats: int = 1,
    ) -> tuple[Rows, DispatchHandle]:  # fmt: skip
        args = DispatchArgs(self._mode, x, x_scales, topk_idx, topk_weights, layout, expert_alignment, num_recv_rows, self._number, repeats)
        rows, handle, move = self._or_tell(self._checked(check_dispatch, args).plan, args)
        self._run(move, args, rows, handle)
        return rows, handle

    def _dispatch_cached(
        self, x: Tensor, x_scales: Tensor | None, topk_weights: Tensor | None, handle: DispatchHandle, weighing: Weighing | None = None,
        repeats: int = 1,
    ) -> Rows:  # fmt: skip
        args = CachedDispatchArgs(self._mode, x, x_scales, topk_weights, handle, weighing, repeats)
        backend = self._checked(check_cached_dispatch, args)

        def make() -> Rows:
            rows, move = backend.dispatch_cached(args)
            self._run(move, args, rows)
            return rows

        return self._or_tell(make)

    def _combine(
        self, x: Tensor, weights: Tensor | None, bias: Tensor | None, lane_values: Tensor | None, handle: DispatchHandle,
        parts: Any = None, repeats: int = 1, at_source: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        args = CombineArgs(self._mode, x, weights, bias, lane_values, handle, parts, repeats, at_source)
        backend = self._checked(check_combine, args)

        def make() -> tuple[Tensor, Tensor | None]:
            combined_x, combined_values, move = backend.combine(args)
            self._run(move, args, combined_x, combined_values)
            return combined_x, combined_values

        return self._or_tell(make)

    # ---- asynchronous calls: on one thread of the buffer's own, in order, or as the backend has it ----

    def _enter_mode(self, is_async: bool, is_split: bool, num_sms: int | None) -> None:
        """How calls run until the caller restores `_own_mode`, in which gradients run too."""
        if is_async or is_split or num_sms is not None:
            self._or_refuse(check_num_sms, num_sms)
            self._mode = Mode(is_async, is_split, self._own_mode.num_sms if num_sms is None else num_sms)

    def _run(self, move: Move, *keep_alive: Any) -> None:
        """Move the rows, now or later; until then the tensors that native code knows by address are held. Raises what an earlier call's
        kernels have reported."""
        mode, on_thread = self._mode, self._alive().moves_on_thread
        if mode.is_split and self._alive().can_split:
            half = partial(_second_half, move, keep_alive)
            self._pending = Event(second_half=half, device=self._alive().device, is_captured=self._is_capturing())
        elif not on_thread or not (mode.is_async or mode.is_split):
            move()
        else:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deepep_moe")
            self._pending = Event(self._executor.submit(lambda _: move(), keep_alive))
        failure, self._earlier_failure = self._earlier_failure, None
        if failure is not None:
            event = self._event(*keep_alive)
            if event is not None:
                event.wait()  # nobody will be given it
            raise failure

    def _event(self, *used: Any) -> Event | None:
        """Of the call just made, where it is asynchronous; `used` are its tensors, and what holds some."""
        if not (self._mode.is_async or self._mode.is_split):
            return None
        return self._pending or Event(recorded=self._alive().recorded(*used))

    def _is_capturing(self) -> bool:
        return self._alive().device is not None and torch.cuda.is_current_stream_capturing()

    def _wait_for_pending(self) -> None:
        """Let the asynchronous call in flight finish. Raises EPError where it failed and nobody has looked: its results are not there."""
        pending = self._pending
        if pending is None:
            return
        if pending.is_half and pending.is_captured != self._is_capturing():
            if not pending.is_captured:
                raise ValueError(
                    "a call of this buffer waits for its hook, and its rest cannot be part of a CUDA graph; call the hook before"
                )
            self._pending = None  # of a graph, whose capture has ended without it
            return
        error = pending.failure()
        self._pending = None
        if error is not None and not pending.seen:
            raise self.refused(EPError(f"an earlier asynchronous call of this buffer failed: {type(error).__name__}: {error}")) from error
