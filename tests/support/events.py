"""Events between the ranks of a test, so that nobody sleeps and hopes. They are files: no process group, which may be what is tested."""

import time
from pathlib import Path

import torch.distributed as dist


def event(name: str) -> Path:
    """The file of an event, in the folder of the ranks that `run_ranks` has started."""
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return Path(f"{store.path}.{name}".replace(" ", "_"))


def tell(name: str) -> None:
    event(name).touch()


def wait_for(*names: str) -> None:
    for path in map(event, names):
        while not path.exists():
            time.sleep(0.01)
