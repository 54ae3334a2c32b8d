"""Backend `collective`: anything torch.distributed reaches, rows through `all_to_all_single` of the process group.

Plain PyTorch on the device of the tensors. A call is an exchange of entries (who is here, with what operation and counts, or with what
error), then an all-to-all whose rows carry their lane indices, weights and scales. Over several nodes rows take two hops (`two_hops`).
"""

import contextlib
import datetime
import time
import weakref
import zlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe import _C
from deepep_moe.device import DTYPE_NAMES
from deepep_moe.errors import Cause, EPCapacityError, EPError, EPMismatchError, EPPeerError, EPTimeoutError, describe
from deepep_moe.exchange.backends.base import (
    Backend,
    CachedDispatchArgs,
    Capabilities,
    CombineArgs,
    CombineOptions,
    DispatchArgs,
    Move,
    MoveExpertsArgs,
    Rows,
    check_bounds,
    new_handle,
)
from deepep_moe.exchange.backends.two_hops import Step, Steps, Sums, TwoHops, picked
from deepep_moe.exchange.handle import DispatchHandle, padded
from deepep_moe.group.rendezvous import Exchange, Introduction, culprit_behind, hang_up, is_of_handler, moves_cpu_tensors
from deepep_moe.group.settings import Settings
from deepep_moe.ops.lanes import count_lanes
from deepep_moe.ops.routing import refuse_bad_copies, refuse_bad_routing

_Result = TypeVar("_Result")
_Owe = Callable[[Tensor, list[int]], Callable[[], _Result]]
_NUM_FIELDS = 4  # the numbers of an `Entry`
_MESSAGE_BYTES = 512
_asleep: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # groups whose NCCL a buffer has suspended


def _reinterpret(rows: Tensor, dtype: torch.dtype, num_columns: int) -> Tensor:
    """Return the bytes of rows [num_rows, ...] as [num_rows, num_columns] of `dtype`."""
    return rows.contiguous().flatten().view(dtype).view(rows.shape[0], num_columns)


def _at_once(step: Step) -> Steps[list[Tensor]]:
    """Make a generator of `Steps` that has one exchange only."""
    return (yield step)


class Entry(NamedTuple):
    """A rank's arrival in a call."""

    buffer: int  # by its number on rank 0: several buffers of one group may be alive
    call: int
    failed: int  # not 0: the rank refuses the call, 1 + Cause
    num_recv_rows: int
    words: str  # what the call does, or why the rank refuses it


def find_difference(entries: list[Entry], rank: int) -> str:
    """Return how the calls of all ranks differ, in the view of `rank`; an empty string if they fit."""
    own_entry = entries[rank]
    others = [peer for peer, entry in enumerate(entries) if entry.buffer != own_entry.buffer]
    if others:
        buffers = "; ".join(f"rank {peer}: buffer {entries[peer].buffer}" for peer in [rank, *others])
        return f"ranks are in calls of different buffers of one group: {buffers} (as rank 0 counts them); call them in the same order"
    numbers = {entry.call for entry in entries}
    calls = [entry.words if len(numbers) == 1 else f"call {entry.call}: {entry.words}" for entry in entries]
    others = [peer for peer, call in enumerate(calls) if call != calls[rank]]
    return f"ranks make different calls: {'; '.join(f'rank {peer}: {calls[peer]}' for peer in [rank, *others])}" if others else ""


def _merged(options: CombineOptions, before: Tensor, values: Tensor, have_expert: Tensor) -> Tensor:
    """Return the values of lanes with those of another rank or node, which has the experts of some."""
    return before + values if options.sums_lanes else torch.where(have_expert, values, before)


class CollectiveBackend(Backend):
    """Moves rows by the collectives of `group` (None: a single rank)."""

    name = "collective"
    capabilities = Capabilities(device_types=("cpu", "cuda"))  # no thread: the caller may be using the group at the same time
    workspace_bytes = 0

    def __init__(self, settings: Settings, group: "dist.ProcessGroup | None", peers: list[Introduction]):
        self._number = peers[0].number
        self.settings = settings
        self.group = group
        self._hops = TwoHops(settings)
        host = peers[settings.rank].host
        self._neighbours = {rank: _C.running(peer.process_id) for rank, peer in enumerate(peers) if peer.host == host}
        self._num_calls = 0
        # After an interrupt, `abandon` runs what is left of the last call: its entry, then the exchange of rows that peers wait for.
        self._arriving: Callable[[], object] | None = None
        self._owed: Callable[[], object] | None = None
        self._broken: str | None = None  # why the group's messages are out of step, for good

    @property
    def num_calls(self) -> int:
        return self._num_calls

    # ---- the three operations ----

    def plan(self, args: DispatchArgs) -> tuple[Rows, DispatchHandle, Move]:
        s, topk_idx = self.settings, args.topk_idx
        refuse_bad_routing(topk_idx, s.num_experts)
        per_rank, per_expert, _ = count_lanes(topk_idx, s.num_experts, s.num_ranks)
        narrow_topk_idx = topk_idx.to(torch.int32, copy=True).contiguous()

        def owe(counts: Tensor, num_to_forward: list[int]) -> Callable[[], list[Tensor]]:
            check_bounds(args, s, counts, self._bounds)
            return partial(self._send_rows, args, narrow_topk_idx, counts[:, s.rank].tolist(), num_to_forward)

        own_counts = self._own_counts(narrow_topk_idx, torch.cat([per_rank, per_expert]))
        counts, send = self._enter(self._entry(args), own_counts, owe, args.num_recv_rows)
        to_here = counts[:, s.rank : s.rank + 1]
        mine = slice(s.num_ranks + s.rank * s.num_local_experts, s.num_ranks + (s.rank + 1) * s.num_local_experts)
        tokens_per_expert = counts[:, mine].sum(0)
        needed = check_bounds(args, s, counts, self._bounds)
        num_rows = needed if args.num_recv_rows < 0 else args.num_recv_rows
        recv_counts, tokens_per_expert = (part.to(topk_idx.device, torch.int32).contiguous() for part in (to_here, tokens_per_expert))
        handle = new_handle(args, self.num_calls, num_rows, int(to_here.sum()), narrow_topk_idx, recv_counts, tokens_per_expert)
        rows = self._allocate(args, handle)
        return rows, handle, lambda: self._place(args, handle, rows, send(), cached=False)

    def dispatch_cached(self, args: CachedDispatchArgs) -> tuple[Rows, Move]:
        handle, rows = args.handle, self._allocate(args, args.handle)

        def move() -> None:
            send_rows = partial(self._send_rows, args, handle.topk_idx, handle.recv_counts.flatten().tolist())
            _, send = self._enter(self._entry(args), self._own_counts(handle.topk_idx), lambda _, forward: partial(send_rows, forward))
            self._place(args, handle, rows, send(), cached=True)

        return rows, move

    def combine(self, args: CombineArgs) -> tuple[Tensor, Tensor | None, Move]:
        s, handle = self.settings, args.handle
        combined_x = args.x.new_empty(handle.num_tokens, s.hidden)
        topk_weight_grads = None if args.topk_weight_grads is None else args.x.new_empty(handle.num_tokens, s.num_topk, dtype=torch.float32)

        def move() -> None:
            send_sums = partial(self._send_sums, args)
            _, send = self._enter(self._entry(args), self._own_counts(handle.topk_idx), lambda _, forward: partial(send_sums, forward))
            self._combine(args, send(), combined_x, topk_weight_grads)

        return combined_x, topk_weight_grads, move

    def expert_slots(self) -> Tensor:
        is_on_gpu = self.group is not None and not moves_cpu_tensors(self.group)
        return torch.empty(self.settings.expert_slot_bytes, dtype=torch.uint8, device="cuda" if is_on_gpu else "cpu")

    def move_experts(self, args: MoveExpertsArgs) -> None:
        """Send entries of `home` to the ranks that hold copies, or entries of `slots` home, where they are added by ascending ranks."""
        s, num_local = self.settings, args.home[0].shape[0]
        copies = args.copies.tolist()
        refuse_bad_copies(copies, s.num_ranks * num_local)
        tensors = [(*tensor.shape, str(tensor.dtype)) for pair in zip(args.slots, args.home, strict=True) for tensor in pair]
        digest = zlib.crc32(repr((copies, tensors)).encode())
        held = sorted((expert // num_local, slot) for slot, expert in enumerate(copies[s.rank]) if expert >= 0)
        lent = [(rank, copy % num_local) for rank, row in enumerate(copies) for copy in row if copy >= 0 and copy // num_local == s.rank]
        slots, experts = ([index for _, index in side] for side in (held, lent))
        num_held, num_lent = ([[rank for rank, _ in side].count(peer) for peer in range(s.num_ranks)] for side in (held, lent))
        step = (
            Step(picked(args.slots, torch.tensor(slots, dtype=torch.long)), num_held, num_lent, True)
            if args.returns
            else Step(picked(args.home, torch.tensor(experts, dtype=torch.long)), num_lent, num_held, True)
        )

        what = f"{'return of gradients' if args.returns else 'fetch of experts'} with copies and tensors #{digest}"
        _, send = self._enter(what, self._own_counts(), lambda *_: lambda: self._go(_at_once(step), "copies of experts"))
        for tensor, rows in zip(args.home if args.returns else args.slots, send(), strict=True):
            if not args.returns:
                tensor[torch.tensor(slots, dtype=torch.long, device=tensor.device)] = rows
                continue
            sums = {expert: tensor[expert].float() for expert in experts}
            for expert, row in zip(experts, rows, strict=True):
                sums[expert] += row.float()
            for expert, total in sums.items():
                tensor[expert] = total.to(tensor.dtype)

    def recorded(self, x: Tensor) -> "torch.cuda.Event | None":
        if not x.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def free(self) -> int:
        """Suspend the group's NCCL if PyTorch can do so, and if the ranks can agree without it. This backend has no memory of its own."""
        group = self.group
        if group is not None and group not in _asleep and moves_cpu_tensors(group) and "nccl" in str(dist.get_backend_config(group)):
            self._forward(group, "suspend")
            _asleep.add(group)
        return 0

    def resume(self) -> None:
        if self.group is not None and self.group in _asleep:  # it serves other buffers too, of which the first one wakes it
            self._forward(self.group, "resume")
            _asleep.discard(self.group)

    def _forward(self, group: "dist.ProcessGroup", method: str) -> None:
        forward = getattr(group._get_backend(torch.device("cuda")), method, lambda: None)  # PyTorch before 2.12 has none
        try:
            forward()
        except RuntimeError as error:
            if "does not support" not in str(error):
                raise

    def refuse(self, message: str, cause: Cause = Cause.OTHER) -> None:
        with contextlib.suppress(EPPeerError):  # `_enter` raises this rank's own refusal too
            self._enter(message, self._own_counts(), lambda *_: lambda: None, failed=1 + cause)

    def abandon(self, message: str) -> None:
        """Finish the exchanges that peers wait for, as nothing else ends their wait. They learn `message` in their next call."""
        try:
            if self._arriving is not None:
                self._arriving()
            if self._owed is not None:
                self._owed()
        except (EPPeerError, EPMismatchError, EPCapacityError):
            return  # all ranks have failed in this call
        except BaseException as error:
            self._broken = self._broken or f"{message}; then {describe(error)}"
            if not isinstance(error, Exception):
                raise
        if self._broken is None:
            self.refuse(message)

    def check_usable(self) -> None:
        if self._broken is not None:
            raise EPError(
                f"an earlier call of this buffer ended half-way ({self._broken}), so that its process group is out of step; make a new "
                "process group and a new Buffer"
            )

    def destroy(self) -> None:
        self.group = None

    # ---- rows ----

    def _allocate(self, args: DispatchArgs | CachedDispatchArgs, handle: DispatchHandle) -> Rows:
        x, num_rows = args.x, handle.num_rows
        recv_x = x.new_zeros(num_rows, self.settings.hidden * x.element_size(), dtype=torch.uint8).view(x.dtype)
        scales = None if args.x_scales is None else x.new_zeros(num_rows, args.x_scales.shape[1], dtype=torch.float32)
        shape = (num_rows,) if handle.layout == "expert" else (num_rows, self.settings.num_topk)
        return Rows(recv_x, scales, None if args.topk_weights is None else x.new_zeros(shape, dtype=torch.float32))

    def _own_counts(self, topk_idx: Tensor | None = None, per_rank_and_expert: Tensor | None = None) -> Tensor:
        """Return the counts of this rank's entry: rows for each rank and expert (0 except in an uncached dispatch), then, over several
        nodes, tokens for each node."""
        s, num_nodes = self.settings, self.settings.num_nodes
        counts = torch.zeros(s.num_ranks + s.num_experts + (num_nodes if num_nodes > 1 else 0), dtype=torch.int64, device="cpu")
        if per_rank_and_expert is not None:
            counts[: s.num_ranks + s.num_experts] = per_rank_and_expert.cpu()
        if topk_idx is not None and num_nodes > 1:
            counts[s.num_ranks + s.num_experts :] = self._hops.num_tokens_per_node(topk_idx).cpu()
        return counts

    def _send_rows(
        self, args: DispatchArgs | CachedDispatchArgs, topk_idx: Tensor, num_received: list[int], num_to_forward: list[int]
    ) -> list[Tensor]:
        """Exchange rows, and return what arrives: rows, their local experts, then scales and weights if these were sent."""
        s = self.settings
        parts = [args.x, topk_idx] + [part for part in (args.x_scales, args.topk_weights) if part is not None]
        arrived = self._go(self._hops.dispatch(parts, topk_idx, num_to_forward, num_received), "dispatch rows")
        local = arrived[1] - s.rank * s.num_local_experts
        arrived[1] = torch.where((local >= 0) & (local < s.num_local_experts), local, -1)
        return arrived

    def _place(
        self, args: DispatchArgs | CachedDispatchArgs, handle: DispatchHandle, rows: Rows, arrived: list[Tensor], *, cached: bool
    ) -> None:
        recv_x, experts, rest = arrived[0], arrived[1], arrived[2:]
        scales = rest.pop(0) if args.x_scales is not None else None
        weights = rest.pop(0) if args.topk_weights is not None else None
        if handle.layout == "rank":
            num_tokens = len(recv_x)
            slots = target = torch.arange(num_tokens, device=recv_x.device)
            if handle.recv_topk_idx is not None and not cached:
                handle.recv_topk_idx[:num_tokens] = experts
            if weights is not None and rows.recv_topk_weights is not None:
                rows.recv_topk_weights[:num_tokens] = torch.where(experts >= 0, weights, 0.0)
        else:
            if not cached:
                handle.recv_row_idx.copy_(self._row_idx(experts, handle))
            slots, lanes = (handle.recv_row_idx >= 0).nonzero(as_tuple=True)
            target = handle.recv_row_idx[slots, lanes].long()
            if weights is not None and rows.recv_topk_weights is not None:
                rows.recv_topk_weights[target] = weights[slots, lanes]
        rows.recv_x.view(torch.uint8)[target] = recv_x.view(torch.uint8)[slots]
        if scales is not None and rows.recv_x_scales is not None:
            rows.recv_x_scales[target] = scales[slots]

    def _row_idx(self, experts: Tensor, handle: DispatchHandle) -> Tensor:
        """Return the row of every lane of every token received. experts: local experts [num_recv_tokens, num_topk]."""
        counts = handle.num_recv_tokens_per_expert.to(experts.device)
        begins = padded(counts, handle.expert_alignment).cumsum(0) - padded(counts, handle.expert_alignment)
        row_idx = torch.full_like(experts, -1)
        for expert, begin in enumerate(begins.tolist()):
            slots, lanes = (experts == expert).nonzero(as_tuple=True)
            row_idx[slots, lanes] = torch.arange(begin, begin + len(slots), dtype=torch.int32, device=experts.device)
        return row_idx

    def _expert_side(self, args: CombineArgs) -> list[Tensor]:
        """Return one row per token received, and its gradients of topk_weights if there are any."""
        handle, num_tokens = args.handle, int(args.handle.recv_counts.sum())
        if handle.layout == "rank":
            x = args.x[:num_tokens]
            if args.weights is not None:
                x = (args.weights[:num_tokens, None] * x.float()).to(x.dtype)
            return [x] if args.topk_weight_grads is None else [x, args.topk_weight_grads[:num_tokens]]
        total = args.x.new_zeros(num_tokens, self.settings.hidden, dtype=torch.float32)
        for lane in range(self.settings.num_topk):
            slots = (handle.recv_row_idx[:, lane] >= 0).nonzero().flatten()
            rows = handle.recv_row_idx[slots, lane].long()
            term = args.x[rows].float()
            total[slots] = total[slots] + (term if args.weights is None else args.weights[rows, None] * term)
        x = total.to(args.x.dtype)
        if args.topk_weight_grads is None:
            return [x]
        row_idx = handle.recv_row_idx[:num_tokens]  # it may have more rows
        there = row_idx >= 0
        values = torch.zeros(there.shape, dtype=torch.float32, device=x.device)
        values[there] = args.topk_weight_grads[row_idx[there].long()]
        return [x, values]

    def _send_sums(self, args: CombineArgs, num_to_forward: list[int]) -> list[Sums]:
        """Send rows back, and return the sums that come from each node."""
        handle, num_received = args.handle, args.handle.recv_counts.flatten().tolist()
        ways = self._hops.combine(self._expert_side(args), handle.topk_idx, num_to_forward, num_received, partial(_merged, args.options))
        return self._go(ways, "combine rows")

    def _combine(self, args: CombineArgs, sums: list[Sums], combined_x: Tensor, topk_weight_grads: Tensor | None) -> None:
        total = combined_x.new_zeros(combined_x.shape, dtype=torch.float32)
        for idx, rows, _ in sums:
            total[idx] = total[idx] + rows.float()
        combined_x.copy_(total if args.bias is None else total + args.bias.float())
        if topk_weight_grads is None:
            return
        topk_weight_grads.zero_()
        num_experts = self.settings.num_experts // len(sums)
        for number, (idx, _, values) in enumerate(sums):
            assert values is not None  # with gradients they come along
            there = (args.handle.topk_idx[idx] >= 0) & (args.handle.topk_idx[idx] // num_experts == number)
            topk_weight_grads[idx] = _merged(args.options, topk_weight_grads[idx], values, there)

    # ---- messages ----

    def _go(self, ways: Steps[_Result], phase: str, first: Callable[[], list[Tensor]] | None = None) -> _Result:
        """Make the exchanges of `ways`, and return its result. `first` finishes an exchange that is already under way."""
        try:
            step = next(ways) if first is None else ways.send(first())
            while True:
                step = ways.send(self._all_to_all(step, ways, phase))
        except StopIteration as end:
            result: _Result = end.value
            return result

    def _all_to_all(self, step: Step, ways: Steps[object], phase: str) -> list[Tensor]:
        """Send rows of all parts (by destination), and receive the same kinds of rows (by source), in one message per peer."""
        parts, num_sent, num_received, is_last = step
        if self.settings.num_ranks == 1:
            self._owed = None
            return parts
        row_bytes = [part.shape[1] * part.element_size() for part in parts]
        payload = torch.cat([_reinterpret(part, torch.uint8, size) for part, size in zip(parts, row_bytes, strict=True)], dim=1)
        received = payload.new_empty(sum(num_received), payload.shape[1])

        works: list[dist.Work] = []

        def arrived() -> list[Tensor]:
            try:
                if not works:  # filled in C, where no signal handler raises: an interrupt cannot hide that rows were sent
                    works.extend(map(self.group.alltoall_base, [received], [payload], [num_received], [num_sent]))  # type: ignore[union-attr]
                if is_last:
                    self._owed = None
                # On a GPU this blocks the stream only, under the group's own deadline.
                works[0].wait(*(() if payload.is_cuda else (datetime.timedelta(seconds=self.settings.timeout_s),)))
            except RuntimeError as error:
                if is_of_handler(error):
                    raise
                raise self._timeout(self._dead_rank(), phase, sum(num_received), 0, str(error)) from error
            pieces = received.split(row_bytes, dim=1)
            return [_reinterpret(piece, part.dtype, part.shape[1]) for piece, part in zip(pieces, parts, strict=True)]

        self._owed = partial(self._go, ways, phase, arrived)
        return arrived()

    def _entry(self, args: DispatchArgs | CachedDispatchArgs | CombineArgs) -> str:
        """Return what the call does. It is the same on all ranks whose calls fit."""
        if isinstance(args, CombineArgs):
            operation, sent = "combine", {"gradients of topk_weights": args.topk_weight_grads}
        else:
            operation = "dispatch" if isinstance(args, DispatchArgs) else "cached dispatch"
            sent = {"topk_weights": args.topk_weights, "x_scales": args.x_scales}
        extras = [f", with {name}" for name, tensor in sent.items() if tensor is not None]
        how = args if isinstance(args, DispatchArgs) else args.handle
        if not isinstance(args, DispatchArgs):
            extras.insert(0, f", with the handle of call {int(args.handle.call)}")
        rows = f"{DTYPE_NAMES[args.x.dtype]} rows, layout {how.layout}, expert_alignment {how.expert_alignment}"
        return f"{operation} of {rows}{''.join(extras)}"

    def _enter(
        self, words: str, counts: Tensor, owe: _Owe[_Result], num_recv_rows: int = -1, failed: int = 0
    ) -> tuple[Tensor, Callable[[], _Result]]:
        """Exchange entries with all ranks, and check that they fit. Return the counts of all ranks, [num_ranks, *counts.shape] int64, and
        the exchange that peers wait for once all have entered: owe(counts, how many tokens each rank has for this node)."""
        s = self.settings
        self.check_usable()
        self._owed = None
        text = words.encode()[: _MESSAGE_BYTES - 1].ljust(_MESSAGE_BYTES, b"\0")
        fields = torch.tensor([self._number, self.num_calls + 1, failed, num_recv_rows], dtype=torch.int64, device="cpu")
        vector = torch.cat([fields, counts, torch.frombuffer(bytearray(text), dtype=torch.int64)])
        is_alone = self.group is None or s.num_ranks == 1
        messages = None if is_alone else Exchange(vector, self.group, "entry into the call", s.timeout_s)  # type: ignore[arg-type]
        arrive = self._arriving = partial(self._arrive, vector, messages, owe)
        self._num_calls += 1
        return arrive()

    def _arrive(self, vector: Tensor, messages: Exchange | None, owe: _Owe[_Result]) -> tuple[Tensor, Callable[[], _Result]]:
        """Finish `_enter`. After an interrupt, `abandon` calls it again."""
        try:
            entries = vector[None] if messages is None else messages.wait()
        except EPTimeoutError as error:
            dead = self._dead_rank()
            culprit = error.rank if dead < 0 else dead
            raise self._timeout(culprit, error.phase, self.num_calls, self.num_calls - 1, str(error.__cause__)) from error
        words = [row[-_MESSAGE_BYTES // 8 :].numpy().tobytes().rstrip(b"\0").decode(errors="replace") for row in entries]
        numbers = entries[:, :_NUM_FIELDS].t().tolist()
        peers = [Entry(*fields) for fields in zip(*numbers, words, strict=True)]
        for rank, peer in enumerate(peers):
            if peer.failed:
                raise EPPeerError(f"rank {rank} did not make its call: {peer.words}", rank=rank, code=peer.failed - 1)
        difference = find_difference(peers, self.settings.rank)
        if difference:
            raise EPMismatchError(difference)
        self._bounds = [peer.num_recv_rows for peer in peers]
        counts = entries[:, _NUM_FIELDS : -_MESSAGE_BYTES // 8]
        s = self.settings
        num_to_forward = self._hops.num_to_forward(counts[:, s.num_ranks + s.num_experts :]) if s.num_nodes > 1 else []
        self._owed = send = owe(counts, num_to_forward)
        self._arriving = None
        return counts, send

    def _dead_rank(self) -> int:
        """Return a rank of this host whose process is gone, or -1. Wait up to a second: connections break before the system reports the
        end of a process."""
        began = time.monotonic()
        while True:
            for rank, process in self._neighbours.items():
                if process.is_gone():
                    return rank
            if time.monotonic() - began > 1:
                return -1
            time.sleep(0.01)

    def _timeout(self, culprit: int, phase: str, expected: int, seen: int, why: str) -> EPTimeoutError:
        peers = [rank for rank in range(self.settings.num_ranks) if rank != self.settings.rank]
        if culprit < 0 and self.group is not None:
            behind = culprit_behind(self.group, peers)
            culprit = peers[0] if len(peers) == 1 else -1 if behind is None else behind
        named = f"rank {culprit}" if culprit >= 0 else "a peer (torch.distributed does not say which)"
        self._broken = f"nothing came from {named}"
        if self.group is not None:
            hang_up(self.group, culprit)
        return EPTimeoutError(
            f"rank {self.settings.rank} in call {self.num_calls}: {named} did not deliver; phase '{phase}', expected {expected}, "
            f"seen {seen}; the process group cannot be used any more: make a new one and a new Buffer; torch.distributed says: {why}",
            rank=culprit, phase=phase, expected=expected, seen=seen,
        )  # fmt: skip
