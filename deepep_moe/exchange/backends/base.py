"""What a backend does, and the arguments every backend gets, already checked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from deepep_moe.exchange.handle import DispatchHandle

LAYOUTS = ("expert", "rank")


@dataclass(frozen=True)
class Mode:
    """How a call runs; its results do not depend on it."""

    is_async: bool = False  # beside the caller's stream or thread
    is_split: bool = False  # in two halves: the second is for the caller to start
    num_sms: int | None = None  # multiprocessors that send, 0 = copy engines; backends without them do not look


@dataclass
class DispatchArgs:
    mode: Mode
    x: Tensor
    x_scales: Tensor | None
    topk_idx: Tensor  # of any strides, as topk_weights
    topk_weights: Tensor | None
    layout: str
    expert_alignment: int
    num_recv_rows: int  # the caller's bound, or -1
    buffer_id: int  # for the handle
    repeats: int = 1  # of all rows of x, one after another, where the backend fuses


@dataclass
class CachedDispatchArgs:
    mode: Mode
    x: Tensor
    x_scales: Tensor | None
    topk_weights: Tensor | None  # of any strides
    handle: DispatchHandle
    weighing: "Weighing | None" = None  # where the backend fuses
    repeats: int = 1  # of all rows of x, likewise


@dataclass
class Weighing:
    """Rows on their way are gradients of `x * weights[:, None]`, and become that of x, with that of weights beside them."""

    weights: Tensor  # [num_rows]
    x: Tensor  # [num_rows, hidden], dtype of the rows
    parts: Any  # as of `CombineArgs`


@dataclass
class CombineArgs:
    mode: Mode
    x: Tensor
    weights: Tensor | None  # [num_rows]
    bias: Tensor | None
    lane_values: Tensor | None  # as recv_topk_weights lies
    handle: DispatchHandle
    parts: Any = None  # `_C.ExpertRows`, where the backend fuses: rows lie in a tensor for each local expert, of which `x` is the first
    repeats: int = 1  # where it fuses, of one expert a token: tokens whose rows are summed, t and those len(combined_x) after it
    at_source: Tensor | None = None  # [repeats, num_tokens / repeats]: by which they are weighed before, and not by `weights`


@dataclass
class Rows:
    """Results of a dispatch; None: does not apply."""

    recv_x: Tensor
    recv_x_scales: Tensor | None
    recv_topk_weights: Tensor | None
    grad_weights: Tensor | None = None  # [num_rows] fp32, with `Weighing`

    def shrink(self, num_rows: int) -> None:
        """Keeps the first rows only, in place: views would be refused as operands of in-place operations where there are gradients."""
        for tensor in (self.recv_x, self.recv_x_scales, self.recv_topk_weights):
            if tensor is not None and tensor.shape[0] > num_rows:
                tensor.resize_(num_rows, *tensor.shape[1:])


Move = Callable[[], None]
"""The second half of an operation: moves the rows. May run on another thread; where `Mode.is_split`, on another stream."""


class Backend(Protocol):
    """One way to move rows. Every method is collective over the buffer's group, in the same order on every rank."""

    name: str
    device_types: tuple[str, ...]
    """Of the tensors it moves."""
    moves_on_thread: bool
    """Do asynchronous calls move their rows on the buffer's thread? Otherwise they are asynchronous by themselves or not at all."""
    can_split: bool
    """Does a call whose `Mode.is_split` leave its second half to the caller?"""
    fuses: bool
    """Does it do by itself what would else be a pass over all rows: `DispatchArgs.repeats`, `CachedDispatchArgs.weighing`,
    `CombineArgs.parts`?"""
    device: torch.device | None
    """The one device of its tensors, where there is one."""
    num_channels: int
    num_handle_numbers: int
    """Numbers in `DispatchHandle.call`."""
    workspace_bytes: int

    @property
    def num_calls(self) -> int:
        """Calls this rank has entered or refused so far."""
        ...

    def plan(self, args: DispatchArgs) -> tuple[Rows, DispatchHandle, Move]:
        """Exchange counts, allocate."""
        ...

    def dispatch_cached(self, args: CachedDispatchArgs) -> tuple[Rows, Move]: ...

    def combine(self, args: CombineArgs) -> tuple[Tensor, Tensor | None, Move]:
        """combined_x [num_tokens, hidden]; combined lane values [num_tokens, num_topk], None when not asked for."""
        ...

    def native_calls(self, number: int, mode: Mode) -> Any:
        """Return what makes the plain calls by expert of the buffer `number` in C++ (`_torch.ByExpert`), in `mode`; None where nothing
        does."""
        ...

    def recorded(self, *used: Any) -> "torch.cuda.Event | None":
        """When the asynchronous call just made is over, where it runs on a stream; `used` are its tensors, and what holds some."""
        ...

    def check(self) -> None:
        """Raise what earlier calls have reported since."""
        ...

    def take_failure(self) -> Exception | None:
        """What earlier calls have reported since, to be raised once the present call is made: so ranks stay in step.

        Raises EPTimeoutError, of a peer that may be gone: the present call is refused then."""
        ...

    def abort(self, message: str) -> None:
        """Tell the peers, who are or will be in the same call, that this rank does not make its call."""
        ...

    def destroy(self) -> None: ...
