"""What calls of a `LowLatencyBuffer` return."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from deepep_moe.event import Event


@dataclass(frozen=True, eq=False)
class LowLatencyHandle:
    """Where the rows of one dispatch came from: what `combine` needs to bring them back, any number of times. Immutable."""

    buffer_id: int
    num_tokens: int
    """Of this rank."""
    state: Tensor
    """uint8, on the device of the dispatch: csrc/common/low_latency.h says what it holds."""
    event: Event | None = None
    """Of a dispatch with `async_op` or `return_hook`."""


class LowLatencyOutput(NamedTuple):
    """What a rank received. `capacity` is num_ranks * num_max_tokens_per_rank."""

    recv_x: Tensor
    """[num_local_experts, capacity, hidden], dtype of `x` or float8_e4m3fn: rows of each local expert, by (source rank, token); behind the
    `num_recv_tokens_per_expert` first of an expert nothing is written."""
    recv_x_scales: Tensor | None
    """With `fp8`, column-major (`stride(1) == 1`), as grouped GEMMs in fp8 take them: [num_local_experts, capacity, hidden / 128] fp32, or,
    with `scale_format="ue8m0"`, [num_local_experts, capacity, ceil(hidden / 512)] int32, each four biased exponents, the first in its
    lowest byte."""
    num_recv_tokens_per_expert: Tensor
    """[num_local_experts] int32, on the device."""
    handle: LowLatencyHandle
    event: Event | None
    hook: Callable[[], None] | None


class LowLatencyStatistics(NamedTuple):
    """Sums over all calls since the buffer was made or `reset_statistics`, as int64 tensors on the device; reading them waits for it."""

    num_tokens_per_expert: Tensor
    """[num_local_experts] rows received."""
    wait_ns: Tensor
    """[num_ranks] nanoseconds from a receiver's start until it had heard of each rank: who is late."""
    num_dropped: Tensor
    """[] (token, expert) pairs of this rank that were not sent, as the expert's rank was masked."""
