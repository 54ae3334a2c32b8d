"""The buffers behind a DeepEP buffer: DeepEP's constructor names no sizes, so they are made at the first call that shows some."""

import contextlib
from collections.abc import Iterable
from operator import methodcaller
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from deepep_moe.device import is_gpu
from deepep_moe.errors import BufferDestroyedError, EPError
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.growing import GrowingBuffer
from deepep_moe.exchange.handle import DispatchOutput
from deepep_moe.group.rendezvous import agree, host_id, join
from deepep_moe.group.suspension import Suspending

_Error = TypeVar("_Error", bound=Exception)
_Handle = TypeVar("_Handle")
_OPTION = "num_max_tokens_per_rank of the DeepEP buffer"
MAX_SIZES = 8
"""The buffers that are kept for calls of different sizes; the oldest one goes where there are more, once no handle needs it."""


class Buffers(Suspending):
    """The buffers of a group, by the sizes of calls."""

    def __init__(self, group: dist.ProcessGroup, ranks_per_node: int | None) -> None:
        self.group, self.num_ranks = group, dist.get_world_size(group)
        self._ranks_per_node, self._num_hosts = ranks_per_node, 1  # until the first call
        self._buffers: dict[Any, Any] = {}
        self._latest: Any = None
        """The buffer of the latest dispatch."""
        self._is_destroyed = False

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes of the group, as far as that is known: hosts from the first call on, or those that the caller made of
        ranks."""
        return self.num_ranks // self._ranks_per_node if self._ranks_per_node else self._num_hosts

    @property
    def _gpu_backend(self) -> str:
        return "nvlink" if self.num_nodes == 1 else "nvshmem"

    def check_alive(self) -> None:
        """Raise BufferDestroyedError after `destroy`."""
        if self._is_destroyed:
            raise BufferDestroyedError("this buffer of deep_ep was destroyed; construct another")

    @property
    def _parts(self) -> Iterable[Any]:  # type: ignore[override]
        self.check_alive()
        return self._buffers.values()

    def _keep(self, key: object, buffer: object) -> None:
        """Keep a new buffer for calls with `key`. Drop the oldest one where there are too many: it ends with the last handle that needs
        it."""
        self._buffers[key] = buffer
        if len(self._buffers) > MAX_SIZES:
            del self._buffers[next(iter(self._buffers))]

    def _greet(self, error: Exception | None = None) -> None:
        """Look for the hosts of all ranks, before they make a buffer together. Collective.

        error: why this rank does not make the call that needs the buffer. It is raised, and the peers raise EPPeerError with the reason.
        """
        self._num_hosts = len(set(agree("first call of a DeepEP buffer", error, self.group, self.num_ranks, host_id())))

    def refuse(self, error: _Error) -> _Error:
        """Tell the peers that this rank does not make its next call; they raise EPPeerError with the reason. Return `error`, for the
        caller to raise.

        Without valid sizes this rank cannot tell in which buffer its peers are. It refuses in the buffer of the latest dispatch. If there
        is none, it meets the peers in their first call. After `destroy` the peers know that this rank is gone.
        """
        return self._refuse(error, self._latest)

    def _refuse(self, error: _Error, buffer: Any) -> _Error:
        """Tell the peers that this rank does not make its call in `buffer`, or with None their first call. Return `error`."""
        if self._is_destroyed:
            return error
        with contextlib.suppress(EPError, type(error)):  # peers do not come: `error` says more
            if buffer is not None:
                buffer.refuse(error)
            else:
                self._greet(error)
        return error

    def checked(self, handle: Any, kind: type[_Handle]) -> _Handle:
        """Return `handle`. If it is none that a dispatch has returned, tell the peers and raise TypeError."""
        if isinstance(handle, kind):
            return handle
        wrong = f"handle is a {type(handle).__name__}; it must be the {kind.__name__} that dispatch returned"
        raise self.refuse(TypeError(f"{wrong}: its items alone do not say which buffer made them"))

    def destroy(self) -> None:
        """Destroy all buffers, for good. Not collective."""
        self._is_destroyed, self._latest = True, None
        while self._buffers:
            self._buffers.popitem()[1].destroy()


class GrowingBuffers(Buffers):
    """One growing `Buffer` for each (hidden, num_experts, num_topk, device) that calls have had, over one group.

    The first call for new sizes makes a buffer, so all ranks make it together. The ranks agree there on the tokens of a rank, and again
    where a rank has more. Other calls do not talk over the process group. The backend is `nvlink` for tensors on GPUs and `shm` for those
    on the CPU, also where the group is gloo; `nvshmem` and `collective` where there are several nodes. All ranks make the same buffers in
    the same order, so they also drop the same one.
    """

    def __init__(
        self, group: dist.ProcessGroup, num_max_tokens_per_rank: int | None = None, ranks_per_node: int | None = None, sums: str = "ranks"
    ) -> None:
        super().__init__(group, ranks_per_node)
        self.sums, self._num_max_tokens = sums, num_max_tokens_per_rank
        """`sums` of the buffers. By lanes they serve the expert layout."""

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, num_experts: int, num_least_tokens: int, **how: Any
    ) -> tuple[Buffer, DispatchOutput]:
        """Return the buffer for `x` [num_tokens, hidden] and what its dispatch returns, of which `how` has the other arguments. Collective.

        `num_least_tokens`: the same on every rank; a buffer with less room is replaced first. Raises what the construction of a Buffer and
        its dispatch raise.
        """
        num_tokens, hidden = x.shape
        key = (hidden, num_experts, topk_idx.shape[1], x.device)
        growing = self._buffers.get(key)
        if growing is None:
            growing = self._make(key, max(num_tokens, num_least_tokens))
            self._keep(key, growing)
        elif growing.num_max_tokens < num_least_tokens and self._num_max_tokens is None:
            self.meet()  # a rank refuses the call in the previous buffer
            growing.grow(num_least_tokens)
        self._latest = growing
        return growing.dispatch(num_tokens, methodcaller("dispatch", x, topk_idx, topk_weights, **how))

    def meet(self) -> None:
        """Wait until all ranks are in a call that makes a buffer or agrees on something. Collective. Raises EPPeerError if a peer has
        refused the call by `refuse`."""
        self.check_alive()
        if self._latest is None:
            self._greet()
        else:
            self._latest.meet()

    def check_layout(self, layout: str, instead: str) -> None:
        """Raise ValueError for compact rows where sums go by lanes. `instead`: what the caller should do."""
        if self.sums != "ranks" and layout == "rank":
            raise ValueError(
                f"DEEPEP_MOE_SUMS is {self.sums!r}, but of compact rows the caller adds up those of a token on one rank; {instead}"
            )

    def _make(self, key: tuple[int, int, int, torch.device], num_tokens: int) -> GrowingBuffer:
        hidden, num_experts, num_topk, device = key
        self.meet()
        backend = self._gpu_backend if is_gpu(device) else "shm" if self._num_hosts == 1 else "collective"
        group, ranks_per_node, sums = self.group, self._ranks_per_node, self.sums

        def construct(bound: int) -> Buffer:
            return Buffer(group, bound, hidden, num_experts, num_topk, backend=backend, ranks_per_node=ranks_per_node, sums=sums)

        return GrowingBuffer(self.group, num_tokens, device, construct, self._num_max_tokens, _OPTION, is_bounded=is_gpu(device))


def check_knows_tokens(buffer: Buffer, name: str) -> None:
    """Raise NotImplementedError for the field `name` of a handle where sums go by lanes: a rank then knows rows, and not which are of one
    token."""
    if buffer.sums != "ranks":
        raise NotImplementedError(
            f"{name} is not known with DEEPEP_MOE_SUMS={buffer.sums}; leave the variable out for callers that read it"
        )


def members_of(group: Any, what: str) -> tuple[dist.ProcessGroup, int, int]:
    """Return the group, this process's rank in it and its size. Raises TypeError for what is no group, ValueError without a group and
    for a process that is not a member; `what`: the class to be made."""
    if group is None:
        raise ValueError("group is None; pass a torch.distributed process group, such as torch.distributed.group.WORLD")
    _, num_ranks, rank = join(group, what)
    return group, rank, num_ranks
