"""The files that profiles lie in: what comes with the package, then the user's own, then the one that `DEEPEP_MOE_PROFILE` names."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deepep_moe import config
from deepep_moe.tuning.profiles import Machine, Profile, Shape, as_text, parse

_PACKAGED = Path(__file__).parent / "defaults"
_NAME = "profiles.json"


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
    """The contents of the files. Later `profiles` have priority. `user_files`: the user's files that were read. `damaged`: errors."""

    profiles: tuple[Found, ...] = ()
    user_files: tuple[Path, ...] = ()
    damaged: tuple[str, ...] = ()
    files: Files = field(default_factory=lambda: Files(None, None))

    def of_other_machines(self, machine: Machine) -> list[str]:
        """Return a sentence for each of the user's files that has profiles, and none of `machine`."""
        sentences = []
        for file in self.user_files:
            machines = {entry.profile.machine for entry in self.profiles if entry.file == file}
            if machines and machine not in machines:
                others = "; ".join(sorted(map(str, machines)))
                sentences.append(f"{file} has no profile of this machine ({machine}), only of: {others}; `deepep-moe tune` makes one")
        return sentences


def load(files: Files | None = None) -> Loaded:
    """Read all files. Damaged ones are left out and listed in `Loaded.damaged`.

    Raises ValueError if the file that `DEEPEP_MOE_PROFILE` names cannot be read.
    """
    files = files or Files.of_environment()
    all_profiles: list[Found] = []
    user_files: list[Path] = []
    damaged: list[str] = []
    for file in (*files.packaged, *(path for path in (files.user, files.from_variable) if path is not None)):
        try:
            profiles = parse(file.read_text(encoding="utf-8"))
        except OSError as error:
            if file == files.from_variable:
                raise ValueError(
                    f"environment variable DEEPEP_MOE_PROFILE={str(file)!r} names a file that cannot be read ({error.strerror}); "
                    "give the path of a file of profiles, or unset it"
                ) from None
            if not isinstance(error, FileNotFoundError):
                damaged.append(f"{file} cannot be read ({error.strerror}). Its profiles are not used; change its permissions or delete it")
            continue
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
            damaged.append(f"{file} is no file of profiles: {error}. Its profiles are not used; repair or delete it")
            continue
        all_profiles += [Found(profile, file) for profile in profiles]
        user_files += [file] if file not in files.packaged else []
    return Loaded(tuple(all_profiles), tuple(user_files), tuple(damaged), files)


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
