"""`enable(sums=)`: the layer applies the probs at the token's rank, and its sum is the same on any number of ranks."""

from contextlib import nullcontext

import pytest
import torch
from megatron_cases import BF16, HIDDEN, RECOMPUTED, layer_of, model_parallel

from deepep_moe.testing import run_ranks

pytest.importorskip("megatron.core")


def step(rank: int, _: int, device: str, ep: int, changes: dict) -> list:
    """Return the output and the gradients of a layer whose experts multiply the rows of expert e by e + 1."""
    with model_parallel(device, ep=ep, sums="lanes") as sizes:
        layer = layer_of(sizes, **BF16, **changes)
        seen = []

        def experts(rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
            seen.append(probs)
            factors = torch.tensor([expert + 1.0 for expert in layer.local_expert_indices], device=rows.device)
            counts = tokens_per_expert.to(rows.device)
            factors = torch.cat((factors, factors.new_zeros(1))).repeat_interleave(torch.cat((counts, len(rows) - counts.sum()[None])))
            return rows * factors[:, None].to(rows.dtype), None

        layer.experts.forward = experts
        x = torch.randn(12, 1, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
        x = x.to(next(layer.parameters()).device).requires_grad_()
        with torch.autocast("cpu", enabled=False) if device == "cpu" else nullcontext():
            y = layer(x)[0]
        y.float().square().sum().backward()
        assert seen and all((probs == 1).all() and not probs.requires_grad for probs in seen)
        return [tensor.detach().float().tolist() for tensor in (y, x.grad, layer.router.weight.grad)]


@pytest.mark.parametrize("changes", ({}, RECOMPUTED), ids=("plain", "recomputed"))
@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(2))))
def test_same_bits(device: str, changes: dict) -> None:
    alone, spread = (run_ranks(step, 2, device, ep, changes) for ep in (1, 2))  # NCCL's groups end with their processes
    assert spread == alone
