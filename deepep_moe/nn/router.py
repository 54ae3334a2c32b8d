"""The router: a linear map from hidden states to expert logits, and the gate."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepep_moe.arguments import as_int, check_bool
from deepep_moe.ops.balance import update_expert_bias
from deepep_moe.ops.gate import OPTIONS, GateOutput, check_options, gate


class Router(nn.Module):
    """Decides which experts each token goes to.

    Args:
        hidden: size of a token.
        num_experts: experts of all ranks.
        num_topk: experts per token.
        expert_bias: keep a bias per expert that balances the load without an auxiliary loss (arXiv 2408.15664). `update_expert_bias`
            moves it.
        num_groups, topk_groups, group_score_topk, score_function, normalize, routed_scaling_factor, index_dtype, check_finite: as in
            `deepep_moe.ops.gate`.
        compute_dtype: dtype of the linear map. Inputs and weight are cast to it; autocast does not apply.
        device, dtype: those of `weight`.

    Attributes:
        weight: `[num_experts, hidden]` parameter.
        expert_bias: `[num_experts]` fp32 buffer, or None. It stays fp32 when the module is cast.
        num_tokens_per_expert: `[num_experts]` int64 buffer, counted in training mode (with gradients enabled) since the last
            `update_expert_bias`; or None. Not part of the state dict. A forward that non-reentrant `torch.utils.checkpoint` runs again
            counts twice. The bias still moves in the right direction if all micro-batches of a step do so.

    Raises:
        TypeError: a setting has another type.
        ValueError: a setting is out of bounds.
    """

    expert_bias: Tensor | None
    num_tokens_per_expert: Tensor | None

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        expert_bias: bool = False,
        num_groups: int = 1,
        topk_groups: int = 1,
        group_score_topk: int = 2,
        score_function: str = "sigmoid",
        normalize: bool = True,
        routed_scaling_factor: float = 1.0,
        index_dtype: torch.dtype = torch.int64,
        check_finite: bool = True,
        compute_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        hidden, num_experts = as_int("hidden", hidden), as_int("num_experts", num_experts)
        check_bool("expert_bias", expert_bias)
        check_bool("check_finite", check_finite)
        num_topk, *values = check_options(
            num_experts, num_topk, num_groups=num_groups, topk_groups=topk_groups, group_score_topk=group_score_topk,
            score_function=score_function, normalize=normalize, routed_scaling_factor=routed_scaling_factor,
        )  # fmt: skip
        self.hidden, self.num_experts, self.num_topk = hidden, num_experts, num_topk
        self.gate_options: dict[str, Any] = {
            **dict(zip(OPTIONS, values, strict=True)),
            "index_dtype": index_dtype,
            "check_finite": check_finite,
        }
        self.compute_dtype = compute_dtype
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype))
        bias = torch.zeros(num_experts, device=device, dtype=torch.float32) if expert_bias else None
        counts = torch.zeros(num_experts, device=device, dtype=torch.int64) if expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.register_buffer("num_tokens_per_expert", counts, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as `torch.nn.Linear` does, and set bias and counts to zero."""
        bound = 1 / math.sqrt(self.hidden)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.expert_bias is not None and self.num_tokens_per_expert is not None:
            self.expert_bias.zero_()
            self.num_tokens_per_expert.zero_()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> GateOutput:
        """Route the tokens of `x` [..., hidden], viewed as [num_tokens, hidden].

        Args:
            x: hidden states of any floating-point dtype.
            mask: `[num_tokens]` bool, True for tokens to leave out.

        Returns:
            `GateOutput(topk_idx, topk_weights, num_tokens_per_expert)`; see `deepep_moe.ops.GateOutput`.

        Raises:
            ValueError, TypeError: see `deepep_moe.ops.gate`.
        """
        output = gate(self.logits(x), self.num_topk, expert_bias=self.expert_bias, mask=mask, **self.gate_options)
        if self.num_tokens_per_expert is not None and self.training and torch.is_grad_enabled():
            self.num_tokens_per_expert += output.num_tokens_per_expert
        return output

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits `[num_tokens, num_experts]` in `compute_dtype`, differentiable, as `deepep_moe.ops.gate_full` takes them.

        Raises:
            ValueError: x has another width, or the weight has no values yet.
        """
        if x.shape[-1] != self.hidden:
            raise ValueError(f"x has shape {list(x.shape)}; its last dimension must be hidden, {self.hidden}")
        if self.weight.is_meta and not x.is_meta:  # PyTorch multiplies them without an error
            raise ValueError("the router's weight is on meta, so it has no values; load or initialize the model before its first forward")
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x.reshape(-1, self.hidden).to(self.compute_dtype), self.weight.to(self.compute_dtype))

    def update_expert_bias(self, rate: float, group: dist.ProcessGroup | None = None) -> None:
        """Apply `deepep_moe.ops.update_expert_bias` to the counts, summed over the ranks, and clear them.

        Call it once per optimizer step, on every rank of the group. group: all ranks that hold a copy of this router. None: the default
        group if torch.distributed is initialized, else this process alone.

        Raises:
            ValueError: the router was made without `expert_bias=True`.
        """
        if self.expert_bias is None or self.num_tokens_per_expert is None:
            raise ValueError("this router has no expert_bias to update; make it with Router(..., expert_bias=True)")
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        update_expert_bias(self.expert_bias, self.num_tokens_per_expert, rate, group)
        self.num_tokens_per_expert.zero_()

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.gate_options.items())
        return f"hidden={self.hidden}, num_experts={self.num_experts}, num_topk={self.num_topk}, {options}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        # Casting the module must not round the bias: its steps are smaller than half precision resolves.
        bias = self.expert_bias
        torch.nn.Module._apply(self, fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self
