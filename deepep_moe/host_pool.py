"""Memory of results in CPU tensors, used again: fresh pages cost more than what is written to them."""

import math
import sys
import threading

import torch
from torch import Tensor, UntypedStorage


class HostPool:
    """Makes tensors in memory that serves again once nobody uses it, whichever thread drops it.

    The memory is PyTorch's own, so callers may free it early and resize it. The pool keeps as much unused memory as was in use at the same
    time, and no more.
    """

    def __init__(self) -> None:
        self._storages: list[UntypedStorage] = []  # those last handed out at the end
        self._most_in_use = 0
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor. Raises MemoryError where there is no memory for it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        with self._lock:
            storage = self._unused(num_bytes) or self._fresh(num_bytes, shape, dtype)
            # A tensor of its own, not a view: autograd forbids changing an operator's output in place if it is one.
            tensor = torch.empty(0, dtype=dtype, device="cpu")
            tensor.set_(storage, 0, shape)  # type: ignore[call-overload]
            return tensor

    def trim(self) -> None:
        """Forget all memory. Memory in use is freed with its last tensor."""
        with self._lock:
            self._storages.clear()

    def _unused(self, num_bytes: int) -> UntypedStorage | None:
        """Return memory that fits. Sizes vary a little from call to call with the routing: up to half as much again fits too."""
        storages = self._storages
        for i in range(len(storages)):
            if num_bytes <= storages[i].nbytes() <= num_bytes + num_bytes // 2 and _is_unused(storages, i):
                storages.append(storages.pop(i))
                return storages[-1]
        return None

    def _fresh(self, num_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> UntypedStorage:
        try:
            storage = torch.empty(num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
        except RuntimeError:
            raise MemoryError(f"no memory for {num_bytes} bytes of {list(shape)} {str(dtype).removeprefix('torch.')}") from None
        self._forget_excess(num_bytes)
        self._storages.append(storage)
        return storage

    def _forget_excess(self, num_new_bytes: int) -> None:
        """Forget memory that its users have freed or share with other processes, and the oldest beyond what was in use at a time."""
        self._storages = [storage for storage in self._storages if storage.nbytes() > 0 and not storage.is_shared()]
        sizes = [storage.nbytes() for storage in self._storages]
        unused = [i for i in range(len(sizes)) if _is_unused(self._storages, i)]
        num_unused_bytes = sum(sizes[i] for i in unused)
        self._most_in_use = max(self._most_in_use, sum(sizes) - num_unused_bytes + num_new_bytes)
        excess = set()
        for i in unused:
            if num_unused_bytes > self._most_in_use:
                excess.add(i)
                num_unused_bytes -= sizes[i]
        self._storages = [storage for i, storage in enumerate(self._storages) if i not in excess]


def _users(storages: list[UntypedStorage], i: int) -> tuple[int, int]:
    """Return how many tensors and objects of Python refer to a storage, the list among them."""
    return torch._C._storage_Use_Count(storages[i]._cdata), sys.getrefcount(storages[i])


_NOBODY = _users([torch.empty(1, device="cpu").untyped_storage()], 0)


def _is_unused(storages: list[UntypedStorage], i: int) -> bool:
    return _users(storages, i) == _NOBODY and not storages[i].is_shared()
