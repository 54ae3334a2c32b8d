"""The layers that the benchmark of fp8 experts compares: ours in bf16 and fp8, and Megatron-Core's with TransformerEngine."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.layers.passes import Pass, draw_inputs
from deepep_moe.nn import GroupedExperts, MoELayer, Router
from deepep_moe.ops.fp8_products import GROUP_ALIGNMENT
from deepep_moe.ops.routing import is_token_in_rank

BF16, EACH, SHARED = "bf16", "fp8", "fp8, micro-batches"


class Layer(Pass):
    """A pass that knows which micro-batch it is."""

    def __init__(
        self, run: Callable[[bool | None], Tensor], cotangent: Tensor, leaves: dict[str, Tensor], *, backend: str,
        release: Callable[[], None], period: int | None = None,
    ):  # fmt: skip
        """`run` takes whether this is the first micro-batch of `period`. None: there are no micro-batches."""
        super().__init__(self._next, cotangent, leaves)
        self._run, self._period, self._number = run, period, 0
        self.backend, self._release = backend, release

    def _next(self) -> Tensor:
        number, self._number = self._number, self._number + 1
        return self._run(None if self._period is None else number % self._period == 0)

    def release(self) -> None:
        """Drop copies of weights, and begin with a first micro-batch."""
        self._number = 0
        self._release()


def _inputs(options: argparse.Namespace, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    x, cotangent = draw_inputs(rank, (options.num_tokens, options.hidden), device, torch.bfloat16)
    return x, cotangent * 1e-3


def make_layers(options: argparse.Namespace, rank: int, num_ranks: int, device: torch.device) -> tuple[dict[str, Layer], int]:
    """Return our layers by name, which share router, experts and buffer, and the rows that this rank sends in a dispatch. A token has one
    for each rank that it goes to, including this rank."""
    num_local_experts = options.num_experts // num_ranks
    torch.manual_seed(1)
    router = Router(options.hidden, options.num_experts, options.num_topk, device=device)
    torch.manual_seed(2 + rank)
    sizes = num_local_experts, options.hidden, options.ffn_hidden
    experts = GroupedExperts(*sizes, zero_tail=False, device=device, dtype=torch.bfloat16)
    most = num_ranks * options.num_tokens * min(options.num_topk, num_local_experts)
    num_rows = (-(-most // GROUP_ALIGNMENT) + num_local_experts) * GROUP_ALIGNMENT
    how: dict[str, Any] = {"expert_alignment": GROUP_ALIGNMENT, "num_recv_rows": num_rows}
    exact = MoELayer(router, experts, num_max_tokens_per_rank=options.num_tokens, backend=options.backend, **how)
    fp8 = MoELayer(router, experts, buffer=exact.buffer, fp8=True, **how)
    x, cotangent = _inputs(options, rank, device)
    leaves = {"input": x} | dict(fp8.named_parameters())

    def layer(module: MoELayer, period: int | None = None) -> Layer:
        how: dict[str, Any] = {"backend": module.buffer.backend, "release": experts.release_fp8_weights, "period": period}
        return Layer(lambda is_first: module(x, is_first_microbatch=is_first), cotangent, leaves, **how)

    layers = {BF16: layer(exact), EACH: layer(fp8), SHARED: layer(fp8, options.micro_batches)}
    with torch.no_grad():
        topk_idx = router(x)[0]
    return layers, int(is_token_in_rank(topk_idx, num_ranks, num_local_experts).sum())


# ---- Megatron-Core with TransformerEngine ----


def make_rivals(options: argparse.Namespace, rank: int, num_ranks: int, device: torch.device) -> dict[str, Layer]:
    """Return Megatron-Core's layers with the dispatcher `alltoall` and fp8 experts, which share one module. Their activation is fused by
    `torch.compile`."""
    from benchmarks.layers import megatron_layers

    torch.compiler.set_stance("default")
    sizes = {name: getattr(options, name) for name in ("hidden", "ffn_hidden", "num_experts", "num_topk")}
    x, cotangent = _inputs(options, rank, device)
    x = x.detach().unsqueeze(1).requires_grad_()
    module = megatron_layers.te_fp8_layer(seed=1, ep=num_ranks, dtype=torch.bfloat16, **sizes)
    leaves = {"input": x} | dict(module.named_parameters())

    def layer(period: int) -> Layer:
        how: dict[str, Any] = {"backend": "alltoall", "release": partial(megatron_layers.release_te_copies, module), "period": period}
        return Layer(partial(megatron_layers.run_te_layer, module, x), cotangent.unsqueeze(1), leaves, **how)

    return {f"alltoall, TE {EACH}": layer(1), f"alltoall, TE {SHARED}": layer(options.micro_batches)}
