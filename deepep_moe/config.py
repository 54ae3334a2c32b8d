"""Settings from the environment. This is the only module that reads environment variables."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path

_DEFAULT_TIMEOUT_S = 300.0
_MAX_THREADS = 64
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def _number(name: str, default: float, low: float, high: float) -> float:
    text = os.environ.get(name)
    if text is None or not text.strip():
        return default
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"environment variable {name}={text!r} is not a number; unset it or give one from {low:g} to {high:g}") from None
    if not low <= value <= high:
        raise ValueError(f"environment variable {name}={text!r} is out of range; give a number from {low:g} to {high:g}")
    return value


def available_cpus() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0))


def world_size() -> int:
    """Return the number of processes a launcher such as torchrun says it has started (`WORLD_SIZE`), else 1."""
    return int(_number("WORLD_SIZE", 1, 1, 1e9))


def launched_rank() -> int | None:
    """Return this process's rank (`RANK`) where a launcher such as torchrun started it, else None."""
    rank = int(_number("RANK", -1, -1, 1e9))
    return None if rank < 0 else rank


def local_rank() -> int:
    """Return the rank of this process on this host (`LOCAL_RANK`), else 0."""
    return int(_number("LOCAL_RANK", 0, 0, 1e6))


def local_world_size() -> int:
    """Return the number of processes that the launcher says it has started on this host (`LOCAL_WORLD_SIZE`), else 1."""
    return int(_number("LOCAL_WORLD_SIZE", 1, 1, 1e6))


def names_no_local_rank() -> str:
    """Return why the local rank is unknown where Slurm or Open MPI started several processes and nobody set `LOCAL_RANK`, else ""."""
    for rank, size in (("SLURM_LOCALID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")):
        if "LOCAL_RANK" not in os.environ and rank in os.environ and os.environ.get(size, "1") != "1":
            cause = f"{size}={os.environ[size]} and LOCAL_RANK is not set"
            return f"{cause}; set LOCAL_RANK to {rank}, and LOCAL_WORLD_SIZE to the ranks of this host"
    return ""


def num_threads(num_ranks_on_host: int | None = None) -> int:
    """Threads one rank's CPU kernels may use: `DEEPEP_MOE_NUM_THREADS`, else an equal share of the CPUs, 8 at most.

    `num_ranks_on_host`: who shares the CPUs; by default what the launcher says (`LOCAL_WORLD_SIZE`), else this process alone. Nobody shares
    those that `deepep_moe.topology.bind` has given to this process.

    Raises ValueError where the variable is not a whole number from 1 to 64.
    """
    num_ranks = 1 if _bound() else max(local_world_size(), num_ranks_on_host or 1)
    share = min(8, max(1, available_cpus() // num_ranks))
    value = _number("DEEPEP_MOE_NUM_THREADS", share, 1, _MAX_THREADS)
    if value != int(value):
        raise ValueError(f"environment variable DEEPEP_MOE_NUM_THREADS={value!r} is not a whole number; give one from 1 to {_MAX_THREADS}")
    return int(value)


def timeout_s() -> float:
    """Deadline of every wait for a peer, seconds: `DEEPEP_MOE_TIMEOUT_S`, else 300."""
    return _number("DEEPEP_MOE_TIMEOUT_S", _DEFAULT_TIMEOUT_S, 0.01, 1e6)


def sums() -> str:
    """Return `sums` of buffers, which check it, for DeepEP's interfaces, but for normal calls of version 1."""
    return os.environ.get("DEEPEP_MOE_SUMS") or "ranks"


def profile_path() -> Path | None:
    """Return the file of profiles with the highest priority (`DEEPEP_MOE_PROFILE`), or None."""
    name = os.environ.get("DEEPEP_MOE_PROFILE")
    return Path(name) if name else None


def trace_folder() -> Path | None:
    """Return the folder for routing traces of layers whose metrics are gathered (`DEEPEP_MOE_TRACE`), else None."""
    name = os.environ.get("DEEPEP_MOE_TRACE")
    return Path(name) if name else None


def cache_folder() -> Path | None:
    """Folder of what this library keeps for the user: in `XDG_CACHE_HOME`, else in ~/.cache; None where the user has no home."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(folder if os.path.isabs(folder) else os.path.expanduser("~/.cache"))  # by its specification a relative one does not count
    return base / "deepep_moe" if base.is_absolute() else None


def nvshmem_home() -> str | None:
    """Return the root of an NVSHMEM installation (`NVSHMEM_HOME`) to use in place of the pip package, else None."""
    return os.environ.get("NVSHMEM_HOME") or None


def log_level() -> str | None:
    """Return the least level of messages that go to stderr (`DEEPEP_MOE_LOG`), in capitals; None where the program's own logging decides.

    Raises ValueError where it is no level.
    """
    level = os.environ.get("DEEPEP_MOE_LOG", "").strip().upper()
    if level not in ("", *_LEVELS):
        value = os.environ["DEEPEP_MOE_LOG"]
        raise ValueError(f"environment variable DEEPEP_MOE_LOG={value!r} is no level; unset it or give one of {', '.join(_LEVELS).lower()}")
    return level or None


def follow_log_level() -> None:
    """Send messages of the level that `DEEPEP_MOE_LOG` names, and above, to stderr, each with the rank that a launcher gave. Without the
    variable nothing is changed. Raises ValueError where it is no level."""
    level = log_level()
    if level is None:
        return
    rank, logger = launched_rank(), logging.getLogger("deepep_moe")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(levelname)s{'' if rank is None else f' rank {rank}'} %(name)s: %(message)s"))
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False  # or handlers of the program would print them again


def with_variables(values: dict[str, str]) -> dict[str, str]:
    """Return the environment of this process with `values`, for a process that it starts."""
    return {**os.environ, **values}


def variables(names: Iterable[str]) -> dict[str, str]:
    """Return the environment variables among `names` that are set, with their values. NVSHMEM reads its settings there itself."""
    return {name: os.environ[name] for name in names if name in os.environ}


def set_unless_given(values: dict[str, str]) -> dict[str, str]:
    """Set environment variables that are not set yet; return those that were not."""
    missing = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(missing)
    return missing


def mark_bound(has_own_cpus: bool = False) -> bool:
    """Note that this process is being bound, and with `has_own_cpus` that its CPUs are its own (`DEEPEP_MOE_BOUND`: its id, and "cpus");
    return whether it was noted before.

    The note outlives `exec`, as a binding does, and means nothing to processes that inherit it.
    """
    before = _bound()
    os.environ["DEEPEP_MOE_BOUND"] = f"{os.getpid()} cpus" if has_own_cpus else str(os.getpid())
    return before is not None


def _bound() -> list[str] | None:
    """Return what is noted beside the id of this process, or None where nothing is."""
    words = os.environ.get("DEEPEP_MOE_BOUND", "").split()
    return words[1:] if words[:1] == [str(os.getpid())] else None
