"""Native library: of a tensor it reads shape, element size and address; each must be contiguous unless said otherwise. Sizes are counts of
elements. Callers keep the tensors alive."""

from collections.abc import Sequence

from torch import Tensor

__version__: str
MAX_RANKS: int
MAX_TOPK: int
SCALE_BLOCK: int
ROW_ALIGNMENT: int

class DType:
    float32: DType
    bfloat16: DType
    float16: DType
    float8_e4m3fn: DType
    float8_e5m2: DType

class Process:
    def is_gone(self) -> bool: ...

def build_info() -> dict[str, bool | str]: ...
def running(pid: int) -> Process: ...

# exchange (csrc/runtime/shm/exchange.h); `args` and `rows` are of exchange/backends/base.py

class ShmExchange:
    def __init__(
        self,
        *,
        num_ranks: int,
        ranks_per_node: int,
        rank: int,
        num_channels: int,
        num_experts: int,
        num_topk: int,
        hidden: int,
        timeout_s: float,
    ) -> None: ...
    path: str
    workspace_bytes: int
    num_calls: int
    def connect(self, paths: list[str], pids: list[int]) -> None: ...
    def seal(self) -> None: ...
    def free(self) -> int: ...
    def plan(self, dtype: DType, args: object, own_counts: Tensor, all_counts: Tensor) -> list[int]: ...
    def dispatch(self, handle: object, args: object, rows: object, recv_topk_idx: Tensor | None, row_begin: Tensor) -> None: ...
    def dispatch_cached(self, dtype: DType, args: object, rows: object) -> None: ...
    def combine(self, dtype: DType, args: object, combined_x: Tensor, combined_topk_weight_grads: Tensor | None) -> None: ...
    def refuse(self, message: str, cause: int) -> None: ...
    def abandon(self, reason: str) -> None: ...

# low latency (csrc/common/low_latency.h, csrc/runtime/shm/peers.h)
LOW_LATENCY_MAX_TOKENS: int
LOW_LATENCY_MAX_LOCAL_EXPERTS: int
LOW_LATENCY_MAX_HOST_RANKS: int
LOW_LATENCY_MAX_RANKS: int
LOW_LATENCY_REFUSED: int
HAS_LEFT: str

def low_latency_handle_offsets(
    *, num_ranks: int, num_experts: int, num_topk: int, hidden: int, num_max_tokens: int
) -> tuple[int, int, int, int]: ...
def low_latency_gpu_workspace_bytes(*, num_ranks: int, num_experts: int, num_topk: int, hidden: int, num_max_tokens: int) -> int: ...
def low_latency_what(is_combine: bool, dtype: DType, fp8: bool, is_rounded: bool, has_weights: bool) -> int: ...
def describe_low_latency(what: int) -> str: ...

class HostPeers:
    def __init__(self, num_ranks: int, rank: int, segment_bytes: int) -> None: ...
    path: str
    is_owner: bool
    def check_owner(self) -> None: ...
    def connect(self, paths: list[str], pids: list[int]) -> None: ...
    def seal(self) -> None: ...
    def is_mapped(self, rank: int) -> bool: ...
    def memory(self, rank: int) -> memoryview: ...
    def give_back(self, offset: int, num_bytes: int) -> int: ...
    def load(self, rank: int, offset: int) -> int: ...
    def store(self, rank: int, offset: int, value: int) -> None: ...
    def is_gone(self, rank: int) -> bool: ...
    def why_silent(self, rank: int, timeout_s: float) -> tuple[str, str]: ...

def are_waits_hurried() -> bool: ...
def hurry_waits(hurry: bool) -> None: ...

# GPU, only where the build found nvcc (csrc/bindings/cuda, csrc/cuda/params.h, csrc/runtime/nvlink)
MAX_GPU_RANKS: int
MAX_GPU_NODES: int

SHIM_BYTES: int

class GpuTuning:
    ring_warps: int
    ring_stages: int
    uses_bulk_copies: bool
    num_receive_blocks: int
    num_work_blocks: int
    num_sms: int
    num_sms_of_sums: int
    max_sms: int
    num_rail_sms: int

def gpu_add_weight_gradients(grads: Tensor, rows: Tensor, group_ends: Tensor, sums: Tensor, stream: int) -> bool: ...
def gpu_clear_tail(values: Tensor, group_ends: Tensor, stream: int) -> None: ...
def gpu_fp8_product(x: Tensor, x_scales: Tensor, w: Tensor, w_scales: Tensor, group_ends: Tensor, y: Tensor, stream: int) -> None: ...
def gpu_fp8_weight_gradient(
    dy_t: Tensor, dy_t_scales: Tensor, x_t: Tensor, x_t_scales: Tensor, group_ends: Tensor, out: Tensor, is_fp32: bool, stream: int
) -> None: ...
def gpu_quantize(x: Tensor, y: Tensor, scales: Tensor, is_rounded: bool, dtype: DType, stream: int) -> None: ...
def gpu_quantize_weights(
    w: Tensor,
    matrix_stride: int,
    y: Tensor | None,
    scales: Tensor | None,
    y_t: Tensor | None,
    scales_t: Tensor | None,
    dtype: DType,
    stream: int,
) -> None: ...
def gpu_swiglu(inner: Tensor, probs: Tensor | None, group_ends: Tensor | None, y: Tensor, dtype: DType, stream: int) -> None: ...
def gpu_swiglu_backward(
    inner: Tensor,
    probs: Tensor | None,
    group_ends: Tensor | None,
    y: Tensor | None,
    grad: Tensor,
    grad_inner: Tensor,
    grad_probs: Tensor | None,
    dtype: DType,
    stream: int,
) -> None: ...
def gpu_weighted_sum(rows: Tensor, weights: Tensor, is_by_token: bool, is_fused: bool, sums: Tensor, dtype: DType, stream: int) -> None: ...
def gpu_weighted_sum_backward(
    rows: Tensor,
    weights: Tensor,
    is_by_token: bool,
    grad: Tensor,
    grad_rows: Tensor,
    grad_weights: Tensor,
    dtype: DType,
    stream: int,
) -> None: ...
def gpu_workspace_bytes(*, num_ranks: int, num_experts: int, num_topk: int, hidden: int, num_max_tokens: int) -> int: ...

class _GpuWorkspace:
    """The methods of both classes below."""

    workspace_bytes: int
    rail_bytes: int
    num_calls: int
    def attach_rail(self, shim: object, addresses: list[int], pes: list[int]) -> None: ...
    def leak(self) -> None: ...
    def handle(self) -> bytes: ...
    def share(self) -> int: ...
    def connect(self, handles: Sequence[bytes], descriptors: list[int]) -> None: ...
    def disconnect(self) -> None: ...
    def free(self) -> None: ...
    def resume(self) -> None: ...
    def check(self) -> None: ...
    def shim(self) -> object: ...
    @staticmethod
    def raise_failure() -> None: ...

class NvlinkLowLatency(_GpuWorkspace):
    def __init__(
        self,
        *,
        num_ranks: int,
        rank: int,
        device: int,
        num_experts: int,
        num_topk: int,
        hidden: int,
        num_max_tokens: int,
        lanes: int,
        timeout_s: float,
        mask_stalled: bool,
        ranks_per_node: int,
    ) -> None: ...
    failed_mark: int
    handle_bytes: int
    masks: int
    num_blocks: int
    def mask(self, rank: int, masked: bool, stream: int) -> None: ...
    def rejoin(self, stream: int) -> None: ...
    def refuse(self, reason: str, stream: int) -> None: ...

class NvlinkExchange(_GpuWorkspace):
    def __init__(
        self,
        *,
        num_ranks: int,
        rank: int,
        device: int,
        num_experts: int,
        num_topk: int,
        hidden: int,
        num_max_tokens: int,
        timeout_s: float,
        num_nodes: int = 1,
        node: int = 0,
        is_by_lane: bool = False,
        expert_slot_bytes: int = 0,
    ) -> None: ...
    def leave(self) -> None: ...
    num_multiprocessors: int
    tuning: GpuTuning
    is_void: bool
    allows_excess: bool
    def refuse(self, reason: str, cause: int, stream: int) -> None: ...
    expert_slots: int
    def move_experts(
        self,
        *,
        copies: Tensor,
        slots: list[Tensor],
        home: list[Tensor],
        home_strides: list[int],
        returns: bool,
        slot_dtype: DType,
        home_dtype: DType,
        num_sms: int,
        stream: int,
    ) -> None: ...
    def settle(self) -> int: ...
    def check_untold(self) -> None: ...

# the gate on a GPU (csrc/common/gate.h), only where the build found nvcc
MAX_GPU_GATE_EXPERTS: int

def gpu_gate_check(device: int) -> None: ...
def gpu_kernel_shim() -> object: ...
def gpu_plan_copies(
    topk_idx: Tensor,
    counts: Tensor,
    copies: Tensor,
    rows: Tensor,
    physical_topk_idx: Tensor,
    rank: int,
    cost: int,
    capacity: int,
    stream: int,
) -> None: ...
def gpu_rows_of_copies(rows: Tensor, of_copies: Tensor, group_ends: Tensor, num_home: int, is_back: bool, stream: int) -> None: ...
def gpu_top2(
    gates: Tensor,
    scores: Tensor,
    capacity: int,
    chosen: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    is_first: Tensor,
    counts: Tensor,
    stream: int,
) -> None: ...
def gpu_top2_backward(
    gates: Tensor,
    chosen: Tensor,
    topk_idx: Tensor,
    grad: Tensor | None,
    grad_loss: Tensor | None,
    load: Tensor,
    grad_gates: Tensor,
    stream: int,
) -> None: ...
