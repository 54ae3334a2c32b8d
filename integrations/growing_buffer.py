"""A buffer for layers that learn from forward to forward how many tokens a rank has."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from deepep_moe.errors import EPPeerError
from deepep_moe.exchange.buffer import Buffer

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_HEADROOM = 128  # bounds agreed at run time are rounded up to a multiple of it, so that slightly longer batches still fit
_GROWTH = 1.5  # at least, so that all buffers take no more than three times the memory of the largest
_MANY = 2**20  # tokens, where memory does not depend on their number


class OutgrownError(ValueError):
    """More tokens than the buffer has room for."""


class GrowingBuffer:
    """A `Buffer` of a group, with a larger one in its place once a rank has more tokens than it has room for."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_tokens: int,
        device: torch.device,
        construct: Callable[[int], Buffer],
        chosen: int | None,
        option: str,
    ):
        """Collective over `group`; constructs the first buffer.

        Args:
            num_tokens: of this rank's first forward.
            device: of its tokens. Buffers that move CPU tensors need no bound; a chosen one holds there too.
            construct: a buffer with room for so many tokens of a rank.
            chosen: the user's bound in tokens, which is kept; None: the largest of the first forward over all ranks, and more later.
            option: how the user chooses it, for messages.
        """
        self._group, self._device, self._construct, self._chosen, self._option = group, device, construct, chosen, option
        bound = chosen or (self._agree_on_bound(num_tokens) if _is_bounded(device) else _MANY)
        self.buffer, self.num_max_tokens = construct(bound), bound
        self._outgrown: list[Buffer] = []  # a backward may still need them

    def dispatch(self, num_tokens: int, send: Callable[[Buffer], _Result]) -> tuple[Buffer, _Result]:
        """The buffer and `send(buffer)`, a dispatch of this rank's `num_tokens` tokens. Collective over the group.

        Where no bound was chosen, a call in which a rank has more tokens than there is room for makes a larger buffer: that rank refuses
        its dispatch, which tells the others, all meet in the old buffer, and dispatch once more. Raises what `send` and the construction
        raise, and OutgrownError for more tokens than the chosen bound; the peers raise EPPeerError then.
        """
        try:
            if num_tokens > self.num_max_tokens:
                raise self.buffer.refuse(self._too_many(num_tokens))
            return self.buffer, send(self.buffer)
        except (OutgrownError, EPPeerError) as error:
            if self._chosen is not None or OutgrownError.__name__ not in f"{type(error).__name__}: {error}":
                raise
        self._meet()
        self._grow(num_tokens)
        return self.buffer, send(self.buffer)

    def destroy(self) -> None:
        """All buffers there were."""
        self.buffer.destroy()
        while self._outgrown:
            self._outgrown.pop().destroy()

    def _meet(self) -> None:
        """A dispatch of nothing, in the layout that no layer uses. A peer that refused the forward for a reason of its own does not come:
        this raises EPTimeoutError or EPMismatchError with its rank, where the all-reduce to follow would wait as long as the process group
        does."""
        x = torch.empty(0, self.buffer.hidden, dtype=torch.float32, device=self._device)
        topk_idx = torch.empty(0, self.buffer.num_topk, dtype=torch.int64, device=self._device)
        self.buffer.dispatch(x, topk_idx, layout="rank")

    def _grow(self, num_tokens: int) -> None:
        self._outgrown.append(self.buffer)
        bound = self._agree_on_bound(max(num_tokens, int(_GROWTH * self.num_max_tokens)))
        if dist.get_rank(self._group) == 0:
            reason = f"some rank has more than before. {self._option} makes it at once and once"
            _log.warning(f"MoE layers make room for {bound} tokens of a rank: {reason}")
        self.buffer, self.num_max_tokens = self._construct(bound), bound

    def _agree_on_bound(self, num_tokens: int) -> int:
        """The largest `num_tokens` of the group, rounded up. Collective."""
        largest = torch.tensor([max(num_tokens, 1)], dtype=torch.int64, device=self._device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return -(-int(largest.item()) // _HEADROOM) * _HEADROOM

    def _too_many(self, num_tokens: int) -> OutgrownError:
        return OutgrownError(
            f"{num_tokens} tokens in a forward, and MoE layers have room for {self.num_max_tokens}; set {self._option} to the most tokens "
            "that a rank ever has, or leave it out"
        )


def _is_bounded(device: torch.device) -> bool:
    """Do buffers need to know the most tokens? The memory of those that move CPU tensors does not depend on it."""
    return device.type != "cpu"
