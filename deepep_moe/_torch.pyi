"""The functions of csrc/torch. Calls with gradients return None where an argument is not what C++ takes."""

from collections.abc import Callable, Sequence

from torch import Tensor, device, dtype

from deepep_moe._C import NvlinkExchange, NvlinkLowLatency
from deepep_moe.exchange.backends.base import CombineOptions
from deepep_moe.ops.gate import FullGateOutput, GateOutput

TORCH_VERSION: str
SHIM_BYTES: int

def connect(shim: object) -> None: ...
def bytes_at(address: int, num_bytes: int, device: device, owner: object) -> Tensor: ...
def call_stream(device: device) -> int: ...

class Mode:
    def __init__(
        self, num_sms: int, is_async: bool, is_split: bool, layer: int, is_late: bool = False, is_checked: bool = False
    ) -> None: ...

class Recorded:
    def __init__(self, device: device) -> None: ...
    def wait(self) -> None: ...
    def query(self) -> bool: ...

class SecondHalf:
    def finish(self) -> bool: ...

class InFlight:
    second_half: SecondHalf | None
    recorded: Recorded | None

class Handle:
    buffer_id: int
    layout: str
    expert_alignment: int
    num_rows: int
    num_tokens: int
    memory: Tensor
    call: Tensor
    counts_on_host: list[int]
    num_rows_per_expert_on_host: Tensor | None
    topk_idx: Tensor
    recv_row_idx: Tensor
    recv_counts: Tensor
    num_recv_tokens_per_expert: Tensor
    recv_topk_idx: Tensor | None
    is_late: bool
    is_unchanged: bool
    has_recv_topk_idx: bool
    def replaced(self, memory: Tensor, call: Tensor) -> Handle: ...
    def emptied(self) -> Handle: ...

class Received(InFlight):
    recv_x: Tensor
    recv_x_scales: Tensor | None
    recv_topk_weights: Tensor | None
    grad_weights: Tensor | None
    parts: tuple[Tensor, ...]
    handle: Handle

class Combined(InFlight):
    combined_x: Tensor
    topk_weight_grads: Tensor | None

class Calls:
    def __init__(
        self,
        *,
        owner: NvlinkExchange,
        number: int,
        num_topk: int,
        num_max_tokens: int,
        num_sms: int,
        lanes: int,
        sums: str,
        device: device,
        tell: Callable[[BaseException, bool], None],
    ) -> None: ...
    def release(self) -> None: ...
    has_failed: bool
    is_held: bool
    can_fuse: bool
    num_handle_numbers: int
    def num_handle_ints(self, num_tokens: int, is_expert_layout: bool) -> int: ...
    def handle_of(
        self, memory: Tensor, call: Tensor, num_tokens: int, is_expert_layout: bool, expert_alignment: int, num_rows: int
    ) -> Handle: ...
    def dispatch(
        self,
        x: Tensor,
        x_scales: Tensor | None,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        is_expert_layout: bool,
        expert_alignment: int,
        num_recv_rows: int,
        mode: Mode,
    ) -> Received | None: ...
    def settle(self, handle: Handle) -> Received | None: ...
    def dispatch_cached(
        self,
        x: Tensor,
        x_scales: Tensor | None,
        topk_weights: Tensor | None,
        handle: object,
        scaling_weights: Tensor | None,
        scaling_x: Tensor | None,
        mode: Mode,
    ) -> Received | None: ...
    def combine(
        self,
        x: Tensor,
        handle: object,
        topk_weights: Tensor | None,
        bias: Tensor | None,
        topk_weight_grads: Tensor | None,
        options: CombineOptions,
        mode: Mode,
    ) -> Combined | None: ...
    def dispatch_by_expert(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, num_leading: int, tokens_per_row: int, mode: Mode
    ) -> Received | None: ...
    def combine_by_expert(
        self, rows: Sequence[Tensor], are_joined: bool, weights: Tensor | None, source_weights: Tensor | None, handle: object
    ) -> Combined | None: ...

class LowLatencyReceived(InFlight):
    num_tokens: int
    recv_x: Tensor
    recv_x_scales: Tensor | None
    num_recv_tokens_per_expert: Tensor
    state: Tensor

class LowLatencyCombined(InFlight):
    combined_x: Tensor

class LowLatencyCalls:
    def __init__(self, owner: NvlinkLowLatency, statistics: Tensor) -> None: ...
    def release(self) -> None: ...
    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        fp8: bool,
        scale_format: str,
        async_op: bool,
        return_hook: bool,
        is_checked: bool,
    ) -> LowLatencyReceived | None: ...
    def combine(
        self,
        x: Tensor,
        state: Tensor,
        num_tokens: int,
        topk_weights: Tensor | None,
        out: Tensor | None,
        wire: str | None,
        async_op: bool,
        return_hook: bool,
        is_checked: bool,
    ) -> LowLatencyCombined | None: ...

class Gated:
    topk_idx: Tensor
    topk_weights: Tensor
    counts: Tensor
    probs: Tensor | None
    routing_map: Tensor | None
    is_token_in_rank: Tensor | None
    shares: Tensor | None

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
    dense: bool,
    num_ranks: int,
    shares: bool,
    is_full: bool = False,
    is_checked: bool = False,
) -> GateOutput | FullGateOutput | Gated | None: ...
def run_gate_backward(
    *,
    grad_topk_weights: Tensor | None,
    grad_probs: Tensor | None,
    grad_shares: Tensor | None,
    logits: Tensor,
    topk_idx: Tensor,
    score_function: str,
    normalize: bool,
    routed_scaling_factor: float,
) -> Tensor | None: ...
def grouped_swiglu(
    x: Tensor,
    counts: Tensor,
    w1: Tensor,
    w2: Tensor,
    probs: Tensor | None,
    recompute_activation: bool,
    main_grad1: Tensor | None,
    main_grad2: Tensor | None,
) -> Tensor | None: ...
def lanes_of_map(
    routing_map: Tensor, values: Tensor | None, num_topk: int, rows: Tensor | None = None
) -> tuple[Tensor, Tensor | None] | None: ...
def dense_of_lanes(topk_idx: Tensor, topk_values: Tensor, num_experts: int) -> Tensor | None: ...
def count_lanes(topk_idx: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor] | None: ...
