"""Checkpoints of spread models: the files of transformers to the byte, which all ranks write and read, each with its own experts."""

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface_cases import build
from on_ranks import on_ranks, refused
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deepep_moe.errors import EPPeerError
from deepep_moe.integrations.huggingface import expert_parameters, gathered_state_dict, load_spread, saving, spread_experts
from deepep_moe.nn import GroupedExperts, MoELayer, Router

TOKENS = torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.slow


def spread(name: str, device: str = "cpu", group: dist.ProcessGroup | None = None) -> nn.Module:
    model = build(name).to(device)
    spread_experts(model, num_max_tokens_per_rank=64, group=group)
    return model


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@on_ranks(2, name=("mixtral", "qwen3", "deepseek"), device=("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(2))))
def test_train_save_load(rank: int, num_ranks: int, name: str, device: str, tmp_path: Path) -> None:
    """The model is loaded without this library, on as many ranks, and on a rank alone."""
    auto_class = pytest.importorskip("transformers", minversion="5").AutoModelForCausalLM
    kind = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        kind = "nccl"
    group = dist.new_group(backend=kind)
    model, tokens = spread(name, device, group), TOKENS.to(device)
    wrapped, optimizer = DistributedDataParallel(model, process_group=group), torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(input_ids=tokens).logits.square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    model.eval()
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 and (rank or files(tmp_path)), "more than one file"
    alone = [dist.new_group([one], backend=kind) for one in range(num_ranks)][rank]
    options = {"num_max_tokens_per_rank": 64, "device_map": device}
    with torch.no_grad():
        want = model(input_ids=tokens).logits
        assert (build(name).to(device)(input_ids=tokens).logits - want).abs().max() > 1e-3
        for loaded in (
            auto_class.from_pretrained(tmp_path, device_map=device),
            load_spread(auto_class, tmp_path, group=group, **options),
            load_spread(auto_class, tmp_path, group=alone, **options),
        ):
            torch.testing.assert_close(loaded(input_ids=tokens).logits, want, rtol=1e-5, atol=1e-5)
    loaded.save_pretrained(tmp_path / "again", max_shard_size="30KB")
    assert rank or files(tmp_path / "again") == files(tmp_path)
    saved, gathered = tensors(tmp_path), dict(gathered_state_dict(model))
    assert gathered.keys() == saved.keys()
    for key, tensor in gathered.items():
        assert tensor is None if rank else torch.equal(tensor.cpu(), saved[key])


@on_ranks(2, name=("mixtral", "qwen3", "deepseek"))
def test_files_are_those_of_the_plain_model(rank: int, num_ranks: int, name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    model, plain = spread(name), build(name)
    for number, options in enumerate(
        ({}, {"max_shard_size": "30KB"}, {"max_shard_size": 1000, "variant": "v"}, {"save_original_format": False, "max_shard_size": "9KB"})
    ):
        theirs, ours = tmp_path / f"{number}", tmp_path / f"{number}-{name}"
        model.save_pretrained(ours, **options)
        if rank == 0:
            plain.save_pretrained(theirs, **options)
            assert files(theirs) == files(ours)
    outer = build(name)
    spread_experts(outer.model, num_max_tokens_per_rank=64)
    for part, place in ((model.model, "base"), (outer, "outer")):
        part.save_pretrained(tmp_path / place)
    if rank == 0:
        plain.model.save_pretrained(theirs / "base")
        assert files(theirs / "base") == files(tmp_path / "base") and files(tmp_path / "0") == files(tmp_path / "outer")
    plain.beside = MoELayer(Router(16, 4, 2), GroupedExperts(4 // num_ranks, 16, 8), num_max_tokens_per_rank=4)
    if rank == 0:  # a layer that nobody has spread is the caller's to save
        plain.save_pretrained(tmp_path / "alone")
        assert "beside.experts.up" in tensors(tmp_path / "alone")


@on_ranks(2)
def test_experts_that_transformers_may_transpose(rank: int, num_ranks: int, tmp_path: Path) -> None:
    """A checkpoint of Qwen3-VL-MoE has them as the model has, or as its authors have published them."""
    transformers = pytest.importorskip("transformers", minversion="5")
    if not hasattr(transformers, "Qwen3VLMoeConfig"):
        pytest.skip("needs Qwen3-VL-MoE")
    from safetensors.torch import save_file

    model, plain = build("qwen3-vl"), build("qwen3-vl")
    spread_experts(model.model.language_model, num_max_tokens_per_rank=64)
    model.save_pretrained(tmp_path / "0")
    if rank == 0:
        for place in ("1", "2"):
            plain.save_pretrained(tmp_path / place)
        assert files(tmp_path / "0") == files(tmp_path / "1")
        published = {name: w.transpose(1, 2).contiguous() if ".experts." in name else w for name, w in tensors(tmp_path / "1").items()}
        save_file(published, tmp_path / "2" / "model.safetensors", metadata={"format": "pt"})
    for place in ("0", "2"):
        loaded = load_spread(type(plain), tmp_path / place, num_topk=2, num_max_tokens_per_rank=64)
        assert all(map(torch.equal, expert_parameters(loaded), expert_parameters(model)))


@on_ranks(2)
def test_rank_0_holds_one_file(rank: int, num_ranks: int, tmp_path: Path) -> None:
    """It gathers all tensors, but keeps those of one file only, and the last tensor of the file before."""
    pytest.importorskip("transformers", minversion="5")
    model, gathered, sizes, fetch = spread("qwen3"), [], [], saving._WholeState.fetch

    def watched(state: Any, name: str) -> Tensor | None:
        tensor = fetch(state, name)
        if tensor is not None and state.tensors[name].is_meta:
            gathered.append(weakref.ref(tensor))
            sizes.append(sum(one.nbytes for reference in gathered if (one := reference()) is not None))
        return tensor

    saving._WholeState.fetch = watched
    model.save_pretrained(tmp_path, max_shard_size="9KB")
    if rank == 0:
        written = [len(content) for content in files(tmp_path).values()]
        assert len(sizes) == 2 * 4 * 3 and max(sizes) < max(written) + 16 * 32 * 4 < sum(written) / 3
    else:
        assert not sizes


class Read:
    """A file of safetensors that counts the bytes that are read from it."""

    num_bytes = 0

    def __init__(self, file: Any):
        self.file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __getitem__(self, index: Any) -> Tensor:
        tensor = self.file[index]
        Read.num_bytes += tensor.nbytes
        return tensor

    def get_slice(self, name: str) -> "Read":
        return Read(self.file.get_slice(name))


@on_ranks(2, in_original_format=(True, False))
def test_a_rank_reads_its_own_experts(rank: int, num_ranks: int, in_original_format: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    from transformers import modeling_utils

    plain = build("qwen3")
    if rank == 0:
        plain.save_pretrained(tmp_path, save_original_format=in_original_format)
    dist.barrier()
    opened = modeling_utils.safe_open
    modeling_utils.safe_open = lambda *args, **kwargs: Read(opened(*args, **kwargs))
    model = load_spread(transformers.AutoModelForCausalLM, tmp_path, num_max_tokens_per_rank=64)
    torch.testing.assert_close(model(input_ids=TOKENS).logits, plain(input_ids=TOKENS).logits, rtol=1e-5, atol=1e-5)
    own_bytes = sum(parameter.nbytes for parameter in expert_parameters(model))
    assert own_bytes > 0 and Read.num_bytes == sum(parameter.nbytes for parameter in plain.parameters()) - own_bytes
    assert sum(parameter.untyped_storage().nbytes() for parameter in expert_parameters(model)) == own_bytes


@on_ranks(2)
def test_ranks_fail_together(rank: int, num_ranks: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    import safetensors.torch

    model, save_file = spread("qwen3"), safetensors.torch.save_file

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    safetensors.torch.save_file = full
    with refused(rank, 0, OSError, "No space left"):
        model.save_pretrained(tmp_path / "full", max_shard_size="30KB")
    safetensors.torch.save_file = save_file
    (tmp_path / "file").write_text("")
    with refused(rank, 1, NotADirectoryError, "Not a directory"):
        model.save_pretrained(tmp_path / ("file/on" if rank else "rank0"))
    for options, why in (
        ({"state_dict": model.state_dict()}, "state_dict has the experts of one rank"),
        ({"push_to_hub": True}, "does not take push_to_hub"),
        ({"distributed_checkpoint": True}, "does not take distributed_checkpoint"),
    ):
        with pytest.raises(ValueError, match=why):
            model.save_pretrained(tmp_path / "refused", **options)
    with pytest.raises(ValueError, match="every rank would upload a part"):
        model.push_to_hub("name")
    with pytest.raises(ValueError, match="has no spread experts"):
        next(gathered_state_dict(build("qwen3")))
    model.save_pretrained(tmp_path / "whole")
    auto_class = transformers.AutoModelForCausalLM
    with refused(rank, 1, OSError, "config.json|Repo|repo"):
        load_spread(auto_class, tmp_path / ("nothing" if rank else "whole"))
    config = dataclasses.replace(build("qwen3").config, num_experts=3)
    with pytest.raises((ValueError, EPPeerError), match="3 experts, which 2 ranks do not divide"):
        load_spread(auto_class, tmp_path / "whole", config=config)
    experts = type(build("qwen3").model.layers[0].mlp.experts)
    forward = experts.forward
    experts.forward = lambda *args: 1.5 * forward(*args)
    with pytest.raises(ValueError, match="computes something else"):
        load_spread(auto_class, tmp_path / "whole", num_max_tokens_per_rank=64)
    experts.forward = forward
    load_spread(auto_class, tmp_path / "whole", num_max_tokens_per_rank=64)


@on_ranks(2)
def test_generate_ends_at_different_steps(rank: int, num_ranks: int) -> None:
    pytest.importorskip("transformers", minversion="5")
    prompt, options = TOKENS[:, : 3 + rank], {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain, model = build("qwen3").eval(), spread("qwen3").eval()
    steps = plain.generate(prompt, **options)[:, prompt.shape[1] :]
    options["eos_token_id"] = [steps[0, 2 + 4 * rank].item(), steps[1, 5 + 3 * rank].item()]
    want = plain.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, **options, synced_gpus=True), want)
    lengths = [None] * num_ranks
    dist.all_gather_object(lengths, want.shape[1] - prompt.shape[1])
    assert len(set(lengths)) == num_ranks, "the ranks end at different steps"
