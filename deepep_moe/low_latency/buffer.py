"""`LowLatencyBuffer`: dispatch and combine for batches so small that launches and waits, not bytes, take the time."""

import contextlib
import itertools
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe import config
from deepep_moe.arguments import as_int, check_bool
from deepep_moe.device import current_stream, is_gpu, making_on
from deepep_moe.errors import BufferDestroyedError, BufferSuspendedError, EPError, describe
from deepep_moe.event import Event
from deepep_moe.group import suspension
from deepep_moe.group.reach import find_nodes
from deepep_moe.group.rendezvous import introduce, join
from deepep_moe.group.settings import Settings, Sizes, check_settings, one_by_one
from deepep_moe.library import is_dry_run
from deepep_moe.low_latency.base import DESTROYED, FORKED, NOT_RECEIVED, LowLatencyBackend
from deepep_moe.low_latency.checks import (
    check_combine,
    check_combine_input,
    check_dispatch,
    check_lane_weights,
    check_low_latency_settings,
    check_memory_of_dispatch,
)
from deepep_moe.low_latency.handle import LowLatencyHandle, LowLatencyOutput, LowLatencyStatistics
from deepep_moe.low_latency.select import BACKENDS, make_backend
from deepep_moe.ops.weighted import for_lanes, sum_lanes

if TYPE_CHECKING:
    from deepep_moe._torch import LowLatencyCalls

logger = logging.getLogger("deepep_moe")
_numbers = itertools.count()
_Error = TypeVar("_Error", bound=BaseException)
MAX_IN_FLIGHT = 2
"""A rank's workspace has room for this many calls in a row that were not received."""


class LowLatencyBuffer(Sizes):
    """Dispatch and combine with one kernel each, no wait on the host, and a hook to receive with.

    Rank r of R holds experts r * E / R to (r + 1) * E / R - 1. Every rank of the group must create the buffer and then make the same calls
    in the same order; token counts may differ from rank to rank and call to call. With sums by ranks a token crosses a link once per rank,
    and is copied to its experts' rows there. `combine` sums on the experts' rank first, so one row per (token, rank) comes back. Calls may
    be captured in CUDA graphs. No gradients: training with large batches has `Buffer`.

    With `return_hook=True` a call sends and returns, `hook()` receives; in between no SM is held. A call may be sent before the last one
    was received, but not before the one before that was. Double-batch overlap needs this (`deepep_moe.nn.overlapped`).

    Args:
        group, num_experts, timeout_s: as for `Buffer`.
        num_max_tokens_per_rank: most tokens one rank may dispatch in a call. It must be 1 to 65535, with `sums`
            by lanes 1 to 65535 / num_topk.
        hidden: columns of a row. A row must be a multiple of 16 bytes, and with `fp8` of 128 columns.
        num_topk: experts per token. At most 32 are allowed.

        backend: "auto", `nvlink` (GPUs of one host), `nvshmem` (GPUs of several nodes, 32 ranks at most) or `shm` (ranks of one host,
            CPU tensors). NVLink between the GPUs is not checked where a process sees its own GPU alone. On GPUs with an NCCL group
            "auto" takes `nvlink` or `nvshmem`, else `shm`. The name is in `buffer.backend`, and in one log line on rank 0. A process
            without a group serves the kind of device that its first dispatch's rows lie on.

        mask_stalled: go on without a rank that died or misses the deadline, instead of failing. The rank is masked (`mask_rank`).
        ranks_per_node: as for `Buffer`. Fewer than a host has make virtual nodes, for tests.
        sums: as in `Buffer`. By lanes a row crosses for each (token, lane), to the same place as by ranks. `combine` weights and adds the
            rows on the token's rank. The workspace grows num_topk times.

    Raises:
        ValueError: a bad argument. The peers raise EPPeerError.
        EPMismatchError: ranks gave different settings; the message names them.
        BackendUnavailableError: no backend, or not the named one, can serve here; the message says why and what to do.
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
        timeout_s: float | None = None,
        mask_stalled: bool = False,
        ranks_per_node: int | None = None,
        sums: str = "ranks",
    ):
        group, num_ranks, rank = join(group, "LowLatencyBuffer")
        s = Settings(num_ranks, rank, num_max_tokens_per_rank, hidden, num_experts, num_topk, 300.0, sums=sums)
        error: Exception | None = None
        num_threads = 1
        try:
            s = check_low_latency_settings(check_settings(s, backend, BACKENDS, timeout_s, ranks_per_node))
            check_bool("mask_stalled", mask_stalled)
            num_threads = config.num_threads(num_ranks)
        except Exception as refused:
            error = refused
        peers = introduce(s, backend, num_threads, error, group, kind="LowLatencyBuffer", mask_stalled=mask_stalled)
        self._settings = s = find_nodes(s, peers)
        self._is_by_lane = s.is_by_lane
        self._group, self._suspended, self._suspended_bytes = group, False, 0
        self._number = next(_numbers)
        self._in_flight: list[tuple[int, Event]] = []
        """Calls that may not be received yet, by number."""
        self._combine_input: dict[torch.dtype, Tensor] = {}
        self._masks_told: set[int] = set()
        self._earlier_failure: Exception | None = None
        self._use(make_backend(backend, s, peers, group, mask_stalled))
        is_open = backend == "auto" and group is None and peers[0].has_gpu  # its first rows may lie on a GPU
        self._make_for_gpu = partial(make_backend, backend, s, peers, None, mask_stalled, True) if is_open else None

    def _use(self, backend: LowLatencyBackend) -> None:
        """Make a new backend ready for calls, and say which it is."""
        try:
            statistics = backend.zeros(self.num_local_experts + self.num_ranks + 1, torch.int64)
            backend.open(statistics)
        except BaseException:
            backend.destroy()
            raise
        self._statistics = statistics
        self._backend: LowLatencyBackend | None = backend
        self.backend: str = backend.name
        self._log_backend(backend.name, backend.workspace_bytes)

    def _choose(self, x: object) -> None:
        """Serve the device of the first rows from now on."""
        if self._make_for_gpu is not None and isinstance(x, Tensor) and is_gpu(x.device):
            with making_on(x):
                backend, before = self._make_for_gpu(), self._alive()
            self._use(backend)
            before.destroy()
        self._make_for_gpu = None

    def _settled(self) -> LowLatencyBackend:
        """Return the backend, which no call changes any more."""
        if self._make_for_gpu is not None:
            raise EPError(
                "this buffer of a process without a group does not know yet whether its rows lie on the GPU; make a dispatch first, or "
                "give it a backend: nvlink for GPUs, shm for CPUs"
            )
        return self._alive()

    # ---- what it is ----

    @property
    def capacity(self) -> int:
        """Return the number of rows of a local expert: num_ranks * num_max_tokens_per_rank."""
        return self._settings.rows_of_expert

    @property
    def workspace_bytes(self) -> int:
        """Memory for the exchange that this rank owns, bytes; docs/design/low_latency.md has the formula."""
        return self._alive().workspace_bytes

    def __repr__(self) -> str:
        s = self._settings
        what = f"{s.num_experts} experts, top-{self.num_topk}, hidden {s.hidden}, {self.num_max_tokens_per_rank} tokens"
        state = "destroyed" if self._backend is None else "suspended" if self._suspended else self.backend
        return f"LowLatencyBuffer({state}, rank {s.rank} of {s.num_ranks}, {what})"

    # ---- what it does ----

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None = None,
        *,
        fp8: bool = False,
        scale_format: str = "fp32",
        async_op: bool = False,
        return_hook: bool = False,
    ) -> LowLatencyOutput:
        """Send every token to the ranks of its experts. Collective.

        Args:
            x: [num_tokens, hidden] contiguous, bf16, fp16 or fp32.
            topk_idx: [num_tokens, num_topk] contiguous, int64 or int32. An index of -1 means no expert. A row must not name one twice.
            topk_weights: [num_tokens, num_topk] contiguous, fp32, by which `combine` multiplies the rows. None: a plain sum.
            fp8: quantize rows to float8_e4m3fn while they are sent (`deepep_moe.ops.quantize_fp8`). Each 128 columns have a scale.
            scale_format: "fp32", or "ue8m0" for scales that are rounded up to powers of two.
            async_op: return at once. Read results or change arguments only after `output.event.wait()`.
            return_hook: send and return. The same holds until `output.hook()`. On a GPU the hook receives on the stream that is current
                then.

        Raises:
            TypeError: an argument has another type or dtype.
            ValueError: an argument has another shape, device or value. Also while the call before last was not received; then the peers
                learn nothing, and the call may be made again.
            EPPeerError: a peer has raised an error, or has left.
            EPMismatchError: ranks make different calls.
            EPTimeoutError: a peer died or stalled. On a GPU the next call or `check` raises this, EPPeerError, and errors of `topk_idx`.
            BufferDestroyedError: after `destroy`.
        """
        calls = self._calls()
        is_sent, s = None, self._settings
        if self._is_by_lane:
            x, topk_idx, topk_weights, is_sent = self._by_lane(x, topk_idx, topk_weights)
        arguments = x, topk_idx, None if self._is_by_lane else topk_weights, fp8, scale_format
        output = None if calls is None else calls.dispatch(*arguments, async_op, return_hook, False)
        if output is None:
            self._choose(x)
            backend = self._begin()
            try:
                check_dispatch(*arguments, self._settings, backend)
            except BaseException as error:
                self._refuse(error)
            output = self._run("dispatch", arguments, async_op, return_hook)
        event = self._in_flight_of(output) if async_op or return_hook else None
        of_lanes = topk_weights if self._is_by_lane else None, is_sent
        handle = LowLatencyHandle(self._number, output.num_tokens // s.lanes, output.state, event, *of_lanes).seal()
        hook = event.wait if return_hook and event is not None else None
        return LowLatencyOutput(output.recv_x, output.recv_x_scales, output.num_recv_tokens_per_expert, handle, event, hook)

    def combine(
        self,
        x: Tensor,
        handle: LowLatencyHandle,
        *,
        topk_weights: Tensor | None = None,
        out: Tensor | None = None,
        wire: str | None = None,
        async_op: bool = False,
        return_hook: bool = False,
    ) -> Any:
        """Bring the experts' outputs back to the tokens' ranks, weighted and summed. Collective.

        The sum is that of `Buffer.combine` with the same `sums`, to the bit. By ranks, an expert's rank adds a token's rows in ascending
        lane of top-k, in fp32, and rounds once to the wire's format. The token's rank adds these over ascending ranks, in fp32, and rounds
        once. With several nodes, each node's ranks are added first, in ascending order and fp32, and rounded once where the sum crosses.
        The token's rank adds the nodes in ascending order. The half that sends then waits on SMs for the ranks of its node.

        Args:
            x: [num_local_experts, capacity, hidden] contiguous, bf16, fp16 or fp32, rows as the dispatch returned them. They are read where
                they lie (`combine_input` gives such a tensor to write to). Rows that were not filled are not read.
            topk_weights: [num_tokens, num_topk] contiguous, fp32, of this rank's tokens. None: the weights of the dispatch. Weights given
                here replace those, with the same bits. All ranks give weights, or none does. The half that sends waits until all ranks have
                entered the call (the kernel on a GPU, the call on a CPU). This costs one trip over the link, so give weights to `dispatch`
                if they are known by then.

            out: [num_tokens, hidden], dtype of `x`. The result is written to it.
            wire: None: rows travel in the dtype of `x`. With "fp8" they travel as e4m3 with one fp32 scale for 128 columns, half the bytes
                of bf16. Each rank's contribution is then off by at most 1/16 of itself. If 2^-10 / 448 of the largest magnitude in its 128
                columns (1e-4 at least) is more, that is the bound. A node's sum is quantized again where it crosses to another node, with
                such an error too.
            async_op, return_hook: return at once with an Event or a hook, as `dispatch`.

        Returns:
            combined_x [num_tokens, hidden], dtype of `x`. With `async_op` it is (combined_x, Event), with `return_hook` (combined_x, hook).
            Tokens without expert are 0.

        Raises: as `dispatch`.
        """
        if self._is_by_lane:
            return self._combine_by_lane(x, handle, topk_weights, out, wire, async_op, return_hook)
        calls, output = self._calls(), None
        arguments = topk_weights, out, wire
        if calls is not None and self._is_received(handle):
            output = calls.combine(x, handle.state, handle.num_tokens, *arguments, async_op, return_hook, False)
        if output is None:
            backend = self._begin()
            try:
                check_combine(x, handle, *arguments, self._settings, backend, self._number)
                self._raise_failure_of(handle)
            except BaseException as error:
                self._refuse(error)
            output = self._run("combine", (x, handle.state, handle.num_tokens, *arguments), async_op, return_hook)
        if not (async_op or return_hook):
            return output.combined_x
        event = self._in_flight_of(output)
        return output.combined_x, event.wait if return_hook else event

    def _by_lane(self, x: Any, topk_idx: Any, topk_weights: Any) -> tuple[Any, Any, Any, Tensor | None]:
        """Return x and topk_idx for each (token, lane), the weights of the lanes, and which of these have an expert."""
        s = self._settings
        self._choose(x)
        is_like_rows = isinstance(x, Tensor) and x.dim() == 2 and x.shape[1] == s.hidden and x.is_contiguous()
        if not is_like_rows or not isinstance(topk_idx, Tensor):
            return x, topk_idx, None, None  # the checks refuse it
        try:
            check_memory_of_dispatch(x, topk_idx, topk_weights)
            topk_idx = one_by_one("topk_idx", topk_idx, len(x), s)
            is_sent = (topk_idx >= 0).view(len(x), s.lanes)
            if topk_weights is not None:
                check_lane_weights(topk_weights, len(x), s, self._alive())
                topk_weights = topk_weights.masked_fill(~is_sent, 0.0)
            return for_lanes(x, s.lanes), topk_idx, topk_weights, is_sent
        except BaseException as error:
            self._begin()
            self._refuse(error)

    def _combine_by_lane(
        self, x: Tensor, handle: LowLatencyHandle, topk_weights: Tensor | None, out: Tensor | None, wire: str | None, async_op: bool,
        return_hook: bool,
    ) -> Any:  # fmt: skip
        backend, s = self._begin(), self._settings
        try:
            check_combine(x, handle, topk_weights, out, wire, s, backend, self._number)
            self._raise_failure_of(handle)
            weights = handle.topk_weights
            if topk_weights is not None and handle.is_sent is not None:
                weights = topk_weights.masked_fill(~handle.is_sent, 0.0)
            sums = x.new_empty(handle.num_tokens, s.hidden) if out is None else out
        except BaseException as error:
            self._refuse(error)
        output = self._run("combine", (x, handle.state, s.lanes * handle.num_tokens, None, None, None), async_op, return_hook)
        add = partial(sum_lanes, sums, output.combined_x, weights, None, s.sums == "lanes_fma")
        if not (async_op or return_hook):
            add()
            return sums
        tensors, stream = (sums, output.combined_x, weights), current_stream(x.device)
        event = self._in_flight_of(output).then(partial(_add_there, add, tensors, stream))
        return sums, event.wait if return_hook else event

    def combine_input(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the buffer's own [num_local_experts, capacity, hidden], to which the experts' last matrix product may write.

        It is the same tensor in every call, so its address stays, for graphs. But `combine` reads any tensor of this shape in place. The
        rows may be written again once the combine that read them has been received.

        Raises:
            TypeError: `combine` does not take the dtype.
            EPError: as `statistics`.
        """
        if dtype not in self._combine_input:
            backend = self._settled()
            check_combine_input(dtype, self._settings, backend)
            self._combine_input[dtype] = backend.zeros((self.num_local_experts, self.capacity, self.hidden), dtype)
        return self._combine_input[dtype]

    # ---- ranks that are gone ----

    def mask_rank(self, rank: int, masked: bool = True) -> None:
        """Leave a rank out, or take it back. Not collective, but ranks must agree: whoever masks a rank neither sends to it nor waits
        for it.

        Tokens of a masked rank do not come; experts of a masked rank contribute nothing to `combine`, and their (token, expert) pairs are
        counted in `statistics().num_dropped`. To take a rank back, all others call `mask_rank(rank, False)` between the same two calls, and
        the rank itself calls `rejoin`. Over nodes the ranks with its index in their nodes then wait for what it has sent to land.

        Raises:
            ValueError: this rank itself, or one that does not exist.
            EPTimeoutError: a rank that is taken back over nodes has not called `rejoin` within the deadline, or a rank of this node has not
                taken it back. The rank is masked still. Then all others mask it, and take it back again.
        """
        s = self._settings
        with contextlib.suppress(TypeError):
            rank = as_int("rank", rank)
        if type(rank) is not int or not 0 <= rank < s.num_ranks or rank == s.rank:
            raise ValueError(f"rank is {rank!r}; it must be one of 0 to {s.num_ranks - 1}, and not this rank, {s.rank}")
        before = set(self._masked())
        self._alive().mask(rank, masked)
        now = set(self._masked())
        self._masks_told = self._masks_told | (now - before) if masked else self._masks_told & now

    def rejoin(self) -> None:
        """Join the peers again after this rank was masked. It forgets its own masks, waits until all ranks take it back, and goes on with
        their next call. From the moment the first one takes this rank back until then, it must make no call.
        All others must be there: while another rank is gone or masked, nobody can rejoin.

        Raises:
            EPTimeoutError: a rank does not take it back within the deadline.
            EPMismatchError: ranks are between different calls.
        """
        self._alive().rejoin()
        self._in_flight.clear()
        self._masks_told.clear()
        self._earlier_failure = None

    @property
    def masked_ranks(self) -> list[int]:
        """Return the ranks that are left out, by `mask_rank` or for a missed deadline, as far as the host can see: without waiting for the
        GPU."""
        self._tell_masks()
        return self._masked()

    # ---- what it has seen ----

    def statistics(self) -> LowLatencyStatistics:
        """Return views of the counters; they go on counting.

        Raises:
            EPError: before the first dispatch of a process without a group that sees a GPU. The dispatch decides where they lie.
        """
        self._settled()
        statistics, num_experts = self._statistics, self.num_local_experts
        return LowLatencyStatistics(statistics[:num_experts], statistics[num_experts:-1], statistics[-1])

    def reset_statistics(self) -> None:
        """Set the statistics to zero, on the current stream."""
        self._statistics.zero_()

    def check(self) -> None:
        """Look at what a GPU has reported of earlier calls. Not collective; does not wait for the GPU.

        Raises: as `dispatch`.
        """
        self._alive().check()
        self._tell_masks()

    def finish_calls(self) -> None:
        """Receive the calls that were not received, where their hooks or events are lost: an error flew before they were called. Not
        collective. On a GPU that is enqueued on the current stream; over shared memory it waits for the peers.

        Raises: what `hook()` or `event.wait()` would have raised, the first error after all were received.
        """
        self._alive()
        in_flight, self._in_flight = self._in_flight, []
        errors = []
        for _, event in in_flight:
            try:
                event.wait()
            except (EPError, ValueError) as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def memory(self) -> suspension.Memory:
        """Return the bytes of exchange memory that this rank holds, and that `suspend` has given back. Not collective.

        Tensors of `combine_input` are PyTorch's and do not count."""
        return suspension.Memory(self._owner().workspace_bytes - self._suspended_bytes, self._suspended_bytes)

    def suspend(self) -> None:
        """Give the exchange memory back until `resume`, as `Buffer.suspend`. Collective. Receives calls that were not received.

        Raises: as `Buffer.suspend`; ValueError while a rank is masked.
        """
        if self._suspended:
            return
        backend, error = self._alive(), None
        try:
            self.finish_calls()
            if masked := self._masked():
                raise ValueError(f"ranks {masked} are masked; take them back before the buffer is suspended")
        except BaseException as failure:
            error = failure
        self._suspended = True  # before the vote, so that no other thread makes a call after it
        try:
            suspension.agree(backend, self._settings, self._group, backend.num_calls(), error)
        except BaseException:
            self._suspended = False
            raise
        failed = suspension.release(backend, self._settings, self._group)
        self._earlier_failure = failed or self._earlier_failure
        self._suspended_bytes = backend.free()

    def resume(self) -> None:
        """Make the memory again. Collective. Raises: as `Buffer.resume`."""
        backend = self._owner()
        if self._suspended:
            suspension.resume(backend, self._settings, self._group)
            self._suspended, self._suspended_bytes = False, 0

    def destroy(self) -> None:
        """Free the workspace and threads. Not collective, may be repeated. On GPUs memory stays as long as that of a `Buffer`."""
        self._group, self._suspended = None, False
        backend, self._backend = self._backend, None
        self._in_flight.clear()
        self._combine_input.clear()
        if backend is not None:
            backend.destroy()

    # ---- how calls run ----

    def _run(self, operation: str, arguments: tuple[object, ...], async_op: bool, return_hook: bool) -> Any:
        """Make a call that was checked, and raise then what earlier ones have left."""
        backend = self._alive()
        num_calls, failure = backend.num_calls(), self._earlier_failure
        try:
            output = backend.run(operation, *arguments, async_op, return_hook)
        except BaseException as error:
            if backend.is_untold(error, num_calls):
                self._refuse(error)  # this call where peers lack its rows, else the next
            self._earlier_failure = None
            if failure is not None:
                raise error from failure
            raise
        self._earlier_failure = None
        if failure is not None:
            if async_op or return_hook:
                self._in_flight_of(output).wait()  # nobody will be given it
            raise failure
        return output

    def _in_flight_of(self, output: object) -> Event:
        backend = self._alive()
        event = backend.event(output)
        self._in_flight.append((backend.num_calls(), event))
        return event

    def _check_room(self) -> None:
        """Raise ValueError if the workspace has no room for another call. An error of an asynchronous call that nobody waited for is raised
        once this call is made, so that ranks stay in step.

        Calls may be received in any order, but each call needs the one before last to be received. It tells the peers that they may
        overwrite what was sent two calls before that. Without room nothing is sent, so the caller may try again."""
        if not self._in_flight:
            return
        over = [(number, event) for number, event in self._in_flight if event.seen or event.is_over()]
        self._in_flight = [entry for entry in self._in_flight if entry not in over]
        for _, event in over:
            error = None if event.seen else event.failure()
            if error is not None and self._earlier_failure is None:
                self._earlier_failure = EPError(f"an earlier asynchronous call of this buffer failed: {describe(error)}")
                self._earlier_failure.__cause__ = error
        if self._in_flight and self._alive().num_calls() + 1 - self._in_flight[0][0] >= MAX_IN_FLIGHT:
            raise ValueError(NOT_RECEIVED)

    def _calls(self) -> "LowLatencyCalls | None":
        """Return what makes the next call from C++, which knows nothing of failures that wait to be raised."""
        calls = self._alive().calls
        if calls is None or self._earlier_failure is not None:
            return None
        self._check_room()
        return calls

    def _is_received(self, handle: object) -> bool:
        """Is this a handle of this buffer, as its dispatch made it, which was received?"""
        if type(handle) is not LowLatencyHandle or handle.buffer_id != self._number or not handle.is_unchanged:
            return False
        return handle.event is None or not handle.event.is_half

    def _begin(self) -> LowLatencyBackend:
        """Look at what earlier calls have left. Their failures are raised once this call is made, so that ranks stay in step."""
        backend = self._alive()
        self._tell_masks()
        self._check_room()
        try:
            backend.check()
        except (EPError, ValueError) as error:
            self._earlier_failure = self._earlier_failure or error
        return backend

    def refuse(self, error: _Error) -> _Error:
        """Tell the peers, which are or will be in a call, that this rank does not make it: they raise EPPeerError with the reason. Return
        `error`, to be raised. Raises ValueError where the call before last was not received: then the peers learn nothing."""
        self._begin().refuse(describe(error))
        return error

    def _refuse(self, error: BaseException) -> NoReturn:
        """Tell the peers why this rank does not make its call, and raise it."""
        if not is_dry_run():  # it makes no call
            self._alive().refuse(describe(error))
        raise error

    def _raise_failure_of(self, handle: LowLatencyHandle) -> None:
        """Raise an earlier failure if it is that of the handle's dispatch: no call can be made that it would be raised after."""
        failure = self._earlier_failure
        if failure is not None and self._alive().has_failed(handle.state):
            self._earlier_failure = None
            raise failure

    def _masked(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if masks >> rank & 1] if (masks := self._alive().masks()) else []

    def _tell_masks(self) -> None:
        for rank in self._masked():
            if rank not in self._masks_told:
                self._masks_told.add(rank)
                why = f"is gone or missed a deadline of {self._settings.timeout_s:g} s; its tokens and experts are dropped"
                logger.warning("LowLatencyBuffer: rank %d masks rank %d, which %s", self.rank, rank, why)

    def _alive(self) -> LowLatencyBackend:
        if self._suspended:
            raise BufferSuspendedError(suspension.SUSPENDED)
        return self._owner()

    def _owner(self) -> LowLatencyBackend:
        """Return the backend, suspended or not."""
        if self._backend is None:
            raise BufferDestroyedError(DESTROYED)
        if os.getpid() != self._backend.process_id:
            raise BufferDestroyedError(FORKED)
        return self._backend


def _add_there(add: Callable[[], None], tensors: tuple[Tensor | None, ...], first: int) -> None:
    """Call `add` on the stream that is current now, which reads and writes tensors of the stream `first`."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda and current_stream(tensor.device) != first:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
    add()
