"""The ranks of one host and their low-latency calls: numbers, waits, refusals, masks. docs/design/low_latency.md has the protocol.

One thread sends while others receive. Whether a call is heard decides when the call after next may be sent. Its turn may be overwritten
only once all ranks are known to have entered it. A call that was received shows that; a call that failed or was refused does not.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.errors import BufferDestroyedError, EPError, EPMismatchError, EPPeerError, EPTimeoutError, describe
from deepep_moe.group.settings import Settings
from deepep_moe.library import unwatched
from deepep_moe.low_latency.base import DESTROYED, NOT_RECEIVED
from deepep_moe.low_latency.handle import handle_offsets

if TYPE_CHECKING:
    from deepep_moe.low_latency.shm_rows import CombineRows, DispatchRows

Rows: TypeAlias = "DispatchRows | CombineRows"
"""The rows of one call, in this rank's areas of the others' turns and in its own turn."""
_MAGIC = 0x64656570_4C4C0001  # plus the rank; stored in the rank's own word of `resumed`, which no peer writes
_TURNS, _MAX_IN_FLIGHT, _REASON_BYTES = 4, 2, 240
_VALUE_BITS, _NUMBER_BIT = 16, 24  # a flag has the number of its call | what the rank does in it | a value
_VALUES = (1 << _VALUE_BITS) - 1
_ROUNDS_PER_LOOK, _YIELDS, _NAP_S = 64, 2000, 50e-6
_HURRIED_S = 1.0
_FROM_HANDLER = "a signal's handler calls the buffer whose call it interrupts; make the call once that one is over"


class _Layout:
    """Computes offsets in the memory of a rank, which its peers write. Only rank `source` writes word or area `source`.

    resumed u64[num_ranks] | left u64[num_ranks] | reasons char[_TURNS][num_ranks][_REASON_BYTES] | turns, each:
      entered u64[num_ranks] | arrived u64[num_ranks] | areas [num_ranks], each:
        experts i32[num_max_tokens][num_topk] | weights f32[num_max_tokens][num_topk] | slots [num_max_tokens] of slot_bytes.
    """

    def __init__(self, s: Settings):
        self._num_ranks = s.num_ranks
        self.slots = _padded(8 * s.num_max_tokens_per_rank * s.num_topk)
        self.slot_bytes = _padded(4 * s.hidden)
        self.area_bytes = self.slots + s.num_max_tokens_per_rank * self.slot_bytes
        self._turns = _padded((16 + _TURNS * _REASON_BYTES) * s.num_ranks)
        self._areas = _padded(16 * s.num_ranks)
        self._turn_bytes = self._areas + s.num_ranks * self.area_bytes
        self.total_bytes = self._turns + _TURNS * self._turn_bytes

    def resumed(self, source: int) -> int:
        return 8 * source

    def left(self, source: int) -> int:
        return 8 * (self._num_ranks + source)

    def reason(self, source: int, number: int) -> int:
        """Each turn has its own, because a rank may refuse two calls before a peer reads the first reason."""
        return 16 * self._num_ranks + _REASON_BYTES * (number % _TURNS * self._num_ranks + source)

    def entered(self, source: int, number: int) -> int:
        return self._turns + number % _TURNS * self._turn_bytes + 8 * source

    def arrived(self, source: int, number: int) -> int:
        """Return the flag of the rows."""
        return self.entered(self._num_ranks + source, number)

    def area(self, source: int, number: int) -> int:
        return self._turns + number % _TURNS * self._turn_bytes + self._areas + source * self.area_bytes


class Area(NamedTuple):
    """One rank's part of the memory of another, for one call."""

    experts: Tensor
    """[num_max_tokens, num_topk] int32, -1 for no expert."""
    weights: Tensor
    """[num_max_tokens, num_topk] fp32."""
    slots: Tensor
    """[num_max_tokens, slot_bytes] uint8: the rows."""


class ShmCalls:
    """The calls of one rank. Calls after `destroy` raise BufferDestroyedError."""

    def __init__(self, settings: Settings, mask_stalled: bool):
        self.settings, self.mask_stalled = settings, mask_stalled
        self.layout = _Layout(settings)
        self.workspace_bytes = self.layout.total_bytes
        *_, self.handle_bytes = handle_offsets(settings)
        self._peers: _C.HostPeers | None = _C.HostPeers(settings.num_ranks, settings.rank, self.workspace_bytes)
        self.num_calls = 0
        """The number of calls that were sent or refused."""
        self.masks = 0
        self.statistics: Tensor
        """Those of the buffer, which begin with `num_local_experts` numbers of rows and `num_ranks` times."""
        self.counting = threading.RLock()
        """Held while they are written: two threads may receive, and so may a signal's handler of one that does."""
        self._sending = threading.RLock()  # guards sending, the number of calls and the masks
        self._is_sending = False
        self._unheard: dict[int, bool] = {}
        """The numbers of calls that not all ranks are known to have entered, and whether these calls are open: else they have failed."""
        self._first_calls = [0] * settings.num_ranks  # first call of each rank since it was last masked
        self.peers.store(settings.rank, self.layout.resumed(settings.rank), _MAGIC + settings.rank)

    # ---- memory ----

    @property
    def peers(self) -> _C.HostPeers:
        if self._peers is None:
            raise BufferDestroyedError(DESTROYED)
        return self._peers

    def connect(self, addresses: list[tuple[str, int]]) -> None:
        self.peers.connect([path for path, _ in addresses], [pid for _, pid in addresses])
        for rank, (path, _) in enumerate(addresses):
            if self.peers.load(rank, self.layout.resumed(rank)) != _MAGIC + rank:
                raise ValueError(f"{path} is not the shared memory of rank {rank}; are the ranks in different containers?")

    def free(self) -> int:
        """Return the memory of rows to the system, between calls that were received. The next call takes it again. Return its bytes."""
        num_bytes = self.settings.num_ranks * self.layout.area_bytes
        return sum(self.peers.give_back(self.layout.area(0, turn), num_bytes) for turn in range(_TURNS))

    def area(self, owner: int, source: int, number: int) -> Area:
        """Return what `source` writes for call `number` into the memory of `owner`."""
        s, first = self.settings, self.layout.area(source, number)
        memory = torch.frombuffer(self.peers.memory(owner)[first : first + self.layout.area_bytes], dtype=torch.uint8)
        shape = (s.num_max_tokens_per_rank, s.num_topk)
        num_bytes = 4 * s.num_max_tokens_per_rank * s.num_topk
        experts = memory[:num_bytes].view(torch.int32).view(shape)
        weights = memory[num_bytes : 2 * num_bytes].view(torch.float32).view(shape)
        return Area(experts, weights, memory[self.layout.slots :].view(s.num_max_tokens_per_rank, self.layout.slot_bytes))

    def destroy(self) -> None:
        """Tell the peers, and let go of the memory, whatever still refers to this."""
        peers, self._peers = self._peers, None
        if peers is None or not peers.is_owner:
            return
        for peer in range(self.settings.num_ranks):
            if peers.is_mapped(peer):
                peers.store(peer, self.layout.left(self.settings.rank), self.num_calls + 1)

    def __del__(self) -> None:
        if hasattr(self, "_peers"):
            self.destroy()

    # ---- words ----

    def entered(self, source: int, number: int) -> int:
        """Return the flag of `source` in call `number`."""
        return self.peers.load(self.settings.rank, self.layout.entered(source, number))

    def arrived(self, source: int, number: int) -> int:
        return self.peers.load(self.settings.rank, self.layout.arrived(source, number))

    def has_left(self, source: int, number: int) -> bool:
        """Return whether the rank has destroyed its buffer before call `number`. It leaves the number of calls that it made, plus 1."""
        left = self.peers.load(self.settings.rank, self.layout.left(source))
        return 0 < left <= number

    def takes_part(self, rank: int, number: int) -> bool:
        return not self.masks >> rank & 1 and number >= self._first_calls[rank]

    def ranks_in(self, number: int) -> int:
        return sum(1 << rank for rank in range(self.settings.num_ranks) if self.takes_part(rank, number))

    def check_refusal(self, peer: int, number: int, entered: int) -> None:
        """Raise EPPeerError if `entered`, the flag of `peer`, says that it has refused the call."""
        if entered >> _VALUE_BITS & 0xFF == _C.LOW_LATENCY_REFUSED:
            first = self.layout.reason(peer, number)
            reason = bytes(self.peers.memory(self.settings.rank)[first : first + _REASON_BYTES]).partition(b"\0")[0]
            words = f"rank {peer} did not make its call: {reason.decode(errors='replace')}"
            raise known_to_peers(EPPeerError(words, rank=peer), number)

    # ---- calls ----

    def send(self, rows: Rows) -> int:
        """Send a call, and return its number. If it fails once it has a number, the peers learn why."""
        with self._alone():
            peers, own_rank, before, served = self.peers, self.settings.rank, self.num_calls, 0
            try:
                number = self._begin()
                ranks, kind = self.ranks_in(number), number << _NUMBER_BIT | rows.what << _VALUE_BITS

                def arrive(rank: int) -> None:
                    nonlocal served
                    if rows.brings_weights:
                        if self.entered(rank, number) != kind | rows.value:
                            return  # a rank that does something else learns so when it receives
                        with unseen():
                            rows.write_weighted(number, 1 << rank)  # type: ignore[union-attr]  # only combines bring some
                    peers.store(rank, self.layout.arrived(own_rank, number), kind | 1)
                    served |= 1 << rank

                with unseen():
                    rows.write(number, ranks)
                for rank in members(ranks):
                    peers.store(rank, self.layout.entered(own_rank, number), kind | rows.value)
                if rows.brings_weights:  # a rank's sums are sent once its weights have come, even if others are late
                    _Waits(self, number).wait_entered(heard=arrive)
                else:
                    for rank in members(ranks):
                        arrive(rank)
            except BaseException as error:
                if self.num_calls > before:
                    self._publish_refusal(peers, before + 1, self.ranks_in(before + 1) & ~served, describe(error))
                    known_to_peers(error, before + 1)
                raise
            return number

    def receive(self, rows: Rows, number: int) -> None:
        peers = self.peers  # the memory stays until the call is over
        peers.check_owner()
        waits, is_heard = _Waits(self, number), False
        try:
            entered = waits.wait_entered()
            is_heard = True
            flags = {rank: self.entered(rank, number) for rank in members(entered)}  # read once: a refusal may replace one
            self._check_flags(number, flags, rows.is_combine)
            wanted = number << _NUMBER_BIT | rows.what << _VALUE_BITS | 1
            phase = f"{'combine' if rows.is_combine else 'dispatch'} rows"
            arrived = sum(1 << rank for rank in flags if waits.wait_rows(rank, wanted, phase))
            with unseen():
                rows.read(number, entered, arrived, [flags.get(rank, 0) & _VALUES for rank in range(self.settings.num_ranks)])
        finally:
            self.lose(number)
            if is_heard:
                self._unheard.pop(number, None)

    def lose(self, number: int) -> None:
        """Note that a call will not be received, if it was sent."""
        if number in self._unheard:
            self._unheard[number] = False

    def _check_flags(self, number: int, flags: dict[int, int], is_combine: bool) -> None:
        """Raise EPMismatchError, or EPPeerError for a refusal, unless all flags are of the same call."""
        for rank, flag in flags.items():
            self.check_refusal(rank, number, flag)
        self._check_same(number, {rank: _C.describe_low_latency(flag >> _VALUE_BITS & 0xFF) for rank, flag in flags.items()})
        if is_combine:  # the dispatch of its handle, of which the flag has the last bits
            near = {rank: number + ((flag - number + 0x8000) & _VALUES) - 0x8000 for rank, flag in flags.items()}
            self._check_same(number, {rank: f"combine with the handle of call {dispatch}" for rank, dispatch in near.items()})

    def _check_same(self, number: int, calls: dict[int, str]) -> None:
        own_rank = self.settings.rank
        if others := [rank for rank, call in calls.items() if call != calls[own_rank]]:
            listed = "; ".join(f"rank {rank}: {calls[rank]}" for rank in (own_rank, *others))
            raise known_to_peers(EPMismatchError(f"ranks make different calls: {listed}"), number)

    def refuse(self, reason: str) -> None:
        """Enter a call whose arguments were refused, so that the peers learn why instead of waiting."""
        with self._alone():
            peers, number = self.peers, self._begin()
            self._publish_refusal(peers, number, self.ranks_in(number), reason)

    def _begin(self) -> int:
        """Return the number of the next call, once it may be sent because nobody reads its turn any more."""
        number = self.num_calls + 1
        earlier = number - _MAX_IN_FLIGHT
        if self._unheard.get(earlier):
            raise ValueError(NOT_RECEIVED)
        if earlier in self._unheard:
            _Waits(self, earlier).wait_entered(counts=False)
            self._unheard.pop(earlier, None)
        self._unheard[number] = True
        self.num_calls = number
        return number

    def _publish_refusal(self, peers: _C.HostPeers, number: int, ranks: int, reason: str) -> None:
        own_rank = self.settings.rank
        text = reason.encode()[: _REASON_BYTES - 1].decode(errors="ignore").encode() + b"\0"  # not cut inside a character
        first = self.layout.reason(own_rank, number)
        for peer in members(ranks):
            peers.memory(peer)[first : first + len(text)] = text
            peers.store(peer, self.layout.entered(own_rank, number), number << _NUMBER_BIT | _C.LOW_LATENCY_REFUSED << _VALUE_BITS)
        self.lose(number)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of senders. A signal's handler may run meanwhile, and may call the same buffer."""
        self.peers.check_owner()
        with self._sending:
            if self._is_sending:
                raise EPError(_FROM_HANDLER)
            try:
                self._is_sending = True
                yield
            finally:
                self._is_sending = False

    # ---- ranks that are gone ----

    def mask(self, rank: int, masked: bool) -> None:
        """Leave a rank out; not `masked`: it takes part again from this rank's next call on."""
        with self._alone():
            if masked:
                self.masks |= 1 << rank
                return
            own_rank, following = self.settings.rank, self.num_calls + 1
            for number in range(_TURNS):  # it may repeat calls that it has already sent
                self.peers.store(own_rank, self.layout.entered(rank, number), 0)
                self.peers.store(own_rank, self.layout.arrived(rank, number), 0)
            self._first_calls[rank] = following
            self.masks &= ~(1 << rank)
            self.peers.store(rank, self.layout.resumed(own_rank), following + 1)

    def rejoin(self) -> None:
        """Wait until all peers have taken this rank back, and go on with their next call."""
        s, own_rank = self.settings, self.settings.rank
        others = [rank for rank in range(s.num_ranks) if rank != own_rank]
        with self._alone():
            for peer in others:
                _Waits(self, self.num_calls).wait_resumed(peer)
            following = {peer: self.peers.load(own_rank, self.layout.resumed(peer)) - 1 for peer in others}
            for peer in others:
                self.peers.store(own_rank, self.layout.resumed(peer), 0)
            for peer in others[1:]:
                if following[peer] != following[others[0]]:
                    raise EPMismatchError(
                        f"ranks take rank {own_rank} back between different calls: rank {others[0]} at call {following[others[0]]}, "
                        f"rank {peer} at call {following[peer]}"
                    )
            if others:
                self.num_calls = following[others[0]] - 1
            self._first_calls = [self.num_calls + 1] * s.num_ranks  # earlier calls are over, even for a rank that still waits in one
            self.masks = 0
            self._unheard.clear()


class _Waits:
    """The waits of one call."""

    def __init__(self, calls: ShmCalls, number: int):
        self._calls, self._number, self._rank = calls, number, calls.settings.rank
        self._progress()

    def wait_entered(self, heard: Callable[[int], None] = lambda rank: None, counts: bool = True) -> int:
        """Wait until all ranks that take part have entered the call, and return them. Calls `heard` for each, even if it is masked
        meanwhile."""
        calls, number, entered = self._calls, self._number, 0
        missing = calls.ranks_in(number)
        began, waited = time.monotonic_ns(), [0] * calls.settings.num_ranks
        self._progress()
        try:
            while missing:
                for peer in members(missing):
                    is_here = peer == self._rank or calls.entered(peer, number) >> _NUMBER_BIT == number
                    if is_here or not calls.takes_part(peer, number):
                        entered |= is_here << peer
                        missing &= ~(1 << peer)
                        waited[peer] = time.monotonic_ns() - began
                        heard(peer)
                if missing:
                    self._idle(missing, "entry into the call", number, self._last_entered)
        finally:
            if counts:
                with calls.counting, unseen():
                    calls.statistics[calls.settings.num_local_experts : -1] += torch.tensor(waited, device="cpu")
        return entered

    def _last_entered(self, peer: int) -> int:
        return max(self._calls.entered(peer, number) >> _NUMBER_BIT for number in range(_TURNS))

    def wait_rows(self, peer: int, wanted: int, phase: str) -> bool:
        """Wait for the rows of `peer`, whose flag they set to `wanted`. False: it is masked."""
        calls, number = self._calls, self._number
        self._progress()
        while calls.arrived(peer, number) != wanted:
            if not calls.takes_part(peer, number):
                return False
            calls.check_refusal(peer, number, calls.entered(peer, number))  # it may have been interrupted after it entered
            self._idle(1 << peer, phase, number, lambda peer: calls.arrived(peer, number) >> _NUMBER_BIT)
        return True

    def wait_resumed(self, peer: int) -> None:
        while self._calls.peers.load(self._rank, self._calls.layout.resumed(peer)) == 0:
            self._idle(1 << peer, "return to the calls", 1, lambda peer: 0, masks=False)

    def _progress(self) -> None:
        self._rounds, self._began = 0, time.monotonic()
        self._is_suspected = self._is_overdue = False

    def _idle(self, missing: int, phase: str, expected: int, seen: Callable[[int], int], masks: bool = True) -> None:
        """Wait a little for `missing`. If ranks are given up, mask them or raise EPTimeoutError or EPPeerError."""
        self._rounds += 1
        os.sched_yield() if self._rounds <= _YIELDS else time.sleep(_NAP_S)
        if self._rounds % _ROUNDS_PER_LOOK:
            return
        calls, hurries = self._calls, _C.are_waits_hurried()
        gone = [peer for peer in members(missing) if calls.has_left(peer, self._number) or calls.peers.is_gone(peer)]
        timeout_s = min(_HURRIED_S, calls.settings.timeout_s) if hurries else calls.settings.timeout_s
        is_late = time.monotonic() - self._began >= timeout_s
        # A peer may deliver and leave between the look at its flags and this one, and the time may pass while this process is stopped. So
        # only a second look counts.
        is_gone, is_overdue = bool(gone) and self._is_suspected, is_late and self._is_overdue
        self._is_suspected, self._is_overdue = self._is_suspected or bool(gone), is_late
        if not is_gone and not is_overdue:
            return
        blamed = gone[0] if is_gone else next(members(missing))
        if hurries and not is_gone:
            raise EPError(
                f"this process ends, and rank {blamed} is late in phase '{phase}'; wait for the event of an asynchronous call before the "
                "process ends"
            )
        if masks and calls.mask_stalled:
            calls.masks |= 1 << blamed if is_gone else missing  # a deadline that has passed applies to all of them
            return self._progress()
        raise known_to_peers(self._error(blamed, phase, expected, seen(blamed)), self._number)

    def _error(self, peer: int, phase: str, expected: int, seen: int) -> EPError:
        calls, here = self._calls, f"rank {self._rank} in call {self._number}"
        if calls.has_left(peer, self._number):
            return EPPeerError(f"{here}, waiting for {phase}: rank {peer}{_C.HAS_LEFT}", rank=peer)
        silent, advice = calls.peers.why_silent(peer, calls.settings.timeout_s)
        return EPTimeoutError(
            f"{here}: rank {peer} did not deliver, {silent}; phase '{phase}', expected {expected}, seen {seen}{advice}",
            rank=peer, phase=phase, expected=expected, seen=seen,
        )  # fmt: skip


def known_to_peers(error: Any, number: int) -> Any:
    """Mark and return an error of call `number` of which the peers need not be told."""
    error.known_in_call = number
    return error


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Let nobody see what runs in the middle of a call."""
    with unwatched(), torch.inference_mode():
        yield


def members(ranks: int) -> Iterator[int]:
    """Yield the ranks whose bits are set."""
    return (rank for rank in range(ranks.bit_length()) if ranks >> rank & 1)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 128) * 128
