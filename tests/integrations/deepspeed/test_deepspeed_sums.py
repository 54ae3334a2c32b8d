"""`sums` of swapped layers: results are those of the definition, and the same bits on 1, 2 and 4 ranks."""

import pytest
import torch
from autoep_cases import Case, autoep_layers, build_engine
from deepspeed_cases import HIDDEN, Expert, make_moe, on_deepspeed_ranks
from torch import nn

from deepep_moe import reference
from deepep_moe.integrations.deepspeed import replace_moe_layers

pytest.importorskip("deepspeed")

SUMS = pytest.mark.parametrize("sums", ("lanes", "lanes_fma"))
DEVICES = pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(4))))
FACTORS = torch.linspace(0.3, 2.9, 8).bfloat16()  # of the experts, whose outputs so do not depend on other rows


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def run(layer: nn.Module, rank: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The output of rows [1, 30 + rank, HIDDEN], and the gradients of the rows and of the gate."""
    generator = torch.Generator().manual_seed(rank)
    x, cotangent = (torch.randn(1, 30 + rank, HIDDEN, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    torch.manual_seed(0)
    y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    (y * cotangent).float().sum().backward()
    (gate,) = (parameter for name, parameter in layer.named_parameters() if "gate" in name and "expert" not in name)
    return y.detach(), x.grad, gate.grad.clone()


def defined(rank: int, idx: torch.Tensor, weights: torch.Tensor, sums: str) -> torch.Tensor:
    """The output for the choice [num_tokens, num_topk], by the reference."""
    x = torch.randn(1, 30 + rank, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()[0]
    received = reference.dispatch([x], [idx.long().cpu()], [weights.detach().float().cpu()], 8)
    y = received[0].recv_x * FACTORS.repeat_interleave(torch.tensor(received[0].num_recv_tokens_per_expert))[:, None]
    return reference.combine([y], received, [len(x)], [received[0].recv_topk_weights], sums=sums)[0]


@DEVICES
@SUMS
@pytest.mark.parametrize("k", (2, 4))
@on_deepspeed_ranks(4)
def test_native_layers(rank, k, sums, device):
    from deepep_moe.integrations.deepspeed.native.routing import route

    results = []
    for ep in (1, 2, 4):
        torch.manual_seed(3)
        layer = make_moe(8, k=k, ep=ep, expert=Scaled(), capacity_factor=1.5).to(device).bfloat16()
        moe = layer.deepspeed_moe
        for expert, factor in zip(moe.experts.deepspeed_experts, FACTORS.tensor_split(ep)[rank % ep].tolist(), strict=True):
            expert.factor.data.fill_(factor)
        assert replace_moe_layers(layer, exact=False, sums=sums) == 1
        results.append(run(layer, rank, device))
    assert all(map(torch.equal, results[0] * 2, results[1] + results[2]))
    rows = torch.randn(1, 30 + rank, HIDDEN, generator=torch.Generator().manual_seed(rank)).to(device, torch.bfloat16)[0]
    torch.manual_seed(0)
    routing = route(moe.gate, rows, None)
    assert torch.equal(results[0][0][0].cpu(), defined(rank, routing.topk_idx.t(), routing.topk_weights.t(), sums))
    replace_moe_layers(layer, exact=False)
    assert not torch.equal(run(layer, rank, device)[0], results[0][0]), "sums by ranks are others"


@DEVICES
@SUMS
@on_deepspeed_ranks(4)
def test_autoep_layers(rank, sums, device):
    pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="AutoEP came with DeepSpeed 0.19.2")
    results = []
    for ep in (1, 2, 4):
        layer = autoep_layers(build_engine(Case("deepseek_v3", ep=ep, exact=False, score_apply="post"), True, sums=sums))[0].bfloat16()
        factors = FACTORS.to(device).tensor_split(ep)[rank % ep]
        layer.shared_experts = None
        layer.experts.forward = lambda rows, counts, factors=factors: rows * factors.repeat_interleave(counts)[:, None]
        results.append(run(layer, rank, device))
    assert all(map(torch.equal, results[0] * 2, results[1] + results[2]))


@on_deepspeed_ranks()
def test_refusals(rank):
    """Where DeepSpeed's own dispatch would run, and where scores are applied before the experts."""
    layer = make_moe(k=2, expert=Expert())
    replace_moe_layers(layer, exact=False, sums="lanes")
    with pytest.raises(ValueError, match=r"sums is 'lanes', but DeepSpeed's own dispatch would run: rows are torch.float64"):
        layer(torch.ones(1, 4, HIDDEN, dtype=torch.float64))
    pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="AutoEP came with DeepSpeed 0.19.2")
    layer = autoep_layers(build_engine(Case("deepseek_v3", exact=False, score_apply="pre"), True, sums="lanes"))[0]
    with pytest.raises(ValueError, match="score_apply is 'pre', which applies scores before the experts"):
        layer(torch.ones(1, 4, HIDDEN))
