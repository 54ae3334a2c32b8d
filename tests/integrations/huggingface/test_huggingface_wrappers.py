"""Spread models under code that wraps, averages, clips and saves parameters train like the plain model, or are refused."""

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from huggingface_cases import build
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deepep_moe.integrations.huggingface import expert_parameters, gathered_state_dict, spread_experts


def tokens_of(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of all ranks under the names of the stock model. Raises where a replicated one differs from rank 0's."""
    of_experts, state = {id(parameter) for parameter in expert_parameters(model)}, {}
    for name, parameter in model.named_parameters():
        parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, parameter.detach().contiguous())
        if id(parameter) in of_experts:
            name = name.replace("experts.experts.up", "experts.gate_up_proj").replace("experts.experts.down", "experts.down_proj")
            state[name] = torch.cat(parts)
        else:
            assert all(torch.equal(part, parts[0]) for part in parts), f"the ranks have different {name}"
            state[name] = parts[0]
    return state


@on_ranks(2, max_norm=(0.01, 1e9), is_frozen=(False, True))
def test_training_in_ddp(rank: int, num_ranks: int, max_norm: float, is_frozen: bool) -> None:
    results = []
    for is_spread in (False, True):
        model, norms = build("stand-in"), []
        for layer in model.layers:
            layer.experts.requires_grad_(not is_frozen)
        if is_spread:
            spread_experts(model, num_max_tokens_per_rank=64)
        wrapped, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):
            optimizer.zero_grad()
            wrapped(input_ids=tokens_of(rank, step)).logits.square().mean().backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
            optimizer.step()
        results.append((gathered(model), torch.stack(norms)))
    (stock, stock_norms), (spread, norms) = results
    torch.testing.assert_close(norms, stock_norms)
    assert stock.keys() == spread.keys()
    before = dict(build("stand-in").named_parameters())["layers.0.experts.down_proj"]
    assert torch.equal(stock["layers.0.experts.down_proj"], before) == is_frozen
    for name, parameter in stock.items():
        torch.testing.assert_close(spread[name], parameter, rtol=1e-4, atol=1e-6)


class Around(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens).logits


@on_ranks(2)
def test_ddp_around_another_module(rank: int, num_ranks: int) -> None:
    model, tokens = build("stand-in"), tokens_of(rank, 0)
    spread_experts(model, num_max_tokens_per_rank=64)
    with pytest.raises(ValueError, match=r"experts of rank 0 .*mark_experts\(model\) on the Around"):
        DistributedDataParallel(Around(model))(tokens)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(input_ids=tokens).logits, model(input_ids=tokens).logits), "a refused call leaves the layers in step"
    DistributedDataParallel(copied)(input_ids=tokens).logits.sum().backward()
    torch.nn.utils.clip_grad_norm_(copied.parameters(), 1.0)


@on_ranks(2)
def test_saving(rank: int, num_ranks: int, tmp_path: Path) -> None:
    """A rank keeps a file of its own; a library that takes it for the model is refused on all ranks."""
    from safetensors.torch import save_model
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model, other = build("stand-in"), build("stand-in")
    for part in (model, other):
        spread_experts(part, num_max_tokens_per_rank=64)
    with torch.no_grad():
        for parameter in expert_parameters(model):
            parameter.mul_(2)
    torch.save(model.state_dict(), f"{tmp_path}/{rank}.pt")
    other.load_state_dict(torch.load(f"{tmp_path}/{rank}.pt"))
    assert dict(gathered_state_dict(other)).keys() == build("stand-in").state_dict().keys()
    tokens = tokens_of(rank, 0)
    assert torch.equal(other(input_ids=tokens).logits, model(input_ids=tokens).logits)
    for save in (get_model_state_dict, lambda model: save_model(model, f"{tmp_path}/{rank}.safetensors")):
        with pytest.raises(ValueError, match="experts of one rank.*save_pretrained"):
            save(model)
    for save in (checkpoint.save, checkpoint.async_save):
        for state in (model.state_dict(), {"all": [dict(model.state_dict())]}, {"model": model}):
            with pytest.raises(ValueError, match="experts of one rank for those of all"):
                save(state, checkpoint_id=tmp_path / "all")
    checkpoint.save(model.state_dict(), checkpoint_id=tmp_path / f"rank {rank}", no_dist=True)
    checkpoint.save(build("stand-in").state_dict(), checkpoint_id=tmp_path / "plain")


@pytest.mark.slow
@on_ranks(2)
def test_trainer_and_accelerate(rank: int, num_ranks: int, tmp_path: Path) -> None:
    """Needs accelerate, which the extra `dev` installs."""
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments
    from transformers.core_model_loading import revert_weight_conversion

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank), ACCELERATE_USE_CPU="true")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29678")
    data = [{"input_ids": tokens_of(index, 7)[0], "labels": tokens_of(index, 7)[0]} for index in range(12)]
    arguments = TrainingArguments(
        "", per_device_train_batch_size=2, max_steps=3, learning_rate=0.5, optim="sgd", max_grad_norm=0.5, report_to=[],
        use_cpu=True, ddp_backend="gloo", save_steps=2, save_only_model=True, disable_tqdm=True,
    )  # fmt: skip
    states = []
    for is_spread in (False, True):
        arguments.output_dir = str(tmp_path / f"spread {is_spread}")
        model = build("qwen3")
        if is_spread:
            spread_experts(model, num_max_tokens_per_rank=64)
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        states.append(gathered(model))
    for name, parameter in states[0].items():
        torch.testing.assert_close(states[1][name], parameter, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "spread True" / "checkpoint-2" / "model.safetensors").exists()
    trainer.save_model(str(tmp_path))
    loaded, tensors = type(model).from_pretrained(tmp_path), dict(gathered_state_dict(model))
    assert rank or all(torch.equal(tensor, tensors[name]) for name, tensor in revert_weight_conversion(loaded, loaded.state_dict()).items())
    with pytest.raises(ValueError, match="load_spread the checkpoint"):
        trainer.train(resume_from_checkpoint=str(tmp_path))
    arguments.load_best_model_at_end = True
    with pytest.raises(ValueError, match="load_spread the checkpoint"):
        trainer.train()
    arguments.load_best_model_at_end = arguments.save_only_model = False
    with pytest.raises(ValueError, match="optimizer's state of rank 0.*save_only_model"):
        trainer.train()
    trainer.model = torch.nn.Sequential(model)
    with pytest.raises(ValueError, match="would save the experts of one rank; write the tensors of gathered_state_dict"):
        trainer.save_model(str(tmp_path))
    whole = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="state_dict has the experts of one rank"):
        model.save_pretrained(tmp_path, state_dict=whole)
    accelerator = Accelerator()
    options = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
    accelerator.unwrap_model(accelerator.prepare(model)).save_pretrained(tmp_path / "unwrapped", **options)
    assert (tmp_path / "unwrapped" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    for save in (accelerator.get_state_dict, lambda model: accelerator.save_model(model, str(tmp_path))):
        with pytest.raises(ValueError, match=r"get_state_dict would take the experts of one rank.*call model\.save_pretrained"):
            save(model)


@pytest.mark.slow
@on_ranks(2, stage=(0, 1, 2, 3))
def test_deepspeed_is_refused(rank: int, num_ranks: int, stage: int) -> None:
    deepspeed = pytest.importorskip("deepspeed")
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    set_accelerator(CPU_Accelerator())
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = build("stand-in")
    spread_experts(model, num_max_tokens_per_rank=64)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    with pytest.raises(ValueError, match=r"DeepSpeed has no process group for experts that deepep_moe has spread"):
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
