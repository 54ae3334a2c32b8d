"""Describes the machine and this package for profiles and records."""

import functools
import platform
import subprocess
from pathlib import Path

import deepep_moe


def cpu_name() -> str:
    """Return the model of this machine's CPU and how many of its cores this process may use."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{name}, {platform.machine()}, {deepep_moe.config.available_cpus()} cores"


@functools.cache
def commit() -> str | None:
    """Return the commit of this package's checkout, with "+changes" if files differ from it. None outside of a checkout, or without git."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        git = subprocess.run(
            ["git", "-C", root, "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+changes"], capture_output=True, text=True
        )
    except OSError:
        return None
    return git.stdout.strip() or None
