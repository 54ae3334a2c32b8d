"""What a backend of a `LowLatencyBuffer` does."""

import os
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepep_moe.errors import BufferDestroyedError
from deepep_moe.event import Event
from deepep_moe.group.settings import Settings

DESTROYED = "this LowLatencyBuffer was destroyed; create another"
FORKED = "this LowLatencyBuffer belongs to the process that created it, not to one forked from it; create another"
NOT_RECEIVED = (
    "the call before last was not received yet; call its hook(), or wait for its event, or where that is lost call finish_calls(), "
    "then make this call again"
)


class Call(NamedTuple):
    """A checked call of the native exchange: its arguments before `sends` and `receives`."""

    operation: str
    arguments: tuple[Any, ...]


class LowLatencyBackend:
    """One way to move the rows. A call has two halves, sending and receiving."""

    name: str
    device: torch.device

    def __init__(self, settings: Settings, native: Any):
        self.settings = settings
        self.process_id = os.getpid()
        self._native = native
        self.workspace_bytes: int = native.workspace_bytes
        self.handle_bytes: int = native.handle_bytes

    # ---- calls ----

    def run(self, call: Call) -> None:
        """Both halves."""
        self._move(call, True, True)

    def start(self, call: Call) -> Event:
        """Send; waiting for the event receives."""
        self._move(call, True, False)
        return Event(second_half=partial(self._move, call, False, True))

    def start_async(self, call: Call) -> Event:
        """Both halves, beside the caller's stream or thread."""
        raise NotImplementedError

    def _move(self, call: Call, sends: bool, receives: bool) -> None:
        raise NotImplementedError

    def plain_calls(self, statistics: Tensor) -> Any:
        """`_torch.LowLatencyCalls` for the plain calls of a buffer with these statistics, or None."""
        return None

    def stream(self) -> int:
        """The address of the current stream; 0 where there are none."""
        return 0

    def keep_for_current(self, tensor: Tensor) -> None:
        """The memory of the tensor is not used again before the current stream is through with it."""

    # ---- the rest ----

    def num_calls(self) -> int:
        """Return the number of calls that this rank has sent or refused. Calls that C++ has made need not be counted: none is made while
        another is in flight."""
        raise NotImplementedError

    def mask(self, rank: int, masked: bool) -> None:
        raise NotImplementedError

    def rejoin(self) -> None:
        raise NotImplementedError

    def refuse(self, reason: str) -> None:
        """Tell the peers, who are or will be in the same call, why this rank refuses its arguments."""
        raise NotImplementedError

    def is_untold(self, error: BaseException, num_calls: int) -> bool:
        """Return whether the peers are still to learn, by `refuse`, of an error that a call has raised, or its half that sends. `num_calls`
        is the number of calls before this one."""
        return False

    def masks(self) -> int:
        """Bit r: rank r is masked."""
        masks: int = self._native.masks
        return masks

    def check(self) -> None:
        self._native.check()

    def has_failed(self, state: Tensor) -> bool:
        """Has the dispatch of a handle, of which this is the memory, failed, as far as it has come?"""
        raise NotImplementedError

    def destroy(self) -> None:
        self._native = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def zeros(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # it outlives the mode that it is made in
            return torch.zeros(shape, dtype=dtype, device=self.device)

    def _call(self, call: Call, *mode: Any) -> None:
        if self._native is None:
            raise BufferDestroyedError(DESTROYED)
        getattr(self._native, call.operation)(*call.arguments, *mode)


def native_settings(s: Settings, mask_stalled: bool) -> dict[str, Any]:
    return {
        "num_ranks": s.num_ranks, "rank": s.rank, "num_experts": s.num_experts, "num_topk": s.num_topk, "hidden": s.hidden,
        "num_max_tokens": s.num_max_tokens_per_rank, "timeout_s": s.timeout_s, "mask_stalled": mask_stalled,
    }  # fmt: skip
