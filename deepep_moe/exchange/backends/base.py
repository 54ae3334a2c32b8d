"""The interface of backends, and the arguments of their calls, already checked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from deepep_moe.errors import Cause, EPCapacityError, EPError, cause_of, describe
from deepep_moe.event import Recorded
from deepep_moe.exchange.handle import DispatchHandle, padded
from deepep_moe.group.rendezvous import Connectable
from deepep_moe.group.settings import Settings

if TYPE_CHECKING:
    from deepep_moe._torch import Calls as NativeCalls
    from deepep_moe._torch import InFlight

LAYOUTS = ("expert", "rank")
_MOST_ROWS = (1 << 31) - 1  # rows that a handle can number


@dataclass(frozen=True)
class Mode:
    """The mode of a call. Results do not depend on it."""

    is_async: bool = False  # beside the caller's stream or thread
    is_split: bool = False  # in two halves: the caller starts the second one
    num_sms: int | None = None  # SMs that send, 0 = copy engines; backends without them ignore it
    layer: int = 0  # the caller's number for the calling layer: on GPUs the rows to receive are predicted per layer


@dataclass(frozen=True)
class RowScaling:
    """The rows sent are gradients of `x * weights[:, None]`. The receiver turns them into gradients of x and of weights."""

    weights: Tensor  # [num_rows]
    x: Tensor  # [num_rows, hidden], dtype of the rows


@dataclass
class DispatchArgs:
    mode: Mode
    x: Tensor
    x_scales: Tensor | None
    topk_idx: Tensor  # any strides, like topk_weights
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
    topk_weights: Tensor | None  # any strides
    handle: DispatchHandle
    scaling: RowScaling | None = None  # only if the backend `can_scale`


@dataclass(frozen=True)
class CombineOptions:
    """Says what a combine computes besides the sums of rows. Kernels get it whole (csrc/common/combine_options.h)."""

    sums_lanes: bool = False
    """A lane of topk_weight_grads gets the sum over all ranks that received its token, not only the value of its expert's rank."""


@dataclass
class CombineArgs:
    mode: Mode
    x: Tensor
    weights: Tensor | None  # [num_rows]
    bias: Tensor | None
    topk_weight_grads: Tensor | None  # the shape of recv_topk_weights; sent back with the rows
    handle: DispatchHandle
    options: CombineOptions = CombineOptions()


@dataclass
class MoveExpertsArgs:
    copies: Tensor  # [num_ranks, num_slots] int32, contiguous
    slots: list[Tensor]  # [num_slots, elements], in the memory of `Backend.expert_slots`
    home: list[Tensor]  # [num_local_experts, elements]
    returns: bool  # gradients of the slots are added to those at home; else weights come from home, as bytes
    num_sms: int | None = None


@dataclass
class Rows:
    """Results of a dispatch. None: does not apply."""

    recv_x: Tensor
    recv_x_scales: Tensor | None
    recv_topk_weights: Tensor | None
    grad_weights: Tensor | None = None  # [num_rows] fp32, with `RowScaling`


Move: TypeAlias = "Callable[[], None] | InFlight"
"""The second half of an operation: a function that moves the rows, perhaps on another thread, or the unfinished part of a call on a GPU."""


@dataclass(frozen=True)
class Capabilities:
    """The abilities of a backend."""

    device_types: tuple[str, ...]
    """Device types whose tensors it moves."""
    moves_on_thread: bool = False
    """Asynchronous calls move their rows on the buffer's thread. Otherwise they are asynchronous by themselves or not at all."""
    can_scale: bool = False
    """It takes a `RowScaling`, and computes the gradients on the rank that receives the rows."""
    shares_rows: bool = False
    """With sums by lanes it takes one row for all lanes of a token, and sums the rows that come back. Elsewhere `Calls` does both."""
    num_channels: int = 1
    """Columns of `DispatchHandle.recv_counts`."""


class Backend(Connectable):
    """One way to move rows. Every method is collective over the buffer's group, in the same order on every rank.

    Methods that do nothing here are for backends of GPUs, whose calls go on when they have returned.
    """

    name: str
    capabilities: Capabilities
    device: torch.device | None = None
    """The only device whose tensors it takes; None: any device of its types."""
    workspace_bytes: int

    @property
    def num_calls(self) -> int:
        """Return the number of calls that this rank has entered or refused."""
        raise NotImplementedError

    def limit_sms(self, max_sms: int) -> None:
        """Let a call take at most `max_sms` SMs."""

    def allow_excess(self) -> None:
        """Report no error for rows beyond `num_recv_rows` if the host would learn of them only after the dispatch."""

    def plan(self, args: DispatchArgs) -> tuple[Rows, DispatchHandle, Move]:
        """Exchange counts and allocate the results."""
        raise NotImplementedError

    def dispatch_cached(self, args: CachedDispatchArgs) -> tuple[Rows, Move]:
        raise NotImplementedError

    def combine(self, args: CombineArgs) -> tuple[Tensor, Tensor | None, Move]:
        """Return combined_x [num_tokens, hidden], gradients of topk_weights [num_tokens, num_topk] if `args` has some, and the move."""
        raise NotImplementedError

    def expert_slots(self) -> Tensor:
        """Return the memory for copies of experts, [settings.expert_slot_bytes] uint8, where there is some."""
        raise NotImplementedError

    def move_experts(self, args: MoveExpertsArgs) -> None:
        raise NotImplementedError

    def native_calls(self, number: int, mode: Mode) -> "NativeCalls | None":
        """Return the `_torch.Calls` that makes the GPU calls of buffer `number` in `mode`; None if Python makes them."""
        return None

    def recorded(self, x: Tensor) -> Recorded | None:
        """Return the event that ends the asynchronous call of `x` just made; None if it runs on no stream or is `InFlight`."""
        return None

    def take_failure(self) -> Exception | None:
        """Return the failure that an earlier call has reported. The caller raises it after the present call, so that ranks stay in step.

        Raises EPTimeoutError if a peer may be gone, and EPCapacityError if other nodes do not know of it. The caller then refuses the
        present call."""
        return None

    def refuse(self, message: str, cause: Cause = Cause.OTHER) -> None:
        """Tell the peers that this rank does not make its next call, in which they are or will be."""
        raise NotImplementedError

    def abandon(self, message: str) -> None:
        """Tell the peers that this rank cannot finish the call that it entered last. Peers that already have its rows learn it in their
        next call."""
        raise NotImplementedError

    def check_usable(self) -> None:
        """Raise EPError if the buffer cannot be used any more and only a new Buffer helps."""

    def settle(self) -> int:
        """Wait for this rank's calls in flight, forget failures, and return how many calls it has entered or refused. Not collective.

        Raises the error of `check_usable`."""
        self.check_usable()
        return self.num_calls


def tell_peers(backend: Backend, error: BaseException, has_entered: bool) -> None:
    """Tell the peers that this rank does not make its call, or, if it `has_entered`, does not finish it. EPErrors are not told: the peers
    know the call's own failures, and otherwise this rank can make no call."""
    if not isinstance(error, EPError):
        backend.abandon(describe(error)) if has_entered else backend.refuse(describe(error), cause_of(error))


def new_handle(
    args: DispatchArgs, num_call: int, num_rows: int, num_recv_tokens: int, topk_idx: Tensor, recv_counts: Tensor, tokens_per_expert: Tensor
) -> DispatchHandle:
    """Return the handle of a dispatch whose rows arrive later. Until then -1 stands for their places. So the handle of a dispatch that
    fails half-way points to no row instead of a wrong one."""
    is_expert, num_topk = args.layout == "expert", topk_idx.shape[1]
    row_idx = topk_idx.new_full((num_recv_tokens if is_expert else 0, num_topk), -1)
    recv_topk_idx = None if is_expert else args.topk_idx.new_full((num_rows, num_topk), -1)
    call, how = torch.tensor([num_call], device="cpu"), (args.layout, args.expert_alignment)
    return DispatchHandle(args.buffer_id, *how, num_rows, topk_idx, row_idx, recv_counts, tokens_per_expert, call, recv_topk_idx)


def check_bounds(args: DispatchArgs, settings: Settings, counts: Tensor, bounds: list[int]) -> int:
    """Return how many rows this rank will receive. Raises EPCapacityError on every rank if any rank's bound is too small.

    counts: [num_ranks, num_ranks + num_experts or more], tokens of each rank for each rank, then for each expert. bounds: -1 for none."""
    s = settings
    per_expert = counts[:, s.num_ranks : s.num_ranks + s.num_experts].sum(0).view(s.num_ranks, s.num_local_experts)
    per_rank = padded(per_expert, args.expert_alignment).sum(1) if args.layout == "expert" else counts[:, : s.num_ranks].sum(0)
    for rank, (rows, bound) in enumerate(zip(per_rank.tolist(), bounds, strict=True)):
        if rows > (bound if bound >= 0 else _MOST_ROWS):
            most = f"its num_recv_rows of {bound}; give a larger bound or none"
            if bound < 0:
                most = "a buffer can number (2^31 - 1); dispatch fewer tokens"
            raise EPCapacityError(f"rank {rank} would receive {rows} rows, more than {most}", rank=rank)
    return int(per_rank[s.rank])
