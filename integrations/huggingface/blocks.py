"""The experts of a MoE block of transformers, each rank with its share of them."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepep_moe.exchange.buffer import Buffer
from deepep_moe.exchange.failures import notify_peers_on_failure
from deepep_moe.nn import GroupedExperts


class SpreadExperts(nn.Module):
    """Takes the place of a block's `experts`, and is called as they are. The block keeps its router and its shared experts.

    Attributes:
        experts: `GroupedExperts` with the weights of this rank's experts.
        buffer: the exchange, which blocks of one size share.
    """

    def __init__(self, experts: nn.Module, buffer: Buffer):
        super().__init__()
        up, down = _weights(experts)
        own = slice(buffer.rank * buffer.num_local_experts, (buffer.rank + 1) * buffer.num_local_experts)
        num_local, inner, hidden = up[own].shape
        self.buffer = buffer
        self.experts = GroupedExperts(num_local, hidden, inner // 2, device="meta")
        self.experts.up, self.experts.down = (
            nn.Parameter(weight[own].detach().clone(), requires_grad=weight.requires_grad) for weight in (up, down)
        )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: [num_tokens, hidden]. top_k_index, top_k_weights: [num_tokens, num_topk]. Returns the shape of hidden_states.

        Collective over the buffer's group. Raises what `Buffer.dispatch` and `GroupedExperts` raise.
        """
        out = notify_peers_on_failure(self.buffer, self._dispatch, hidden_states, top_k_index, top_k_weights)
        return notify_peers_on_failure(self.buffer, self._combine, out).view(hidden_states.shape)

    def _dispatch(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        return self.buffer.dispatch(rows, top_k_index, top_k_weights.float())

    def _combine(self, out: Any) -> Tensor:
        y = self.experts(out.recv_x, out.handle.num_rows_per_expert)
        return self.buffer.combine(y.contiguous(), out.handle, out.recv_topk_weights)


def spread_experts(
    model: nn.Module,
    *,
    num_topk: int | None = None,
    group: "dist.ProcessGroup | None" = None,
    num_max_tokens_per_rank: int = 4096,
    backend: str = "auto",
) -> list[str]:
    """Replace the experts of every MoE block of `model` by this rank's share of them, which tokens of all ranks reach.

    Call it on every rank, with the same weights on all of them, once these are loaded and lie on their device, and before an optimizer or
    `DistributedDataParallel` takes the parameters. Outputs stay those of the model, up to the order of sums. The memory of a rank's experts
    shrinks by the number of ranks.

    Args:
        model: its blocks have `experts` with `gate_up_proj [num_experts, 2 * intermediate, hidden]` and `down_proj [num_experts, hidden,
            intermediate]`, SwiGLU without biases, called with (hidden_states, top_k_index, top_k_weights): Mixtral, Qwen MoE, DeepSeek-V2
            and -V3, GLM-4 MoE, OLMoE and others.
        num_topk: experts of a token. None: `model.config.num_experts_per_tok`.
        group, num_max_tokens_per_rank, backend: as for `Buffer`.

    Returns:
        The names of the modules that were replaced.

    Raises:
        ValueError: no block has this shape, an expert has biases or another activation, or the top-k is not known. And whatever `Buffer`
            raises, such as for a number of experts that the ranks do not divide.
    """
    if num_topk is None:
        num_topk = getattr(getattr(model, "config", None), "num_experts_per_tok", None)
    if num_topk is None:
        raise ValueError("num_topk is None, and the model has no config.num_experts_per_tok; pass num_topk")
    found = {name: module for name, module in model.named_modules() if name.split(".")[-1] == "experts" and _is_stack(module)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no module `experts` with gate_up_proj [num_experts, 2 * intermediate, hidden] and down_proj "
            "[num_experts, hidden, intermediate]; transformers 5 and newer has them so"
        )
    for name, experts in found.items():
        _check(name, experts)
    buffers: dict[tuple[int, int], Buffer] = {}
    for name, experts in found.items():
        up, _ = _weights(experts)
        sizes = up.shape[2], up.shape[0]
        if sizes not in buffers:
            buffers[sizes] = Buffer(group, num_max_tokens_per_rank, *sizes, num_topk, backend=backend)
        model.get_submodule(name.rpartition(".")[0]).experts = SpreadExperts(experts, buffers[sizes])
    return list(found)


def expert_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that differ from rank to rank. Leave them out of an average over ranks: their gradients have the tokens of all ranks
    already. With a loss averaged over R ranks, divide them by R."""
    for module in model.modules():
        if isinstance(module, SpreadExperts):
            yield from module.experts.parameters()


def _weights(experts: nn.Module) -> tuple[Tensor, Tensor]:
    return experts.gate_up_proj, experts.down_proj  # type: ignore[return-value]


def _is_stack(module: nn.Module) -> bool:
    up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not (isinstance(up, Tensor) and isinstance(down, Tensor) and up.dim() == down.dim() == 3):
        return False
    num_experts, inner, hidden = up.shape
    return down.shape == (num_experts, hidden, inner // 2) and inner % 2 == 0


def _check(name: str, experts: nn.Module) -> None:
    biases = [bias for bias in ("gate_up_proj_bias", "down_proj_bias") if getattr(experts, bias, None) is not None]
    if biases:
        raise ValueError(f"{name} has {' and '.join(biases)}; only experts without biases can be spread")
    activation, x = getattr(experts, "act_fn", None), torch.linspace(-3, 3, 7)
    if not callable(activation) or not torch.allclose(activation(x), nn.functional.silu(x)):
        raise ValueError(f"{name} has the activation {activation!r}; only experts with SiLU can be spread")
