"""Layers with grouped experts against the same layers with experts one by one: outputs, every gradient, steps, what is saved."""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed_cases import (
    HIDDEN,
    Case,
    Expert,
    SeparateGate,
    assert_equal,
    build_engine,
    logged,
    make_model,
    make_moe,
    most_experts,
    on_deepspeed_ranks,
    read_expert,
    run_layer,
    run_steps,
    sequential,
    serves,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepep_moe.integrations.deepspeed import ExpertWeights, replace_moe_layers, restore_moe_layers
from deepep_moe.nn import SwiGLU

pytest.importorskip("deepspeed")

# Matrix products of other shapes round other bits. A bias is added to a product that is rounded, where torch.nn.Linear adds it before: one
# rounding more, of 2^-9 in bf16 and of 2^-12 in fp16.
ON_GPUS = 1e-5  # in fp32, where each product may have a kernel of its own
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def read_gated(expert: SeparateGate) -> ExpertWeights:
    return ExpertWeights(torch.cat((expert.gate.weight, expert.up.weight)), None, expert.down.weight, None, "swiglu")


@contextlib.contextmanager
def grouped_calls(num: int | None = None) -> Iterator[list[bool]]:
    """Yield a list with one entry per grouped forward: True if its weights were not copied. Assert that there are `num` entries."""
    from deepep_moe.integrations.deepspeed.native import grouped

    are_views: list[bool] = []
    with mock.patch.object(grouped, "grouped_mlp", wraps=grouped.grouped_mlp) as products:
        yield are_views
    are_views += [not call.args[2].is_contiguous() for call in products.call_args_list]
    assert num is None or len(are_views) == num, f"{len(are_views)} layers ran in grouped products, not {num}"


def make_layer(expert: nn.Module, dtype: torch.dtype = torch.float32, num_experts: int = 8, **options: Any) -> nn.Module:
    """Return a layer whose experts have different weights; DeepSpeed makes them equal."""
    torch.manual_seed(3)
    layer = make_moe(num_experts, expert=expert, **options).to(dtype)
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
    """Return the results with experts one by one, and grouped."""
    passes, state = [], {name: id(value) for name, value in layer.state_dict(keep_vars=True).items()}
    for grouped in (False, option):
        replace_moe_layers(layer, exact=exact, grouped_experts=grouped)
        with grouped_calls(int(grouped is not False)) as are_views:
            passes.append(run_layer(layer, x, cotangent))
        assert {name: id(value) for name, value in layer.state_dict(keep_vars=True).items()} == state, "checkpoints are the same"
    assert option is read_gated or are_views == [in_one_memory], "weights are copied only where they must be"
    return passes


@on_deepspeed_ranks(device=("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(2))))
def test_passes_equal_experts_one_by_one(rank, device):
    """Other numbers of tokens on every rank, and none on the last; biases or not, all dtypes, both modes, weights in one memory or not."""
    torch.manual_seed(rank)  # a bias is rounded twice where products are grouped, so unlucky weights pass the tolerance
    for k, expert, option in (
        (2, sequential(bias=False), True),
        (1, sequential(), True),
        (2, SwiGLU(HIDDEN, 24), True),
        (2, SeparateGate(), read_gated),
        (min(4, most_experts()), Expert(bias=True), read_expert),
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


@on_deepspeed_ranks(device=("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(2))))
def test_default_groups_where_it_is_fast_without_a_copy(rank, device):
    """On GPUs in bf16. The third forward has a guess of its rows, the fourth more rows than that, the last less."""
    for dtype, in_one_memory in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)):
        layer = make_layer(sequential(bias=False), dtype, k=2).to(device)
        if in_one_memory:
            flatten(layer.deepspeed_moe.experts)
        is_grouped = device.type == "cuda" and dtype == torch.bfloat16 and in_one_memory
        for exact in (True, False):
            for num_tokens in ((40, 24), (40, 24), (40, 24), (24, 120), (24, 8)):
                x, cotangent = torch.randn(2, num_tokens[rank], HIDDEN, generator=torch.Generator().manual_seed(rank)).to(device, dtype)
                replace_moe_layers(layer, exact=exact, grouped_experts=False)
                one_by_one = run_layer(layer, x, cotangent)
                replace_moe_layers(layer, exact=exact)
                with grouped_calls() as are_views:
                    assert_equal(
                        run_layer(layer, x, cotangent), one_by_one, f"{dtype}, exact {exact}, {num_tokens}, rank {rank}",
                        tolerance=ROUNDING[dtype] if is_grouped else 0.0,
                    )  # fmt: skip
                assert bool(are_views) == all([is_grouped, *are_views])


@on_deepspeed_ranks()
def test_experts_without_rows_get_gradients_of_zeros(rank):
    """All tokens go to one expert; then nobody has any; then through a buffer with room for a layer with more experts."""
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


@on_deepspeed_ranks()
def test_recomputation_and_autocast(rank):
    """Experts one by one and grouped, by each kind of checkpoint."""
    import deepspeed

    x, cotangent = torch.randn(2, 60, HIDDEN, generator=torch.Generator().manual_seed(rank))
    layer = make_layer(sequential(), k=2)
    forward = layer.forward
    deepspeed.checkpointing.configure(None)
    ways = [partial(checkpoint, forward, use_reentrant=reentrant) for reentrant in (False, True)]
    if "Stream(" not in inspect.getsource(deepspeed.checkpointing):  # as in older versions, which need a GPU's
        ways.append(partial(deepspeed.checkpointing.checkpoint, forward))
    for option in (False, True):
        layer.forward = forward
        replace_moe_layers(layer, grouped_experts=option)
        want = run_layer(layer, x, cotangent)
        for again in ways:
            layer.forward = again
            assert_equal(run_layer(layer, x, cotangent, num_forwards=2), want, f"grouped {option}, {again}, rank {rank}")

    layer.forward = forward
    with torch.autocast("cpu", torch.bfloat16):
        one_by_one, grouped = _passes(layer, True, True, x, cotangent)
    assert grouped["output"].dtype == torch.bfloat16
    assert_equal(grouped, one_by_one, f"rank {rank}", tolerance=ROUNDING[torch.bfloat16])


@pytest.mark.slow
@on_deepspeed_ranks()
def test_compiled_layers(rank):
    """Dynamo warns of nothing, neither in the first forward, which constructs the buffer, nor later."""
    for option in (False, True):
        layer = make_layer(sequential(), k=1, use_rts=False)  # whose gate draws no random numbers
        replace_moe_layers(layer, grouped_experts=option)
        x = torch.randn(20, HIDDEN)
        compiled = torch.compile(layer, backend="eager")
        with warnings.catch_warnings(record=True) as caught, grouped_calls(3 * option):
            warnings.simplefilter("always")
            first, second = (compiled(x)[0] for _ in range(2))
            first.sum().backward()
            assert torch.equal(first, second) and torch.equal(first, layer(x)[0])
        assert not [str(warning.message) for warning in caught if "Dynamo" in str(warning.message)]
        assert all(parameter.grad is not None for parameter in layer.deepspeed_moe.experts.parameters())
        restore_moe_layers(layer)  # the next one constructs a buffer too
        torch.compiler.reset()


# ---- steps of the optimizer ----

STEPS = [
    (Case(zero=0, k=2), True),
    (Case(zero=2, k=2, use_residual=True, accumulation=2), True),
    (Case(zero=1, k=1, drop_tokens=False, exact=False), True),
    (Case(zero=2, k=2, dtype="bf16"), False),
    (Case(zero=1, k=1, dtype="bf16", exact=False), False),
]
"""A case, and whether experts have biases. In bf16 those round otherwise, and steps take another route where top-k is nearly a tie."""


@on_deepspeed_ranks()
def test_steps_equal_experts_one_by_one(rank):
    for case, bias in STEPS:
        if not serves(case):
            continue
        runs = []
        for option in (False, True):
            with grouped_calls(12 * case.accumulation * option) as are_views:
                engine = build_engine(case, False, model=make_model(case, partial(sequential, bias=bias)))
                assert replace_moe_layers(engine, exact=case.exact, grouped_experts=option) == 2
                runs.append(run_steps(engine, rank, 6))
        assert are_views == [case.zero > 0] * len(are_views), "ZeRO has put all weights into one memory"
        assert_equal(runs[1], runs[0], f"{case}, rank {rank}", tolerance=1e-4)


# ---- where experts run one by one ----


@on_deepspeed_ranks()
def test_experts_that_cannot_be_grouped_are_called_and_a_line_says_why(rank):
    """Results are those of experts one by one, to the bit, and come from calls. Each rank says once what holds there."""
    x, cotangent = torch.randn(2, 40, HIDDEN, generator=torch.Generator().manual_seed(rank))
    calls: list[int] = []

    def hooked(layer: nn.Module) -> None:
        if rank == 0:  # its peer goes on in grouped products
            layer.deepspeed_moe.experts.deepspeed_experts[1].register_forward_hook(lambda *_: calls.append(1))

    changes: list[tuple[nn.Module, Callable[[nn.Module], Any], int, str]] = [
        (sequential(), hooked, rank, "Sequential of local expert 1 has hooks"),
        (Expert(), lambda _: None, 0, "experts are Expert, whose weights deepep_moe cannot read"),
        (nn.Sequential(*sequential(), nn.Dropout(1e-9)), lambda _: None, 0, "Dropout of local expert 0 drops with p=1e-09 in training"),
    ]
    for expert, change, num_grouped, reason in changes:
        layer = make_layer(expert, k=2)
        change(layer)
        replace_moe_layers(layer)
        want = run_layer(layer, x, cotangent)
        replace_moe_layers(layer, grouped_experts=True)
        with logged() as lines, grouped_calls(2 * num_grouped):
            for _ in range(2):
                assert_equal(run_layer(layer, x, cotangent), want, f"{expert}, rank {rank}", tolerance=2e-6 * num_grouped)
        said = [line for line in lines if line.startswith("experts")]
        assert len(said) == (num_grouped == 0) and all(reason in line for line in said), said
    layer.eval()
    with grouped_calls(1), torch.no_grad():
        layer(x)  # where nothing drops
    assert len(calls) == 3 * (rank == 0)
