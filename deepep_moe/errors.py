"""Errors of the library. Wrong arguments raise `ValueError` or `TypeError`; everything else is an `EPError`."""

import re
from enum import IntEnum

# Every backend passes a peer's error on as its class, a colon and its message.
_RELAYED = re.compile(
    r"(?:rank \d+ in [^:]*: )?rank \d+ (?:did not make its call|left its call|could not (?:create|suspend) its Buffer): ([^\W\d]\w*): "
)


def describe(error: BaseException) -> str:
    """Return the class and the words of an error, as peers are told them. The words may be anything: an error that has none, or whose
    words have no encoding, is told too."""
    try:
        words = str(error)
    except Exception as failure:
        words = f"(its text cannot be had: {type(failure).__name__})"
    return f"{type(error).__name__}: {words}".encode(errors="backslashreplace").decode()


class EPError(RuntimeError):
    """The base of every error that is not a wrong argument of the caller."""


class EPTimeoutError(EPError):
    """A peer died or stalled: its process is gone, or a wait passed its deadline.

    Attributes: `rank` (the peer waited for, in the buffer's group; -1 where it cannot be told), `phase`, `expected` and `seen`
    (what the wait expected of that peer and what was there).
    """

    def __init__(self, message: str, *, rank: int = -1, phase: str = "", expected: int = -1, seen: int = -1):
        super().__init__(message)
        self.rank, self.phase, self.expected, self.seen = rank, phase, expected, seen


class Cause(IntEnum):
    """Why a rank refused a call, where its peers decide by it. GPUs that refuse it because of another pass it on, between nodes too."""

    OTHER = 0
    OUTGROWN = 1
    """It raised OutgrownError: peers may meet it in a larger buffer."""
    NO_EXPERT = 2
    """An entry of its topk_idx is no expert: `no_expert` has made its ValueError."""

    @classmethod
    def _missing_(cls, value: object) -> "Cause":
        """Return OTHER for numbers that a failing peer has written by half."""
        return cls.OTHER


class OutgrownError(ValueError):
    """A rank has more tokens than the buffer has room for."""

    code = Cause.OUTGROWN


def no_expert(message: str) -> ValueError:
    """Return the error of a rank with an entry of topk_idx that is no expert."""
    error = ValueError(message)
    error.code = Cause.NO_EXPERT  # type: ignore[attr-defined]
    return error


class EPPeerError(EPError):
    """Another rank left this call with its own error, which the message repeats.

    Attributes: `rank`, the peer that failed, in the buffer's group. `cause`, the name of its error's class, such as "ValueError"; "" if
    the peer destroyed its buffer. `code`, a `Cause`.
    """

    def __init__(self, message: str, *, rank: int = -1, code: int = Cause.OTHER):
        super().__init__(message)
        self.rank, self.code = rank, Cause(code)
        match = _RELAYED.match(message)
        self.cause = match[1] if match else ""


def cause_of(error: BaseException) -> Cause:
    """Return why a rank refuses the call in which it has raised this error. A peer's cause is of the peer's call, and is not passed on."""
    code = getattr(error, "code", None) if isinstance(error, ValueError) else None
    return code if isinstance(code, Cause) else Cause.OTHER  # errors of others may have codes too


class EPMismatchError(EPError):
    """Ranks disagree: other settings at construction, or another operation at the same call. The message names the ranks."""


class EPCapacityError(EPError):
    """A rank would receive more rows than its `num_recv_rows`. Every rank raises it; on GPUs, ranks of other nodes raise it in their next
    call. No rows of the dispatch can be used.

    Attribute: `rank`, the rank whose bound is too small, in the buffer's group.
    """

    def __init__(self, message: str, *, rank: int = -1):
        super().__init__(message)
        self.rank = rank


class BackendUnavailableError(EPError):
    """The backend asked for by name cannot serve this group here; the message says why and what to do.

    A note below the message, which tracebacks show, names `deepep-moe doctor`.
    """

    def __init__(self, *args: object):
        super().__init__(*args)
        self.add_note("deepep-moe doctor says what this machine can run, and what to do where it cannot")


class BufferSuspendedError(EPError):
    """A buffer was used between its `suspend()` and its `resume()`, or its `resume()` has found no memory on some rank."""


class BufferDestroyedError(EPError):
    """A buffer or a handle was used after the buffer's `destroy()` or in a process forked from its owner."""
