"""Builds the program of this folder, and runs it: `python tests/threads/build.py`. DEEPEP_MOE_SANITIZE is as in `emulated_gpu`."""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from emulated_gpu import ROOT, SANITIZE, SITE, compile_objects

FOLDERS = ("common", "cpu", "runtime", "runtime/shm")


def build() -> Path:
    sources = [path for folder in FOLDERS for path in (ROOT / "csrc" / folder).glob("*.cpp") if path.name != "segment.cpp"]
    objects = compile_objects([*sources, *Path(__file__).parent.glob("*.cpp")])
    program = SITE.parent / "threads"
    if not program.exists() or program.stat().st_mtime < max(path.stat().st_mtime for path in objects):
        subprocess.run(["g++", "-pthread", *SANITIZE, *map(str, objects), "-o", str(program)], check=True)
    return program


def run() -> subprocess.CompletedProcess[str]:
    return subprocess.run([build()], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)


if __name__ == "__main__":
    result = run()
    print(result.stdout)
    sys.exit(result.returncode)
