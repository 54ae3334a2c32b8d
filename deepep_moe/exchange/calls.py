"""The calls of one buffer. Each call is checked, planned and moved, or refused, so that all ranks stay in step.

Operators and handles refer to a buffer by `Calls.number`.
"""

import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import _StopRecomputationError

from deepep_moe.arguments import as_int
from deepep_moe.device import is_gpu
from deepep_moe.errors import BufferDestroyedError, BufferSuspendedError, Cause, EPError, cause_of, describe
from deepep_moe.event import Event
from deepep_moe.exchange.backends.base import (
    Backend,
    CachedDispatchArgs,
    CombineArgs,
    DispatchArgs,
    Mode,
    Move,
    Rows,
    tell_peers,
)
from deepep_moe.exchange.checks import (
    check_cached_dispatch,
    check_combine,
    check_device,
    check_dispatch,
    check_handle,
    check_num_sms,
)
from deepep_moe.exchange.handle import DispatchHandle
from deepep_moe.group import suspension
from deepep_moe.group.settings import MAX_NUMBER, Settings
from deepep_moe.library import is_dry_run, unwatched
from deepep_moe.ops.weighted import for_lanes, sum_lanes
from deepep_moe.worker import Worker

if TYPE_CHECKING:
    from deepep_moe._torch import Calls as NativeCalls
    from deepep_moe._torch import InFlight, SecondHalf
    from deepep_moe.exchange.buffer import Buffer

live_calls: "weakref.WeakValueDictionary[int, Calls]" = weakref.WeakValueDictionary()
_numbers = itertools.count()
_Result = TypeVar("_Result")
_Error = TypeVar("_Error", bound=BaseException)

ENDS = (_StopRecomputationError, GeneratorExit)
"""Exceptions with which checkpointing ends a recomputation, and Python a generator. They are no failures."""
PASS_FAILED = RuntimeError("its backward pass failed; see its output for the error")
_PASS_FAILED = describe(PASS_FAILED)


def calls_of(number: int) -> "Calls":
    """Return the calls that operators and handles know as `number`."""
    calls = live_calls.get(number)
    if calls is None:
        raise BufferDestroyedError(f"buffer {number} is gone; keep the Buffer alive as long as its handles and graphs are used")
    return calls


class Calls:
    """The calls of one buffer, one at a time."""

    def __init__(
        self, backend: Backend, settings: Settings, num_sms: int | None, for_gpu: Callable[[], Callable[[Tensor], Backend] | None] | None
    ):
        """`for_gpu`: weak reference to a function that makes another backend if the first rows lie on a GPU; None: `backend` serves all."""
        self.settings, self.capabilities = settings, backend.capabilities
        self.number = next(_numbers)
        self.own_mode = Mode(num_sms=num_sms)
        """The mode of gradients, and the default of calls."""
        self._calling = threading.Lock()
        self._backend: Backend | None = backend
        self._suspended: tuple[Backend, NativeCalls | None] | None = None  # `_backend` and `native` between `suspend` and `resume`
        self._suspended_bytes = 0
        self._for_gpu = for_gpu
        self.native = backend.native_calls(self.number, self.own_mode)
        """The native calls, or None if the backend moves rows from Python."""
        self._worker: Worker | None = None
        self.in_flight: Event | None = None
        """The asynchronous call made last, until its end is seen."""
        self._num_submitted = 0  # the number of the call in flight, which the thread may not have entered yet
        self._earlier_failure: Exception | None = None  # the failure of an earlier call, raised once the present call is made
        self._process_id = os.getpid()
        live_calls[self.number] = self

    # ---- properties ----

    @property
    def backend(self) -> Backend:
        """Raises BufferDestroyedError after `destroy`, BufferSuspendedError after `suspend`."""
        if self._suspended is not None:
            raise BufferSuspendedError(suspension.SUSPENDED)
        if self._backend is None:
            raise BufferDestroyedError("this buffer was destroyed; create a new Buffer")
        return self._backend

    @property
    def is_destroyed(self) -> bool:
        return self._backend is None and self._suspended is None

    @property
    def is_suspended(self) -> bool:
        return self._suspended is not None

    @property
    def num_calls(self) -> int:
        """Return the number of calls that this rank has submitted, entered or refused. The thread enters submitted calls, whatever fails
        now."""
        return max(self.backend.num_calls, self._num_submitted)

    def make(self, name: str, *args: object, handle: object = None, waits: bool = False, is_async: bool = False) -> Any:
        """Return the result of the method `name` of `_torch.Calls`; None if it declines, and on CPUs.

        The call uses `handle`. With `waits` its host waits for counts; with `is_async` part of it stays in flight.
        """
        if self.native is None or self._process_id != os.getpid():
            return None
        if self.in_flight is not None:
            if self.in_flight.is_enqueued:
                self.in_flight = None
            else:
                self._finish_earlier_call()
        call = getattr(self.native, name)
        output = call(*args)
        if output is None and self.native is not None and self.native.has_failed:  # an earlier call has reported a failure
            self._note_failure(self.backend, lambda: waits or (isinstance(handle, DispatchHandle) and handle.has_failed))
            output = call(*args)
        if output is not None and (is_async or self._earlier_failure is not None):
            self._keep_in_flight(output)
        return output

    def mode_of(self, num_sms: int | None, is_async: bool = False, is_split: bool = False, layer: int = 0) -> Mode:
        """Return how a call with these arguments runs. `num_sms`: None for the buffer's."""
        if torch.compiler.is_compiling():
            layer = 0  # layers share one graph
        if not (is_async or is_split) and num_sms is None and layer == 0:
            return self.own_mode
        num_sms = self.refuse_on_failure(check_num_sms, num_sms)
        layer = self.refuse_on_failure(as_int, "layer", layer, "a whole number", 0, MAX_NUMBER)
        return Mode(is_async, is_split, self.own_mode.num_sms if num_sms is None else num_sms, layer)

    # ---- calls ----

    def dispatch(self, args: DispatchArgs | CachedDispatchArgs) -> tuple[Rows, DispatchHandle]:
        is_fresh = isinstance(args, DispatchArgs)
        if is_fresh and torch.is_inference_mode_enabled():  # PyTorch counts no in-place changes of tensors made in inference mode
            with torch.inference_mode(False), torch.no_grad():
                return self.dispatch(args)
        self._refuse_second_caller()
        with self._calling, unwatched():
            backend = self._admit(check_dispatch if is_fresh else check_cached_dispatch, args)
            args = self.refuse_on_failure(self._with_row_per_lane, backend, args)
            num_calls = backend.num_calls
            if isinstance(args, DispatchArgs):
                rows, handle, move = self._tell_on_failure(num_calls, partial(backend.plan, args))
            else:
                handle = args.handle
                rows, move = self._tell_on_failure(num_calls, partial(backend.dispatch_cached, args))
            self._move(args.mode, num_calls, move, args, rows, handle)
            return rows, handle.seal() if is_fresh else handle

    def combine(self, args: CombineArgs) -> tuple[Tensor, Tensor | None]:
        """Return combined_x, and the gradients of topk_weights if `args` has some."""
        self._refuse_second_caller()
        with self._calling, unwatched():
            backend = self._admit(check_combine, args)
            if self.settings.is_by_lane and not backend.capabilities.shares_rows:
                return self._combine_by_lane(backend, args)
            num_calls = backend.num_calls
            combined_x, topk_weight_grads, move = self._tell_on_failure(num_calls, partial(backend.combine, args))
            self._move(args.mode, num_calls, move, args, combined_x, topk_weight_grads)
            return combined_x, topk_weight_grads

    def _with_row_per_lane(self, backend: Backend, args: DispatchArgs | CachedDispatchArgs) -> DispatchArgs | CachedDispatchArgs:
        """Return `args` with rows as the backend takes them: with sums by lanes one for each (token, lane), unless it shares them."""
        lanes = self.settings.lanes
        if lanes == 1 or backend.capabilities.shares_rows:
            return args
        return replace(args, x=for_lanes(args.x, lanes), x_scales=None if args.x_scales is None else for_lanes(args.x_scales, lanes))

    def _combine_by_lane(self, backend: Backend, args: CombineArgs) -> tuple[Tensor, Tensor | None]:
        """Bring rows back one by one with their weights, and sum them here."""
        s, mode, sent = self.settings, args.mode, args.weights
        if not backend.capabilities.moves_on_thread:
            mode = replace(mode, is_async=False, is_split=False)  # the sum follows on the caller's stream
        unsummed = CombineArgs(mode, args.x, None, None, args.topk_weight_grads if sent is None else sent, args.handle)
        combined_x = self.refuse_on_failure(args.x.new_empty, args.handle.num_tokens // s.lanes, s.hidden)
        num_calls = backend.num_calls
        rows, values, move = self._tell_on_failure(num_calls, partial(backend.combine, unsummed))
        add = partial(sum_lanes, combined_x, rows, None if sent is None else values, args.bias, s.sums == "lanes_fma")
        keep_alive = args, unsummed, rows, values, combined_x
        if callable(move):
            self._move(mode, num_calls, partial(_one_after_the_other, move, add), *keep_alive)
        else:
            self._move(mode, num_calls, move, *keep_alive)
            add()
        return combined_x, values if sent is None else None

    def _finish_earlier_call(self) -> None:
        """Wait for the call in flight. If an interrupt ends the wait, refuse the next call."""
        try:
            self._wait_for_pending()
        except (EPError, ValueError):
            raise
        except BaseException as error:
            with contextlib.suppress(EPError):  # the call before has failed: `error` says more
                self.refuse(error)
            raise

    def _refuse_second_caller(self) -> None:
        """Raise EPError if a call is already being made, on another thread or below this signal handler."""
        if self._calling.locked():
            raise EPError("two threads are in calls of one buffer; make its calls one after the other")

    def event(self, mode: Mode, x: Tensor) -> Event | None:
        """Return the event of the call of `x` just made; None if it was not asynchronous."""
        if not (mode.is_async or mode.is_split):
            return None
        return self.in_flight or Event(recorded=self.backend.recorded(x))

    def _keep_in_flight(self, call: "InFlight") -> None:
        """Keep the unfinished part of a call that was enqueued on a GPU, and raise an earlier call's failure."""
        if (recorded := call.recorded) is not None:
            self.in_flight = Event(recorded=recorded)
        elif (second_half := call.second_half) is not None:
            half, is_captured = partial(self._finish, second_half), self._is_capturing()
            self.in_flight = Event(second_half=half, device=self.backend.device, is_captured=is_captured)
        if self._earlier_failure is not None:
            self._raise_earlier_failure(self.in_flight)

    def _finish(self, half: "SecondHalf") -> None:
        """Finish `half`. If it fails, tell the peers, since its call was entered."""
        try:
            is_finished = half.finish()
        except BaseException as error:
            if self._backend is not None:
                with contextlib.suppress(EPError):  # peers do not come: `error` says more
                    tell_peers(self._backend, error, True)
            raise
        if not is_finished:
            raise BufferDestroyedError("the buffer was destroyed before this call's hook; its results will not come")

    def check(self) -> None:
        """Raise the failure that an earlier call has reported, if any."""
        if (failure := self._take_earlier_failure()) is not None:
            raise failure
        self.backend.check()

    @property
    def memory(self) -> suspension.Memory:
        backend = self.backend if self._suspended is None else self._suspended[0]
        return suspension.Memory(backend.workspace_bytes - self._suspended_bytes, self._suspended_bytes)

    def suspend(self, group: "dist.ProcessGroup | None") -> None:
        """Give the memory back together with the peers of `group`. A failure of an earlier call is kept for the next call."""
        if self._suspended is not None:
            return
        self._refuse_other_process()
        self._refuse_second_caller()
        with self._calling:
            backend, native, error = self.backend, self.native, None
            self._serve(None)  # so that other threads' calls look at the lock
            try:
                try:
                    backend.check_usable()
                    self._wait_for_pending(refuses=False)
                except BaseException as failure:
                    error = failure
                suspension.agree(backend, self.settings, group, backend.num_calls, error)
            except BaseException:
                self._serve(native)
                raise
            self._suspended, self._backend = (backend, native), None
            failed = suspension.release(backend, self.settings, group)
            self._earlier_failure = failed or self._earlier_failure
            self._suspended_bytes = backend.free()

    def resume(self, group: "dist.ProcessGroup | None") -> None:
        """Make the memory again together with the peers of `group`."""
        self._refuse_other_process()
        self._refuse_second_caller()
        with self._calling:
            if self._suspended is None:
                self.backend  # noqa: B018  # raises after `destroy`
                return
            suspension.resume(self._suspended[0], self.settings, group)
            self._wake()

    def _wake(self) -> None:
        if self._suspended is not None:
            self._backend, native = self._suspended
            self._suspended, self._suspended_bytes = None, 0
            self._serve(native)

    def _serve(self, native: "NativeCalls | None") -> None:
        """Let `native` make calls, or none. It makes a gradient by itself unless it is held."""
        for calls in (self.native, native):
            if calls is not None:
                calls.is_held = native is None or self._earlier_failure is not None
        self.native = native

    def destroy(self) -> None:
        self._wake()
        if self._backend is None:
            return
        if self._worker is not None and os.getpid() == self._process_id:
            self._worker.finish()
        self._worker = None
        backend, self._backend, self.native = self._backend, None, None
        backend.destroy()
        self.in_flight = None  # comes last: a GPU may have used the tensors of the second half until here

    def recover(self, meet: Callable[[int], list[int]]) -> None:
        """Bring the ranks back into step: ranks that have made fewer calls refuse the rest. meet(number) returns every rank's number."""
        self._refuse_other_process()
        backend, pending = self.backend, self.in_flight
        backend.check_usable()  # else this rank would wait for peers in a group that is out of step
        self.in_flight = None
        self._take_earlier_failure()
        if pending is not None and not pending.is_half:
            pending.failure()
        self._num_submitted = 0
        self._refuse_rest(backend.num_calls, meet)  # ends the waits of peers, so that they can settle
        self._refuse_rest(backend.settle(), meet)
        meet(0)
        backend.settle()

    def _refuse_rest(self, number: int, meet: Callable[[int], list[int]]) -> None:
        for _ in range(max(meet(number)) - number):
            self.backend.refuse("this rank had made fewer calls than its peers when they recovered")

    # ---- refusals ----

    def refuse(self, error: _Error) -> _Error:
        """Tell the peers that this rank does not make its next call; they raise EPPeerError with the reason. Return `error`, for the
        caller to raise."""
        self.tell(describe(error), cause_of(error))
        return error

    def tell(self, reason: str, cause: Cause = Cause.OTHER) -> None:
        """Do what `refuse` does, with a reason in the form that `describe` returns."""
        if self._process_id != os.getpid() or is_dry_run():
            return  # a forked process would write to its owner's connections, and a dry run makes no call
        with unwatched():
            if not self._is_capturing():
                self._wait_for_pending()
            self.backend.refuse(reason, cause)

    def refuse_on_failure(self, function: Callable[..., _Result], *args: object, **kwargs: object) -> _Result:
        """Return the function's result. Refuse the call if the function raises anything. (A context manager would be slower.)"""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise self.refuse(error) from None
        except BaseException as error:
            with contextlib.suppress(EPError):  # an earlier call has failed: an interrupt says more
                self.refuse(error)
            raise

    def _tell_on_failure(self, num_calls: int, function: Callable[[], _Result]) -> _Result:
        """Return the function's result. If it raises anything, tell the peers: this rank refuses the call, or abandons it if the backend
        has entered it (its count is no longer `num_calls`)."""
        try:
            return function()
        except BaseException as error:
            backend = self._backend
            if backend is not None:
                with contextlib.suppress(EPError):  # peers do not come: `error` says more
                    tell_peers(backend, error, backend.num_calls != num_calls)
            raise

    def _admit(self, check: Callable[[Any, Settings], None], args: DispatchArgs | CachedDispatchArgs | CombineArgs) -> Backend:
        """Check `args` and this rank's state, and return the backend that makes the call."""
        backend = self.backend
        self._refuse_other_process()
        self._finish_earlier_call()
        if self._for_gpu is not None:
            backend = self.refuse_on_failure(self._choose, args.x)
        self.refuse_on_failure(check_device, args.x, backend)
        if isinstance(args, (CachedDispatchArgs, CombineArgs)):
            self.refuse_on_failure(check_handle, args.handle, self.settings)
        self.refuse_on_failure(check, args, self.settings)
        self._note_failure(backend, partial(_ends_with_a_failure, args))
        return backend

    def _note_failure(self, backend: Backend, ends_call: Callable[[], bool]) -> None:
        """Keep an earlier call's failure, to raise it once the present call is made: so one failure does not make two calls fail. If
        `ends_call()`, refuse the present call and raise it now."""
        try:
            failure = backend.take_failure()
        except EPError as error:
            raise self.refuse(error) from None
        if failure is not None and ends_call():
            raise self.refuse(failure)
        self._earlier_failure = failure or self._earlier_failure
        self._serve(self.native)

    def _take_earlier_failure(self) -> Exception | None:
        failure, self._earlier_failure = self._earlier_failure, None
        self._serve(self.native)
        return failure

    def _raise_earlier_failure(self, event: Event | None) -> NoReturn:
        """Raise the failure of an earlier call, after the call of `event` is made."""
        failure = self._take_earlier_failure()
        if event is not None:
            event.wait()  # the caller will not get it
        assert failure is not None
        raise failure

    @property
    def has_chosen(self) -> bool:
        """Return whether the backend is final. A process without a group may change it with the first rows."""
        return self._for_gpu is None

    def _choose(self, x: Tensor) -> Backend:
        """Return the backend for the device of the first rows, and serve that device from now on."""
        make = None if self._for_gpu is None else self._for_gpu()
        if make is not None and is_gpu(x.device):
            before, backend = self.backend, make(x)
            self._backend, self.capabilities = backend, backend.capabilities
            self.native = backend.native_calls(self.number, self.own_mode)
            before.destroy()
        self._for_gpu = None
        return self.backend

    def _refuse_other_process(self) -> None:
        """Raise BufferDestroyedError in a process forked from the buffer's owner: its thread and GPU do not exist there."""
        if self._process_id != os.getpid():
            raise BufferDestroyedError(
                f"this buffer belongs to process {self._process_id}, this is process {os.getpid()}, forked from it; "
                "create a Buffer in each process"
            )

    # ---- asynchronous calls: in order on one thread of the buffer, or on a GPU's stream ----

    def _move(self, mode: Mode, num_calls: int, move_rows: Move, *keep_alive: Any) -> None:
        """Move the rows, now or later. `keep_alive` holds the tensors that native code knows by address until then. Raises an earlier
        call's failure."""
        if not callable(move_rows):
            self._keep_in_flight(move_rows)
        else:
            move = partial(self._tell_on_failure, num_calls, move_rows)
            if self.capabilities.moves_on_thread and (mode.is_async or mode.is_split):
                self._tell_on_failure(num_calls, partial(self._move_on_thread, num_calls + 1, move, keep_alive))
            else:
                move()
        if self._earlier_failure is not None:
            self._raise_earlier_failure(self.event(mode, keep_alive[0].x))

    def _move_on_thread(self, number: int, move: Callable[[], None], keep_alive: object) -> None:
        if self._worker is None:
            self._worker = Worker()
        self._num_submitted = number
        self.in_flight = Event(self._worker.submit(lambda _: move(), keep_alive))

    def _is_capturing(self) -> bool:
        return self.backend.device is not None and torch.cuda.is_current_stream_capturing()

    def _wait_for_pending(self, refuses: bool = True) -> None:
        """Let the asynchronous call in flight finish. Raises EPError if it failed and nobody has seen its error, and then refuses the next
        call if this one is it."""
        pending = self.in_flight
        if pending is None:
            return
        if pending.is_half and pending.is_captured != self._is_capturing():
            if not pending.is_captured:
                raise ValueError(
                    "a call of this buffer waits for its hook, and its rest cannot be part of a CUDA graph; call the hook before"
                )
            self.in_flight = None  # the capture of its graph has ended without its second half
            return
        error = pending.failure()
        self.in_flight, self._num_submitted = None, 0
        if error is not None and not pending.seen:
            failed = EPError(f"an earlier asynchronous call of this buffer failed: {describe(error)}")
            raise (self.refuse(failed) if refuses else failed) from error


def _ends_with_a_failure(args: DispatchArgs | CachedDispatchArgs | CombineArgs) -> bool:
    """Return whether an earlier failure is raised instead of this call. A dispatch whose host waits for counts would wait for the failed
    rank, whose next call may be far away. A handle of a failed dispatch allows no call."""
    return args.num_recv_rows < 0 if isinstance(args, DispatchArgs) else args.handle.has_failed


def _one_after_the_other(*functions: Callable[[], None]) -> None:
    for function in functions:
        function()


# ---- failures between two calls: of an expert, of a gradient's hook, of a forward that a backward pass repeats ----


class _Watch:
    """PyTorch calls this at the end of a backward pass, and drops it without a call if the pass fails."""

    def __init__(self, tell: Callable[[], None]):
        self._tell, self._is_over = tell, False

    def __call__(self) -> None:
        self._is_over = True

    def __del__(self) -> None:
        if not self._is_over:
            self._tell()


def watch_pass(tell: Callable[[], None]) -> bool:
    """Call `tell` if the running backward pass fails. (A backward in csrc/torch does the same.) Return False if no backward pass runs."""
    runs = not is_dry_run() and torch._C._current_graph_task_id() >= 0
    if runs:
        torch.autograd.Variable._execution_engine.queue_callback(_Watch(tell))
    return runs


def watch_backward(calls: Calls, reason: str = _PASS_FAILED) -> bool:
    """Make the peers raise EPPeerError if the running backward pass fails before its next call of the buffer. Return False if none runs."""
    return watch_pass(partial(pass_failed, calls.number, calls.num_calls, reason))


def pass_failed(number: int, num_calls: int, reason: str = _PASS_FAILED) -> None:
    """Tell the peers, unless the buffer has made more than `num_calls` calls: then a later call has told them."""
    calls = live_calls.get(number)
    if calls is None or calls.is_destroyed or calls.num_calls != num_calls:
        return
    with contextlib.suppress(EPError, RuntimeError):  # the error of the forward or backward says more
        calls.tell(reason)


def tell_failure(calls: Calls, error: BaseException) -> None:
    """Tell the peers that this rank does not make its next call because of `error`. If a backward pass repeats this forward, the peers are
    told only once that pass fails; the error may have been a way to end the repetition early."""
    if isinstance(error, ENDS):
        return
    with contextlib.suppress(EPError, RuntimeError):  # missing peers or a failed GPU: `error` says more
        if not watch_backward(calls, describe(error)):
            calls.refuse(error)


def notify_peers_on_failure(buffer: "Buffer", function: Callable[..., _Result], *args: object) -> _Result:
    """Return `function(*args)`, which makes no call of the buffer or ends with one. If it fails before that call, the peers raise
    EPPeerError with the same error instead of waiting."""
    if torch.compiler.is_compiling():
        return function(*args)
    num_calls = buffer.num_calls
    try:
        return function(*args)
    except BaseException as error:
        notify_peers(buffer, error, num_calls)
        raise


def notify_peers(buffer: "Buffer", error: BaseException, num_calls: int | None = None) -> None:
    """Make the peers raise EPPeerError with this error in their next call of the buffer. If this rank has made more than `num_calls`
    calls, they know already."""
    if not buffer.calls.is_destroyed and num_calls in (None, buffer.num_calls):
        tell_failure(buffer.calls, error)
