"""The ranks of a group find each other by small messages with a deadline. An error names the rank that stays silent. A buffer is made in
three steps. `join` finds the group, `introduce` tells every rank what the others were given, and `connect` maps the memory of all ranks.
"""

import contextlib
import datetime
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe import config
from deepep_moe.arguments import as_int
from deepep_moe.errors import EPError, EPMismatchError, EPPeerError, EPTimeoutError, describe
from deepep_moe.group.settings import Settings
from deepep_moe.torch_module import WHY_NOT

_TAG = 0xDEE9  # tag of this library's messages in the caller's group; a vector's tag is larger by its number of bytes
_MAX_BYTES = 1 << 20  # a message is a few strings and numbers
_MAX_WORDS = 10_000  # characters of an error in a message
_numbers = itertools.count()
_TOLD_WITHIN_S = 0.2  # a rank whose connections end says within this time whom it waited for


class Connectable:
    """A backend with memory that other ranks reach. The methods that are not overridden do nothing."""

    why_not_suspend = ""
    """The reason why the memory cannot be given back between calls; empty if it can."""

    def address(self) -> Any:
        """Return what peers need to reach this rank's memory."""

    def connect(self, addresses: list[Any]) -> None:
        """Map the memory of all ranks; `addresses` by rank. Raises OSError, RuntimeError or ValueError where one cannot be reached."""

    def disconnect(self) -> None:
        """Unmap the memory of the peers, as some rank could not map another's, unless mappings end with this object."""

    def seal(self) -> None:
        """Close this rank's memory to everybody else, once all ranks are connected."""

    def free(self) -> int:
        """Give this rank's memory back, which no rank maps any more. Return its bytes."""
        return 0

    def resume(self) -> None:
        """Make this rank's memory again, unless the next call takes it. Raises OSError or RuntimeError if there is none."""

    def check(self) -> None:
        """Raise the failure that an earlier call has reported, if any. On CPUs each call raises its own."""

    def destroy(self) -> None:
        """Leave the peers, and free all memory. No call comes after it."""


_Backend = TypeVar("_Backend", bound=Connectable)
_Message = TypeVar("_Message")


@dataclass
class Introduction:
    """The message that a rank sends to all others before a buffer is made."""

    error: str | None  # a mistake of the caller
    backend: str
    settings: dict[str, object]
    host: str
    process_id: int
    num_threads: int
    group_backend: str
    has_gpu: bool
    lacks_torch: str
    """The reason why the rank has no module `_torch`; empty if it has one."""
    number: int
    """The number of the buffer among those that this process has begun to make."""


def host_id() -> str:
    """Return an id that is the same for processes that can share memory: one kernel, one namespace of process ids."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"


def join(group: "dist.ProcessGroup | None", what: str) -> "tuple[dist.ProcessGroup | None, int, int]":
    """The group to make a `what` for (None: this process alone), its size and this process's rank in it. Raises TypeError, ValueError."""
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if group is not None and group != outside and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is {group!r}; it must be a torch.distributed.ProcessGroup or None")
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None and config.world_size() > 1:
        raise ValueError(
            f"this process is one of WORLD_SIZE={config.world_size()}, but torch.distributed is not initialized; "
            f"call torch.distributed.init_process_group before creating a {what}"
        )
    num_ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    if rank < 0:
        raise ValueError(f"this process is not a member of the group; create the {what} on the group's ranks only")
    return group, num_ranks, rank


def introduce(
    settings: Settings, backend: str, num_threads: int, error: Exception | None, group: "dist.ProcessGroup | None", *,
    kind: str = "Buffer", mask_stalled: bool = False,
) -> list[Introduction]:  # fmt: skip
    """Exchange introductions. Raises the caller's own error, EPPeerError for a peer's, EPMismatchError where settings differ."""
    common: dict[str, object] = {}
    if not error:
        common["sums"] = settings.sums  # first: other numbers follow from it
        common |= {name: value for name, value in asdict(settings).items() if name not in ("rank", "timeout_s")}
        common |= {"mask_stalled": mask_stalled, "kind": kind}
    message = None if error is None else describe(error)[:_MAX_WORDS]
    group_backend = "none" if group is None else str(dist.get_backend_config(group))

    with hanging_up(group):
        number, has_gpu = next(_numbers), torch.cuda.is_available()
        introduction = asdict(
            Introduction(message, str(backend), common, host_id(), os.getpid(), num_threads, group_backend, has_gpu, WHY_NOT, number)
        )

        def read(fields: Any) -> Introduction:
            unlike: dict[str, object] = {} if error is None and fields["error"] is None else {"settings": {}}
            if not _is_like(fields | unlike, introduction | unlike):
                raise ValueError("an introduction")
            return Introduction(**fields)

        peers = gather_objects(introduction, group, settings.num_ranks, "construction of a Buffer", settings.timeout_s, read)
    raise_first(error, [peer.error for peer in peers], "could not create its Buffer")
    check_same([{"kind of buffer": peer.settings.pop("kind")} for peer in peers], "create the same kind on every rank")
    check_same([{"backend": peer.backend, **peer.settings} for peer in peers], "create the Buffer with the same value on every rank")
    return peers


def check_same(settings: list[dict[str, object]], advice: str) -> None:
    """Compare the settings of all ranks. Raises EPMismatchError for the first that is not the same everywhere."""
    for name in settings[0]:
        values = [one.get(name) for one in settings]
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
            raise EPMismatchError(f"ranks disagree on {name} ({listed}); {advice}")


def moves_cpu_tensors(group: "dist.ProcessGroup") -> bool:
    """Does the group have a backend for CPU tensors, such as gloo?"""
    return "cpu:" in str(dist.get_backend_config(group))


def is_of_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised this error, and not torch.distributed, which was waiting."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and not trace.tb_frame.f_globals.get("__name__", "").startswith(("torch.", "deepep_moe."))


def hang_up(group: "dist.ProcessGroup", culprit: int) -> None:
    """End the waits of all peers for this rank, which has given up on `culprit` or has failed itself. Gloo closes all connections of a
    rank once one of its receives has passed its deadline. The group cannot be used afterwards."""
    if not moves_cpu_tensors(group):
        return
    rank, nothing = dist.get_rank(group), torch.empty(1, dtype=torch.uint8, device="cpu")
    with contextlib.suppress(Exception):  # the store's process may be gone; then peers do not learn of `culprit`
        _store_of(group).set(_gave_up_key(rank), str(culprit))
    for peer in range(dist.get_world_size(group)):
        if peer != rank:
            with contextlib.suppress(RuntimeError):  # the deadline has passed, or the connection is closed already
                work: Any = dist.irecv(nothing, group=group, group_src=peer, tag=_TAG)  # no vector has this tag
                work.wait(datetime.timedelta(milliseconds=1))


def _store_of(group: "dist.ProcessGroup") -> "torch._C._distributed_c10d.Store":
    return dist.distributed_c10d._world.pg_map[group][1]


def _gave_up_key(rank: int) -> str:
    return f"deepep_moe: rank {rank} has given up on"


def culprit_behind(group: "dist.ProcessGroup", peers: Sequence[int]) -> int | None:
    """Return the rank on which a peer has given up, by the first of `peers` that recorded it when it hung up. If that rank has given up on
    another one, follow the chain to its end. None: no peer has recorded one. -1: the store cannot be asked."""
    culprits: list[int | None] = []

    def given_up_on(store: "torch._C._distributed_c10d.Store", rank: int) -> int | None:
        return int(store.get(_gave_up_key(rank))) if store.check([_gave_up_key(rank)]) else None

    def ask() -> None:
        store = _store_of(group)
        with contextlib.suppress(AttributeError, RuntimeError):  # some stores make no second connection
            store = store.clone()  # type: ignore[attr-defined]
        deadline, culprit = time.monotonic() + _TOLD_WITHIN_S, None
        while culprit is None and time.monotonic() < deadline:
            culprit = next((rank for rank in (given_up_on(store, peer) for peer in peers) if rank is not None), None)
            time.sleep(0.01)
        passed: set[int] = set()
        while culprit is not None and culprit not in passed:
            passed.add(culprit)
            behind = given_up_on(store, culprit)
            culprit = culprit if behind is None else behind
        culprits.append(culprit)

    def ask_or_not() -> None:
        with contextlib.suppress(Exception):
            ask()

    asking = threading.Thread(target=ask_or_not, daemon=True)  # a store whose process was stopped does not answer
    asking.start()
    asking.join(1.0)
    if culprits:
        return culprits[0]
    # Rank 0 of the job has the store, if nobody else has: it has ended, if it has closed its connections too.
    return None if len(peers) == 1 and dist.get_global_rank(group, peers[0]) == 0 else -1


@contextlib.contextmanager
def hanging_up(group: "dist.ProcessGroup | None") -> Iterator[None]:
    """Guard a part of a construction. If this rank times out or fails in it, end the waits of its peers. Other errors are raised on all
    ranks alike."""
    try:
        yield
    except BaseException as error:
        if group is not None and (isinstance(error, EPTimeoutError) or not isinstance(error, EPError)):
            hang_up(group, error.rank if isinstance(error, EPTimeoutError) else dist.get_rank(group))
        raise


class Exchange:
    """An all-gather of one vector `message` [n] per rank, a CPU tensor of the same size on each.

    Ranks that are in different exchanges of one group may send different sizes. gloo ends a process that receives more bytes than expected.
    So only vectors of one size are matched; other ranks wait until the deadline.
    """

    def __init__(self, message: Tensor, group: "dist.ProcessGroup", phase: str, timeout_s: float):
        self._own, self._group, self._phase, self._timeout_s = message, group, phase, timeout_s
        self._num_ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._rows = message.repeat(self._num_ranks, 1)
        self._peers = [(self._rank + offset) % self._num_ranks for offset in range(1, self._num_ranks)]
        self._works: list[Any] = []  # a send and a receive for each peer

    def wait(self) -> Tensor:
        """Return [num_ranks, n]. It may be called again after an exception of a signal handler has ended it.

        Raises EPTimeoutError with the rank that died or did not answer in time. A group that moves only GPU tensors uses the current
        device, under the group's own deadline.
        """
        if not moves_cpu_tensors(self._group):
            gathered = torch.empty(self._num_ranks, len(self._own), dtype=self._own.dtype, device="cuda")
            dist.all_gather_into_tensor(gathered, self._own.cuda(), group=self._group)
            return gathered.cpu()
        num_over, began = 0, time.monotonic()
        try:
            self._post()
            for work in self._works:
                began = time.monotonic()
                if not work.is_completed():  # a second wait would be for another message
                    work.wait(datetime.timedelta(seconds=self._timeout_s))
                num_over += 1
        except RuntimeError as error:
            if is_of_handler(error):
                raise
            failed = num_over if len(self._works) == 2 * len(self._peers) else len(self._works)
            culprit, why = self._culprit(self._peers[failed // 2], time.monotonic() - began >= self._timeout_s)
            raise EPTimeoutError(
                f"rank {self._rank}: {why}; phase '{self._phase}', expected 1 message, seen 0; torch.distributed says: {error}",
                rank=culprit, phase=self._phase, expected=1, seen=0,
            ) from error  # fmt: skip
        return self._rows

    def _culprit(self, peer: int, is_late: bool) -> tuple[int, str]:
        """Return the rank to blame where `peer` has not delivered, -1 where it cannot be told, and what happened."""
        if is_late:
            return peer, f"rank {peer} did not deliver within {self._timeout_s:g} s"
        closed = f"rank {peer} closed its connection"
        culprit = culprit_behind(self._group, [peer])
        if culprit is None:
            return peer, f"{closed}: it has ended (see its output)"
        if culprit == peer:
            return peer, f"{closed}, as it has failed (see its output)"
        if culprit == -1:
            return -1, f"{closed}: it has ended, or has given up on another rank (see its output)"
        return culprit, f"{closed}, as it has given up on rank {culprit}"

    def _post(self) -> None:
        """Post all messages. The loop runs in C, where no signal's handler raises: what was posted is known also after an interrupt."""
        send, receive, tag = self._group.send, self._group.recv, _TAG + self._own.nbytes
        if not self._works:
            posts = [(partial(send, [self._own], peer, tag), partial(receive, [self._rows[peer]], peer, tag)) for peer in self._peers]
            self._works.extend(map(partial.__call__, itertools.chain.from_iterable(posts)))


def gather_objects(
    value: Any,
    group: "dist.ProcessGroup | None",
    num_ranks: int,
    phase: str,
    timeout_s: float,
    read: Callable[[Any], _Message] = lambda value: value,
) -> list[_Message]:
    """Return `read(value)` for the `value` of every rank, which travels as JSON: None, bools, numbers, text, bytes, lists and dicts.

    Collective; raises as `Exchange`, and EPError naming the rank whose message `read` does not take (AttributeError, KeyError,
    TypeError, ValueError).
    """
    if group is None or num_ranks == 1:
        return [read(value)]
    data = torch.frombuffer(bytearray(json.dumps(value, default=_as_json).encode()), dtype=torch.uint8)
    sizes = Exchange(torch.tensor([len(data)], device="cpu"), group, phase, timeout_s).wait().flatten().tolist()
    for rank, size in enumerate(sizes):
        if not 0 < size <= _MAX_BYTES:
            raise _strange(rank, f"{size} bytes long", f"1 to {_MAX_BYTES}", phase)
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    padded[: len(data)] = data
    rows = Exchange(padded, group, phase, timeout_s).wait()
    return [_read(row[:size].numpy().tobytes(), read, rank, phase) for rank, (row, size) in enumerate(zip(rows, sizes, strict=True))]


def agree(
    phase: str, error: Exception | None, group: "dist.ProcessGroup | None", num_ranks: int, value: object = None,
    timeout_s: float | None = None,
) -> list[Any]:  # fmt: skip
    """Return the value of each rank. Raises this rank's error, or EPPeerError where a peer has one. Collective; raises as
    `gather_objects`."""
    own_answer = value, None if error is None else describe(error)[:_MAX_WORDS]
    answers = gather_objects(own_answer, group, num_ranks, phase, config.timeout_s() if timeout_s is None else timeout_s, list)
    raise_first(error, [reason for _, reason in answers], "did not make its call")
    return [answer for answer, _ in answers]


def _read(data: bytes, read: Callable[[Any], _Message], rank: int, phase: str) -> _Message:
    try:
        return read(json.loads(data, object_hook=_from_json))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _strange(rank, repr(data[:80]), "JSON with the fields of this phase", phase) from error


def _strange(rank: int, fault: str, wanted: str, phase: str) -> EPError:
    return EPError(
        f"the message of rank {rank} is {fault}; it must be {wanted} (phase '{phase}'): run the same version of deepep_moe on every rank, "
        "and let nothing else talk in its process group"
    )


def _as_json(value: object) -> dict[str, str] | int:
    if isinstance(value, bytes):  # the address of a backend for GPUs
        return {"bytes": value.hex()}
    with contextlib.suppress(TypeError):
        return as_int("a number", value)
    raise TypeError(f"a message of ranks holds a {type(value).__name__}; it must hold text, numbers and bytes")


def _from_json(value: dict[str, Any]) -> Any:
    return bytes.fromhex(value["bytes"]) if value.keys() == {"bytes"} else value


def _is_like(theirs: object, ours: object) -> bool:
    """Return whether two messages have the same form. Text may be None."""
    if isinstance(ours, dict):
        return isinstance(theirs, dict) and theirs.keys() == ours.keys() and all(_is_like(theirs[name], ours[name]) for name in ours)
    if isinstance(ours, (list, tuple)):
        return isinstance(theirs, (list, tuple)) and len(theirs) == len(ours) and all(map(_is_like, theirs, ours))
    return type(theirs) is type(ours) or all(isinstance(one, (str, type(None))) for one in (theirs, ours))


def first_reason(failure: str | None, group: "dist.ProcessGroup | None", settings: Settings, phase: str) -> str | None:
    """Return the first `failure` among the ranks, with its rank, or None. Collective; raises as `gather_objects`."""
    reasons: list[str | None] = gather_objects(failure, group, settings.num_ranks, phase, settings.timeout_s)
    return next((f"on rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None), None)


def raise_first(error: BaseException | None, reasons: Iterable[str | None], what: str) -> None:
    """Raise this rank's `error`, or EPPeerError for the first rank that has a reason. `what`: what that rank could not do."""
    if error is not None:
        raise error
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise EPPeerError(f"rank {rank} {what}: {reason}", rank=rank)


def connect(make: "Callable[[], _Backend]", settings: Settings, group: "dist.ProcessGroup | None") -> "_Backend | str":
    """Return the backend that `make` makes, with every rank's memory mapped, or the reason why some rank cannot reach another. The answer
    is the same on every rank. Collective."""
    with hanging_up(group):
        failure: str | None = None
        backend: _Backend | None = None
        address: object = None
        try:
            backend = make()
            address = backend.address()
        except (OSError, RuntimeError) as error:
            failure = str(error)[:_MAX_WORDS]

        def read(message: Any) -> tuple[str | None, Any]:
            reason, theirs = message
            if failure is None and reason is None and not _is_like(theirs, address):
                raise TypeError("address")
            return reason, theirs

        gathered = gather_objects([failure, address], group, settings.num_ranks, "sharing of workspaces", settings.timeout_s, read)
        if backend is not None and all(reason is None for reason, _ in gathered):
            try:
                backend.connect([address for _, address in gathered])
            except (OSError, RuntimeError, ValueError) as error:
                failure = str(error)[:_MAX_WORDS]
        reason = first_reason(failure, group, settings, "mapping of workspaces")
        if reason is not None:
            if backend is not None:
                backend.disconnect()
            gather_objects(None, group, settings.num_ranks, "unmapping of workspaces", settings.timeout_s)
            if backend is not None:
                backend.free()
            return reason
        assert backend is not None
        backend.seal()
        return backend
