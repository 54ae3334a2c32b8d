"""Layers with grouped experts against the same layers with experts one by one: outputs, every gradient, steps, checkpoints, failures."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_cases import (
    HIDDEN,
    Case,
    Expert,
    Model,
    assert_equal,
    build_engine,
    ds_config,
    engine_ready,
    logged,
    make_moe,
    most_experts,
    repeats_bits,
    run_layer,
    run_steps,
    serves,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepep_moe.errors import EPPeerError
from deepep_moe.integrations.deepspeed import ExpertWeights, initialize, replace_moe_layers, restore_moe_layers
from deepep_moe.nn import SwiGLU
from deepep_moe.testing.launch import run_ranks

pytest.importorskip("deepspeed")

# Matrix products of other shapes round other bits. A bias is added to a product that is rounded, where torch.nn.Linear adds it before: one
# rounding more, of 2^-9 in bf16 and of 2^-12 in fp16.
ON_GPUS = 1e-5  # in fp32, where each product may have a kernel of its own
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class SeparateGate(nn.Module):
    """Three matrices, as the experts of many models have them."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((HIDDEN, 24), (HIDDEN, 24), (24, HIDDEN)))

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def read_gated(expert: SeparateGate) -> ExpertWeights:
    return ExpertWeights(torch.cat((expert.gate.weight, expert.up.weight)), None, expert.down.weight, None, "swiglu")


def read(expert: Expert) -> ExpertWeights:
    return ExpertWeights(expert.up.weight, expert.up.bias, expert.down.weight, expert.down.bias, nn.functional.gelu)


def sequential(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 48, bias=bias), nn.GELU(), nn.Linear(48, HIDDEN, bias=bias))


@contextlib.contextmanager
def grouped_calls(num: int | None = None) -> Iterator[list[bool]]:
    """Whether each layer's weights were read where they lie, once for each forward in grouped products. Asserts that those are `num`."""
    from deepep_moe.integrations.deepspeed.native import grouped

    own, calls = grouped.grouped_mlp, []

    def counting(rows: torch.Tensor, counts: Any, w1: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(not w1.is_contiguous())
        return own(rows, counts, w1, *args, **kwargs)

    grouped.grouped_mlp = counting
    try:
        yield calls
    finally:
        grouped.grouped_mlp = own
    assert num is None or len(calls) == num, f"{len(calls)} layers ran in grouped products, not {num}"


def make_layer(expert: nn.Module, dtype: torch.dtype = torch.float32, num_experts: int = 8, **options: Any) -> nn.Module:
    """With weights that differ from expert to expert, where DeepSpeed makes them alike."""
    torch.manual_seed(3)
    layer = make_moe(num_experts, expert=expert, **options).to(dtype)
    layer.set_deepspeed_parallelism()
    with torch.no_grad():
        for parameter in layer.deepspeed_moe.experts.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def flatten(experts: nn.Module) -> None:
    """Put all parameters into one memory, as ZeRO 1 and 2 do."""
    parameters = list(experts.parameters())
    parts = torch.cat([parameter.detach().flatten() for parameter in parameters]).split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part.view(parameter.shape)


# ---- one pass ----


def _passes(
    layer: nn.Module, option: Any, exact: bool, x: torch.Tensor, cotangent: torch.Tensor, in_one_memory: bool = False
) -> list[dict]:
    """With experts one by one, and grouped."""
    passes = []
    for grouped in (False, option):
        replace_moe_layers(layer, exact=exact, grouped_experts=grouped)
        with grouped_calls(int(grouped is not False)) as are_views:
            passes.append(run_layer(layer, x, cotangent))
    assert option is read_gated or are_views == [in_one_memory], "weights are copied only where they must be"
    return passes


def _pass_worker(rank: int, num_ranks: int, device_type: str) -> None:
    """Other numbers of tokens on every rank, and none on the last; biases or not, all dtypes, both modes, weights in one memory or not."""
    with engine_ready(device_type) as device:
        for k, expert, option in (
            (2, sequential(bias=False), True),
            (1, sequential(), True),
            (2, SwiGLU(HIDDEN, 24), True),
            (2, SeparateGate(), read_gated),
            (min(4, most_experts()), Expert(bias=True), read),
        ):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                layer = make_layer(expert, dtype, k=k).to(device)
                in_one_memory = dtype != torch.float32
                if in_one_memory:
                    flatten(layer.deepspeed_moe.experts)
                for exact in (True, False):
                    for num_tokens in ((40, 24), (50, 0)):
                        generator = torch.Generator().manual_seed(rank)
                        x, cotangent = torch.randn(2, num_tokens[rank], HIDDEN, generator=generator).to(device, dtype)
                        one_by_one, grouped = _passes(layer, option, exact, x, cotangent, in_one_memory)
                        context = f"{expert}, {dtype}, exact {exact}, {num_tokens}, rank {rank}"
                        tolerance = max(ROUNDING[dtype], ON_GPUS if device.type == "cuda" else 0.0)
                        assert_equal(grouped, one_by_one, context, tolerance=tolerance)


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(2))))
def test_passes_equal_experts_one_by_one(device):
    run_ranks(_pass_worker, 2, device)


def _rounding_worker(rank: int, num_ranks: int) -> list[tuple[float, float]]:
    """How far bf16 is from fp32 with the same weights, of experts one by one and grouped, in the outputs and in all gradients."""
    generator = torch.Generator().manual_seed(rank)
    x, cotangent = (torch.randn(200, HIDDEN, generator=generator).bfloat16() for _ in range(2))
    with engine_ready():
        layer = make_layer(sequential(), torch.bfloat16, num_experts=4, k=2)
        narrow = _passes(layer, True, True, x, cotangent)
        layer.float()
        replace_moe_layers(layer)
        want = run_layer(layer, x.float(), cotangent.float())
    distances = []
    for name, wide in want.items():
        if name not in ("counts", "l_aux"):
            distances.append(tuple(float((run[name].float() - wide).norm() / wide.norm()) for run in narrow))
    return distances


def test_grouped_products_are_as_exact_in_bf16():
    """With biases they round once more. In the norm they are at most twice as far from fp32."""
    for one_by_one, grouped in run_ranks(_rounding_worker, 2)[0]:
        assert 0 < grouped < 2 * one_by_one, (one_by_one, grouped)


def _rowless_worker(rank: int, num_ranks: int) -> None:
    """All tokens go to one expert; then nobody has any; then through a buffer with room for a layer with more experts."""
    with engine_ready():
        layer, wider = make_layer(sequential(), num_experts=4, k=1, drop_tokens=False), make_layer(sequential(), k=1)
        with torch.no_grad():
            layer.deepspeed_moe.gate.wg.weight.zero_()[1] = 1
        for exact in (True, False):
            for num_tokens in (20, 0):
                x, cotangent = torch.ones(2, num_tokens, HIDDEN)
                passes = []
                for option in (False, True):
                    assert replace_moe_layers(nn.ModuleList([layer, wider]), exact=exact, grouped_experts=option) == 2
                    passes.append(run_layer(layer, x, cotangent))
                assert_equal(passes[1], passes[0], f"exact {exact}, {num_tokens} tokens, rank {rank}", tolerance=2e-6)
                for i, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
                    has_rows = num_tokens > 0 and (rank, i) == (0, 1)
                    for parameter in expert.parameters():
                        assert bool(parameter.grad.any()) == has_rows, "gradients of zeros, not none"


def test_experts_without_rows_get_gradients_of_zeros():
    run_ranks(_rowless_worker, 2)


def _recomputing_worker(rank: int, num_ranks: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    x, cotangent = (torch.randn(60, HIDDEN, generator=generator) for _ in range(2))
    with engine_ready():
        layer = make_layer(sequential(), k=2)
        replace_moe_layers(layer, grouped_experts=True)
        want = run_layer(layer, x, cotangent)
        forward = layer.forward
        for reentrant in (False, True):
            layer.forward = lambda *args, how=reentrant: checkpoint(forward, *args, use_reentrant=how)
            assert_equal(run_layer(layer, x, cotangent, num_forwards=2), want, f"reentrant {reentrant}, rank {rank}")
        layer.forward = forward
        with torch.autocast("cpu", torch.bfloat16):
            passes = _passes(layer, True, True, x, cotangent)
        assert passes[1]["output"].dtype == torch.bfloat16
        assert_equal(passes[1], passes[0], f"autocast, rank {rank}", tolerance=ROUNDING[torch.bfloat16])


def test_recomputed_and_under_autocast():
    run_ranks(_recomputing_worker, 2)


def _compiling_worker(rank: int, num_ranks: int) -> None:
    with engine_ready():
        layer = make_layer(sequential(), k=1, use_rts=False)  # whose gate draws no random numbers
        replace_moe_layers(layer, grouped_experts=True)
        x = torch.randn(20, HIDDEN)
        compiled = torch.compile(layer, backend="eager")
        with grouped_calls(3):
            assert torch.equal(compiled(x)[0], layer(x)[0])
            compiled(x)[0].sum().backward()
        assert all(parameter.grad is not None for parameter in layer.deepspeed_moe.experts.parameters())


@pytest.mark.slow
def test_compiled_layers():
    run_ranks(_compiling_worker, 2)


# ---- steps of the optimizer ----

STEPS = [
    (Case(zero=0, k=2), True),
    (Case(zero=2, k=2, use_residual=True, accumulation=2), True),
    (Case(zero=1, k=1, drop_tokens=False, exact=False), True),
    (Case(zero=2, k=2, dtype="bf16"), False),
    (Case(zero=1, k=1, dtype="bf16", exact=False), False),
]
"""A case, and whether experts have biases. In bf16 those round otherwise, and steps take another route where top-k is nearly a tie."""


def _model(case: Case, bias: bool) -> Model:
    torch.manual_seed(7)
    options = {"drop_tokens": case.drop_tokens, "use_residual": case.use_residual}
    return Model([make_moe(8, k=case.k, expert=sequential(bias), **options) for _ in range(2)])


def _engine(case: Case, option: Any, bias: bool = True) -> Any:
    engine = build_engine(case, False, model=_model(case, bias))
    assert replace_moe_layers(engine, exact=case.exact, grouped_experts=option) == 2
    return engine


def _steps_worker(rank: int, num_ranks: int) -> None:
    with engine_ready():
        for case, bias in STEPS:
            if not serves(case):
                continue
            runs = []
            for option in (False, True):
                with grouped_calls(12 * case.accumulation * option) as are_views:
                    runs.append(run_steps(_engine(case, option, bias), rank, 6))
            assert are_views == [case.zero > 0] * len(are_views), "ZeRO has put all weights into one memory"
            assert_equal(runs[1], runs[0], f"{case}, rank {rank}", tolerance=1e-4)


def test_steps_equal_experts_one_by_one():
    run_ranks(_steps_worker, 2)


# ---- state ----


def _state_worker(rank: int, num_ranks: int, folder: str) -> None:
    """Names and parameters stay, and each way loads what the other has saved. From there all train alike."""
    case = Case(zero=2, k=2)
    with engine_ready():
        first = _engine(case, True)
        layer = first.module.layers[0]
        parameters = {name: id(value) for name, value in layer.state_dict(keep_vars=True).items()}
        run_steps(first, rank, 2)
        assert {name: id(value) for name, value in layer.state_dict(keep_vars=True).items()} == parameters
        restore_moe_layers(first)
        assert {name: id(value) for name, value in layer.state_dict(keep_vars=True).items()} == parameters
        replace_moe_layers(first, grouped_experts=True)
        first.save_checkpoint(folder, tag="two")
        straight = run_steps(first, rank, range(2, 4))
        files = sorted(file.name for file in Path(folder, "two").iterdir())
        assert sum("expert_" in name for name in files) >= 16, files
        second = _engine(case, False)
        assert second.load_checkpoint(folder, tag="two")[0] is not None
        assert_equal(run_steps(second, rank, range(2, 4)), straight, f"loaded one by one, rank {rank}", tolerance=1e-4)
        second.save_checkpoint(folder, tag="four")
        third = _engine(case, True)
        assert third.load_checkpoint(folder, tag="four")[0] is not None
        assert_equal(run_steps(third, rank, range(4, 6)), run_steps(first, rank, range(4, 6)), f"and back, rank {rank}", tolerance=1e-4)


@pytest.mark.skipif(not repeats_bits(), reason="DeepSpeed before 0.15 loads its own checkpoints in newer PyTorch only with a switch")
def test_checkpoints_go_both_ways(tmp_path):
    run_ranks(_state_worker, 2, str(tmp_path))


def _config_worker(rank: int, num_ranks: int) -> None:
    case = Case(zero=1)
    with engine_ready():
        model = _model(case, True)
        config = ds_config(case) | {"deepep_moe": {"grouped_experts": True}}
        engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
        with grouped_calls(2):
            run_steps(engine, rank, 1)


def test_key_of_ds_config():
    run_ranks(_config_worker, 2)


# ---- where experts run one by one ----

SAID = "experts of a MoE layer run one by one, without grouped products: "


def _called_worker(rank: int, num_ranks: int) -> list[list[str]]:
    """What each change makes rank 0 say, once. Results are those of experts one by one, to the bit, and come from calls."""
    generator = torch.Generator().manual_seed(rank)
    x, cotangent = (torch.randn(40, HIDDEN, generator=generator) for _ in range(2))
    calls: list[int] = []
    said = []
    with engine_ready():

        def hooked(layer: nn.Module) -> None:
            if rank == 0:  # its peer goes on in grouped products
                layer.deepspeed_moe.experts.deepspeed_experts[1].register_forward_hook(lambda *_: calls.append(1))

        changes: list[tuple[nn.Module, Callable[[nn.Module], Any], int]] = [
            (sequential(), hooked, rank),
            (Expert(), lambda _: None, 0),
            (nn.Sequential(*sequential(), nn.Dropout(1e-9)), lambda _: None, 0),
        ]
        for expert, change, num_grouped in changes:
            layer = make_layer(expert, k=2)
            change(layer)
            replace_moe_layers(layer)
            want = run_layer(layer, x, cotangent)
            replace_moe_layers(layer, grouped_experts=True)
            with logged() as lines, grouped_calls(2 * num_grouped):
                for _ in range(2):
                    assert_equal(run_layer(layer, x, cotangent), want, f"{expert}, rank {rank}", tolerance=2e-6 * num_grouped)
            said.append([line for line in lines if line.startswith("experts")])
        layer.eval()
        with grouped_calls(1), torch.no_grad():
            layer(x)  # where nothing drops
    assert len(calls) == 3 * (rank == 0)
    return said


def test_experts_that_cannot_be_grouped_are_called_and_a_line_says_why():
    first, second = run_ranks(_called_worker, 2)
    unread = (
        "experts are Expert, whose weights deepep_moe cannot read; pass replace_moe_layers a function as grouped_experts that returns the "
        "ExpertWeights of an expert"
    )
    dropping = "Dropout of local expert 0 drops with p=1e-09 in training"
    assert first == [[f"{SAID}Sequential of local expert 1 has hooks, which would not run"], [SAID + unread], [SAID + dropping]]
    assert second == [[], *first[1:]], "each rank says what holds there"


def _failing_worker(rank: int, num_ranks: int) -> None:
    with engine_ready():
        layer, failing = make_layer(Expert(), k=2), []

        def reading(expert: Expert) -> ExpertWeights:
            if failing:
                raise ArithmeticError(f"no weights on rank {rank}")
            return read(expert)

        x = torch.randn(20, HIDDEN)
        for exact in (True, False):
            replace_moe_layers(layer, exact=exact, grouped_experts=reading)
            failing.extend([1] * rank)
            told = "" if rank else "rank 1 did not make its call: ArithmeticError: "
            with pytest.raises(ArithmeticError if rank else EPPeerError, match=f"{told}no weights on rank 1"):
                layer(x)
            failing.clear()
            assert layer(x)[0].isfinite().all(), "all go on"


def test_peers_learn_of_a_function_that_fails():
    run_ranks(_failing_worker, 2)
