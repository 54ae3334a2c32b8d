"""Native library: tensors are addresses (`Tensor.data_ptr()`, 0 for none) of contiguous memory; sizes are counts of elements."""

from typing import Any

__version__: str

class DType:
    float32: DType
    bfloat16: DType
    float16: DType
    float8: DType

# gate (csrc/cpu/gate.h)
MAX_TOPK: int

class GateOptions:
    def __init__(
        self,
        *,
        num_tokens: int,
        num_experts: int,
        num_topk: int,
        num_groups: int,
        topk_groups: int,
        group_score_topk: int,
        score_function: str,
        normalize: bool,
        routed_scaling_factor: float,
        dtype: DType,
        index64: bool,
        num_threads: int,
    ) -> None: ...

def gate_forward(
    options: GateOptions,
    *,
    logits_ptr: int,
    expert_bias_ptr: int,
    mask_ptr: int,
    topk_idx_ptr: int,
    topk_weights_ptr: int,
    num_tokens_per_expert_ptr: int,
) -> None: ...
def gate_backward(
    options: GateOptions, *, logits_ptr: int, topk_idx_ptr: int, grad_topk_weights_ptr: int, grad_logits_ptr: int
) -> None: ...

def __getattr__(name: str) -> Any: ...  # the exchange's bindings
