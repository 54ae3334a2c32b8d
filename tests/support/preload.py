"""Imports of the server that forks the ranks: the test modules of a run, so that not every rank imports them."""

import gc
import importlib
import os

PATH, MODULES = "DEEPEP_MOE_TESTS_PATH", "DEEPEP_MOE_TESTS_MODULES"


def start_server(modules: set[str]) -> None:
    """Start the server, which imports `modules` while the tests begin. It looks for them where this process does."""
    import sys
    from multiprocessing import forkserver

    before = os.environ.get("PYTHONPATH")
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), PATH: before or "", MODULES: ",".join(sorted(modules))}
    try:
        forkserver.set_forkserver_preload(["preload"])
        forkserver.ensure_running()
    finally:
        del os.environ[PATH], os.environ[MODULES], os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


if MODULES in os.environ:
    os.environ["PYTHONPATH"] = os.environ.pop(PATH)
    for name in os.environ.pop(MODULES).split(","):
        importlib.import_module(name)
    gc.freeze()  # a rank does not look through what it shares with the server
