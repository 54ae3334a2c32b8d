"""What a check found."""

from dataclasses import dataclass

OK, WARNING, FAULT, ABSENT = "ok", "warning", "fault", "not here"


@dataclass(frozen=True)
class Finding:
    """One line of the page: what was looked at, its state (one of the four above), what is there, and what to do about it."""

    check: str
    state: str
    text: str
    advice: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check, OK, text)


def warning(check: str, text: str, advice: str) -> Finding:
    return Finding(check, WARNING, text, advice)


def fault(check: str, text: str, advice: str) -> Finding:
    return Finding(check, FAULT, text, advice)


def late(check: str, what: str, why: str) -> Finding:
    """Return the fault of a program that was stopped at its deadline: a busy machine or a cold disk, more often than one that hangs."""
    return fault(check, f"{what} was stopped: {why}", "run the doctor again while the machine is idle")


def absent(check: str, text: str) -> Finding:
    return Finding(check, ABSENT, text)
