"""The message that a rank sends to all others when it enters a call of the backend `collective`."""

from dataclasses import dataclass

from deepep_moe.device import DTYPE_NAMES
from deepep_moe.exchange.backends.base import LAYOUTS

_OPERATIONS = ("dispatch", "cached dispatch", "combine", "fetch of experts", "return of gradients")

FETCH = 3


@dataclass
class Entry:
    """A rank's arrival in a call."""

    buffer: int  # by its number on rank 0: several buffers of one group may be alive
    call: int
    failed: int  # not 0: the rank refuses the call, 1 + Cause
    operation: int
    dtype: int
    layout: int
    expert_alignment: int
    flags: int  # 1: topk_weights, 2: x_scales, 4: gradients of topk_weights
    num_recv_rows: int
    handle_call: int  # the dispatch whose handle is used, 0 without one; for copies of experts a digest of what moves

    def signature(self) -> tuple[int, ...]:
        return (self.call, self.operation, self.dtype, self.layout, self.expert_alignment, self.flags, self.handle_call)

    def describe(self, with_number: bool = False) -> str:
        extras = [", with topk_weights", ", with x_scales", ", with gradients of topk_weights"]
        extras = [text for bit, text in enumerate(extras) if self.flags >> bit & 1]
        if self.handle_call:
            extras.insert(0, f", with the handle of call {self.handle_call}")
        name = sorted(set(DTYPE_NAMES.values()))[self.dtype]
        what = f"{f'call {self.call}: ' if with_number else ''}{_OPERATIONS[self.operation]}"
        if self.operation >= FETCH:
            return f"{what} with copies and tensors #{self.handle_call}"
        return f"{what} of {name} rows, layout {LAYOUTS[self.layout]}, expert_alignment {self.expert_alignment}" + "".join(extras)


NUM_FIELDS = len(Entry.__dataclass_fields__)


def find_difference(entries: list[Entry], rank: int) -> str:
    """Return how the calls of all ranks differ, in the view of `rank`; an empty string if they fit."""
    own_entry = entries[rank]
    others = [peer for peer, entry in enumerate(entries) if entry.buffer != own_entry.buffer]
    if others:
        buffers = "; ".join(f"rank {peer}: buffer {entries[peer].buffer}" for peer in [rank, *others])
        return f"ranks are in calls of different buffers of one group: {buffers} (as rank 0 counts them); call them in the same order"
    others = [peer for peer, entry in enumerate(entries) if entry.signature() != own_entry.signature()]
    numbers = {entry.call for entry in entries}
    calls = "; ".join(f"rank {peer}: {entries[peer].describe(with_number=len(numbers) > 1)}" for peer in [rank, *others])
    return f"ranks make different calls: {calls}" if others else ""
