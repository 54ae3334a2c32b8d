"""Profiles of tuned settings, and their JSON form, whose fields are checked. Their files are those of the package, then the user's own,
then the one that `DEEPEP_MOE_PROFILE` names."""

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from deepep_moe import config

FORMAT = 1
_PACKAGED = Path(__file__).parent / "defaults"
_NAME = "profiles.json"
_MOST_BLOCKS = 4096


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


SETTINGS = tuple(each.name for each in fields(Values))
_RANGES = {
    "num_sms": (1, _MOST_BLOCKS), "num_ranks": (1, 1 << 20), "num_nodes": (1, 1 << 20), "num_tokens": (1, 1 << 31), "hidden": (1, 1 << 31),
    "num_topk": (1, 1 << 10), "num_sms_of_sums": (1, _MOST_BLOCKS), "ring_warps": (1, 11), "ring_stages": (3, 16),
    "num_receive_blocks": (1, _MOST_BLOCKS), "num_work_blocks": (0, _MOST_BLOCKS),
}  # fmt: skip


@dataclass(frozen=True)
class Profile:
    """Values that were faster than the defaults on `machine` for `shape`.

    For readers, and so not checked: `gain`, the share of the default's time that they save; `source`, how that was measured.
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
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise ValueError(f"its format is {version!r}, this version of deepep_moe reads {FORMAT}")
    if not isinstance(profiles := content.get("profiles"), list):
        raise ValueError(f"'profiles' is a {type(profiles).__name__}, not a list")
    return [_profile(f"profile {index}", profile) for index, profile in enumerate(profiles)]


def as_text(profiles: Sequence[Profile]) -> str:
    """Return the text of a file with `profiles`."""
    return json.dumps({"format": FORMAT, "profiles": [asdict(profile) for profile in profiles]}, indent=2) + "\n"


def _profile(what: str, record: Any) -> Profile:
    profile: Profile = _read(what, Profile, record)
    for name in ("num_sms", "num_sms_of_sums"):
        if getattr(profile.values, name) > profile.machine.num_sms:
            raise ValueError(f"{what}: {name!r} is {getattr(profile.values, name)}, and its machine has {profile.machine.num_sms} SMs")
    return profile


def _read(what: str, kind: Any, record: Any) -> Any:
    """Return the dataclass `kind` of a record, with those in it."""
    names = [each.name for each in fields(kind)]
    if not isinstance(record, dict) or sorted(record) != sorted(names):
        found = ", ".join(record) if isinstance(record, dict) else f"a {type(record).__name__}"
        raise ValueError(f"{what} is {found}, not {', '.join(names)}")
    for name in record.keys() & _RANGES.keys():
        low, high = _RANGES[name]
        if type(record[name]) is not int or not low <= record[name] <= high:
            raise ValueError(f"{what}: {name!r} is {record[name]!r}, not a whole number from {low} to {high}")
    inner = {each.name: _read(f"{what}: {each.name}", each.type, record[each.name]) for each in fields(kind) if is_dataclass(each.type)}
    return kind(**record | inner)


# ---- files ----


@dataclass(frozen=True)
class Files:
    """The files of profiles. `user`: None if the user has no home; `from_variable`: None if `DEEPEP_MOE_PROFILE` is not set."""

    user: Path | None
    from_variable: Path | None
    packaged: Sequence[Path] = ()

    @classmethod
    def of_environment(cls) -> "Files":
        folder = config.cache_folder()
        return cls(None if folder is None else folder / _NAME, config.profile_path(), tuple(sorted(_PACKAGED.glob("*.json"))))


@dataclass(frozen=True)
class Found:
    """A profile and the file that it is from."""

    profile: Profile
    file: Path


@dataclass(frozen=True)
class Loaded:
    """The contents of the files. Later `profiles` have priority. `damaged`: errors."""

    profiles: tuple[Found, ...] = ()
    damaged: tuple[str, ...] = ()
    files: Files = field(default_factory=lambda: Files(None, None))


def load(files: Files | None = None) -> Loaded:
    """Read all files. Damaged ones are left out and listed in `Loaded.damaged`.

    Raises ValueError if the file that `DEEPEP_MOE_PROFILE` names cannot be read.
    """
    files = files or Files.of_environment()
    profiles: list[Found] = []
    damaged: list[str] = []
    for file in (*files.packaged, *(path for path in (files.user, files.from_variable) if path is not None)):
        try:
            profiles += [Found(profile, file) for profile in parse(file.read_text(encoding="utf-8"))]
        except OSError as error:
            if file == files.from_variable:
                raise ValueError(
                    f"environment variable DEEPEP_MOE_PROFILE={str(file)!r} names a file that cannot be read ({error.strerror}); "
                    "give the path of a file of profiles, or unset it"
                ) from None
            if not isinstance(error, FileNotFoundError):
                damaged.append(f"{file} cannot be read ({error.strerror}). Its profiles are not used; change its permissions or delete it")
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
            damaged.append(f"{file} is no file of profiles: {error}. Its profiles are not used; repair or delete it")
    return Loaded(tuple(profiles), tuple(damaged), files)


def choose(loaded: Loaded, machine: Machine, shape: Shape) -> Found | None:
    """Return the profile for a buffer of `shape` on `machine`, of the file with the highest priority, or None."""
    fitting = [entry for entry in loaded.profiles if entry.profile.key == (machine, shape)]
    return fitting[-1] if fitting else None


def write(profile: Profile, file: Path) -> None:
    """Add `profile` to `file`, in place of one for the same machine and shape. Other processes see the old file or the new one.

    Raises ValueError where the file is damaged, OSError where it cannot be written.
    """
    profiles: list[Profile] = []
    with contextlib.suppress(FileNotFoundError):
        profiles = parse(file.read_text(encoding="utf-8"))
    profiles = [other for other in profiles if other.key != profile.key] + [profile]
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        temporary.write_text(as_text(profiles), encoding="utf-8")
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
