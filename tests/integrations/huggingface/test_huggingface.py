"""Experts of Hugging Face style models, spread over ranks: outputs and gradients are those of the model itself."""

import json
from types import SimpleNamespace

import pytest
import torch
from huggingface_cases import build, example
from torch import nn

from deepep_moe.integrations.huggingface import SpreadExperts, expert_parameters, spread_experts
from deepep_moe.testing import run_ranks


def parity_worker(rank: int, num_ranks: int, names: tuple[str, ...]) -> list[tuple[list[str], int]]:
    return [parity(rank, num_ranks, name) for name in names]


def parity(rank: int, num_ranks: int, name: str) -> tuple[list[str], int]:
    model, spread = build(name), build(name)
    replaced = spread_experts(spread, num_max_tokens_per_rank=64)
    experts = [module for module in spread.modules() if isinstance(module, SpreadExperts)]
    tokens = torch.randint(0, 64, (2, 5 + rank), generator=torch.Generator().manual_seed(rank))  # other tokens, and another number
    theirs, ours = model(input_ids=tokens).logits, spread(input_ids=tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for logits in (theirs, ours):
        logits.square().sum().backward()
    own = {id(parameter) for parameter in expert_parameters(spread)}
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    for key, parameter in spread.named_parameters():
        if id(parameter) not in own:
            torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-4, atol=1e-5)
    for place, module in zip(replaced, experts, strict=True):
        for ours_name, theirs_name in (("up", "gate_up_proj"), ("down", "down_proj")):
            total = gradients[f"{place}.{theirs_name}"].clone()
            torch.distributed.all_reduce(total)
            local = total.unflatten(0, (num_ranks, -1))[rank]
            torch.testing.assert_close(getattr(module.experts, ours_name).grad, local, rtol=1e-4, atol=1e-5)
    return replaced, len({id(module.buffer) for module in experts})


def test_parity():
    assert run_ranks(parity_worker, 2, ("stand-in",)) == [[(["layers.0.experts", "layers.1.experts"], 1)]] * 2


@pytest.mark.slow
def test_parity_of_transformers():
    pytest.importorskip("transformers", minversion="5")
    blocks = {"mixtral": (0, 1), "qwen3": (0, 1), "deepseek": (1,)}
    expected = [([f"model.layers.{block}.mlp.experts" for block in found], 1) for found in blocks.values()]
    assert run_ranks(parity_worker, 2, tuple(blocks)) == [expected] * 2


def with_experts(**changes) -> nn.Module:
    model = example("model").build(stand_in=True)
    for name, value in changes.items():
        setattr(model.layers[1].experts, name, value)
    return model


def test_models_that_are_refused():
    with pytest.raises(ValueError, match=r"layers\.1\.experts has gate_up_proj_bias; only experts without biases can be spread"):
        spread_experts(with_experts(gate_up_proj_bias=nn.Parameter(torch.zeros(8, 64))))
    with pytest.raises(ValueError, match=r"layers\.1\.experts has the activation GELU.*; only experts with SiLU can be spread"):
        spread_experts(with_experts(act_fn=nn.GELU()))
    with pytest.raises(ValueError, match="Linear has no module `experts` with gate_up_proj"):
        spread_experts(nn.Linear(2, 2), num_topk=2)
    model = with_experts()
    model.config = SimpleNamespace()
    with pytest.raises(ValueError, match=r"no config\.num_experts_per_tok; pass num_topk"):
        spread_experts(model)
    assert not any(isinstance(module, SpreadExperts) for module in model.modules()), "a model that is refused stays as it is"


def example_worker(rank: int, num_ranks: int, folder: str):
    return example("train").train(rank, num_ranks, 25, True, folder)


@pytest.mark.slow
def test_example(tmp_path):
    for replaced, difference, losses in run_ranks(example_worker, 2, str(tmp_path)):
        assert replaced == ["layers.0.experts", "layers.1.experts"] and difference < 1e-5
        assert losses[0] - losses[-1] > 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == losses and lines[0]["deepep_moe/layer_1/rows"] == 2 * 4 * 32 * 2
