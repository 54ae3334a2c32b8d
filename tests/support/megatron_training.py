"""Training with Megatron-Core's own DDP, optimizers and checkpoints on CPU ranks over gloo. Runs in workers.

A `Setting` names what a cell of a matrix trains with, `training` builds it, and `train` makes steps. Kinds of experts stand in `EXPERTS`; a
new kind needs a line there.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import megatron_states
import torch
import torch.distributed as dist
from megatron_cases import SOFTMAX, layer_config
from te_experts import te_experts
from torch.overrides import TorchFunctionMode

from deepep_moe.integrations.megatron.config_switches import selection

VOCABULARY, LENGTH, HIDDEN, BATCH, MICRO_BATCHES = 64, 16, 128, 2, 2
EXPERTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "sequential": {"experts": "framework"},
    "grouped": {"experts": "own"},
    "fp8": {"experts": "own", "fp8": True},
    "stock TE": None,
    "TE": {"experts": "framework"},
    "grouped for TE": {"experts": "own"},
    "auto for TE": {"experts": "auto"},
}
"""Options of `enable()` for each kind of experts. None: Megatron-Core's own dispatcher `alltoall`. With "TE" in its name, the spec of the
model has TEGroupedMLP, otherwise SequentialMLP."""


@dataclass(frozen=True)
class Setting:
    """The settings of a training run."""

    experts: str
    ep: int = 1
    is_distributed: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    dtype: torch.dtype = torch.float32
    bucket_size: int | None = 60_000
    changes: tuple[tuple[str, Any], ...] = ()


@dataclass
class Training:
    """A model with DDP and its optimizer."""

    config: Any
    model: Any
    optimizer: Any


# ---- Megatron-Core on CPUs ----


class _CudaIsCpu(TorchFunctionMode):
    """Answer "cuda" devices and tensor types, which DDP and optimizers name, with the CPU's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        if name == "type" and len(args) == 1 and not kwargs:
            return "torch.cuda." + func(*args).removeprefix("torch.")
        if name == "to":
            args = tuple(torch.device("cpu") if isinstance(a, str | torch.device) and str(a).startswith("cuda") else a for a in args)
        return func(*args, **kwargs)


@contextlib.contextmanager
def _one_by_one(*_: Any, **__: Any) -> Iterator[Any]:
    """Start collectives one by one, as gloo joins none, with a handle that waits for all. A gather writes late, as on GPUs."""
    from megatron.core.distributed import param_and_grad_buffer

    works: list[Any] = []

    def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if (work := function(*args, **kwargs)) is not None:
                works.append(work)
            return work

        return call

    with contextlib.ExitStack() as undo:
        gathers, scatters = (param_and_grad_buffer, "dist_all_gather_func"), (param_and_grad_buffer, "dist_reduce_scatter_func")
        for place, name in (gathers, scatters, (dist, "all_reduce")):
            undo.enter_context(mock.patch.object(place, name, keeping(getattr(place, name))))
        yield SimpleNamespace(wait=lambda: [work.wait() for work in works])


def _set_states(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the step of PyTorch's Adam, a tensor, which formats for apex's and TransformerEngine's do not store."""

    def call(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        state["step"] = state["step"].clone()  # all parameters share one, to which each would add
        return stock(self, model_param, tensors | {"step": state["step"]})

    return call


@contextlib.contextmanager
def on_cpus() -> Iterator[None]:
    """Let DDP and optimizers of Megatron-Core work on CPU tensors."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    name = "_set_main_param_and_optimizer_states"
    of_states = mock.patch.object(DistributedOptimizer, name, _set_states(getattr(DistributedOptimizer, name)))
    with mock.patch.object(param_and_grad_buffer, "_coalescing_manager", _one_by_one), of_states, _CudaIsCpu():
        yield


# ---- models ----


@contextlib.contextmanager
def training(setting: Setting, *, seed: int = 7) -> Iterator[Training]:
    """Groups, a model of two MoE layers with weights from `seed`, DDP and an optimizer."""
    import megatron_ranks as ranks

    options, before = EXPERTS[setting.experts], _groups()
    with ranks.model_parallel("cpu", ep=setting.ep, seed=seed, options=options), on_cpus():
        config = _config(setting)
        with te_experts() if "TE" in setting.experts else contextlib.nullcontext():
            model = gpt(config, seed)
        yield Training(config, *_wrap(setting, config, model))
    dist.barrier()
    for group in _groups() - before:  # Megatron-Core destroys none, and each group of gloo has threads that never rest
        dist.destroy_process_group(group)


def _groups() -> set[Any]:
    return set(dist.distributed_c10d._world.pg_map)


def _config(setting: Setting) -> Any:
    dispatcher = selection("alltoall" if EXPERTS[setting.experts] is None else "deepep_moe")
    routing = SOFTMAX | {"moe_router_topk": 2, "moe_router_dtype": "fp32", "moe_router_load_balancing_type": "aux_loss"}
    fields = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 128,
        "moe_ffn_hidden_size": 32,
        "moe_shared_expert_intermediate_size": None,
        "gradient_accumulation_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_dropout_fusion": False,
        "bf16": setting.dtype == torch.bfloat16,
        "params_dtype": setting.dtype,
        "expert_model_parallel_size": setting.ep,
    }
    return layer_config(**(routing | fields | dispatcher | dict(setting.changes)))


def gpt(config: Any, seed: int = 7) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    return GPTModel(config, spec, VOCABULARY, LENGTH, position_embedding_type="rope", share_embeddings_and_output_weights=False)


def _wrap(setting: Setting, config: Any, model: Any) -> tuple[Any, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    is_bf16 = setting.dtype == torch.bfloat16
    alike = {"use_distributed_optimizer": setting.is_distributed, "overlap_param_gather": setting.overlap_param_gather}
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=setting.overlap_grad_reduce, grad_reduce_in_fp32=True, bucket_size=setting.bucket_size, **alike
    )
    wrapped = DistributedDataParallel(config, ddp, Float16Module(config, model) if is_bf16 else model)
    adam = OptimizerConfig(
        optimizer="adam", lr=1e-2, min_lr=1e-2, weight_decay=0.1, clip_grad=1.0, bf16=is_bf16, params_dtype=setting.dtype,
        adam_eps=1e-4,  # with the default of 1e-8, gradients that are nothing but rounding move weights as far as others do
        **alike,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(adam, [wrapped])
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    if setting.overlap_grad_reduce:
        config.no_sync_func = wrapped.no_sync
    if setting.overlap_param_gather:
        config.param_sync_func = wrapped.start_param_sync
    return wrapped, optimizer


def unwrapped(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model


# ---- steps ----


def train(run: Training, steps: range) -> list[float]:
    """Make these steps, each with its own batches; return the losses, averaged over the ranks."""
    return [_train_step(run, step) for step in steps]


def batch_of(step: int, micro: int) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(100_000 * step + 1000 * micro + dist.get_rank())
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": positions,
        "attention_mask": None,
    }


def _loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


def _train_step(run: Training, step: int) -> float:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    run.model.zero_grad_buffer()
    run.optimizer.zero_grad()
    outputs = get_forward_backward_func()(
        forward_step_func=lambda batches, chunk: (chunk(**next(batches)), _loss_of),
        data_iterator=iter([batch_of(step, micro) for micro in range(MICRO_BATCHES)]),
        model=run.model,
        num_microbatches=MICRO_BATCHES,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    assert run.optimizer.step()[0]
    loss = torch.stack([one["loss"] for one in outputs]).mean()
    dist.all_reduce(loss)
    return float(loss / dist.get_world_size())


# ---- checkpoints ----


def _sharded_state(run: Training, kind: str, is_loading: bool) -> dict[str, Any]:
    metadata = megatron_states.metadata(distrib_optim_sharding_type=kind, chained_optim_avoid_prefix=True)
    of_model = unwrapped(run.model).sharded_state_dict(metadata=metadata)
    return {"model": of_model, "optimizer": run.optimizer.sharded_state_dict(of_model, is_loading=is_loading, metadata=metadata)}


def save(run: Training, folder: Path, kind: str = "dp_reshardable") -> None:
    """Save model and optimizer as Megatron-LM does, with `--ckpt-format torch` too."""
    if run.model.ddp_config.overlap_param_gather:  # Megatron-LM gathers the parameters first
        run.model.disable_forward_pre_hook()
        run.model.enable_forward_pre_hook()
    if kind == "torch":
        return _save_plain(run, folder)
    megatron_states.save(_sharded_state(run, kind, is_loading=False), folder)


def load(run: Training, folder: Path, kind: str = "dp_reshardable") -> None:
    """Load what `save` has saved."""
    from megatron.core import dist_checkpointing

    for optimizer in getattr(run.optimizer, "chained_optimizers", [run.optimizer]):  # PyTorch's Adam makes states in its first step
        if hasattr(optimizer, "_init_optimizer_states_with_dummy_values") and not optimizer.optimizer.state:
            optimizer._init_optimizer_states_with_dummy_values()
    if kind == "torch":
        return _load_plain(run, folder)
    loaded = dist_checkpointing.load(_sharded_state(run, kind, is_loading=True), str(folder))
    unwrapped(run.model).load_state_dict(loaded["model"])
    with torch.no_grad():
        run.optimizer.load_state_dict(loaded["optimizer"])


def _save_plain(run: Training, folder: Path) -> None:
    """Each rank saves its state dicts, and the distributed optimizer's states in a file of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {"model": unwrapped(run.model).state_dict(), "optimizer": run.optimizer.state_dict()}
    torch.save(state, folder / f"{dist.get_rank()}.pt")
    if hasattr(run.optimizer, "save_parameter_state") and run.model.ddp_config.use_distributed_optimizer:
        run.optimizer.save_parameter_state(str(folder / f"optimizer-{_ep_rank()}.pt"))
    dist.barrier()


def _load_plain(run: Training, folder: Path) -> None:
    state = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=False)
    unwrapped(run.model).load_state_dict(state["model"])
    with torch.no_grad():
        run.optimizer.load_state_dict(state["optimizer"])
        if run.model.ddp_config.use_distributed_optimizer:
            run.optimizer.load_parameter_state(str(folder / f"optimizer-{_ep_rank()}.pt"))


def _ep_rank() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_expert_model_parallel_rank()
