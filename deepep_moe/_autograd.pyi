"""Of csrc/autograd: what only deepep_moe/torch_ops.py and deepep_moe/autograd_module.py call."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, device

TORCH_VERSION: str
GPU_CALLS_BYTES: int

class ByExpert:
    def __init__(
        self,
        *,
        communicator: Any,
        number: int,
        num_ranks: int,
        num_local_experts: int,
        num_topk: int,
        hidden: int,
        num_max_tokens: int,
        num_sms: int,
        num_sms_of_sums: int,
        device: device,
        shape_of: Callable[[int], Any],
        current_stream: Callable[[], int],
        abort: Callable[[Exception], None],
    ) -> None: ...
    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, num_leading: int, repeats: int
    ) -> tuple[Any, ...] | None: ...
    def combine(
        self,
        parts: Sequence[Tensor],
        weights: Tensor | None,
        at_source: Tensor | None,
        memory: Tensor,
        call: Tensor,
        starts: tuple[int, ...],
        num_rows: int,
        num_tokens: int,
    ) -> Tensor | None: ...

def set_hooks(
    *, plain: Callable[[int], ByExpert | None], dispatch_gradients: Callable[..., Any], combine_gradients: Callable[..., Any]
) -> None: ...
