"""One launcher for everything that needs several ranks on this host."""

import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import wait as wait_connections
from typing import Any

from deepep_moe.topology.binding import bind_this_rank

_PRELOAD = ["torch", "torch.distributed", "deepep_moe"]


class RankFailedError(RuntimeError):
    """A worker raised or died. The message holds its traceback or exit code; `rank` says which."""

    def __init__(self, rank: int, message: str):
        super().__init__(rank, message)  # pickle makes it again from these
        self.rank = rank

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.args[1]}"


def _worker(
    fn: Callable[..., Any], rank: int, num_ranks: int, store: str, timeout_s: float, bind: bool, args: tuple[object, ...], connection: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Torchrun sets the first two, DeepSpeed's launcher sets LOCAL_SIZE.
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(num_ranks), LOCAL_SIZE=str(num_ranks))
    try:
        if bind:
            bind_this_rank()
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timeout)
        dist.barrier()  # else a rank that ends at once closes connections that others still make
        result = fn(rank, num_ranks, *args)
        connection.send((True, result))
    except BaseException:  # the parent re-raises it, whatever it was
        connection.send((False, traceback.format_exc()))
    finally:
        connection.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _collect(processes: list[Any], connections: list[Any], deadline: float, expected_dead: Collection[int]) -> list[Any]:
    """Return results by rank. Raises RankFailedError for the first rank that failed, died or was late."""
    results: list[Any] = [None] * len(processes)
    pending = {connection: rank for rank, connection in enumerate(connections)}
    while pending:
        ready: list[Any] = wait_connections(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailedError(min(pending.values()), f"no result in time; still running: ranks {sorted(pending.values())}")
        for connection in ready:
            rank = pending.pop(connection)
            try:
                succeeded, value = connection.recv()
            except EOFError:
                processes[rank].join(timeout=10)
                if rank in expected_dead:
                    continue
                raise RankFailedError(rank, f"the process died with exit code {processes[rank].exitcode}") from None
            if not succeeded:
                raise RankFailedError(rank, value)
            results[rank] = value
    return results


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 600.0,
    start_method: str = "forkserver",
    expected_dead: Collection[int] = (),
    bind: bool = False,
) -> list[Any]:
    """Run `fn(rank, num_ranks, *args)` in `num_ranks` processes that share a gloo process group; return their results by rank.

    `fn` and `args` must be picklable. Workers run PyTorch with one thread each. `start_method` is one of `forkserver` (fast: PyTorch
    is imported once), `spawn`, `fork`. Ranks in `expected_dead` may die (a test kills them); their result is None. `bind` binds each rank
    to what is beside its GPU (`deepep_moe.topology.bind`) and prints a line for it.

    Raises:
        RankFailedError: a rank fails, with its traceback, dies, or is not done within `timeout_s` seconds.
    """
    context: Any = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="deepep_moe_") as folder:
        store = os.path.join(folder, "store")
        processes, connections = [], []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (fn, rank, num_ranks, store, timeout_s, bind, args, sender)
            process = context.Process(target=_worker, args=arguments, daemon=False)
            process.start()
            sender.close()
            processes.append(process)
            connections.append(receiver)
        try:
            return _collect(processes, connections, time.monotonic() + timeout_s, expected_dead)
        except RankFailedError:
            for process in processes:
                process.kill()
            raise
        finally:
            for process in processes:
                process.join()
            for connection in connections:
                connection.close()
