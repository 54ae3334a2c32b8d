"""The work of one rank: build the model, train it, measure."""

import contextlib
import math
import sys
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import config
import moe_report
import numpy as np
import passes
import torch
import torch.distributed as dist
from moe_report import Scalars
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import data
import timeline
from launch import Turn
from megatron_ranks import model_parallel
from parts import Run, parts_of


@dataclass(frozen=True)
class Settings:
    """One run. Sizes of groups: `ep` expert-parallel, `tp` tensor-parallel, `etp` tensor-parallel inside experts. `report_interval`: steps
    between two reports of MoE layers, for which the host waits."""

    model: str = "tiny"
    dtype: str = "fp32"
    dispatcher: str = "deepep_moe"
    device: str = "cpu"
    backend: str = "auto"
    ranks_per_node: int | None = None
    max_sms: int | None = None
    gate: bool = True
    experts: str = "auto"
    fp8_experts: bool = False
    sync_free: bool = False
    recv_capacity_factor: float | None = None
    shared_overlap: bool = False
    shared_width: int | None = None
    expert_width: int | None = None
    recompute: bool = False
    interleave: bool = False
    cuda_graph: bool = False
    micro_batches: int = 1
    tensorboard: str | None = None
    timeline: bool = False
    steps: int = 400
    seed: int = 1234
    seq_length: int = 128
    num_sequences: int = 8
    lr: float = 3e-3
    report_interval: int = 1
    ep: int = 2
    tp: int = 1
    etp: int = 1
    shares_gpus: bool = False
    progress: bool = True

    @property
    def name(self) -> str:
        """Return the name of the run in tables."""
        words = {"fp8_experts": "fp8", "sync_free": "sync-free", "shared_overlap": "shared overlap"}
        words |= {"recompute": "recomputed", "interleave": "1F1B", "cuda_graph": "CUDA graph"}
        grouped = ["grouped"] if self.experts == "own" else []
        return " + ".join([self.dispatcher, *grouped, *(word for field, word in words.items() if getattr(self, field))])

    @property
    def options(self) -> dict[str, Any] | None:
        """Arguments of `enable()`, None for Megatron-Core's own dispatchers."""
        if self.dispatcher != "deepep_moe":
            return None
        names = ("backend", "ranks_per_node", "max_sms", "gate", "experts", "sync_free", "recv_capacity_factor")
        return {name: getattr(self, name) for name in names} | {"metrics": True, "fp8": self.fp8_experts}

    @property
    def exact(self) -> bool:
        """Return whether a GPU must compute the same bits in every run, as a CPU does. In fp32 two runs are compared to the bit."""
        return self.device == "cuda" and self.dtype == "fp32"

    @property
    def switches(self) -> dict[str, Any]:
        """Fields of Megatron-Core's config."""
        fields: dict[str, Any] = {"moe_shared_expert_overlap": True} if self.shared_overlap else {}
        if self.shared_width is not None:
            fields["moe_shared_expert_intermediate_size"] = self.shared_width
        if self.expert_width is not None:
            fields["moe_ffn_hidden_size"] = self.expert_width
        return fields | ({"recompute_granularity": "selective", "recompute_modules": ["moe"]} if self.recompute else {})


class Outcome:
    """The results of a step. The host may read them later, when the device has computed them."""

    def __init__(self, loss: torch.Tensor, load: torch.Tensor):
        on_gpu = loss.device.type == "cuda"
        self._on_host = [
            torch.empty(value.shape, dtype=value.dtype, pin_memory=on_gpu).copy_(value, non_blocking=True) for value in (loss, load)
        ]
        self._event = torch.cuda.Event() if on_gpu else None
        if self._event is not None:
            self._event.record()

    def read(self) -> tuple[float, np.ndarray]:
        """Wait. Returns the mean loss over ranks, and the load [moe_layers, num_experts] of all ranks."""
        if self._event is not None:
            self._event.synchronize()
        loss, load = self._on_host
        return loss.item() / dist.get_world_size(), load.numpy().astype(np.int64)


class Trainer:
    """Megatron-Core's GPTModel and DDP, and PyTorch's AdamW on fp32 copies of this rank's parameters (in fp32 on themselves)."""

    def __init__(self, settings: Settings, device: torch.device):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        sizes = {"ep": settings.ep, "tp": settings.tp, "etp": settings.etp}
        how = {"dtype": settings.dtype, "exact": settings.exact, **sizes, **settings.switches}
        model_config = config.model_config(settings.model, settings.dispatcher, **how)
        model = GPTModel(
            model_config,
            get_gpt_decoder_block_spec(model_config, use_transformer_engine=False, normalization="RMSNorm"),
            vocab_size=data.VOCAB_SIZE,
            max_sequence_length=settings.seq_length,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        ).to(device)
        self.routers = [layer.mlp.router for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
        self.dispatchers = [layer.mlp.token_dispatcher for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
        ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False, grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(model_config, ddp_config, model)
        self.parameters = list(self.model.parameters())
        self.masters = [parameter.detach().float() for parameter in self.parameters]
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self._parameter_groups(), lr=settings.lr, betas=(0.9, 0.95), eps=1e-8, fused=fused)
        self.settings, self.device, self.config = settings, device, model_config
        self.captured = passes.Captured(self.model, self._micro_batches) if settings.cuda_graph else None

    def _parameter_groups(self) -> list[dict]:
        matrices = [master for master in self.masters if master.dim() > 1]
        vectors = [master for master in self.masters if master.dim() <= 1]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]

    def _learning_rate(self, step: int) -> float:
        """Linear warmup over the first tenth, then a cosine to a tenth of the peak."""
        warmup = max(1, self.settings.steps // 10)
        if step < warmup:
            return self.settings.lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.settings.steps - warmup)
        return self.settings.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    def step(self, step: int, tokens: torch.Tensor) -> Outcome:
        """One optimizer step on tokens [num_sequences, seq_length + 1] on the device."""
        from megatron.core.distributed import finalize_model_grads

        self.model.zero_grad_buffer()
        loss = self.forward_backward(tokens)
        # finalize_model_grads uses up the counts when it updates the expert biases.
        load = torch.stack([router.local_tokens_per_expert for router in self.routers])
        dist.all_reduce(load)
        dist.all_reduce(loss)
        finalize_model_grads([self.model])
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = parameter.main_grad
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        self.optimizer.step()
        if self.settings.dtype != "fp32":
            torch._foreach_copy_([parameter.data for parameter in self.parameters], self.masters)
        return Outcome(loss, load)

    def forward_backward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of tokens on the device. Gradients are added to those that are there."""
        if self.captured is not None:
            return self.captured(tokens)
        run = passes.interleaved if self.settings.interleave else passes.one_after_another
        return run(self.model, self._micro_batches(tokens))

    def _micro_batches(self, tokens: torch.Tensor) -> list[dict[str, Any]]:
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        parts = tokens.chunk(self.settings.micro_batches)
        MoEAuxLossAutoScaler.set_loss_scale(torch.full((), 1 / len(parts), device=self.device))
        positions = torch.arange(tokens.shape[1] - 1, device=self.device)
        return [
            {
                "input_ids": part[:, :-1],
                "position_ids": positions.expand(len(part), -1),
                "attention_mask": None,
                "labels": part[:, 1:],
            }
            for part in parts
        ]


def _loop(trainer: Trainer, corpus: np.ndarray, rank: int, num_ranks: int, turn: Turn) -> Run:
    from megatron.core import parallel_state

    settings = trainer.settings
    data_rank = parallel_state.get_data_parallel_rank()
    num_tokens = settings.num_sequences * settings.seq_length * num_ranks // settings.tp
    result, load = Run(settings.name, parts=parts_of(trainer.model, trainer.optimizer)), []

    def batch(step: int) -> torch.Tensor:
        of_step = data.batch(corpus, settings.num_sequences, settings.seq_length, seed=settings.seed, step=step, rank=data_rank)
        return of_step.pin_memory().to(trainer.device, non_blocking=True) if trainer.device.type == "cuda" else of_step

    scalars = Scalars(_tensorboard(settings)) if rank == 0 else None
    shown = rank == 0 and settings.progress
    bar = tqdm(total=settings.steps, desc=settings.name, unit="step", disable=not shown, mininterval=0.5, position=turn.index)
    start = before = time.perf_counter()
    pending: list[Outcome] = []
    # Read a GPU's results of a step when the next one is under way, so that it has no pause between them.
    late = int(trainer.device.type == "cuda")
    for step in range(settings.steps + late):
        waited = turn.take()
        start, before = start + waited, before + waited
        if step < settings.steps:
            pending.append(trainer.step(step, batch(step)))
        if step >= late:
            loss, step_load = pending.pop(0).read()
            now = time.perf_counter()
            result.losses.append(loss)
            result.step_s.append(now - before)
            result.tokens_per_s.append(num_tokens / result.step_s[-1])
            load.append(step_load)
            bar.set_postfix({"loss": f"{loss:.3f}", "tokens/s": f"{result.tokens_per_s[-1]:,.0f}"}, refresh=False)
            bar.update()
            before = now
        if (step + 1) % settings.report_interval == 0 and step < settings.steps:
            moe_report.report(scalars, step, trainer.config, settings.report_interval)
        if scalars is not None and step < settings.steps:
            result.add_scalars(scalars.take())
        turn.give()
    bar.close()
    result.seconds, result.load = time.perf_counter() - start, np.stack(load)
    if settings.timeline:
        turn.take()
        step_again = partial(trainer.step, settings.steps, batch(settings.steps))
        if trainer.device.type == "cuda":
            result.timeline = timeline.record(step_again, partial(trainer.forward_backward, batch(settings.steps)))
        else:
            result.timeline = timeline.record_cpu(step_again)
        turn.give()
        turn.take()  # a run that ends while the other one is profiled would slow it
        turn.give()
    result.backend = getattr(getattr(trainer.dispatchers[0], "buffer", None), "backend", "megatron")
    return result


def _tensorboard(settings: Settings) -> Any:
    """A writer into the folder of the settings, or None."""
    if settings.tensorboard is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(Path(settings.tensorboard) / settings.name.replace(" ", "")))


def _repeat_exactly() -> None:
    """Make a GPU compute the same bits in every run, as a CPU does: two runs are compared, and their routing amplifies a last bit."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    for kernel in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context with a new stream on a GPU, because no CUDA graph can capture the default one."""
    return torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else contextlib.nullcontext()


def train(rank: int, num_ranks: int, settings: Settings, turn: Turn | None = None) -> Run | None:
    """One rank of one run (a gloo process group is there), which makes its steps in its `turn`; rank 0 returns what it measured."""
    if settings.dispatcher == config.DEEP_EP:
        from deepep_moe.compat import deep_ep

        deep_ep.install()  # before Megatron-Core looks for it
    # Megatron-Core's remarks on missing GPU packages and on its own deprecations are not about this run.
    for module in ("megatron", "torch"):
        warnings.filterwarnings("ignore", module=module)
    if settings.exact:
        _repeat_exactly()
    sizes = {"ep": settings.ep, "tp": settings.tp, "etp": settings.etp}
    how = {"seed": settings.seed, "options": settings.options, "shares_gpus": settings.shares_gpus}
    parallel = model_parallel(settings.device, **sizes, **how)
    with parallel as device, _own_stream(device):
        result = _loop(Trainer(settings, device), data.load_corpus(), rank, num_ranks, turn or Turn())
    return result if rank == 0 else None
