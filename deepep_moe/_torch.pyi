"""Of csrc/torch. Every call returns None where Python is to make it."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, device, dtype

TORCH_VERSION: str
SHIM_BYTES: int

class Calls:
    def __init__(
        self,
        *,
        shim: Any,
        number: int,
        num_ranks: int,
        num_local_experts: int,
        num_topk: int,
        hidden: int,
        num_max_tokens: int,
        num_sms: int,
        device: device,
        shape_of: Callable[[int, str], Any],
        current_stream: Callable[[], int],
        tell: Callable[[BaseException, bool], None],
    ) -> None: ...
    def release(self) -> None: ...
    def dispatch(
        self,
        x: Tensor,
        x_scales: Tensor | None,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        is_expert_layout: bool,
        expert_alignment: int,
        num_recv_rows: int,
        num_sms: int,
    ) -> tuple[Any, ...] | None: ...
    def dispatch_cached(
        self, x: Tensor, x_scales: Tensor | None, topk_weights: Tensor | None, handle: Any, num_sms: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None] | None: ...
    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None, bias: Tensor | None, num_sms: int) -> Tensor | None: ...
    def combine_with_lanes(
        self, x: Tensor, handle: Any, lanes: Tensor, bias: Tensor | None, num_sms: int
    ) -> tuple[Tensor, Tensor] | None: ...
    def dispatch_by_expert(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, num_leading: int, tokens_per_row: int
    ) -> tuple[Any, ...] | None: ...
    def combine_by_expert(
        self, parts: Sequence[Tensor], weights: Tensor | None, source_weights: Tensor | None, handle: Any
    ) -> Tensor | None: ...

class LowLatencyCalls:
    def __init__(
        self,
        *,
        shim: Any,
        num_ranks: int,
        num_local_experts: int,
        num_topk: int,
        hidden: int,
        num_max_tokens: int,
        handle_bytes: int,
        statistics: Tensor,
    ) -> None: ...
    def release(self) -> None: ...
    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, fp8: bool, scale_format: str, stream: int
    ) -> tuple[int, Tensor, Tensor | None, Tensor, Tensor] | None: ...
    def combine(
        self, x: Tensor, state: Tensor, num_tokens: int, topk_weights: Tensor | None, out: Tensor | None, wire: str | None, stream: int
    ) -> Tensor | None: ...

def set_hooks(
    *,
    plain: Callable[[int], Calls | None],
    pass_failed: Callable[[int, int], None],
    dispatch_gradients: Callable[..., Any],
    combine_gradients: Callable[..., Any],
) -> None: ...
def gate(
    logits: Tensor,
    num_topk: int,
    num_groups: int,
    topk_groups: int,
    group_score_topk: int,
    score_function: str,
    expert_bias: Tensor | None,
    normalize: bool,
    routed_scaling_factor: float,
    mask: Tensor | None,
    index_dtype: dtype,
    check_finite: bool,
) -> tuple[Tensor, Tensor, Tensor] | None: ...
def gate_full(
    logits: Tensor,
    num_topk: int,
    num_groups: int,
    topk_groups: int,
    group_score_topk: int,
    score_function: str,
    expert_bias: Tensor | None,
    normalize: bool,
    routed_scaling_factor: float,
    mask: Tensor | None,
    index_dtype: dtype,
    check_finite: bool,
    dense: bool,
    num_ranks: int,
    shares: bool,
) -> tuple[Any, ...] | None: ...
def set_gate_hooks(*, shim: Any, current_stream: Callable[[int], int] | None, gradients: Callable[..., Tensor]) -> None: ...
def set_expert_hooks(*, shim: Any, current_stream: Callable[[int], int] | None) -> None: ...
def grouped_swiglu(
    x: Tensor, counts: Tensor, w1: Tensor, w2: Tensor, probs: Tensor | None, recompute_activation: bool
) -> Tensor | None: ...
