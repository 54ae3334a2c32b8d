"""Swapped layers with fp8 experts against the same layers in bf16: gradients, steps of an engine with ZeRO, checkpoints, refusals."""

from typing import Any

import pytest
import torch
from deepspeed_cases import Case, Model, assert_equal, ds_config, on_deepspeed_ranks, run_layer, run_steps
from exchange_cases import plans_of_copies
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepep_moe.errors import EPPeerError
from deepep_moe.integrations.common.registry import all_buffers
from deepep_moe.integrations.deepspeed import initialize, replace_moe_layers, set_is_first_microbatch
from deepep_moe.nn import Balance, SwiGLU
from deepep_moe.ops import QuantizedRows

pytest.importorskip("deepspeed")

HIDDEN, WIDTH = 128, 128
FP8: dict[str, Any] = {"exact": False, "grouped_experts": True, "fp8": True}


def make_layer(expert: nn.Module | None = None, *, num_experts: int = 4, k: int = 2, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    from deepspeed.moe.layer import MoE

    torch.manual_seed(3)
    layer = MoE(HIDDEN, expert or SwiGLU(HIDDEN, WIDTH), num_experts=num_experts, ep_size=2, k=k, capacity_factor=2.0).to(dtype)
    if dtype != torch.float32:  # else an engine does
        layer.set_deepspeed_parallelism()
    torch.manual_seed(10 + torch.distributed.get_rank())
    with torch.no_grad():
        for parameter in layer.deepspeed_moe.experts.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return layer


def tokens(rank: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """The input and the gradient of the output."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(3, 20 + rank, HIDDEN, generator=generator).to(dtype) for _ in range(2)]


@on_deepspeed_ranks()
def test_layers(rank):
    both = nn.ModuleList([make_layer(), make_layer(num_experts=8, k=4)])  # which share a buffer
    assert replace_moe_layers(both, exact=False, grouped_experts=True) == 2
    exact = [run_layer(layer, *tokens(rank)) for layer in both]
    assert replace_moe_layers(both, **FP8) == 2
    ours = [run_layer(layer, *tokens(rank)) for layer in both]
    assert len(all_buffers()) == 1
    for got, want in zip(ours, exact, strict=True):
        for name in want.keys() - {"l_aux", "counts"}:
            values = want[name]
            error = float((got[name].float() - values.float()).norm() / values.float().norm())
            assert error < 0.12, f"{name}: {error}"
            assert error > 0.005 or "experts" not in name, f"{name}: {error}"
    forward = both[0].forward
    both[0].forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    again = run_layer(both[0], *tokens(rank), num_forwards=2)
    different = [name for name in again if not torch.equal(again[name], ours[0][name])]
    assert not different, f"recomputed: {different}"


@on_deepspeed_ranks()
def test_copies_of_experts(rank):
    """Each has home's fp8 weights, whether home keeps them or not. Sums round to bf16 in another order."""
    layer, runs, plans = make_layer(num_experts=8), [], plans_of_copies()
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight[0] += 0.3
    for balance in (None, Balance(2, cost=1)):
        replace_moe_layers(layer, exact=False, fp8=True, balance=balance)
        for is_first in (None, True, False):
            layer.deepspeed_moe.is_first_microbatch = is_first
            runs.append(run_layer(layer, *tokens(rank)))
    assert len(plans) == 3 and all((planned.plan.copies >= 0).any() for planned in plans)
    for number, (with_copies, without) in enumerate(zip(runs[3:], runs[:3], strict=True)):
        assert_equal(with_copies, without, f"rank {rank}, run {number}", tolerance=2e-2)


@on_deepspeed_ranks()
def test_rows_are_fp8_in_both_passes(rank):
    from deepep_moe.integrations.deepspeed.native import grouped

    layer, seen = make_layer(), []
    replace_moe_layers(layer, **FP8)
    stock = grouped.grouped_mlp

    def watched(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(type(x))
        y = stock(x, *args, **kwargs)
        y.register_hook(lambda grad: seen.append(type(grad)))
        return y

    grouped.grouped_mlp = watched
    run_layer(layer, *tokens(rank))
    assert seen == [QuantizedRows, QuantizedRows]


@on_deepspeed_ranks()
def test_refusals(rank):
    """One rank refuses before anything is sent, and its peer learns why."""
    for expert, dtype, message in (
        (nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.GELU(), nn.Linear(WIDTH, HIDDEN)), torch.bfloat16, "the experts have biases"),
        (SwiGLU(HIDDEN, 96), torch.bfloat16, "the width of an expert is 96, but fp8 experts need multiples of 128"),
        (nn.Linear(HIDDEN, HIDDEN), torch.bfloat16, "experts cannot run in grouped products: experts are Linear"),
        (SwiGLU(HIDDEN, WIDTH), torch.float32, "tokens have dtype float32, but fp8 experts take bfloat16"),
    ):
        layer = make_layer(expert).to(dtype)
        replace_moe_layers(layer, **FP8)
        with pytest.raises((ValueError, TypeError, EPPeerError), match=message):
            layer(tokens(rank, dtype)[0])


# ---- engines ----


def engine_of(zero: int, section: dict[str, Any], **others: Any) -> Any:
    torch.manual_seed(7)
    model = Model([make_layer(dtype=torch.float32)], HIDDEN)
    config = ds_config(Case(zero=zero, dtype="bf16")) | {"deepep_moe": section, **others}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    return initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def losses(engine: Any, rank: int, steps: range) -> torch.Tensor:
    return run_steps(engine, rank, steps)["losses"]


@on_deepspeed_ranks()
def test_engines(rank, tmp_path):
    """Losses are near those of bf16, and a checkpoint goes on where it was."""
    for zero in (1, 2):
        exact = losses(engine_of(zero, FP8 | {"fp8": False}), rank, range(12))
        engine = engine_of(zero, FP8)
        assert engine.module.layers[0].deepspeed_moe.deepep_moe_plan.options.fp8
        ours = losses(engine, rank, range(8))
        engine.save_checkpoint(tmp_path, tag=f"eight, zero {zero}")
        ours = torch.cat([ours, losses(engine, rank, range(8, 12))])
        assert not torch.equal(ours, exact) and ours[-1] < ours[0], f"zero {zero}"
        torch.testing.assert_close(ours, exact, rtol=0.01, atol=0)
        other = engine_of(zero, FP8)
        other.load_checkpoint(tmp_path, tag=f"eight, zero {zero}")
        assert torch.equal(losses(other, rank, range(8, 12)), ours[8:]), f"zero {zero}, after loading"


@on_deepspeed_ranks()
def test_accumulating(rank):
    """Two forwards of a step share copies of the weights where ZeRO has these in one memory. Losses are the same."""
    for zero in (0, 1, 2):
        plain, engine = (engine_of(zero, FP8, gradient_accumulation_steps=2) for _ in range(2))
        layer = engine.module.layers[0].deepspeed_moe
        assert set_is_first_microbatch(engine, True) == 1

        def mark(_module, _inputs, engine=engine) -> None:
            set_is_first_microbatch(engine, engine.micro_steps % 2 == 0)

        engine.module.register_forward_pre_hook(mark)
        assert torch.equal(losses(engine, rank, range(3)), losses(plain, rank, range(3))), f"zero {zero}"
        assert (layer.kept_weights.num_bytes > 0) == (zero > 0) and plain.module.layers[0].deepspeed_moe.kept_weights is None
        set_is_first_microbatch(engine, None)
        assert layer.kept_weights is None
        with pytest.raises(TypeError, match="is_first_microbatch is 0"):
            set_is_first_microbatch(engine, 0)
