"""The work of one rank: build the model and the engine, train, measure, save; and load what the other way has saved."""

import math
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import model
import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import data
import timeline
from deepspeed_ranks import engine_ready
from launch import Turn
from parts import Run, parts_of

OURS, DEEPSPEED = "deepep_moe", "deepspeed"
_TAG = "trained"


@dataclass(frozen=True)
class Settings:
    """One run. `dispatcher`: "deepep_moe" or "deepspeed"; `checkpoint`: a folder to save to at the end."""

    dispatcher: str = OURS
    device: str = "cpu"
    backend: str = "auto"
    ranks_per_node: int | None = None
    exact: bool = True
    grouped_experts: bool | None = None
    fused_adam: bool = False
    zero: int = 2
    ep: int = 2
    steps: int = 300
    seed: int = 1234
    seq_length: int = 128
    num_sequences: int = 8
    lr: float = 3e-3
    balance: float = 1e-2
    checkpoint: str = ""
    progress: bool = True


def ds_config(settings: Settings) -> dict[str, Any]:
    """Return a user's usual ds_config, plus the one section that swaps the layers."""
    adam = {"lr": settings.lr, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": not settings.fused_adam}
    return {
        "train_micro_batch_size_per_gpu": settings.num_sequences,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {"stage": settings.zero, "reduce_scatter": True, "contiguous_gradients": True},
        "steps_per_print": 10**9,
        "deepep_moe": {
            "enabled": settings.dispatcher == OURS,
            "backend": settings.backend,
            "ranks_per_node": settings.ranks_per_node,
            "exact": settings.exact,
            "grouped_experts": settings.grouped_experts,
        },
    }


def build_engine(settings: Settings) -> Any:
    """The engine; without `"deepep_moe"` in its config, `initialize` is deepspeed.initialize."""
    from deepep_moe.integrations.deepspeed import initialize

    torch.manual_seed(settings.seed + dist.get_rank())  # experts differ from rank to rank; the engine broadcasts the rest
    built = model.Model(model.Sizes(), settings.ep)
    return initialize(model=built, model_parameters=built.parameters(), config=ds_config(settings))[0]


def _learning_rate(settings: Settings, step: int) -> float:
    """Linear warmup over the first tenth, then a cosine to a tenth of the peak."""
    warmup = max(1, settings.steps // 10)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, settings.steps - warmup)
    return settings.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def _batch(corpus: np.ndarray, settings: Settings, step: int, device: torch.device) -> torch.Tensor:
    numbers = {"seed": settings.seed, "step": step, "rank": dist.get_rank()}
    return data.batch(corpus, settings.num_sequences, settings.seq_length, **numbers).to(device)


def _forward_backward(engine: Any, tokens: torch.Tensor, settings: Settings, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(step)  # gates draw random numbers
    loss, l_aux, load = engine(tokens)
    engine.backward(loss + settings.balance * l_aux)
    return loss, load


def _step(engine: Any, tokens: torch.Tensor, settings: Settings, step: int) -> tuple[float, np.ndarray]:
    """One optimizer step on tokens [num_sequences, seq_length + 1] -> (loss over all ranks, load [moe_layers, num_experts])."""
    loss, load = _forward_backward(engine, tokens, settings, step)
    for group in engine.optimizer.param_groups:
        group["lr"] = _learning_rate(settings, step)
    engine.step()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    dist.all_reduce(load)
    return mean.item(), load.cpu().numpy().astype(np.int64)


def _nodes_per_token(engine: Any) -> float:
    """Nodes that a token of the last forward went to, mean over MoE layers and ranks."""
    from deepep_moe.integrations.common.registry import all_buffers
    from deepep_moe.integrations.deepspeed.native.layer import PackedMOELayer

    buffer = all_buffers()[0]
    num_nodes = buffer.num_ranks // buffer.ranks_per_node
    layers = [module for module in engine.module.modules() if isinstance(module, PackedMOELayer)]
    mean = torch.stack([layer.nodes_per_token(num_nodes).float().mean() for layer in layers]).mean() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


def _loop(engine: Any, settings: Settings, device: torch.device, turn: Turn) -> Run:
    corpus, rank = data.load_corpus(), dist.get_rank()
    num_tokens = settings.num_sequences * settings.seq_length * dist.get_world_size()
    result, load = Run(settings.dispatcher, parts=parts_of(engine.module, engine.optimizer)), []
    shown = rank == 0 and settings.progress
    bar = tqdm(total=settings.steps, desc=settings.dispatcher, unit="step", disable=not shown, mininterval=0.5, position=turn.index)
    start = time.perf_counter()
    for step in range(settings.steps):
        start += turn.take()
        tokens = _batch(corpus, settings, step, device)
        begin = time.perf_counter()
        loss, step_load = _step(engine, tokens, settings, step)
        result.step_s.append(time.perf_counter() - begin)
        result.losses.append(loss)
        if settings.dispatcher == OURS:
            result.nodes_per_token.append(_nodes_per_token(engine))
        result.tokens_per_s.append(num_tokens / result.step_s[-1])
        load.append(step_load)
        bar.set_postfix({"loss": f"{loss:.3f}", "tokens/s": f"{result.tokens_per_s[-1]:,.0f}"}, refresh=False)
        bar.update()
        turn.give()
    bar.close()
    result.seconds, result.load = time.perf_counter() - start, np.stack(load)
    return result


def _timeline(engine: Any, settings: Settings, device: torch.device, turn: Turn) -> timeline.Timeline:
    """Steps more, whose weights nobody needs."""
    turn.take()
    again = engine, _batch(data.load_corpus(), settings, settings.steps, device), settings, settings.steps
    if device.type == "cuda":
        recorded = timeline.record(partial(_step, *again), partial(_forward_backward, *again))
    else:
        recorded = timeline.record_cpu(partial(_step, *again))
    turn.give()
    turn.take()  # a run that ends while the other one is profiled would slow it
    turn.give()
    return recorded


def train(rank: int, num_ranks: int, settings: Settings, turn: Turn | None = None) -> Run | None:
    """One rank of one run (a gloo process group is there), which makes its steps in its `turn`; rank 0 returns what it measured."""
    turn = turn or Turn()
    from deepep_moe.integrations.common.registry import all_buffers

    with engine_ready(settings.device) as device:
        engine = build_engine(settings)
        result = _loop(engine, settings, device, turn)
        result.backend = all_buffers()[0].backend if settings.dispatcher == OURS else dist.get_backend()
        if settings.checkpoint:
            engine.save_checkpoint(settings.checkpoint, tag=_TAG)
        result.timeline = _timeline(engine, settings, device, turn)
    return result if rank == 0 else None


def evaluate(rank: int, num_ranks: int, settings: Settings) -> float:
    """The loss of the checkpoint in `settings.checkpoint` on text of its own, through the dispatcher of `settings`."""
    with engine_ready(settings.device) as device:
        engine = build_engine(settings)
        path, _ = engine.load_checkpoint(settings.checkpoint, tag=_TAG)
        if path is None:
            raise FileNotFoundError(f"no checkpoint of DeepSpeed in {settings.checkpoint!r}; run the training first")
        engine.eval()
        corpus = data.load_corpus()
        with torch.no_grad():
            losses = [engine(_batch(corpus, settings, 10**6 + i, device))[0] for i in range(4)]
        mean = torch.stack(losses).mean() / num_ranks
        dist.all_reduce(mean)
    return mean.item()
