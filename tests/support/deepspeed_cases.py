"""Shared parts of the DeepSpeed tests: ranks, layers, a model, ten steps of an engine, and the comparison of two runs."""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from deepspeed_ranks import engine_ready as engine_ready
from logs import heard
from on_ranks import assert_close, on_ranks
from packaging.version import Version
from torch import nn

from deepep_moe.integrations.deepspeed import ExpertWeights, replace_moe_layers

HIDDEN = 32
STEPS = 10


def on_deepspeed_ranks(num_ranks: int = 2, **how: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function of `rank`, as `on_ranks` does, which each rank runs where DeepSpeed is ready. `device`, "cpu" or "cuda" for
    the test, is the rank's own device there."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def in_engine(rank: int, **arguments: Any) -> None:
            with engine_ready(arguments.get("device", "cpu")) as device:
                body(rank, **(arguments | ({"device": device} if "device" in arguments else {})))

        return on_ranks(num_ranks, **how)(in_engine)

    return decorate


def repeats_bits() -> bool:
    """Return whether the installed DeepSpeed applies weights like exact mode: 0.19.4 and newer. Older ones use a matrix product."""
    from deepspeed.moe.sharded_moe import TopKGate

    return "sparse_routes" in inspect.signature(TopKGate.forward).parameters


def most_experts() -> int:
    """The largest k of the installed DeepSpeed's gates: 2 before they had `topkgating`."""
    from deepspeed.moe import sharded_moe

    return 8 if hasattr(sharded_moe, "topkgating") else 2


class Expert(nn.Module):
    """A feed-forward network without biases: their gradients are plain sums of rows, which padding with zeros regroups."""

    def __init__(self, bias: bool = False):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 48, bias=bias), nn.Linear(48, HIDDEN, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def sequential(activation: nn.Module | None = None, *, bias: bool = True) -> nn.Sequential:
    """An expert of a class that grouped products know."""
    return nn.Sequential(nn.Linear(HIDDEN, 48, bias=bias), activation or nn.GELU(), nn.Linear(48, HIDDEN, bias=bias))


class SeparateGate(nn.Module):
    """Three matrices, as the experts of many models have them."""

    def __init__(self, hidden: int = HIDDEN, width: int = 24):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((hidden, width), (hidden, width), (width, hidden)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def read_expert(expert: Expert) -> ExpertWeights:
    """Return an expert's weights for grouped products, like a user's function for an unknown class."""
    return ExpertWeights(expert.up.weight, expert.up.bias, expert.down.weight, expert.down.bias, nn.functional.gelu)


def make_moe(
    num_experts: int = 8, *, k: int = 2, ep: int = 2, expert: nn.Module | None = None, with_groups: bool = True, **options: Any
) -> nn.Module:
    """A `deepspeed.moe.layer.MoE`, its weights drawn from PyTorch's state. with_groups: its process groups
    are made too, as an engine makes them."""
    from deepspeed.moe.layer import MoE

    layer = MoE(HIDDEN, expert or Expert(), num_experts=num_experts, ep_size=ep, k=k, **options)
    if with_groups:
        layer.set_deepspeed_parallelism()
    return layer


def run_layer(
    layer: nn.Module, x: torch.Tensor, cotangent: torch.Tensor, *extra: Any, seed: int = 0, num_forwards: int = 1
) -> dict[str, torch.Tensor]:
    """Output, l_aux, counts, input gradient and every parameter gradient of one pass, random numbers from `seed`. A swapped layer has
    dispatched in each of `num_forwards`, where it served."""
    layer.zero_grad()
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    with dispatches(num_forwards * num_swapped(layer)):
        output, l_aux, counts = layer(x, *extra)
        ((output * cotangent).float().sum() + l_aux).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters() if parameter.requires_grad}
    return {"output": output.detach(), "l_aux": l_aux.detach(), "counts": counts, "input gradient": x.grad} | gradients


def num_swapped(model: nn.Module) -> int:
    """Its layers whose rows deepep_moe moves."""
    from deepep_moe.integrations.deepspeed.native.layer import PackedMOELayer

    return sum(isinstance(module, PackedMOELayer) for module in model.modules())


@contextlib.contextmanager
def dispatches(num: int) -> Iterator[None]:
    """Asserts that so many exchanges of swapped layers begin meanwhile."""
    from deepep_moe.integrations.deepspeed.native import layer

    with mock.patch.object(layer, "ready", wraps=layer.ready) as ready:
        yield
    assert ready.call_count == num, f"{ready.call_count} exchanges, not {num}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of an engine."""

    zero: int = 0
    k: int = 2
    ep: int = 2
    drop_tokens: bool = True
    use_residual: bool = False
    dtype: str = "fp32"
    noisy_gate_policy: str | None = None
    accumulation: int = 1
    exact: bool = True
    tolerance: float = 0.0
    """Most that losses and gradients may differ, relative to the entry's largest; 0: equal to the bit."""


def serves(case: Case) -> bool:
    """Return whether the installed DeepSpeed can run the case. Before 0.15 it has no k above 2, and no fp16 on CPUs. Up to 0.16, bf16
    without ZeRO fails on CPUs in the norm of gradients. Up to 0.18, k above 2 without dropping fails."""
    import deepspeed

    if case.dtype == "bf16" and case.zero == 0 and Version(deepspeed.__version__) < Version("0.17"):
        return False
    if case.dtype == "fp16" and most_experts() == 2:
        return False
    return case.k <= 2 or (most_experts() > 2 and (case.drop_tokens or repeats_bits()))


class Model(nn.Module):
    """MoE layers between dense ones; returns the loss of predicting `target`."""

    def __init__(self, layers: list[nn.Module], hidden: int = HIDDEN):
        super().__init__()
        self.input, self.output = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.layers = nn.ModuleList(layers)

    def predict(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The prediction and the layers' balance losses."""
        h, l_aux = self.input(x), torch.zeros((), device=x.device)
        for layer in self.layers:
            y, layer_aux, _ = layer(h)
            h, l_aux = h + y, l_aux + layer_aux
        return self.output(h), l_aux

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        y, l_aux = self.predict(x)
        return nn.functional.mse_loss(y.float(), target.float()) + 0.01 * l_aux


def make_model(case: Case, make_expert: Callable[[], nn.Module] = Expert) -> Model:
    torch.manual_seed(7)
    options = {"drop_tokens": case.drop_tokens, "use_residual": case.use_residual, "noisy_gate_policy": case.noisy_gate_policy}
    return Model([make_moe(4, k=case.k, ep=case.ep, expert=make_expert(), with_groups=False, **options) for _ in range(2)])


def ds_config(case: Case) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.accumulation,
        # With the default eps of 1e-8, gradients that are nothing but rounding move weights as far as others do.
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": case.zero, "reduce_scatter": True, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    return config | {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}.get(case.dtype, {})


def build_engine(case: Case, ours: bool, *, model: nn.Module | None = None, **arguments: Any) -> Any:
    """An engine of DeepSpeed, its MoE layers swapped or not."""
    import deepspeed

    model = model or make_model(case)
    arguments = {"model_parameters": model.parameters(), "config": ds_config(case)} | arguments
    engine = deepspeed.initialize(model=model, **arguments)[0]
    if ours:
        assert replace_moe_layers(engine, exact=case.exact) == sum(hasattr(module, "gate") for module in engine.module.modules())
    return engine


@contextlib.contextmanager
def recorded_gradients(engine: Any) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's gradients before they are reduced, in every stage of ZeRO."""
    gradients: dict[str, torch.Tensor] = {}
    handles = []
    for name, parameter in engine.module.named_parameters():
        handles.append(parameter.register_hook(lambda grad, name=name: gradients.__setitem__(name, grad.clone())))
    yield gradients
    for handle in handles:
        handle.remove()


def run_steps(engine: Any, rank: int, steps: range | int = STEPS, num_tokens: int = 64) -> dict[str, torch.Tensor]:
    """Losses of every micro step, gradients of the last, parameters at the end. Swapped layers have dispatched in each."""
    losses = []
    dtype = next(engine.module.parameters()).dtype
    steps = range(steps) if isinstance(steps, int) else steps
    num_dispatches = len(steps) * engine.gradient_accumulation_steps() * num_swapped(engine)
    with recorded_gradients(engine) as gradients, dispatches(num_dispatches):
        for step in steps:
            for micro in range(engine.gradient_accumulation_steps()):
                generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
                shape = (2, num_tokens, engine.module.input.in_features)
                x, target = (torch.randn(shape, generator=generator).to(engine.device, dtype) for _ in range(2))
                torch.manual_seed(step)
                loss = engine(x, target)
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
    state = {"parameter " + name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    return {"losses": torch.stack(losses)} | {"gradient " + name: grad for name, grad in gradients.items()} | state


def assert_equal(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], context: str, *, tolerance: float = 0.0, rounding: float = 1e-4
) -> float:
    """Check that all entries are equal, to the bit or up to `tolerance` of the largest; return the largest difference.

    Instead of the bits, a DeepSpeed that does not have them is held to `rounding`.
    """
    if not repeats_bits():
        tolerance = max(tolerance, rounding)
    assert set(actual) == set(expected), f"{context}: {set(actual) ^ set(expected)} are in one run only"
    for name, want in expected.items():
        assert actual[name].dtype == want.dtype and actual[name].shape == want.shape, f"{context}: {name} has another form"
        assert torch.isfinite(actual[name].float()).all(), f"{context}: {name} is not finite"
    return assert_close(actual, expected, context, tolerance, 1e-6)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Messages of the library meanwhile."""
    logger = logging.getLogger("deepep_moe")
    level, handlers = logger.level, [*logger.handlers]
    yield heard(logging.INFO)
    logger.handlers[:] = handlers
    logger.setLevel(level)
