"""NVSHMEM's world for the ranks of a group, and memory of its symmetric heap.

A process has one world, which stays until the process ends. NVSHMEM ends the process, or waits forever, where calls of ranks do not fit
together. So all ranks tell each other what they have, with a deadline, before any call of NVSHMEM that waits for a peer. A rank that cannot
take part makes all ranks raise the same BackendUnavailableError.
"""

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from deepep_moe import config, nvshmem_module
from deepep_moe.errors import BackendUnavailableError
from deepep_moe.group.rendezvous import gather_objects, hanging_up
from deepep_moe.group.settings import Settings

logger = logging.getLogger("deepep_moe")
_INITIALIZED = 2  # the least status of an initialized NVSHMEM; 1: bootstrapped, and no more
_MAX_WORDS = 2000
_NO_ROOM = "NVSHMEM's symmetric heap has no {} bytes left"
_Message = TypeVar("_Message")


@dataclass
class _Process:
    """The state of this process in its NVSHMEM world."""

    world: str = ""  # the name of the world, if this module made it
    broken: str = ""  # why no call of NVSHMEM may be made any more
    allocated: dict[int, tuple[int, int]] = field(default_factory=dict)  # address and bytes by number, which is the same on all ranks
    freed: set[int] = field(default_factory=set)  # allocations that other ranks have not freed yet
    returned: int = 0  # bytes given back to the heap
    num_allocated: int = 0
    pid: int = 0  # the process that joined the world; a forked process is not part of it
    rank: int = -1
    timeout_s: float = 0.0
    is_stuck: bool = False  # the GPU waits for puts that do not arrive


_process = _Process()


@dataclass
class _Standing:
    """The message that a rank sends to all others before it joins a world."""

    error: str | None
    built: list[int] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    status: int = 0
    pe: int = -1
    num_pes: int = 0
    world: str = ""
    job_ranks: int = 0
    variables: dict[str, str] = field(default_factory=dict)


class World:
    """The NVSHMEM world of a group.

    pe_of: [num_ranks], the PE of each rank. version: that of NVSHMEM. variables: the environment variables that were set for it.
    num_hosts: over several hosts, a network card writes to symmetric memory."""

    pe_of: tuple[int, ...]
    version: str
    variables: dict[str, str]

    def __init__(self, module: Any, settings: Settings, group: "dist.ProcessGroup | None", num_hosts: int):
        self.module, self.settings, self.num_hosts, self._group = module, settings, num_hosts, group

    def gather(self, error: str | None, value: Any, phase: str, read: Callable[[Any], _Message], after_s: float = 0.0) -> list[_Message]:
        """Return `read(value)` for the `value` of every rank, by rank. Raises BackendUnavailableError, on all ranks alike, where one has an
        `error`. `after_s`: how much later than the first rank the last one may come without being late."""

        def read_outcome(outcome: Any) -> tuple[str | None, _Message | None]:
            reason, theirs = outcome
            return reason, read(theirs) if reason is None else None

        own_outcome = [error and error[:_MAX_WORDS], value]
        with hanging_up(self._group):
            deadline_s = self.settings.timeout_s + after_s
            outcomes = gather_objects(own_outcome, self._group, self.settings.num_ranks, phase, deadline_s, read_outcome)
        _refuse_first([reason for reason, _ in outcomes])
        return [theirs for _, theirs in outcomes if theirs is not None]

    def allocate(self, num_bytes: int) -> int:
        """Return the address of `num_bytes` of the symmetric heap, zero on every rank. Collective.

        First give back allocations that all ranks have freed. Raises BackendUnavailableError, on all ranks alike, if they ask for different
        sizes or if the heap of one rank is exhausted.
        """
        with _whole("an allocation of symmetric memory", BackendUnavailableError):
            request = [num_bytes, self.module.free_bytes(), *sorted(_process.freed)]
            asked = self.gather(_process.broken or None, request, "request of symmetric memory", list)
            sizes = [size for size, *_ in asked]
            if len(set(sizes)) > 1:
                listed = _by_rank(sizes)
                _refuse(f"ranks ask for different sizes of symmetric memory, in bytes ({listed}); create the Buffer with the same values")
            for number in sorted(set.intersection(*(set(freed) for _, _, *freed in asked))):
                address, size = _process.allocated.pop(number)
                self.module.free(address)
                _process.freed.remove(number)
                _process.returned += size
            # NVSHMEM does not survive a request that is larger than the GPU's memory: its barrier fails when the process ends.
            rooms = [free + _process.returned for _, free, *_ in asked]
            _refuse_first([f"{_NO_ROOM.format(num_bytes)}: its GPU has {room}" if num_bytes > room else None for room in rooms])
            number, error = _process.num_allocated, None
            _process.num_allocated += 1
            try:
                _process.allocated[number] = self.module.allocate(num_bytes), num_bytes
            except RuntimeError as failure:  # some ranks have failed: the others cannot free their memory, which is collective
                error = str(failure)
            self.gather(error, 0, "allocation of symmetric memory", int)
            return _process.allocated[number][0]

    def free(self, address: int) -> None:
        """Let go of what `allocate` returned. Waits for no rank: the heap has it back with the first allocation after all ranks have freed
        it. NVSHMEM keeps the memory for its heap in any case."""
        for number, (one, _) in _process.allocated.items():
            if one == address and number not in _process.freed:
                _process.freed.add(number)
                return
        raise ValueError(f"address is {address:#x}; it must be one that allocate returned and that is not free")

    def quiet(self) -> bool:
        return quiet()


def join(settings: Settings, group: "dist.ProcessGroup | None", *, hosts: list[str], device: int | None, heap_bytes: int) -> World:
    """Return the world of the group's ranks: the one that there is, or a new one. Collective.

    `hosts`: of each rank; `device`: this rank's CUDA device; `heap_bytes`: what NVSHMEM_SYMMETRIC_SIZE becomes, unless it is set. Raises
    BackendUnavailableError with the reason and what to do, on all ranks alike; EPTimeoutError for a rank that does not answer.
    """
    defaults, module = _variables(hosts, heap_bytes), nvshmem_module.load()
    world, state = World(module, settings, group, len(set(hosts))), _standing(module, device, defaults)
    ranks = world.gather(state.error, asdict(state), "what ranks have of NVSHMEM", lambda fields: _Standing(**fields))
    _refuse(_why_not(ranks, hosts))
    assert not isinstance(module, str) and device is not None
    exists = state.status >= _INITIALIZED
    world.variables = {} if exists else config.set_unless_given(defaults)
    with _whole("NVSHMEM's initialization"):
        world.pe_of = tuple((_attach if exists else _start)(world, device))
    world.version = nvshmem_module.dotted(module.version_found())
    _process.pid, _process.rank, _process.timeout_s = os.getpid(), settings.rank, settings.timeout_s
    if settings.rank == 0:
        logger.info("NVSHMEM %s: %d PEs, environment variables set: %s", world.version, settings.num_ranks, world.variables or "none")
    return world


def quiet() -> bool:
    """Wait until what this process has put has arrived, so that it may end. Needs no other rank.

    False where that takes longer than the deadline, after a warning. From then on whatever synchronizes the GPU may wait for ever, so no
    call of NVSHMEM is made any more.
    """
    p = _process
    if p.is_stuck or p.broken or p.pid != os.getpid():
        return not p.is_stuck
    module = nvshmem_module.load()
    assert not isinstance(module, str)  # the process has a world
    try:
        has_arrived = module.quiet(p.timeout_s)
    except RuntimeError as error:  # the GPU has failed: nothing waits for it
        p.broken = f"what rank {p.rank} has put may not have arrived ({error}); start the processes again"
        logger.warning("NVSHMEM: %s", p.broken)
        return True
    if not has_arrived:
        p.is_stuck = True
        p.broken = f"what rank {p.rank} has put has not arrived within {p.timeout_s:g} s; start the processes again"
        logger.warning("NVSHMEM: %s. Peers may miss rows of the last call, and memory of this rank's buffers is not freed", p.broken)
    return not p.is_stuck


def _variables(hosts: list[str], heap_bytes: int) -> dict[str, str]:
    """NVLink SHARP and NVLink between hosts are off: NVSHMEM uses neither for puts, and initialization fails with them on some machines."""
    variables = {"NVSHMEM_DISABLE_NVLS": "1", "NVSHMEM_DISABLE_MNNVL": "1", "NVSHMEM_SYMMETRIC_SIZE": str(heap_bytes)}
    return variables | ({"NVSHMEM_REMOTE_TRANSPORT": "none"} if len(set(hosts)) == 1 else {})


def _standing(module: Any, device: int | None, defaults: dict[str, str]) -> _Standing:
    if isinstance(module, str):
        return _Standing(module)
    if _process.broken:
        return _Standing(_process.broken)
    if device is None:
        return _Standing("this process sees no CUDA device; start it where there is one, or use backend='collective'")
    job_ranks = dist.get_world_size() if dist.is_initialized() else 1
    variables = defaults | config.variables(defaults)
    state = _Standing(None, [*module.version_built()], [*module.version_found()], module.status(), job_ranks=job_ranks, variables=variables)
    if state.status >= _INITIALIZED:
        state.pe, state.num_pes, state.world = module.my_pe(), module.num_pes(), _process.world
    return state


def _why_not(ranks: list[_Standing], hosts: list[str]) -> str | None:
    """The reason why these ranks cannot be one world, or None. The same on every rank."""
    versions = [f"built for {nvshmem_module.dotted(one.built)}, found {nvshmem_module.dotted(one.loaded)}" for one in ranks]
    if len({(*one.built[:2], *one.loaded[:2]) for one in ranks}) > 1:
        return f"ranks have different versions of NVSHMEM ({_by_rank(versions)}); install the same one on every host"
    if any(one.status >= _INITIALIZED for one in ranks):
        return _why_not_existing(ranks)
    if any(one.status for one in ranks):
        statuses = [one.status for one in ranks]
        return f"an earlier initialization of NVSHMEM in this job ended half-way (status by rank: {statuses}); start the processes again"
    sizes = {host: hosts.count(host) for host in hosts}
    if len(set(sizes.values())) > 1:
        return f"NVSHMEM needs the same number of ranks on every host, and these have {sizes}; start as many on each"
    for name in ranks[0].variables:
        values = [one.variables[name] for one in ranks]
        if len(set(values)) > 1:
            return f"ranks disagree on the variable {name} of the environment ({_by_rank(values)}); set one value on every rank, or none"
    return None


def _why_not_existing(ranks: list[_Standing]) -> str | None:
    """Return the reason why the world that some processes have is not one of exactly these ranks, or None."""
    count = len(ranks)
    places = [f"PE {one.pe} of {one.num_pes}" if one.status >= _INITIALIZED else "none" for one in ranks]
    fits = all(one.num_pes == count for one in ranks) and sorted(one.pe for one in ranks) == list(range(count))
    is_one = len({one.world for one in ranks}) == 1
    # PyTorch makes a world of all processes of the job, and does not say which one.
    is_of_job = bool(ranks[0].world) or all(one.job_ranks == count for one in ranks)
    if fits and is_one and is_of_job:
        return None
    return (
        f"NVSHMEM is initialized already, and not for exactly the {count} ranks of this group, 0 to {count - 1} "
        f"(its PEs: {_by_rank(places)}; ranks of the job: {ranks[0].job_ranks}). A process has one NVSHMEM world: "
        "make the Buffer for the group that it was made for, or use backend='collective'"
    )


def _attach(world: World, device: int) -> list[int]:
    """Use the world that exists; return the PE of each rank."""
    timeout_s = world.settings.timeout_s
    error = _within(timeout_s, lambda: world.module.attach(device))
    return world.gather(error, world.module.my_pe(), "use of the NVSHMEM that exists", int, timeout_s)


def _start(world: World, device: int) -> list[int]:
    """Make the world; return the PE of each rank."""
    module, settings, error, own_id = world.module, world.settings, None, b""
    if settings.rank == 0:
        try:
            own_id = module.unique_id()
        except RuntimeError as failure:
            error = str(failure)
    unique_id = world.gather(error, own_id, "unique id of NVSHMEM", bytes)[0]
    error = _within(settings.timeout_s, lambda: module.init(unique_id, settings.rank, settings.num_ranks, device))
    pe = module.my_pe() if error is None else -1
    pe_of = world.gather(error, pe, "initialization of NVSHMEM", int, settings.timeout_s)
    if sorted(pe_of) != list(range(settings.num_ranks)):
        _refuse(f"NVSHMEM gave the ranks the PEs {pe_of}, and not each of 0 to {settings.num_ranks - 1}; start the processes again")
    _process.world = hashlib.sha256(unique_id).hexdigest()
    return pe_of


def _within(timeout_s: float, call: Callable[[], None]) -> str | None:
    """Make a call of NVSHMEM that has no deadline of its own; return what went wrong, or None."""
    outcome: list[str | None] = []

    def run() -> None:
        try:
            call()
            outcome.append(None)
        except (RuntimeError, ValueError) as error:
            outcome.append(str(error))

    thread = threading.Thread(target=run, name="deepep_moe NVSHMEM", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if outcome:
        return outcome[0]
    return (
        f"NVSHMEM has not initialized within {timeout_s:g} s; look for a rank that failed, see by NVSHMEM_DEBUG=INFO where it waits, "
        "and start the processes again"
    )


@contextlib.contextmanager
def _whole(what: str, *harmless: type[BaseException]) -> Iterator[None]:
    """Make a part that all ranks make together. Once one has left it half-way, their calls of NVSHMEM no longer fit together, and no more
    are made."""
    try:
        yield
    except harmless:
        raise
    except BaseException as error:
        _process.broken = f"{what} failed before in this process ({error}); start the processes again"
        raise


def _refuse(reason: str | None) -> None:
    if reason:
        raise BackendUnavailableError(f"NVSHMEM cannot serve these ranks: {reason}")


def _refuse_first(reasons: list[str | None]) -> None:
    """Refuse for the first reason, with the ranks that have it, unless there is none."""
    if first := next(filter(None, reasons), None):
        ranks = [rank for rank, reason in enumerate(reasons) if reason == first]
        _refuse(f"on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {first}")


def _by_rank(values: list[Any]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
