"""The buffers that the MoE layers of one process share."""

import atexit
import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import _StopRecomputationError

from deepep_moe import autograd_module
from deepep_moe._C import ROW_ALIGNMENT
from deepep_moe.buffer import Buffer
from deepep_moe.errors import EPError, EPPeerError
from deepep_moe.integrations.deepspeed.options import Options
from deepep_moe.integrations.process_groups import agree_on_bound

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_GROWTH = 1.5  # at least, so that all buffers of a plan take no more than three times the memory of the largest


@functools.cache
def say_once(message: str, *, on_all_ranks: bool = False) -> None:
    """A warning on rank 0, or on whichever rank has one, the first time only."""
    if on_all_ranks or not dist.is_initialized() or dist.get_rank() == 0:
        _log.warning(message)


def why_not_rows(x: torch.Tensor) -> str | None:
    """The reason that no buffer takes rows such as those of x [..., hidden], or None."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"rows are {x.dtype}, not torch.float32, torch.bfloat16 or torch.float16"
    multiple = ROW_ALIGNMENT // x.element_size()
    return f"the hidden size is {x.shape[-1]}; in {x.dtype} it must be a multiple of {multiple}" if x.shape[-1] % multiple else None


@dataclass(frozen=True, eq=False)
class Plan:
    """What swapped layers that share buffers have in common: the options, the most that one of them needs, and the buffers."""

    options: Options
    num_local_experts: int
    """Experts of a rank in the buffer: the largest count of the layers that share it."""
    num_topk: int
    """Experts of a token, of the layer with most."""
    buffers: dict[tuple[Any, ...], Buffer] = field(default_factory=dict, init=False, repr=False)
    """By group, width of rows and type of device. Layers that share one run one after another, in any dtype."""
    outgrown: list[Buffer] = field(default_factory=list, init=False, repr=False)
    """Buffers that became too small. A backward may still need them."""
    layers: "weakref.WeakSet[nn.Module]" = field(default_factory=weakref.WeakSet, init=False, repr=False)
    """That use it; without any the buffers may go."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.options, self.num_local_experts, self.num_topk)  # copies of layers get buffers of their own

    @property
    def lanes(self) -> int:
        """Experts of a row in the buffer: exact mode sends a row for each."""
        return 1 if self.options.exact else self.num_topk

    @property
    def rows_of_token(self) -> int:
        """That a dispatch gets, at most."""
        return self.num_topk if self.options.exact else 1

    def release(self, layers: Iterable[nn.Module]) -> None:
        """These use it no more; without any that do the buffers go. No rank needs to know what another has left."""
        self.layers.difference_update(layers)
        if not self.layers:
            self.destroy()

    def destroy(self) -> None:
        """Destroy the buffers. The next dispatch constructs new ones."""
        while self.buffers:
            self.buffers.popitem()[1].destroy()
        while self.outgrown:
            self.outgrown.pop().destroy()


class OutgrownError(ValueError):
    """More tokens than the buffer has room for."""


def ready(group: dist.ProcessGroup, x: torch.Tensor, plan: Plan) -> Buffer:
    """The plan's buffer for x [num_tokens, hidden]. Collective over `group` when it constructs it. Raises as `Buffer`."""
    key = (group, x.shape[1], x.device.type)
    buffer = plan.buffers.get(key)
    if buffer is None:
        _plans.add(plan)
        buffer = plan.buffers[key] = _make(group, _bound(group, x.shape[0], plan, x.device), x.shape[1], plan)
    return buffer


def or_tell(buffer: Buffer, function: Callable[..., _Result], *args: Any) -> _Result:
    """`function(*args)`. If it fails before it has made a call of the buffer, this rank's next call there raises EPPeerError with the
    reason on the peers, who would wait for it else."""
    before = buffer.num_calls
    try:
        return function(*args)
    except Exception as error:
        if not isinstance(error, _StopRecomputationError):  # by which checkpointing ends a recomputation
            with contextlib.suppress(EPError, RuntimeError):  # peers that do not come, a GPU that failed: `error` says more
                if buffer.num_calls == before:
                    buffer.refused(error)
        raise


def dispatch(
    buffer: Buffer, group: dist.ProcessGroup, num_tokens: int, plan: Plan, device: torch.device, send: Callable[[Buffer], _Result]
) -> tuple[Buffer, _Result]:
    """The plan's buffer, `buffer` or a larger one, and `send(buffer)`, a dispatch of this rank's tokens. Collective over `group`.

    Where no bound was chosen, a call in which a rank has more tokens than there is room for makes a larger buffer: that rank refuses its
    dispatch, which tells the others, all meet in the old buffer, and dispatch once more. Raises what `Buffer` and `send` raise, and
    OutgrownError for more tokens than the chosen bound; the peers raise EPPeerError then.
    """
    try:
        if num_tokens * plan.rows_of_token > buffer.num_max_tokens_per_rank:
            raise buffer.refused(_outgrown(num_tokens, buffer, plan))
        return buffer, send(buffer)
    except (OutgrownError, EPPeerError) as error:
        if plan.options.num_max_tokens_per_rank is not None or OutgrownError.__name__ not in f"{type(error).__name__}: {error}":
            raise
    _meet(buffer, plan, device)
    plan.outgrown.append(buffer)
    least = int(_GROWTH * buffer.num_max_tokens_per_rank) // plan.rows_of_token
    bound = agree_on_bound(group, max(num_tokens, least), device)
    if dist.get_rank() == 0:
        _log.warning(
            f"MoE layers make room for {bound} tokens of a rank: some rank has more than before. num_max_tokens_per_rank, an argument of "
            'replace_moe_layers and a key of "deepep_moe" in ds_config, makes it at once and once'
        )
    buffer = plan.buffers[group, buffer.hidden, device.type] = _make(group, bound, buffer.hidden, plan)
    return buffer, send(buffer)


def _meet(buffer: Buffer, plan: Plan, device: torch.device) -> None:
    """A dispatch of nothing, in the layout that no layer uses. A peer that refused the forward for a reason of its own does not come: this
    raises EPTimeoutError or EPMismatchError with its rank, where the all-reduce to follow would wait as long as the process group does."""
    x = torch.empty(0, buffer.hidden, device=device)
    buffer.dispatch(x, torch.empty(0, plan.lanes, dtype=torch.int64, device=device), layout="rank")


def _outgrown(num_tokens: int, buffer: Buffer, plan: Plan) -> OutgrownError:
    return OutgrownError(
        f"{num_tokens} tokens in a forward, and MoE layers have room for {buffer.num_max_tokens_per_rank // plan.rows_of_token}; set "
        'num_max_tokens_per_rank, an argument of replace_moe_layers and a key of "deepep_moe" in ds_config, to the most tokens that a rank '
        "ever has, or leave it out"
    )


def _is_bounded(device: torch.device) -> bool:
    """Do buffers need to know the most tokens? The memory of those that move CPU tensors does not depend on it."""
    return device.type != "cpu"


def _bound(group: dist.ProcessGroup, num_tokens: int, plan: Plan, device: torch.device) -> int:
    """Tokens of a rank that a first buffer has room for."""
    if not _is_bounded(device):
        return (2**31 - 1) // plan.rows_of_token
    return plan.options.num_max_tokens_per_rank or agree_on_bound(group, num_tokens, device)


def _make(group: dist.ProcessGroup, bound: int, hidden: int, plan: Plan) -> Buffer:
    num_experts, options = plan.num_local_experts * dist.get_world_size(group), plan.options
    size = bound * plan.rows_of_token, hidden, num_experts, plan.lanes
    buffer = Buffer(group, *size, backend=options.backend, num_sms=options.num_sms)
    if buffer.backend == "nvlink" and autograd_module.MODULE is None:
        why_not = autograd_module.WHY_NOT
        say_once(f"MoE layers with few experts a token wait for the host longer than they must: deepep_moe._autograd is {why_not}")
    return buffer


# ---- of the process ----

_plans: "weakref.WeakSet[Plan]" = weakref.WeakSet()


def all_buffers() -> list[Buffer]:
    """Those in use, of all plans."""
    return [buffer for plan in _plans for buffer in plan.buffers.values()]


def destroy_all() -> None:
    """Destroy the buffers of all plans."""
    for plan in list(_plans):
        plan.destroy()


atexit.register(destroy_all)
