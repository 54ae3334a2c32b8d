from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.experts import Experts
from torch import Tensor, nn

FIRST_ALLTOALL_TIMER: str
MOE_TIMER: str
SECOND_ALLTOALL_TIMER: str
exp_selection_uniform_map: dict[torch.device, Callable[[torch.Size], Tensor]]

def __getattr__(name: str) -> Any: ...
def gumbel_rsample(shape: torch.Size, device: torch.device) -> Tensor: ...

class TopKGate(nn.Module):
    def __getattr__(self, name: str) -> Any: ...

class MOELayer(nn.Module):
    ep_group: dist.ProcessGroup  # None before `deepspeed.initialize`
    ep_size: int
    experts: Experts
    gate: TopKGate
    num_local_experts: int
    timers: Callable[[str], Any]
    use_tutel: bool
    wall_clock_breakdown: bool

    def __setstate__(self, state: dict[str, object]) -> None: ...
    def forward(self, *inputs: Tensor, **kwargs: Any) -> Tensor: ...
