"""Top-2 gating in GPU kernels, as one autograd function, because the host limits the speed of a layer with few experts per token.

Decisions, weights, loss and gradients equal those of the operations in `gates` to the bit.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.device import current_stream, is_gpu, on_device
from deepep_moe.library import Context

_ALL = 2**31  # the capacity of an expert that takes all tokens
Decided = tuple[Tensor, Tensor, Tensor, Tensor]


def has_kernels(logits: Tensor) -> bool:
    return is_gpu(logits.device) and hasattr(_C, "gpu_top2") and len(logits) > 0


class Top2(torch.autograd.Function):
    """Computes `by_operations(logits, scores, capacity)`, which it calls for the second derivative only.

    logits and scores are [num_tokens > 0, num_experts] fp32. scores have no gradient, and the second choices are the best of them.
    capacity is the most tokens of an expert, or None. Returns l_aux, counts [num_experts] int64, topk_idx [2, num_tokens] int32 with -1
    for dropped, and topk_weights [2, num_tokens] fp32.
    """

    @staticmethod
    def forward(ctx: Context, logits: Tensor, scores: Tensor, capacity: int | None, by_operations: Callable[..., Decided]) -> Decided:
        gates, scores = logits.softmax(1), scores.contiguous()
        num_tokens, num_experts = gates.shape
        chosen, topk_idx = (gates.new_empty(2, num_tokens, dtype=torch.int32) for _ in range(2))
        topk_weights, is_first = gates.new_empty(2, num_tokens), torch.empty_like(gates)
        counts = gates.new_empty(num_experts, dtype=torch.int64)
        with on_device(gates):
            _C.gpu_top2(
                gates=gates, scores=scores, capacity=_ALL if capacity is None else capacity, chosen=chosen, topk_idx=topk_idx,
                topk_weights=topk_weights, is_first=is_first, counts=counts, stream=current_stream(gates.device),
            )  # fmt: skip
        load = is_first.mean(0)
        l_aux = torch.mean(gates.mean(0) * load) * num_experts * num_experts
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(counts, topk_idx)
        ctx.save_for_backward(logits, scores, gates, chosen, topk_idx, load)
        ctx.again = capacity, by_operations
        return l_aux, counts, topk_idx, topk_weights

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        grad_l_aux, _, _, grad_weights = grads
        if grad_l_aux is None and grad_weights is None:
            return None, None, None, None
        logits, scores, gates, chosen, topk_idx, load = ctx.saved_tensors
        if torch.is_grad_enabled():
            capacity, by_operations = ctx.again
            l_aux, _, _, topk_weights = by_operations(logits, scores, capacity)
            wanted = [(out, grad) for out, grad in ((l_aux, grad_l_aux), (topk_weights, grad_weights)) if grad is not None]
            outputs, given = zip(*wanted, strict=True)
            return *torch.autograd.grad(outputs, logits, given, create_graph=True), None, None, None
        grad_weights = None if grad_weights is None else grad_weights.contiguous()
        grad_gates = torch.empty_like(gates)
        with on_device(gates):
            _C.gpu_top2_backward(
                gates=gates, chosen=chosen, topk_idx=topk_idx, grad=grad_weights, grad_loss=grad_l_aux, load=load, grad_gates=grad_gates,
                stream=current_stream(gates.device),
            )  # fmt: skip
        return torch.ops.aten._softmax_backward_data(grad_gates, gates, 1, torch.float32), None, None, None
