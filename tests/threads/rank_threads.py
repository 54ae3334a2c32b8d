"""Ranks as threads: builds and runs the program of this folder. DEEPEP_MOE_SANITIZE is as in `emulated_gpu`.

It is the CPU library without the memory that processes share. The thread sanitizer follows its protocols between ranks.
"""

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from emulated_gpu import ROOT, SITE, alone, compile_objects, link_objects

FOLDERS = ("common", "cpu", "runtime", "runtime/shm")


@alone()
def build() -> Path:
    sources = [path for folder in FOLDERS for path in (ROOT / "csrc" / folder).glob("*.cpp") if path.name != "segment.cpp"]
    return link_objects(SITE.parent / "threads", compile_objects([*sources, *Path(__file__).parent.glob("*.cpp")]))


def run() -> subprocess.CompletedProcess[str]:
    """The program, which ends at the first race: it goes wrong from there."""
    environment = {"TSAN_OPTIONS": "halt_on_error=1"} | os.environ
    return subprocess.run([build()], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)


if __name__ == "__main__":
    result = run()
    print(result.stdout)
    sys.exit(result.returncode)
