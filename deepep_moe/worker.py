"""The thread that makes a buffer's asynchronous calls on CPU tensors, one after the other."""

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any

from deepep_moe import _C

_alive: "weakref.WeakSet[Worker]" = weakref.WeakSet()
_registered: set[tuple[int, Callable[[], None]]] = set()
"""The processes whose end will call a function."""


class Worker:
    """A thread that ends with the last reference to this, once it has made the calls that it was given."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[None], Callable[..., None], tuple[object, ...]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._jobs,), name="deepep_moe", daemon=True)
        self._thread.start()
        at_end_of_process(_end_of_process)
        _alive.add(self)

    def submit(self, function: Callable[..., None], *args: object) -> "Future[None]":
        future: Future[None] = Future()
        self._jobs.put((future, function, args))
        return future

    def finish(self) -> None:
        """Make the calls that were given, then end."""
        self._jobs.put(None)
        self._thread.join()

    def __del__(self) -> None:
        self._jobs.put(None)


def _run(jobs: "SimpleQueue[Any]") -> None:
    while (job := jobs.get()) is not None:
        future, function, args = job
        try:
            function(*args)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del job, future, function, args  # they hold tensors


def _end_of_process() -> None:
    """Finish calls in flight, as peers may need their rows and no thread may be in a call when the interpreter ends. Do not wait long for
    a peer: an error of this process is visible only after its end."""
    _C.hurry_waits(True)
    try:
        for worker in list(_alive):
            worker.finish()
    finally:
        _C.hurry_waits(False)


def at_end_of_process(function: Callable[[], None]) -> None:
    """Let this process call `function` when it ends. Processes of multiprocessing do not run `atexit`, and forked ones lose what their
    parent has registered."""
    if (os.getpid(), function) not in _registered:
        _registered.add((os.getpid(), function))
        Finalize(None, function, exitpriority=0)
