from torch import Tensor, nn

class TokenChoiceTopKRouter(nn.Module):
    e_score_correction_bias: Tensor | None
    gate: nn.Linear
    group_score_func: str
    num_expert_groups: int | None
    num_experts: int
    num_limited_groups: int | None
    route_norm: bool
    route_scale: float
    score_func: str
    top_k: int

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]: ...
