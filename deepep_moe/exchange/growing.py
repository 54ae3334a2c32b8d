"""A buffer for callers that do not know beforehand how many tokens a rank has."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from deepep_moe import config
from deepep_moe.errors import Cause, EPPeerError, OutgrownError
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.checks import MAX_ALIGNMENT
from deepep_moe.exchange.handle import DispatchOutput
from deepep_moe.group.rendezvous import gather_objects
from deepep_moe.group.suspension import Suspending

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Error = TypeVar("_Error", bound=Exception)
_HEADROOM = 128  # bounds agreed at run time are rounded up to a multiple of it, so that slightly longer batches still fit
_GROWTH = 1.5  # least factor between two bounds, so that all buffers take no more than three times the memory of the largest
_MANY = 2**20  # the bound in tokens where memory does not depend on it


class GrowingBuffer(Suspending):
    """A `Buffer` of a group that is replaced by a larger one when a rank has more tokens than it has room for."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_tokens: int,
        device: torch.device,
        construct: Callable[[int], Buffer],
        chosen: int | None,
        option: str,
        *,
        is_bounded: bool = False,
    ):
        """Construct the first buffer. Collective over `group`.

        Args:
            num_tokens: the tokens of this rank in the first dispatch.
            device: the device of the tokens. CPU tensors need no bound, and keep a chosen one.
            construct: returns a buffer with room for that many tokens of a rank.
            chosen: the bound that the user chose, which stays. None: the most tokens of any rank so far.
            option: the name of the user's option for the bound, for messages.
            is_bounded: agree on a bound for CPU tensors too.
        """
        self.group, self._device, self._construct, self._chosen, self._option = group, device, construct, chosen, option
        self.is_destroyed = False
        bound = chosen or (self._agree_on_bound(num_tokens) if is_bounded or _is_bounded(device) else _MANY)
        self.buffer, self.num_max_tokens = construct(bound), bound
        self._outgrown: list[Buffer] = []  # a backward may still need them

    def dispatch(self, num_tokens: int, send: Callable[[Buffer], _Result]) -> tuple[Buffer, _Result]:
        """Return the buffer and `send(buffer)`, a dispatch of this rank's `num_tokens` tokens. Collective over the group.

        A rank may have more tokens than there is room for. If no bound was chosen, that rank refuses its dispatch, which tells the others.
        All ranks then meet in the old buffer, construct a larger one and dispatch again. If a bound was chosen, that rank raises
        OutgrownError and its peers raise EPPeerError. Raises what `send` and the construction raise.
        """
        try:
            if num_tokens > self.num_max_tokens:
                raise self.refuse(self._too_many(num_tokens))
            return self.buffer, send(self.buffer)
        except (OutgrownError, EPPeerError) as error:
            if self._chosen is not None or (isinstance(error, EPPeerError) and error.code != Cause.OUTGROWN):
                raise
        self.meet()
        self.grow(num_tokens)
        return self.buffer, send(self.buffer)

    def settle(
        self, num_tokens: int, send: Callable[[Buffer], DispatchOutput], buffer: Buffer, output: DispatchOutput
    ) -> tuple[Buffer, DispatchOutput]:
        """Return the buffer and `Buffer.settle(output)`, for what `dispatch(num_tokens, send)` has returned. If a peer has had no room for
        its tokens, all ranks dispatch again into a larger buffer here."""
        return self.dispatch(num_tokens, lambda now: now.settle(output) if now is buffer else send(now))

    def refuse(self, error: _Error) -> _Error:
        """Do not make the next call, as `Buffer.refuse`."""
        return self.buffer.refuse(error)

    def destroy(self) -> None:
        """Destroy the buffer and those that it replaced."""
        self.is_destroyed = True
        self.buffer.destroy()
        while self._outgrown:
            self._outgrown.pop().destroy()

    @property
    def _parts(self) -> tuple[Buffer, ...]:  # type: ignore[override]
        return *self._outgrown, self.buffer

    def meet(self) -> None:
        """Dispatch nothing, in a way that no layer uses: with the largest alignment, in the layout that pads no rows where there is one.

        A peer that refused the dispatch for a reason of its own does not come. Then this raises EPTimeoutError or EPMismatchError, which
        name its rank and the call that it is in. The agreement that follows does not know the call.
        """
        x = torch.empty(0, self.buffer.hidden, dtype=torch.float32, device=self._device)
        topk_idx = torch.empty(0, self.buffer.num_topk, dtype=torch.int64, device=self._device)
        layout = "rank" if self.buffer.sums == "ranks" else "expert"
        self.buffer.dispatch(x, topk_idx, layout=layout, expert_alignment=MAX_ALIGNMENT)

    def grow(self, num_tokens: int) -> None:
        """Replace the buffer by one with room for `num_tokens` tokens of a rank, or more. Collective over the group."""
        self._outgrown.append(self.buffer)
        bound = self._agree_on_bound(max(num_tokens, int(_GROWTH * self.num_max_tokens)))
        if dist.get_rank(self.group) == 0:
            _log.warning(
                f"a buffer makes room for {bound} tokens of a rank, as a rank has more than before. To make room only once, set "
                f"{self._option} to the most tokens that a rank ever has"
            )
        self.buffer, self.num_max_tokens = self._construct(bound), bound

    def _agree_on_bound(self, num_tokens: int) -> int:
        """Return the largest `num_tokens` of the group, rounded up. Collective; works over groups that move tensors of one device only."""
        num_ranks = dist.get_world_size(self.group)
        bounds = gather_objects(max(num_tokens, 1), self.group, num_ranks, "agreement on the tokens of a rank", config.timeout_s(), int)
        return -(-max(bounds) // _HEADROOM) * _HEADROOM

    def _too_many(self, num_tokens: int) -> OutgrownError:
        return OutgrownError(
            f"a rank dispatches {num_tokens} tokens, but its buffer has room for {self.num_max_tokens}; set {self._option} to the most "
            "tokens that a rank ever has, or leave it out"
        )


def _is_bounded(device: torch.device) -> bool:
    """Return whether buffers need a bound. The memory of buffers that move CPU tensors does not depend on the number of tokens."""
    return device.type != "cpu"
