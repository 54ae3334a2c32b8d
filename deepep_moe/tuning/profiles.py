"""Profiles of tuned settings and their JSON form, whose fields are all checked."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

FORMAT = 1
_MOST_BLOCKS = 4096
_Record = TypeVar("_Record", "Machine", "Shape", "Values")


@dataclass(frozen=True)
class Machine:
    """The machine that a profile was measured on. It has no host name, as equal machines share profiles.

    `num_sms`: SMs that a process may use, which are fewer under MPS. `num_ranks`: of all nodes together.
    """

    gpu: str
    num_sms: int
    num_ranks: int
    num_nodes: int

    def __str__(self) -> str:
        return f"{self.gpu} with {self.num_sms} SMs, {self.num_ranks} ranks, nodes: {self.num_nodes}"


@dataclass(frozen=True)
class Shape:
    """The buffers that a profile is for. `num_tokens`: most tokens of a rank, a power of two.

    A buffer has one set of settings for all its calls. So the dtype is no part of it, and neither is the number of experts, which only
    changes the plan.
    """

    num_tokens: int
    hidden: int
    num_topk: int

    @classmethod
    def of(cls, num_tokens: int, hidden: int, num_topk: int) -> "Shape":
        """Return the shape of a buffer for `num_tokens` tokens a rank, rounded up to a power of two."""
        return cls(1 << max(0, num_tokens - 1).bit_length(), hidden, num_topk)

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens, hidden {self.hidden}, top-{self.num_topk}"


@dataclass(frozen=True)
class Values:
    """Settings of `_C.GpuTuning`; csrc/cuda/tuning.h says what each does."""

    num_sms: int
    num_sms_of_sums: int
    ring_warps: int
    ring_stages: int
    num_receive_blocks: int
    num_work_blocks: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())


SETTINGS = tuple(field.name for field in fields(Values))
_RANGES = {
    "num_sms": (1, _MOST_BLOCKS), "num_ranks": (1, 1 << 20), "num_nodes": (1, 1 << 20), "num_tokens": (1, 1 << 31), "hidden": (1, 1 << 31),
    "num_topk": (1, 1 << 10), "num_sms_of_sums": (1, _MOST_BLOCKS), "ring_warps": (1, 11), "ring_stages": (3, 16),
    "num_receive_blocks": (1, _MOST_BLOCKS), "num_work_blocks": (0, _MOST_BLOCKS),
}  # fmt: skip


@dataclass(frozen=True)
class Profile:
    """Values that were faster than the defaults on `machine` for `shape`.

    `gain`: share of the default's time that they save, above 0 and below 1. `source`: how that was measured, for readers.
    """

    machine: Machine
    shape: Shape
    values: Values
    gain: float
    source: str

    @property
    def key(self) -> tuple[Machine, Shape]:
        return self.machine, self.shape


def parse(text: str) -> list[Profile]:
    """Return the profiles of a file with this text. Raises ValueError that says what is wrong with which value."""
    content = json.loads(text)  # its error is a ValueError
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not an object")
    if content.get("format") != FORMAT:
        raise ValueError(f"its format is {content.get('format')!r}, this version of deepep_moe reads {FORMAT}")
    _check_names("the file", content, ("format", "profiles"))
    if not isinstance(content["profiles"], list):
        raise ValueError(f"'profiles' is a {type(content['profiles']).__name__}, not a list")
    profiles = [_profile(f"profile {index}", profile) for index, profile in enumerate(content["profiles"])]
    keys = [profile.key for profile in profiles]
    for index, key in enumerate(keys):
        if key in keys[:index]:
            raise ValueError(f"profiles {keys.index(key)} and {index} are for the same machine and shape")
    return profiles


def as_text(profiles: Sequence[Profile]) -> str:
    """Return the text of a file with `profiles`."""
    return json.dumps({"format": FORMAT, "profiles": [asdict(profile) for profile in profiles]}, indent=2) + "\n"


def _check_names(what: str, record: object, names: Sequence[str]) -> None:
    if not isinstance(record, dict):
        raise ValueError(f"{what} is a {type(record).__name__}, not an object")
    for name in names:
        if name not in record:
            raise ValueError(f"{what} lacks {name!r}")
    for name in record:
        if name not in names:
            raise ValueError(f"{what} has {name!r}, which this version does not know")


def _profile(what: str, record: Any) -> Profile:
    _check_names(what, record, [field.name for field in fields(Profile)])
    gain, source = record["gain"], record["source"]
    if isinstance(gain, bool) or not isinstance(gain, (int, float)) or not 0 < gain < 1:
        raise ValueError(f"{what}: 'gain' is {gain!r}, not a number above 0 and below 1")
    if not isinstance(source, str):
        raise ValueError(f"{what}: 'source' is {source!r}, not a text")
    machine = _record(f"{what}: machine", Machine, record["machine"])
    shape = _record(f"{what}: shape", Shape, record["shape"])
    values = _record(f"{what}: values", Values, record["values"])
    if shape.num_tokens & (shape.num_tokens - 1):
        raise ValueError(f"{what}: 'num_tokens' is {shape.num_tokens}, not a power of two")
    for name in ("num_sms", "num_sms_of_sums"):
        if getattr(values, name) > machine.num_sms:
            raise ValueError(f"{what}: {name!r} is {getattr(values, name)}, and its machine has {machine.num_sms} SMs")
    return Profile(machine, shape, values, float(gain), source)


def _record(what: str, cls: type[_Record], record: Any) -> _Record:
    _check_names(what, record, [field.name for field in fields(cls)])
    for name, value in record.items():
        if name == "gpu":
            if not isinstance(value, str) or not value:
                raise ValueError(f"{what}: 'gpu' is {value!r}, not the name of a GPU")
            continue
        low, high = _RANGES[name]
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{what}: {name!r} is {value!r}, not a whole number from {low} to {high}")
    return cls(**record)
