"""The buffers, and the copies of experts, that the layers of one process share."""

import atexit
import gc
import itertools
import weakref
from collections.abc import Callable, Hashable, ValuesView

import torch.distributed as dist

from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.growing import GrowingBuffer
from deepep_moe.group.suspension import Suspending
from deepep_moe.library import untraced
from deepep_moe.nn.balance import Balance, Copies, Parts, sizes_of


def is_destroyed(group: "dist.ProcessGroup | None") -> bool:
    """Return whether `group` was made by torch.distributed and then destroyed. None stands for the default group."""
    if not dist.is_initialized():
        return True
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return True
    return False


class BufferRegistry(Suspending):
    """Keeps growing buffers by key, such as a group and sizes, and copies of experts. Layers that share one run one after another.

    A buffer whose group was destroyed goes when somebody asks for a new buffer, or for all of them. Copies go with their group, and end
    where buffers are suspended or recover: the next forward makes new ones.
    """

    def __init__(self) -> None:
        self._buffers: dict[Hashable, GrowingBuffer] = {}
        self._copies: dict[tuple[object, ...], tuple[dist.ProcessGroup | None, Copies]] = {}  # by `sizes_of` experts
        _registries[next(_numbers)] = self

    def get(self, key: Hashable, construct: Callable[[], GrowingBuffer]) -> GrowingBuffer:
        """Return the buffer of `key`. The first call for a key constructs it, so all ranks of its group must make that call together."""
        growing = self._buffers.get(key)
        return self._construct(key, construct) if growing is None else growing

    @untraced  # constructions cannot be traced
    def _construct(self, key: Hashable, construct: Callable[[], GrowingBuffer]) -> GrowingBuffer:
        self.release(is_destroyed)
        growing = self._buffers[key] = construct()
        return growing

    def copies_of(self, balance: Balance, weights: Parts, buffer: Buffer, meet: Callable[[], None] | None = None) -> Copies:
        """Return the copies of experts with these weights. Collective over the buffer's group where they are made. `meet` makes a call of
        the buffer before, which a rank refuses whose weights cannot have copies."""
        key = sizes_of(weights, buffer)
        if key not in self._copies:
            if meet is not None:
                meet()
            self._copies[key] = buffer._group, Copies(balance, weights, buffer)
        return self._copies[key][1]

    def end_copies(self, is_dead: Callable[["dist.ProcessGroup | None"], bool] = lambda group: True) -> None:
        """End the copies of groups that are dead, or all."""
        for key in [key for key, (group, _) in self._copies.items() if is_dead(group)]:
            self._copies.pop(key)[1].destroy()

    def buffers(self) -> list[Buffer]:
        """Return the buffers in use."""
        self.release(is_destroyed)
        return [growing.buffer for growing in self._buffers.values()]

    def recover(self) -> None:
        """Bring all buffers back into step, as `Buffer.recover`. Collective over their groups."""
        self.end_copies()
        for buffer in self.buffers():
            buffer.recover()

    def suspend(self) -> None:
        """Suspend all buffers, as `Buffer.suspend`. Collective over their groups."""
        self.release(is_destroyed)
        self.end_copies()
        super().suspend()

    @property
    def _parts(self) -> ValuesView[GrowingBuffer]:  # type: ignore[override]
        return self._buffers.values()

    def release(self, is_dead: Callable[["dist.ProcessGroup | None"], bool]) -> None:
        """Destroy the buffers and copies of groups that are dead. Makes no call of a group."""
        self.end_copies(is_dead)
        for key in [key for key, growing in self._buffers.items() if is_dead(growing.group)]:
            self._buffers.pop(key).destroy()

    def destroy(self) -> None:
        """Destroy all buffers and copies. May be called any number of times; the next `get` constructs a new one."""
        self.release(lambda group: True)


_numbers = itertools.count()
_registries: "weakref.WeakValueDictionary[int, BufferRegistry]" = weakref.WeakValueDictionary()
"""Those of this process, in the order in which all ranks make them."""


def all_buffers() -> list[Buffer]:
    """Return the buffers in use of all registries of this process."""
    return [buffer for registry in _registries.values() for buffer in registry.buffers()]


def _in_use() -> list[BufferRegistry]:
    gc.collect()  # a registry that nobody refers to goes on all ranks alike
    return list(_registries.values())


def recover() -> None:
    """Bring the buffers of all layers back into step after an error, as `Buffer.recover` does. Collective over their groups; does nothing
    where no layer has run."""
    for registry in _in_use():
        registry.recover()


def suspend() -> None:
    """Give the exchange memory of all layers back until `resume`, as `Buffer.suspend` does, such as while a rollout runs in the same
    process. Collective over the groups of all buffers, between steps; does nothing where no layer has run.

    Forwards fail with BufferSuspendedError meanwhile. With copies of experts no backward of an earlier forward may follow. CUDA graphs
    stay valid.

    Raises: as `Buffer.suspend`.
    """
    for registry in _in_use():
        registry.suspend()


def resume() -> None:
    """Make the memory again that `suspend` has given back, as `Buffer.resume` does. Collective as `suspend`.

    Raises: as `Buffer.resume`.
    """
    for registry in _in_use():
        registry.resume()


def destroy_all() -> None:
    """Destroy the buffers of all registries of this process."""
    for registry in list(_registries.values()):
        registry.destroy()


atexit.register(destroy_all)
