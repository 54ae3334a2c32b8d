"""Ask DeepSpeed's gates, of every version, for experts and weights per token."""

import functools
import inspect
from typing import Any, NamedTuple

import torch
from deepspeed.moe.sharded_moe import TopKGate
from torch import Tensor

from deepep_moe.integrations.common.patches import meanwhile
from deepep_moe.integrations.deepspeed.native import gates


class Routing(NamedTuple):
    """The decision for this rank's tokens, lane by lane."""

    l_aux: Tensor
    """The gate's load balancing loss, a scalar; 0 on a rank without tokens."""
    exp_counts: Tensor
    """[num_experts] int64: tokens that chose each expert, before any were dropped."""
    topk_idx: Tensor
    """[num_topk, num_tokens] int32 or int64: experts, -1 = dropped."""
    topk_weights: Tensor
    """[num_topk, num_tokens] fp32, 0 where dropped. Its gradient reaches the gate."""


def route(gate: TopKGate, x: Tensor, used_token: Tensor | None) -> Routing:
    """Ask a `TopKGate` about x [num_tokens, hidden] and used_token, [num_tokens] or None. Not collective.

    Decisions, weights, losses and random numbers are those of the installed version's gate. Either the gate is called, or `gates` decides
    as it does. A rank without tokens does not call the gate, which divides by their number.
    """
    if x.shape[0] == 0:
        return _route_nothing(gate, x)
    if gates.decides_alike(gate, x, used_token):
        return Routing(*gates.decide(gate, x))
    # Without its group the gate does not agree with other ranks on the fullest expert, which only padded slots need. The gate refuses fewer
    # tokens than its least capacity, so that is lowered to their number. No token is dropped with either capacity.
    with meanwhile(gate, ep_group=None, min_capacity=min(gate.min_capacity, x.shape[0])):
        decided = ask(gate, x, used_token)
    if has_sparse_routes(type(gate).forward):
        l_aux, _, _, topk_idx, _, topk_weights, exp_counts = decided
        return Routing(l_aux, exp_counts, topk_idx, topk_weights.float())  # under autocast einsum narrows them
    l_aux, combine_weights, _, exp_counts = decided
    # [num_tokens, num_experts], as a token has at most one slot in an expert. These versions weight in the dtype of the rows.
    weights = combine_weights.sum(-1).to(x.dtype).float()
    topk_weights, topk_idx = weights.topk(gate.k, dim=1)
    return Routing(l_aux, exp_counts, topk_idx.masked_fill(topk_weights == 0, -1).t(), topk_weights.t())


def ask(gate: TopKGate, x: Tensor, used_token: Tensor | None) -> Any:
    """Return what the gate returns to its layer."""
    return gate(x, used_token, True, False) if has_sparse_routes(type(gate).forward) else gate(x, used_token)


@functools.cache
def has_sparse_routes(forward: Any) -> bool:
    """Return whether the gate can return experts and weights per token, as in 0.19.4 and newer. A fourth argument is for Tutel."""
    return "sparse_routes" in inspect.signature(forward).parameters


def is_gate_unknown() -> bool:
    """Return whether gates that can name experts must be called, because `gates` does not know how they decide."""
    return has_sparse_routes(TopKGate.forward) and not gates.knows_the_gate()


def _route_nothing(gate: TopKGate, x: Tensor) -> Routing:
    """Return no decisions, but connected to the gate's weight: it gets a gradient of 0, as ranks reduce gradients together."""
    scores = torch.nn.functional.linear(x.float(), gate.wg.weight.float()).float().softmax(1)  # autocast narrows
    topk_idx = torch.empty(gate.k, 0, dtype=torch.int32, device=x.device)
    exp_counts = torch.zeros(scores.shape[1], dtype=torch.int64, device=x.device)
    return Routing(scores.sum(), exp_counts, topk_idx, scores[:, : gate.k].t())
