"""A combine that brings one number per lane of top-k back beside the rows: what gradients of topk_weights are, and DeepEP's weights."""

from torch import Tensor

from deepep_moe.exchange import operators
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.checks import check_owner, check_tensors
from deepep_moe.exchange.handle import DispatchHandle


def combine_with_lanes(
    buffer: Buffer, x: Tensor, handle: DispatchHandle, lanes: Tensor, bias: Tensor | None = None, num_sms: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sum the rows as `Buffer.combine` does, and return the sum and the lanes at their source, [num_tokens, num_topk] fp32. Collective.

    lanes: fp32, as the dispatch of `handle` returned recv_topk_weights: [num_rows] in the expert layout, [num_rows, num_topk] in the rank
    layout. Each rank's count for the lanes whose expert it holds. Lanes without expert are 0. Differentiable in x, bias and lanes. Raises
    what `Buffer.combine` raises.
    """
    calls = buffer.calls
    mode = calls.mode_of(num_sms)
    calls.refuse_on_failure(check_tensors, x, lanes=lanes, bias=bias)
    calls.refuse_on_failure(check_owner, handle, calls.number)
    combined_x, combined_lanes = operators.combine(calls, mode, x, None, bias, lanes, handle)
    assert combined_lanes is not None  # as lanes were given
    return combined_x, combined_lanes
