"""Swapped layers with fp8 experts against the same layers in bf16: gradients, steps of an engine with ZeRO, checkpoints, refusals."""

from typing import Any

import pytest
import torch
from deepspeed_cases import engine_ready
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepep_moe.errors import EPPeerError
from deepep_moe.integrations.common.registry import all_buffers
from deepep_moe.integrations.deepspeed import initialize, replace_moe_layers, set_is_first_microbatch
from deepep_moe.integrations.deepspeed.options import Options
from deepep_moe.nn import SwiGLU
from deepep_moe.ops import QuantizedRows
from deepep_moe.testing.launch import run_ranks

pytest.importorskip("deepspeed")

HIDDEN, WIDTH, NUM_EXPERTS = 128, 128, 4
FP8: dict[str, Any] = {"exact": False, "grouped_experts": True, "fp8": True}


def make_layer(
    expert: nn.Module | None = None, num_experts: int = NUM_EXPERTS, k: int = 2, dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
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


def tokens(rank: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x, grad = (torch.randn(3, 20 + rank, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    return x, grad


def run(layer: nn.Module, rank: int, *, recompute: bool = False) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    x, grad = tokens(rank)
    x.requires_grad_()
    torch.manual_seed(0)
    y, l_aux, _ = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
    ((y * grad).float().sum() + l_aux).backward()
    return {"output": y.detach(), "x": x.grad} | {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}


def layers(rank: int, num_ranks: int) -> None:
    with engine_ready("cpu"):
        both = nn.ModuleList([make_layer(), make_layer(num_experts=8, k=4)])  # which share a buffer
        assert replace_moe_layers(both, exact=False, grouped_experts=True) == 2
        exact = [run(layer, rank) for layer in both]
        assert replace_moe_layers(both, **FP8) == 2
        ours = [run(layer, rank) for layer in both]
        assert len(all_buffers()) == 1
        for got, want in zip(ours, exact, strict=True):
            for name, values in want.items():
                error = float((got[name].float() - values.float()).norm() / values.float().norm())
                assert error < 0.12, f"{name}: {error}"
                assert error > 0.005 or "experts" not in name, f"{name}: {error}"
        again = run(both[0], rank, recompute=True)
        different = [name for name in again if not torch.equal(again[name], ours[0][name])]
        assert not different, f"recomputed: {different}"


def test_layers():
    run_ranks(layers, 2, timeout_s=300)


# ---- engines ----


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.input, self.moe, self.output = nn.Linear(HIDDEN, HIDDEN), make_layer(dtype=torch.float32), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        h = self.input(x)
        y, l_aux, _ = self.moe(h)
        return nn.functional.mse_loss(self.output(h + y).float(), target.float()) + 0.01 * l_aux


def engine_of(zero: int, section: dict[str, Any], **others: Any) -> Any:
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
        "deepep_moe": section,
        **others,
    }
    return initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def losses(engine: Any, rank: int, steps: range) -> torch.Tensor:
    found = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        x, target = (torch.randn(2, 64, HIDDEN, generator=generator).bfloat16() for _ in range(2))
        torch.manual_seed(step)  # by which gates draw second experts
        loss = engine(x, target)
        engine.backward(loss)
        engine.step()
        found.append(loss.detach())
    return torch.stack(found)


def engines(rank: int, num_ranks: int, zero: int, folder: str) -> None:
    with engine_ready("cpu"):
        exact = losses(engine_of(zero, FP8 | {"fp8": False}), rank, range(12))
        engine = engine_of(zero, FP8)
        assert engine.module.moe.deepspeed_moe.deepep_moe_plan.options.fp8
        ours = losses(engine, rank, range(8))
        engine.save_checkpoint(folder, tag="eight")
        ours = torch.cat([ours, losses(engine, rank, range(8, 12))])
        assert not torch.equal(ours, exact) and ours[-1] < ours[0]
        torch.testing.assert_close(ours, exact, rtol=0.01, atol=0)
        other = engine_of(zero, FP8)
        other.load_checkpoint(folder, tag="eight")
        assert torch.equal(losses(other, rank, range(8, 12)), ours[8:]), "after loading"


@pytest.mark.parametrize("zero", (1, 2))
def test_engines(zero, tmp_path):
    run_ranks(engines, 2, zero, str(tmp_path), timeout_s=300)


def accumulating(rank: int, num_ranks: int, zero: int) -> None:
    """Two forwards of a step share copies of the weights where ZeRO has these in one memory. Losses are the same."""
    with engine_ready("cpu"):
        engines = [engine_of(zero, FP8, gradient_accumulation_steps=2) for _ in range(2)]
        found: list[list[torch.Tensor]] = [[], []]
        for micro in range(6):
            assert set_is_first_microbatch(engines[1], engines[1].micro_steps % 2 == 0) == 1
            for engine, losses_of in zip(engines, found, strict=True):
                losses_of.append(losses(engine, rank, range(micro, micro + 1)))
        assert torch.equal(torch.cat(found[0]), torch.cat(found[1]))
        layer = engines[1].module.moe.deepspeed_moe
        assert (layer.kept_weights.num_bytes > 0) == (zero > 0) and engines[0].module.moe.deepspeed_moe.kept_weights is None
        set_is_first_microbatch(engines[1], None)
        assert layer.kept_weights is None
        with pytest.raises(TypeError, match="is_first_microbatch is 0; it must be True, False or None"):
            set_is_first_microbatch(engines[1], 0)


@pytest.mark.parametrize("zero", (0, 1, 2))
def test_accumulating(zero):
    run_ranks(accumulating, 2, zero, timeout_s=300)


# ---- refusals ----


def test_options():
    for bad in ({"exact": True}, {"grouped_experts": False}):
        with pytest.raises(ValueError, match="fp8 is True with exact=.*; it needs exact=False and grouped_experts"):
            Options(**(FP8 | bad))
    with pytest.raises(TypeError, match="fp8 is 1; it must be true or false"):
        Options(**(FP8 | {"fp8": 1}))


def refusals(rank: int, num_ranks: int) -> None:
    """One rank refuses before anything is sent, and its peer learns why."""
    with engine_ready("cpu"):
        for expert, dtype, message in (
            (nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.GELU(), nn.Linear(WIDTH, HIDDEN)), torch.bfloat16, "the experts have biases"),
            (SwiGLU(HIDDEN, 96), torch.bfloat16, "the width of an expert is 96, but fp8 experts need multiples of 128"),
            (nn.Linear(HIDDEN, HIDDEN), torch.bfloat16, "experts cannot run in grouped products: experts are Linear"),
            (SwiGLU(HIDDEN, WIDTH), torch.float32, "tokens have dtype float32, but fp8 experts take bfloat16; train in bf16"),
        ):
            layer = make_layer(expert).to(dtype)
            replace_moe_layers(layer, **FP8)
            x, _ = tokens(rank, dtype)
            with pytest.raises((ValueError, TypeError, EPPeerError), match=message):
                layer(x)


def test_refusals():
    run_ranks(refusals, 2, timeout_s=300)


def rows_of_experts(rank: int, num_ranks: int) -> None:
    from deepep_moe.integrations.deepspeed.native import fp8

    with engine_ready("cpu"):
        layer, seen = make_layer(), []
        replace_moe_layers(layer, **FP8)
        stock = fp8.grouped_mlp

        def watched(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append(type(x))
            y = stock(x, *args, **kwargs)
            y.register_hook(lambda grad: seen.append(type(grad)))
            return y

        fp8.grouped_mlp = watched
        run(layer, rank)
        assert seen == [QuantizedRows, QuantizedRows]


def test_rows_are_fp8_in_both_passes():
    run_ranks(rows_of_experts, 2)
