"""Scripts that tests start as users do."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_python(*words: object, code: int = 0, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these words, and this repository on its path. It must end with `code`."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}  # scripts find the files beside them
    environment |= {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-W", "ignore", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=800)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def modules_of(folder: Path, *names: str) -> list[Any]:
    """Import scripts of a folder."""
    sys.path.insert(0, str(folder))
    try:
        return [__import__(name) for name in names]
    finally:
        sys.path.remove(str(folder))
