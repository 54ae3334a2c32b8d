"""DeepSpeed's layers where ranks have other numbers of tokens, more than there is room for, or none."""

import pytest
import torch
import torch.distributed as dist
from deepspeed_cases import HIDDEN, assert_equal, logged, make_moe, on_deepspeed_ranks
from torch import nn

from deepep_moe.errors import EPPeerError
from deepep_moe.exchange import growing
from deepep_moe.integrations.common.registry import all_buffers
from deepep_moe.integrations.deepspeed import replace_moe_layers, restore_moe_layers

pytest.importorskip("deepspeed")

# ---- other numbers of tokens on every rank ----


def _layer(rank: int, ep: int) -> nn.Module:
    """A layer of 4 experts, of which each has weights of its own, the same for every `ep`."""
    torch.manual_seed(3)
    layer = make_moe(4, k=2, ep=ep, drop_tokens=False)
    experts = layer.deepspeed_moe.experts.deepspeed_experts
    for number, expert in enumerate(experts, rank * len(experts) if ep > 1 else 0):
        torch.manual_seed(number)
        for parameter in expert.parameters():
            nn.init.normal_(parameter, std=0.2)
    return layer


def _pass(layer: nn.Module, x: torch.Tensor, cotangent: torch.Tensor) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_(len(x) > 0)  # where there are no tokens, nobody may have asked for their gradient
    torch.manual_seed(5)  # gates draw the second expert
    y = layer(x)[0]
    (y * cotangent).sum().backward()
    return {"output": y.detach(), "input gradient": x if x.grad is None else x.grad}


@on_deepspeed_ranks(exact=(True, False))
def test_uneven_tokens_equal_layers_with_all_experts(rank, exact):
    """Outputs and every gradient, against DeepSpeed's own layers that exchange nothing; a rank without tokens too."""
    layer, alone = _layer(rank, 2), _layer(rank, 1)
    replace_moe_layers(layer, exact=exact)
    for num_tokens in ((5, 9), (11, 0), (0, 7), (1, 6), (1, 1)):
        x, cotangent = torch.randn(2, num_tokens[rank], HIDDEN, generator=torch.Generator().manual_seed(rank))
        actual = _pass(layer, x, cotangent)
        alone.zero_grad()
        expected = _pass(alone, x, cotangent) if len(x) else {"output": x, "input gradient": x}
        both = layer.deepspeed_moe, alone.deepspeed_moe
        gates = [torch.zeros(4, HIDDEN) if moe.gate.wg.weight.grad is None else moe.gate.wg.weight.grad for moe in both]
        actual["gate"], expected["gate"] = gates
        local = layer.deepspeed_moe.experts.deepspeed_experts
        for number, expert in enumerate(alone.deepspeed_moe.experts.deepspeed_experts):
            for name, parameter in expert.named_parameters():
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(grad)
                if number // 2 == rank:
                    expected[f"expert {number} {name}"] = grad
                    actual[f"expert {number} {name}"] = local[number % 2].get_parameter(name).grad
        assert_equal(actual, expected, f"{num_tokens}, exact {exact}, rank {rank}", tolerance=1e-5)


# ---- room ----


@on_deepspeed_ranks()
def test_more_tokens_than_the_bound(rank):
    """A chosen bound holds on CPUs too, where none is needed."""
    layer = make_moe(4, k=2)
    for exact in (True, False):
        replace_moe_layers(layer, exact=exact, num_max_tokens_per_rank=16)
        layer(torch.randn(16, HIDDEN))
        with pytest.raises(EPPeerError if rank else ValueError, match="17 tokens, .* room for 16; set num_max_tokens_per_rank"):
            layer(torch.randn(16 if rank else 17, HIDDEN))
        layer(torch.randn(16, HIDDEN))


@on_deepspeed_ranks(device=("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(2))))
def test_room_grows_with_the_tokens(rank, device):
    """If there is no bound, the first forward that needs more room gets it, while earlier forwards still wait for their backward."""
    growing._is_bounded = lambda device: True
    layer = make_moe(4, k=2, drop_tokens=False).to(device)
    runs, room = [], []
    for ours in (False, True):
        layer.zero_grad()
        with logged() as messages:
            if ours:
                replace_moe_layers(layer)
            outputs = []
            for num_tokens in ((100, 120), (100, 120), (30, 129), (140, 500), (100, 120)):
                if not ours:
                    num_tokens = (max(num_tokens),) * 2  # DeepSpeed wants as many on all ranks
                x = torch.randn(500, HIDDEN, generator=torch.Generator().manual_seed(rank)).to(device)[: num_tokens[rank]]
                torch.manual_seed(0)
                outputs.append(layer(x)[0][: min(30, len(x))])
                room.extend([all_buffers()[0].num_max_tokens_per_rank] if ours else [])
        torch.cat(outputs).sum().backward()
        runs.append(torch.cat(outputs).detach())
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())
    assert room == [2 * bound for bound in (128, 128, 256, 512, 256 * 2)], room
    assert_equal({"outputs": runs[1]}, {"outputs": runs[0]}, f"rank {rank}", tolerance=1e-5)
    grown = [line.split(",")[0] for line in messages if "make room" in line]
    assert grown == [f"a buffer makes room for {bound} tokens of a rank" for bound in (256, 512)] * (rank == 0), messages
    assert restore_moe_layers(layer) == 1 and not all_buffers()
