"""Experts of Hugging Face style models, spread over ranks: outputs and gradients are those of the model itself, also under code that wraps
the model, or it is refused."""

import contextlib
import io
import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from huggingface_cases import EXAMPLE, build
from on_ranks import on_ranks
from scripts import modules_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deepep_moe
from deepep_moe.errors import EPMismatchError, EPPeerError
from deepep_moe.integrations.huggingface import SpreadExperts, expert_parameters, gathered_state_dict, spread_experts
from deepep_moe.nn import Metrics


@on_ranks(2, name=("stand-in", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "qwen3", "deepseek"))))
def test_parity(rank: int, num_ranks: int, name: str) -> None:
    if name != "stand-in":
        pytest.importorskip("transformers", minversion="5")
    model, spread = build(name), build(name)
    replaced = spread_experts(spread, num_max_tokens_per_rank=64)
    experts = [module for module in spread.modules() if isinstance(module, SpreadExperts)]
    tokens = torch.randint(0, 64, (2, 5 + rank), generator=torch.Generator().manual_seed(rank))  # other tokens, and another number
    theirs, ours = model(input_ids=tokens).logits, spread(input_ids=tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for logits in (theirs, ours):
        logits.square().sum().backward()
    of_experts = {id(parameter) for parameter in expert_parameters(spread)}
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    for key, parameter in spread.named_parameters():
        if id(parameter) not in of_experts:
            torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-4, atol=1e-5)
    for place, module in zip(replaced, experts, strict=True):
        for ours_name, theirs_name in (("up", "gate_up_proj"), ("down", "down_proj")):
            total = gradients[f"{place}.{theirs_name}"].clone()
            dist.all_reduce(total)
            local = total.unflatten(0, (num_ranks, -1))[rank]
            torch.testing.assert_close(getattr(module.experts, ours_name).grad, local, rtol=1e-4, atol=1e-5)
    place = "layers.{}.experts" if name == "stand-in" else "model.layers.{}.mlp.experts"
    assert replaced == [place.format(block) for block in ((1,) if name == "deepseek" else (0, 1))]
    assert len({id(module.buffer) for module in experts}) == 1


@on_ranks(2)
def test_one_line_says_that_it_is_on_and_metrics_count(rank: int, num_ranks: int) -> None:
    lines, model = io.StringIO(), build("stand-in")
    with contextlib.redirect_stderr(lines):  # without any setting of logging
        spread_experts(model, num_max_tokens_per_rank=64)
    start = f"deepep_moe {deepep_moe.__version__}: 2 MoE layers on this rank, backend shm, "
    expected = [f"{start}deepep_moe's grouped experts in the place of the model's"] * (rank == 0)
    assert [line for line in lines.getvalue().splitlines() if "deepep_moe" in line] == expected
    metrics = Metrics(model)
    model(input_ids=torch.randint(0, 64, (2, 5))).logits.sum().backward()
    for report in metrics.take():
        of_ranks = torch.tensor(report.rows_per_expert).unflatten(0, (num_ranks, -1)).sum(1)
        assert report.rank_overload == report.max_rank_overload == of_ranks.max() / of_ranks.double().mean() >= 1
        assert report.max_vio == pytest.approx(report.busiest - 1)


# Changes of the model or of the experts of its second block.
REFUSED = [
    (lambda model, _: setattr(model, "config", SimpleNamespace()), r"no config\.num_experts_per_tok; pass num_topk"),
    (lambda model, _: model.to("meta"), r"layers\.0\.experts has weights on the device meta"),
    (
        lambda _, experts: setattr(experts, "gate_up_proj_bias", nn.Parameter(torch.zeros(8, 64))),
        r"layers\.1\.experts has gate_up_proj_bias",
    ),
    (lambda _, experts: setattr(experts, "act_fn", nn.GELU()), r"layers\.1\.experts has the activation GELU"),
    (lambda _, experts: setattr(experts, "scale", nn.Parameter(torch.ones(8))), "has scale, which would be lost"),
    (lambda _, experts: experts.register_forward_hook(print), "experts or its weights have hooks, which would be lost"),
    (lambda _, experts: experts.down_proj.data.zero_(), "has zeros or numbers that are not finite for weights"),
    (lambda model, experts: setattr(model.layers[0], "same", experts.down_proj), "down_proj is also a parameter of another module"),
    (
        lambda model, experts: setattr(model.layers[1], "experts", nn.ModuleDict({"base_layer": experts})),
        r"layers\.1\.experts is a ModuleDict around experts.*merge_and_unload",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_models_that_are_refused(change, message):
    model = build("stand-in")
    change(model, model.layers[1].experts)
    with pytest.raises(ValueError, match=message):
        spread_experts(model)
    assert is_stock(model), "a model that is refused stays as it is"


def test_a_model_without_experts():
    with pytest.raises(ValueError, match="Linear has no module `experts` with gate_up_proj"):
        spread_experts(nn.Linear(2, 2), num_topk=2)


def is_stock(model: nn.Module) -> bool:
    return not any(isinstance(module, SpreadExperts) for module in model.modules())


@pytest.mark.slow
@on_ranks(2)
def test_example(rank: int, num_ranks: int, tmp_path: Path) -> None:
    (train,) = modules_of(EXAMPLE, "train")
    replaced, difference, losses = train.train(rank, num_ranks, 25, True, str(tmp_path))
    assert replaced == ["layers.0.experts", "layers.1.experts"] and difference < 1e-5 and losses[0] - losses[-1] > 1
    if rank:
        return
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == losses and lines[0]["deepep_moe/layer_1/rows"] == 2 * 4 * 32 * 2


OTHERS = {
    "plain": lambda experts, plain, x: plain(x),
    "limited": lambda experts, plain, x: plain(x).clamp(-100, 100),
    "scaled": lambda experts, plain, x: 1.5 * plain(x),
    "of other rows": lambda experts, plain, x: plain(x) - plain(x).mean(0),
    "with dropout": lambda experts, plain, x: nn.functional.dropout(plain(x), 0.1, experts.training),
    "without the gradient of rows": lambda experts, plain, x: plain(x.detach()),
}


def other_experts(name: str) -> nn.Module:
    """A model whose second block has experts that do something else than the plain ones."""
    model = build("stand-in")
    experts = model.layers[1].experts
    plain_class = type(experts)

    class Experts(plain_class):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return OTHERS[name](self, lambda x: plain_class.forward(self, x, top_k_index, top_k_weights), hidden_states)

    experts.__class__ = Experts
    return model


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", [name for name in OTHERS if name != "plain"])
def test_experts_with_other_arithmetic(name, dtype):
    model = other_experts(name).to(dtype).eval()
    state, random_state = {name: id(tensor) for name, tensor in model.named_parameters()}, torch.get_rng_state()
    with pytest.raises(ValueError, match=r"layers\.1\.experts .*(something else|cannot be called)"):
        spread_experts(model)
    assert state == {name: id(tensor) for name, tensor in model.named_parameters()} and not model.layers[1].experts.training
    assert torch.equal(random_state, torch.get_rng_state())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_experts_that_compute_the_same(dtype):
    assert spread_experts(other_experts("plain").to(dtype)) == ["layers.0.experts", "layers.1.experts"]


def test_a_module_in_two_places_stays_one():
    model = build("stand-in")
    model.layers[1].experts = model.layers[0].experts
    tokens = torch.randint(0, 64, (2, 5))
    want = model(input_ids=tokens).logits
    assert spread_experts(model) == ["layers.0.experts", "layers.1.experts"]
    assert model.layers[0].experts is model.layers[1].experts
    torch.testing.assert_close(model(input_ids=tokens).logits, want)


@on_ranks(2)
def test_ranks_refuse_together(rank: int, num_ranks: int) -> None:
    model = other_experts("limited" if rank == 1 else "plain")
    error, why = (ValueError, "something else") if rank == 1 else (EPPeerError, "rank 1 did not make its call: ValueError")
    with pytest.raises(error, match=why):
        spread_experts(model)
    assert is_stock(model)
    model = build("stand-in")
    if rank == 1:
        del model.layers[1]
    with pytest.raises(EPMismatchError, match="ranks disagree on blocks .*rank 1: .*layers.0.experts"):
        spread_experts(model)
    assert is_stock(model)
    model = build("stand-in")
    for weight in ("gate_up_proj", "down_proj"):
        setattr(model.layers[1].experts, weight, nn.Parameter(getattr(model.layers[1].experts, weight)[:5].detach().clone()))
    with pytest.raises(ValueError, match=r"layers\.1\.experts has 5 experts, which 2 ranks do not divide"):
        spread_experts(model)
    assert is_stock(model)
    with pytest.raises(ValueError, match="backend"):
        spread_experts(model := build("stand-in"), backend="none")
    assert is_stock(model)
    model = build("stand-in")
    spread_experts(model, num_max_tokens_per_rank=16)
    with pytest.raises(ValueError, match=r"already spread \(layers\.0\.experts and 1 more\)"):
        spread_experts(model)
    error, why = (ValueError, r"17 tokens.*16; .*spread_experts\(model, num_max") if rank == 1 else (EPPeerError, "rank 1 .*17 tokens")
    with pytest.raises(error, match=why):
        model(input_ids=torch.ones(1, 16 + rank, dtype=torch.int64))
    assert model(input_ids=torch.ones(1, 16, dtype=torch.int64)).logits.isfinite().all()


@pytest.mark.slow
def test_experts_of_transformers_with_other_arithmetic():
    pytest.importorskip("transformers", minversion="5")
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
    from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
    from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

    fields = {"num_local_experts": 4, "num_experts": 4, "hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16}
    fields |= {"moe_hidden_size": 32, "hidden_act": "silu", "swiglu_limit": 10.0, "post_norm_eps": 1e-6, "num_experts_per_tok": 2}
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        config = SimpleNamespace(**fields, _experts_implementation=implementation)
        for make, why in (
            (OlmoeExperts, None),
            (Step3p7Experts, None),
            (partial(Step3p7Experts, swiglu_limit=7.0), "something else"),
            (DeepseekV4Experts, "something else"),
            (MuseSparkExperts, "post_expert_norm.weight, which would be lost"),
        ):
            block = nn.Module()
            block.experts, block.config = make(config), config
            for parameter in block.parameters():
                nn.init.normal_(parameter, 0, 0.1)
            if why is None:
                assert spread_experts(block) == ["experts"]
            else:
                with pytest.raises(ValueError, match=why):
                    spread_experts(block)


# ---- under code that wraps, averages, clips and saves parameters, models train like the plain one, or are refused ----


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
    from deepspeed_ranks import engine_ready

    model = build("stand-in")
    spread_experts(model, num_max_tokens_per_rank=64)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    with engine_ready(), pytest.raises(ValueError, match=r"DeepSpeed has no process group for experts that deepep_moe has spread"):
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
