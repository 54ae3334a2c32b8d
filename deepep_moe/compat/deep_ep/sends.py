"""The dispatches of DeepEP's `Buffer`: with new routing, with ranks alone, or along a handle."""

from typing import NamedTuple

import torch
from torch import Tensor

from deepep_moe import config
from deepep_moe.arguments import as_int
from deepep_moe.compat.deep_ep.arguments import checked_routing, detached
from deepep_moe.compat.deep_ep.core import GrowingBuffers
from deepep_moe.compat.deep_ep.handle import Handle
from deepep_moe.compat.deep_ep.layout import lanes_of_ranks
from deepep_moe.compat.deep_ep.widths import dispatch_along
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.handle import DispatchOutput
from deepep_moe.group.rendezvous import gather_objects

_Told = tuple[Tensor | None, Tensor | None, list[int], Handle]


class Routing(NamedTuple):
    """The routing that a caller passes; fields are the arguments of DeepEP's dispatch."""

    is_token_in_rank: Tensor | None
    num_tokens_per_expert: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    expert_alignment: int
    num_worst_tokens: int


def send(
    buffers: GrowingBuffers, x: Tensor, x_scales: Tensor | None, routing: Routing, num_sms: int | None
) -> tuple[DispatchOutput, _Told]:
    """Dispatch with new routing. Return the output, and (recv_topk_idx, recv_topk_weights, tokens of each local expert, the handle)."""
    try:
        num_experts, topk_idx, topk_weights = _lanes_of(routing)
        alignment = as_int("expert_alignment", routing.expert_alignment)
        bound = as_int("num_worst_tokens", routing.num_worst_tokens) or None
    except (TypeError, ValueError) as error:
        raise buffers.refuse(error) from None

    def dispatch(buffer: Buffer) -> DispatchOutput:
        return buffer.dispatch(
            x, topk_idx, topk_weights, x_scales=x_scales, layout="rank", expert_alignment=alignment, num_recv_rows=bound,
            num_sms=num_sms,
        )  # fmt: skip

    least = 0 if bound is None else -(-bound // buffers.num_ranks)  # the caller's bound is for every rank with as many tokens
    buffer, out = buffers.dispatch(x, num_experts, topk_idx.shape[-1], dispatch, least)
    handle = Handle(buffer, out.handle)
    if routing.topk_idx is None:
        return out, (None, None, [] if bound else _counts_of_all(buffers, buffer, routing, alignment), handle)
    return out, (out.recv_topk_idx, out.recv_topk_weights, [] if bound else out.handle.num_rows_per_expert_list, handle)


def send_along(
    buffers: GrowingBuffers, x: Tensor, x_scales: Tensor | None, handle: Handle, topk_idx: Tensor | None, num_sms: int | None
) -> DispatchOutput:
    """Dispatch along a handle. Raises TypeError if `handle` is none, ValueError if topk_idx is given too."""
    buffer = checked(buffers, handle).buffer
    if topk_idx is not None:
        raise buffer.refuse(ValueError("topk_idx and handle were both given; a handle repeats the routing of its own dispatch"))
    return dispatch_along(buffer, x, x_scales, handle.along, num_sms=num_sms)


def checked(buffers: GrowingBuffers, handle: object) -> Handle:
    """Return `handle`. If no dispatch has returned it, tell the peers and raise TypeError."""
    if not isinstance(handle, Handle):
        raise buffers.refuse(
            TypeError(
                f"handle is a {type(handle).__name__}; it must be the object that dispatch returned: its tensors alone do not say which "
                "buffer made them"
            )
        )
    return handle


def _lanes_of(routing: Routing) -> tuple[int, Tensor, Tensor | None]:
    """Return the number of experts, topk_idx and topk_weights. Raises TypeError or ValueError if something is missing or wrong."""
    num_experts = _num_experts(routing)
    if routing.topk_idx is not None:
        weights = routing.topk_weights
        return num_experts, checked_routing(routing.topk_idx), None if weights is None else detached(weights)
    assert routing.is_token_in_rank is not None  # `_num_experts` has checked it
    return num_experts, lanes_of_ranks(routing.is_token_in_rank, num_experts), None


def _num_experts(routing: Routing) -> int:
    """Return the number of experts, the length of num_tokens_per_expert. Raises ValueError if something is missing."""
    if routing.num_tokens_per_expert is None:
        raise ValueError("num_tokens_per_expert is missing; give what get_dispatch_layout returned, or the handle of an earlier dispatch")
    if routing.topk_idx is None and routing.is_token_in_rank is None:
        raise ValueError("topk_idx and is_token_in_rank are missing; give one of them, or the handle of an earlier dispatch")
    if not isinstance(routing.num_tokens_per_expert, Tensor) or routing.num_tokens_per_expert.dim() != 1:
        raise ValueError(f"num_tokens_per_expert is {routing.num_tokens_per_expert!r:.80}; it must be a tensor [num_experts]")
    return routing.num_tokens_per_expert.shape[0]


def _counts_of_all(buffers: GrowingBuffers, buffer: Buffer, routing: Routing, alignment: int) -> list[int]:
    """Return how many tokens each local expert receives. Without topk_idx the rows received do not show it, so ranks exchange their own
    counts. Collective."""
    assert routing.num_tokens_per_expert is not None
    mine = routing.num_tokens_per_expert.tolist()
    table = gather_objects(mine, buffers.group, buffers.num_ranks, "counts of a DeepEP dispatch without topk_idx", config.timeout_s(), list)
    first = buffer.rank * buffer.num_local_experts
    counts = torch.tensor(table).sum(0)[first : first + buffer.num_local_experts].tolist()
    return [-(-count // alignment) * alignment for count in counts]
