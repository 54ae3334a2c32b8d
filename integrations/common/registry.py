"""The buffers that the layers of one process share."""

import atexit
import weakref
from collections.abc import Callable, Hashable

from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.growing import GrowingBuffer


class BufferRegistry:
    """Growing buffers by key, such as a group and sizes. Layers that share one run one after another."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, GrowingBuffer] = {}
        _registries.add(self)

    def get(self, key: Hashable, construct: Callable[[], GrowingBuffer]) -> GrowingBuffer:
        """Return the buffer of `key`. The first call for a key constructs it, so all ranks of its group must make that call together."""
        found = self._buffers.get(key)
        if found is None:
            found = self._buffers[key] = construct()
        return found

    def buffers(self) -> list[Buffer]:
        """Return the buffers in use."""
        return [growing.buffer for growing in self._buffers.values()]

    def destroy(self) -> None:
        """Destroy all buffers. May be called any number of times; the next `get` constructs a new one."""
        while self._buffers:
            self._buffers.popitem()[1].destroy()


_registries: "weakref.WeakSet[BufferRegistry]" = weakref.WeakSet()


def all_buffers() -> list[Buffer]:
    """Return the buffers in use of all registries of this process."""
    return [buffer for registry in _registries for buffer in registry.buffers()]


def destroy_all() -> None:
    """Destroy the buffers of all registries of this process."""
    for registry in list(_registries):
        registry.destroy()


atexit.register(destroy_all)
