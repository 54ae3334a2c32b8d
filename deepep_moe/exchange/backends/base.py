"""What a backend does, and the arguments every backend gets, already checked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from deepep_moe.errors import Cause, EPError, told
from deepep_moe.event import Recorded
from deepep_moe.exchange.handle import DispatchHandle

LAYOUTS = ("expert", "rank")


@dataclass(frozen=True)
class Mode:
    """How a call runs; its results do not depend on it."""

    is_async: bool = False  # beside the caller's stream or thread
    is_split: bool = False  # in two halves: the second is for the caller to start
    num_sms: int | None = None  # SMs that send, 0 = copy engines; backends without them ignore it
    layer: int = 0  # that makes the call, by a number of the caller's: on GPUs the rows of each are guessed apart


@dataclass(frozen=True)
class RowScaling:
    """Rows on their way are gradients of `x * weights[:, None]`. They become gradients of x; those of weights come beside them."""

    weights: Tensor  # [num_rows]
    x: Tensor  # [num_rows, hidden], dtype of the rows


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


@dataclass
class CachedDispatchArgs:
    mode: Mode
    x: Tensor
    x_scales: Tensor | None
    topk_weights: Tensor | None  # of any strides
    handle: DispatchHandle
    scaling: RowScaling | None = None  # where the backend `can_scale`


@dataclass
class CombineArgs:
    mode: Mode
    x: Tensor
    weights: Tensor | None  # [num_rows]
    bias: Tensor | None
    topk_weight_grads: Tensor | None  # as recv_topk_weights lies: brought back beside the rows
    handle: DispatchHandle
    sums_lanes: bool = False
    """A lane of topk_weight_grads gets the sum over all ranks that its token went to, and not what its expert's rank has."""


@dataclass
class Rows:
    """Results of a dispatch; None: does not apply."""

    recv_x: Tensor
    recv_x_scales: Tensor | None
    recv_topk_weights: Tensor | None
    grad_weights: Tensor | None = None  # [num_rows] fp32, with `RowScaling`

    def shrink(self, num_rows: int) -> None:
        """Keeps the first rows only, in place: views would be refused as operands of in-place operations where there are gradients."""
        for tensor in (self.recv_x, self.recv_x_scales, self.recv_topk_weights):
            if tensor is not None and tensor.shape[0] > num_rows:
                tensor.resize_(num_rows, *tensor.shape[1:])


class InFlight(Protocol):
    """What is left of a call that a GPU has been given (`_torch.InFlight`)."""

    second_half: Any
    """Of a split call: its `finish()` enqueues the rest, and returns False where the buffer was destroyed before."""
    recorded: Recorded | None
    """Of an asynchronous one: when its results are there."""


Move = Callable[[], None] | InFlight
"""The second half of an operation: moves the rows, perhaps on another thread. Or what is in flight of them."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do."""

    device_types: tuple[str, ...]
    """Types of the devices whose tensors it moves."""
    moves_on_thread: bool = False
    """Asynchronous calls move their rows on the buffer's thread. Otherwise they are asynchronous by themselves or not at all."""
    can_scale: bool = False
    """It takes a `RowScaling`, and computes where rows arrive."""
    num_channels: int = 1
    """Columns of `DispatchHandle.recv_counts`."""


class Backend(Protocol):
    """One way to move rows. Every method is collective over the buffer's group, in the same order on every rank."""

    name: str
    capabilities: Capabilities
    device: torch.device | None
    """The one device of its tensors, where there is one."""
    workspace_bytes: int

    @property
    def num_calls(self) -> int:
        """Calls this rank has entered or refused so far."""
        ...

    def limit_sms(self, max_sms: int) -> None:
        """Let a call take at most so many SMs. CPU backends have none."""
        ...

    def allow_excess(self) -> None:
        """Say nothing of rows beyond `num_recv_rows` where the host would hear of them after the dispatch."""
        ...

    def plan(self, args: DispatchArgs) -> tuple[Rows, DispatchHandle, Move]:
        """Exchange counts, allocate."""
        ...

    def dispatch_cached(self, args: CachedDispatchArgs) -> tuple[Rows, Move]: ...

    def combine(self, args: CombineArgs) -> tuple[Tensor, Tensor | None, Move]:
        """Return combined_x [num_tokens, hidden], and gradients of topk_weights [num_tokens, num_topk] if they were given."""
        ...

    def native_calls(self, number: int, mode: Mode) -> Any:
        """Return what makes the calls of the buffer `number` on GPUs (`_torch.Calls`), in `mode`; None on CPUs."""
        ...

    def recorded(self, x: Tensor) -> Recorded | None:
        """When the asynchronous call of `x` just made is over, where it runs on a stream and the backend has not said so by `InFlight`."""
        ...

    def check(self) -> None:
        """Raise what earlier calls have reported since."""
        ...

    def take_failure(self) -> Exception | None:
        """What earlier calls have reported since, to be raised once the present call is made: so ranks stay in step.

        Raises EPTimeoutError, of a peer that may be gone, and EPCapacityError that other nodes do not know: the present call is refused
        then."""
        ...

    def refuse(self, message: str, cause: Cause = Cause.OTHER) -> None:
        """Tell the peers, which are or will be in the same call, that this rank does not make it."""
        ...

    def abandon(self, message: str) -> None:
        """Tell the peers, which are or will be in the last call, that this rank has entered it and cannot finish it. They learn it in the
        next call where they have its rows."""
        ...

    def check_usable(self) -> None:
        """Raise EPError where only a new Buffer helps."""
        ...

    def settle(self) -> int:
        """Wait for what this rank has in flight, forget what failed, and return how many calls it has entered or refused. Not collective.

        Raises as `check_usable`."""
        ...

    def destroy(self) -> None: ...


def tell_peers(backend: Backend, error: BaseException, has_entered: bool) -> None:
    """Tell the peers that this rank does not make its call, or once it `has_entered` does not finish it. An EPError is either the call's
    own, which they know, or says that this rank can make no call."""
    if not isinstance(error, EPError):
        (backend.abandon if has_entered else backend.refuse)(told(error))
