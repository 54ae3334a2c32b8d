"""The ranks of one host: their shared memory, mapped here, and their processes."""

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from deepep_moe import _C

_MARK, _MARK_BYTES = 0x64656570_65700006, 8  # plus the rank; behind the memory, so that another container's file is noticed


class HostPeers:
    """A rank's memory is an anonymous file: it has no name in any file system, so nothing is left behind however its owner ends. Peers of
    the same user open it through the owner's /proc/<pid>/fd. It is zeroed, and stays until nobody refers to its tensor."""

    def __init__(self, rank: int, num_bytes: int):
        self._rank, self._num_bytes, self._owner_pid = rank, num_bytes, os.getpid()
        self._file = -1
        self._memory: dict[int, Tensor] = {}
        self._addresses: dict[int, int] = {}
        self._processes: list[_C.Process] = []
        self._pids: list[int] = []
        with _explained("cannot create shared memory"):
            self._file = os.memfd_create("deepep_moe", os.MFD_CLOEXEC)
            os.ftruncate(self._file, num_bytes + _MARK_BYTES)
        self._map(rank, self.path)
        self.store(rank, num_bytes, _MARK + rank)

    @property
    def path(self) -> str:
        """Return where peers open this rank's memory, until `seal`."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def connect(self, paths: list[str], pids: list[int]) -> None:
        """Map the memory of all ranks; rank r has paths[r] and pids[r]. Raises OSError, RuntimeError or ValueError."""
        self._pids, self._processes = pids, [_C.running(pid) for pid in pids]
        for rank, path in enumerate(paths):
            if rank not in self._memory:  # a buffer that was suspended has kept it
                self._map(rank, path)
            if self.load(rank, self._num_bytes) != _MARK + rank:
                raise ValueError(f"{path} is not the shared memory of rank {rank}; are the ranks in different containers?")

    def _map(self, rank: int, path: str) -> None:
        with _explained(f"cannot open a peer's shared memory at {path} (ranks must run as one user in one container)"):
            num_bytes = os.stat(path).st_size
        if num_bytes != self._num_bytes + _MARK_BYTES:
            raise ValueError(f"shared memory at {path} has {num_bytes} bytes, expected {self._num_bytes + _MARK_BYTES}")
        memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8, device="cpu")
        self._memory[rank], self._addresses[rank] = memory, memory.data_ptr()

    def seal(self) -> None:
        """Let nobody open this rank's memory any more, once all ranks are connected."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.seal()

    def is_mapped(self, rank: int) -> bool:
        return rank in self._memory

    def memory(self, rank: int) -> Tensor:
        """Return [num_bytes] uint8, once it is mapped."""
        return self._memory[rank][: self._num_bytes]

    def give_back(self, begin: int, end: int) -> int:
        """Return whole pages of this rank's memory to the system, between calls; they are zeros then. Return their bytes."""
        return _C.give_back(self.memory(self._rank)[begin:end])

    # ---- words of 8 bytes ----

    def load(self, rank: int, offset: int) -> int:
        """Return a word. What its rank has written before it is visible then."""
        return _C.load_word(self._addresses[rank] + offset)

    def store(self, rank: int, offset: int, value: int) -> None:
        _C.store_word(self._addresses[rank] + offset, value)

    # ---- processes ----

    @property
    def is_owner(self) -> bool:
        """Return False in a process forked from the one that made this."""
        return os.getpid() == self._owner_pid

    def check_owner(self) -> None:
        """Raise BufferDestroyedError in such a process."""
        _C.check_owner(self._owner_pid)

    def is_gone(self, rank: int) -> bool:
        """Return whether the process of a rank has ended."""
        return self._processes[rank].is_gone()

    def why_silent(self, rank: int, timeout_s: float) -> tuple[str, str]:
        """Return text for a message about a wait that ended in vain, and for its end."""
        if self.is_gone(rank):
            return f"its process {self._pids[rank]} is gone", ""
        return f"nothing came for {timeout_s:g} s", _C.IF_SLOW


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Begin an error of the system with `what` failed."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{what}: {error.strerror}") from None
