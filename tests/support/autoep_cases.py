"""Shared parts of the AutoEP tests, which run in workers: tiny models of transformers, an engine with AutoEP, some training steps."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import deepspeed_cases
import torch
from huggingface_cases import build

from deepep_moe.exchange.buffer import Buffer
from deepep_moe.integrations.deepspeed import replace_moe_layers

STEPS = 3


@dataclass(frozen=True)
class Case(deepspeed_cases.Case):
    """One run of an engine."""

    family: str = "mixtral"
    score_apply: str = "auto"
    gate: bool = True
    recomputed: bool | None = None
    """Activation checkpointing: None: none; else whether it is the reentrant kind."""
    uneven: bool = False
    tolerance: float = field(default=1e-4, kw_only=True)


def make_model(case: Case) -> Any:
    """A causal language model of two MoE layers; the weights are spread, so that experts differ."""
    changes = {"num_experts_per_tok": 3, "num_hidden_layers": 3, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    changes = {"mixtral": {"output_router_logits": True}, "qwen3": {}}.get(case.family, changes)
    model = build(case.family, initializer_range=0.2, use_cache=False, **changes)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.1, 0.1, buffer.numel()))
    if case.recomputed is not None:
        model.gradient_checkpointing_enable({"use_reentrant": case.recomputed})
    return model


def ds_config(case: Case, **sections: Any) -> dict[str, Any]:
    config = deepspeed_cases.ds_config(case) | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    ours = {"enabled": True, "autoep_size": case.ep, "use_grouped_mm": False, "score_apply": case.score_apply}
    return config | {"expert_parallel": ours} | sections


def build_engine(case: Case, ours: bool, *, model: Any = None, config: dict[str, Any] | None = None, **options: Any) -> Any:
    """An engine whose MoE layers are AutoEP's, swapped or not."""
    import deepspeed

    model = make_model(case) if model is None else model
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config or ds_config(case))[0]
    assert len(autoep_layers(engine)) == 2, "AutoEP has made its layers"
    if ours:
        assert replace_moe_layers(engine, exact=case.exact, gate=case.gate, **options) == 2
    return engine


def autoep_layers(engine: Any) -> list[Any]:
    return [module for module in engine.modules() if getattr(module, "_is_autoep_layer", False)]


def tokens(rank: int, step: int, uneven: bool = False) -> torch.Tensor:
    """[2, length] ids of a batch; uneven: rank r has some r times longer."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(64, (2, 24 if not uneven else 5 + 30 * rank), generator=generator)


def run_steps(engine: Any, rank: int, case: Case, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Losses and logits of every step, gradients of the first and last, parameters at the end."""
    results: dict[str, torch.Tensor] = {}
    for step in range(steps):
        ids = tokens(rank, step, case.uneven).to(engine.device)
        with deepspeed_cases.recorded_gradients(engine) as gradients:
            output = engine(input_ids=ids, labels=ids)
            engine.backward(output.loss)
        engine.step()
        results |= {f"loss {step}": output.loss.detach().clone(), f"logits {step}": output.logits.detach().clone()}
        if step in (0, steps - 1):
            results |= {f"gradient {step} {name}": gradient for name, gradient in gradients.items()}
    return results | {"parameter " + name: owned(parameter).detach().clone() for name, parameter in engine.module.named_parameters()}


def owned(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of it in ZeRO 3, which may still be gathering the whole when a step has returned."""
    return getattr(parameter, "ds_tensor", parameter)


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Calls of our dispatch and of AutoEP's all-to-all, its DeepEP path and its router's own choice meanwhile."""
    from deepspeed.module_inject import auto_ep_layer
    from deepspeed.moe.ep_router import TokenChoiceTopKRouter

    exchange, choice = auto_ep_layer._AllToAllV, TokenChoiceTopKRouter
    calls = {"dispatch": 0, "AutoEP's all-to-all": 0, "AutoEP's choice": 0}

    def counting(stock: Any, key: str) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            calls[key] += 1
            return stock(*args, **kwargs)

        return count

    with contextlib.ExitStack() as undo:
        for (owner, name), key in zip(((Buffer, "dispatch"), (exchange, "apply"), (choice, "forward")), calls, strict=True):
            count = counting(getattr(owner, name), key)
            undo.enter_context(mock.patch.object(owner, name, staticmethod(count) if owner is exchange else count))
        yield calls
