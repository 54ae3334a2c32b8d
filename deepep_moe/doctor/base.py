"""The inputs of the checks, and how a function becomes a check. Tests replace `root`, `variables` and `run`."""

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepep_moe import config, topology
from deepep_moe.topology.reader import Tree

OK, WARNING, FAULT, ABSENT = "ok", "warning", "fault", "not here"


@dataclass(frozen=True)
class Ran:
    """The end of a program. `code` is None if it could not be started or was stopped at its deadline; `errors` then says which."""

    code: int | None
    output: str = ""
    errors: str = ""

    def why(self) -> str:
        """Return what it said last, in one line."""
        lines = [line.strip() for line in (self.errors.strip() or self.output).splitlines()]
        lines = [line for line in lines if line and not line.startswith("{")]  # lines in braces are facts
        return lines[-1] if lines else f"it ended with code {self.code} and said nothing"


def run(command: list[str], timeout_s: float) -> Ran:
    """Run `command` for at most `timeout_s` seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except OSError as error:
        return Ran(None, errors=f"{command[0]} does not start: {error.strerror}")
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""  # bytes, whatever `text` says
        said = output if isinstance(output, str) else output.decode(errors="replace")
        return Ran(None, said, f"no end within {timeout_s:g} s: the machine is busy, or it hangs")
    return Ran(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Environment:
    """The machine. `root`: the folder that has /proc, /sys and /dev; `variables`: those of the environment; `run`: runs a command."""

    root: Path = Path("/")
    variables: Mapping[str, str] = field(default_factory=lambda: config.variables(("CUDA_VISIBLE_DEVICES",)))
    run: Callable[[list[str], float], Ran] = run
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, path: str) -> str:
        """Return the text of a file under the root, "" where it cannot be read."""
        return Tree(self.root).text(path)

    def python(self, *arguments: str, timeout_s: float = 120) -> Ran:
        """Run Python with `arguments` in a process of its own, which may break without harm to this one."""
        return self.run([sys.executable, "-P", *arguments], timeout_s)

    @property
    def facts(self) -> dict[str, Any]:
        """Return what PyTorch and this library report (facts.py): `torch`, `cuda`, `features`, `nvshmem`. If one is missing, `error` says
        why."""
        with self._lock:  # checks run in parallel, and the first one asks
            return self._facts

    @functools.cached_property
    def _facts(self) -> dict[str, Any]:
        folder = Path(__file__).parent
        ran = self.python(str(folder / "facts.py"), str(folder.parents[1]))  # the facts of the package that has this module
        lines = [json.loads(line) for line in ran.output.splitlines() if line.startswith("{")]
        facts = {name: value for line in lines for name, value in line.items()}
        return facts if ran.code == 0 else facts | {"error": ran.why()}

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """Return the GPUs that CUDA lets this process use: `name` and `capability`."""
        gpus: list[dict[str, Any]] = self.facts.get("cuda", {}).get("gpus", [])
        return gpus

    @functools.cached_property
    def machine(self) -> topology.Topology:
        """Return the cards and NICs of the machine, whether CUDA and NVSHMEM can use them or not."""
        return topology.read(self.root)

    def lacks(self, need: str) -> str:
        """Return why there is no `need` ("torch", "cuda" or "features" of the facts, "GPUs", "NICs") to look at, "" where there is."""
        if need == "GPUs":
            return "" if self.gpus else "CUDA sees no GPU"
        if need == "NICs":
            return "" if self.machine.nics else "no RDMA device in /sys/class/infiniband; only GPUs of several hosts need one"
        return "" if need in self.facts else "not looked at, because a check above found a fault"


@dataclass(frozen=True)
class Finding:
    """One line of the page: what was looked at, its state (`OK`, ...), what is there, and what to do about it."""

    check: str
    state: str
    text: str
    advice: str = ""


Check = Callable[[Environment], Finding]


def check(name: str, *needs: str) -> Callable[[Callable[[Environment], tuple[str, ...]]], Check]:
    """Make a check of a function that returns state, text and, for `WARNING` and `FAULT`, advice.

    Where one of `needs` (see `Environment.lacks`) is not there, the finding is `ABSENT`. A function that raises is a fault of its own.
    """

    def decorate(function: Callable[[Environment], tuple[str, ...]]) -> Check:
        def look(env: Environment) -> Finding:
            try:
                missing = next(filter(None, map(env.lacks, needs)), "")
                return Finding(name, ABSENT, missing) if missing else Finding(name, *function(env))
            except Exception as error:
                return Finding(name, FAULT, f"the check itself failed: {type(error).__name__}: {error}", "file an issue with this page")

        return look

    return decorate
