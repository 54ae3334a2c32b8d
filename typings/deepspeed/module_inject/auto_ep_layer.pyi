from typing import NamedTuple

import torch.distributed as dist
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from torch import Tensor, nn

class RouterOutput(NamedTuple):
    top_scores: Tensor
    selected_experts: Tensor
    num_tokens_per_expert: Tensor

class AutoEPMoELayer(nn.Module):
    combine_impl: str
    ep_group: dist.ProcessGroup  # None before `deepspeed.initialize`
    ep_size: int
    expert_bias: Tensor | None
    experts: nn.Module
    moe_output_shape: str
    num_local_experts: int
    return_router_logits: bool
    router: TokenChoiceTopKRouter
    score_apply: str
    shared_experts: nn.Module | None
    shared_experts_gate: nn.Module | None
    tokens_per_expert: Tensor
    top_k: int

    def __setstate__(self, state: dict[str, object]) -> None: ...
    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]: ...
    def _deepep_route(self, tokens: Tensor, router_output: object) -> Tensor: ...
