"""A combine that sums a number for each lane of top-k beside the rows, as DeepEP's combine does with its weights."""

from torch import Tensor

from deepep_moe.exchange import native
from deepep_moe.exchange.backends.base import CombineArgs
from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.checks import check_owner, check_tensors
from deepep_moe.exchange.handle import DispatchHandle


def combine_with_lanes(
    buffer: Buffer, x: Tensor, handle: DispatchHandle, lanes: Tensor, bias: Tensor | None = None, num_sms: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the rows' sum as `Buffer.combine` makes it, and the lanes' sums [num_tokens, num_topk] fp32. Collective, without gradient.

    lanes: fp32, as the dispatch of `handle` returned recv_topk_weights: [num_rows] in the expert layout, [num_rows, num_topk] in the rank
    layout. Lane k of a token is the sum of lane k over all ranks that the token went to: recv_topk_weights come back as they were sent, as
    they are 0 where another rank has the expert. Raises what `Buffer.combine` raises.
    """
    calls = buffer.calls
    made = native.combine_rows(calls, x, handle, None, bias, num_sms, lanes=lanes)
    if made is not None:
        return made.combined_x, made.topk_weight_grads
    mode = calls.mode_of(num_sms)
    calls.refuse_on_failure(check_tensors, x, is_operator=False, topk_weights=lanes, bias=bias)
    calls.refuse_on_failure(check_owner, handle, calls.number)
    combined_x, sums = calls.combine(CombineArgs(mode, x, None, bias, lanes, handle, sums_lanes=True))
    assert sums is not None  # as lanes were given
    return combined_x, sums
