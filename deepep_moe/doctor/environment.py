"""What the checks look at: files, programs, packages, GPUs. Tests replace each part."""

import functools
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepep_moe import config, tuning

VARIABLES = (
    "CUDA_HOME", "CUDA_LAUNCH_BLOCKING", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES",
    "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NVSHMEM_HOME",
)  # fmt: skip
_CHILDREN = Path(__file__).parent / "children"
_IMPORT_S, _FACTS_S = 20.0, 10.0  # one after the other, with a check's own program, end in less than 30 s


@dataclass(frozen=True)
class Ran:
    """How a program ended. `code` is None where it could not be started or was stopped at its deadline; `errors` then says which."""

    code: int | None
    output: str = ""
    errors: str = ""

    def why(self) -> str:
        """Return what it said last, in one line. Some, such as nvidia-smi, tell errors on stdout."""
        lines = [line.strip() for line in (self.errors.strip() or self.output).splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with code {self.code} and said nothing"


def run(command: list[str], timeout_s: float) -> Ran:
    """Run `command` for at most `timeout_s` seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except OSError as error:
        return Ran(None, errors=f"{command[0]} does not start: {error.strerror}")
    except subprocess.TimeoutExpired:
        return Ran(None, errors=f"no end within {timeout_s:g} s")
    return Ran(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Gpu:
    """A GPU that CUDA lets this process use. `num_sms` is what MPS leaves of it."""

    name: str
    capability: tuple[int, int]
    num_sms: int


@dataclass(frozen=True)
class Cuda:
    """What libcuda says. `error`: why it says nothing; `driver`: the newest CUDA version that the driver serves; `reach`: pairs of GPUs of
    which the first can map the second's memory; `atomics`: those of them with atomics on their link, which NVLink has.
    """

    error: str = ""
    driver: tuple[int, int] = (0, 0)
    gpus: tuple[Gpu, ...] = ()
    reach: frozenset[tuple[int, int]] = frozenset()
    atomics: frozenset[tuple[int, int]] = frozenset()

    @classmethod
    def read(cls, told: dict[str, Any]) -> "Cuda":
        """Return what the child `cuda.py` has told as JSON."""
        gpus = tuple(Gpu(gpu["name"], tuple(gpu["capability"]), gpu["num_sms"]) for gpu in told.get("gpus", ()))
        pairs = {name: frozenset((first, second) for first, second in told.get(name, ())) for name in ("reach", "atomics")}
        return cls(told.get("error", ""), tuple(told.get("driver", (0, 0))), gpus, **pairs)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _space(path: Path) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total, usage.free


@dataclass(frozen=True)
class Environment:
    """The machine. `root`: the folder that has /proc, /sys and /dev; `variables`: those of the environment; `run`: runs a command;
    `version`: of an installed package, or None; `space`: total and free bytes at a path, or None; `which`: the path of a program, or None;
    `profiles`: what the files of tuned settings say.
    """

    root: Path = Path("/")
    variables: Mapping[str, str] = field(default_factory=lambda: config.given(VARIABLES))
    run: Callable[[list[str], float], Ran] = run
    version: Callable[[str], str | None] = _version
    space: Callable[[Path], tuple[int, int] | None] = _space
    which: Callable[[str], str | None] = shutil.which
    profiles: Callable[[], tuning.Loaded] = tuning.load
    _cuda_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _library_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, path: str) -> str:
        """Return the text of a file under the root, "" where it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def exists(self, path: str) -> bool:
        return os.path.exists(self.root / path)

    def child(self, name: str, *arguments: str, timeout_s: float = _IMPORT_S) -> Ran:
        """Run one of the scripts in `children`, each of which imports what could break this process."""
        return self.run([sys.executable, "-P", str(_CHILDREN / f"{name}.py"), *arguments], timeout_s)

    @property
    def cuda(self) -> Cuda:
        """What libcuda says, from a process of its own, as this one must stay free of CUDA."""
        with self._cuda_lock:  # checks run at once, and the first asks
            return self._cuda

    @functools.cached_property
    def _cuda(self) -> Cuda:
        ran = self.child("cuda", "facts", timeout_s=_FACTS_S)
        return Cuda.read(json.loads(ran.output)) if ran.code == 0 else Cuda(error=ran.why())

    @property
    def library(self) -> dict[str, Any]:
        """What PyTorch and this library say of themselves: `torch`, `features`, `nvshmem`. Where one is missing, `error` says why, and
        `late` whether that is because time was up."""
        with self._library_lock:
            return self._library

    @functools.cached_property
    def _library(self) -> dict[str, Any]:
        ran = self.child("library", str(_CHILDREN.parents[2]))  # the package that this module is of
        facts: dict[str, Any] = {}
        for line in ran.output.splitlines():
            if line.startswith("{"):
                facts |= json.loads(line)
        if ran.code != 0:
            facts |= {"error": ran.why(), "late": ran.code is None}
        return facts

    def imports(self, modules: str) -> Ran:
        """Import `modules`, with commas between them, in a process of its own, and return how that ended."""
        return self.run([sys.executable, "-P", "-c", f"import {modules}"], _IMPORT_S)
