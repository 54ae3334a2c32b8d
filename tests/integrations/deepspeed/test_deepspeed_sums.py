"""`sums` of swapped layers: results are those of the reference, and the same bits on 1, 2 and 4 ranks."""

import pytest
import torch
from autoep_cases import Case, autoep_layers, build_engine
from deepspeed_cases import HIDDEN, Expert, make_moe, on_deepspeed_ranks

from deepep_moe import reference
from deepep_moe.integrations.deepspeed import replace_moe_layers

pytest.importorskip("deepspeed")

FACTORS = torch.linspace(0.3, 2.9, 8).bfloat16()  # by which experts scale rows, so that outputs do not depend on other rows


def rows_of(rank):
    return torch.randn(1, 30 + rank, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()


def run(layer, rank):
    """The output, and the gradients of the rows and of the gate."""
    x = rows_of(rank).requires_grad_()
    torch.manual_seed(0)
    y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    y.float().square().sum().backward()
    (gate,) = (parameter for name, parameter in layer.named_parameters() if "gate" in name and "expert" not in name)
    return y.detach(), x.grad, gate.grad


@on_deepspeed_ranks(4, k=(2, 4), sums=("lanes", "lanes_fma"))
def test_native_layers(rank, k, sums):
    from deepep_moe.integrations.deepspeed.native.routing import route

    results = []
    for ep in (1, 2, 4):
        torch.manual_seed(3)
        moe = (layer := make_moe(8, k=k, ep=ep, capacity_factor=1.5).bfloat16()).deepspeed_moe
        for expert, factor in zip(moe.experts.deepspeed_experts, FACTORS.tensor_split(ep)[rank % ep], strict=True):
            expert.forward = lambda rows, factor=factor: rows * factor
        assert replace_moe_layers(layer, exact=False, sums=sums) == 1
        results.append(run(layer, rank))
    assert all(map(torch.equal, results[0] * 2, results[1] + results[2]))
    x = rows_of(rank)[0]
    torch.manual_seed(0)
    routing = route(moe.gate, x, None)
    received = reference.dispatch([x], [routing.topk_idx.t().long()], [routing.topk_weights.t().detach()], 8)
    y = received[0].recv_x * FACTORS.repeat_interleave(torch.tensor(received[0].num_recv_tokens_per_expert))[:, None]
    assert torch.equal(results[0][0][0], reference.combine([y], received, [len(x)], [received[0].recv_topk_weights], sums=sums)[0])


@on_deepspeed_ranks(4, sums=("lanes", "lanes_fma"))
def test_autoep_layers(rank, sums):
    pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="AutoEP came with DeepSpeed 0.19.2")
    results = []
    for ep in (1, 2, 4):
        engine = build_engine(Case("deepseek", ep=ep, exact=False, score_apply="post"), True, sums=sums)
        layer, factors = autoep_layers(engine)[0].bfloat16(), FACTORS.tensor_split(ep)[rank % ep]
        layer.shared_experts = None
        layer.experts.forward = lambda rows, counts, factors=factors: rows * factors.repeat_interleave(counts)[:, None]
        results.append(run(layer, rank))
    assert all(map(torch.equal, results[0] * 2, results[1] + results[2]))


@on_deepspeed_ranks()
def test_refusals(rank):
    layer = make_moe(expert=Expert())
    replace_moe_layers(layer, exact=False, sums="lanes")
    with pytest.raises(ValueError, match=r"sums is 'lanes', but DeepSpeed's own dispatch would run: rows are torch.float64"):
        layer(torch.ones(1, 4, HIDDEN, dtype=torch.float64))
    pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="AutoEP came with DeepSpeed 0.19.2")
    layer = autoep_layers(build_engine(Case("deepseek", exact=False, score_apply="pre"), True, sums="lanes"))[0]
    with pytest.raises(ValueError, match="score_apply is 'pre', which applies scores before the experts"):
        layer(torch.ones(1, 4, HIDDEN))
