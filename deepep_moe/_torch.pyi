"""The classes of csrc/torch that annotations name; csrc/torch/module.cpp has all."""

from torch import Tensor, device

from deepep_moe._C import NvlinkLowLatencyShim

class Recorded:
    def __init__(self, device: device) -> None: ...
    def wait(self) -> None: ...
    def query(self) -> bool: ...

class SecondHalf:
    def finish(self) -> bool: ...

class InFlight:
    second_half: SecondHalf | None
    recorded: Recorded | None

class LowLatencyReceived(InFlight):
    num_tokens: int
    recv_x: Tensor
    recv_x_scales: Tensor | None
    num_recv_tokens_per_expert: Tensor
    state: Tensor

class LowLatencyCombined(InFlight):
    combined_x: Tensor

class LowLatencyCalls:
    def __init__(
        self,
        *,
        shim: NvlinkLowLatencyShim,
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
