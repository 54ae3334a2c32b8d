"""Waits ask whether a process still runs."""

import os
import resource
import subprocess
import sys

from deepep_moe import _C


def start():
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_own_process():
    assert not _C.running(os.getpid()).is_gone()


def test_process_that_ends():
    child = start()
    process = _C.running(child.pid)
    assert not process.is_gone()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.is_gone(), "it only waits to be reaped"
    child.wait()
    assert process.is_gone()


def test_process_that_nobody_can_see():
    child = start()
    child.kill()
    child.wait()
    assert not _C.running(child.pid).is_gone(), "as it was not known when it began"


def test_no_file_can_be_opened():
    """A process that has all the files it may have does not take its peers for dead."""
    child = start()
    process = _C.running(child.pid)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = os.open(os.devnull, os.O_RDONLY)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, limits[1]))
        assert not process.is_gone()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(used)
        child.kill()
        child.wait()
    assert process.is_gone()
