"""Switching on and off, what is refused, and the launcher. Everything else must stay as it was."""

import argparse
import gc
import os
import subprocess
import sys
import typing
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron_cases import HIDDEN, build_layer, layer_config, model_parallel
from on_ranks import on_ranks

from deepep_moe.errors import BufferDestroyedError
from deepep_moe.exchange import growing
from deepep_moe.integrations.common.registry import all_buffers
from deepep_moe.integrations.common.warn_once import warn_once
from deepep_moe.integrations.megatron import disable, enable, plugin
from deepep_moe.integrations.megatron.__main__ import with_flex
from deepep_moe.integrations.megatron.plugin import selection
from deepep_moe.testing.launch import run_ranks

pytest.importorskip("megatron.core")

ROOT = Path(__file__).parents[3]


def _backend_choices() -> tuple[str, ...]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    field = TransformerConfig.__dataclass_fields__.get("moe_flex_dispatcher_backend")
    if field is None:
        pytest.skip("megatron-core before 0.16 has no backend flag")
    return typing.get_args(field.type)


def test_disable_restores_what_enable_replaced():
    from megatron.core.transformer.moe import moe_layer

    before = moe_layer.MoEFlexTokenDispatcher
    disable()
    assert moe_layer.MoEFlexTokenDispatcher is before
    enable()
    assert moe_layer.MoEFlexTokenDispatcher is not before and issubclass(moe_layer.MoEFlexTokenDispatcher, before)
    enable()  # the same again: nothing
    with pytest.raises(ValueError, match=r"already enabled with Options\(.*backend='auto'.*call disable\(\) first"):
        enable(backend="collective")
    disable()
    assert moe_layer.MoEFlexTokenDispatcher is before


def test_command_line_takes_the_backend_while_enabled():
    before = _backend_choices()
    enable()
    try:
        # Megatron-LM makes its argument from the field: choices are the members of its Literal.
        parser = argparse.ArgumentParser()
        parser.add_argument("--moe-flex-dispatcher-backend", choices=_backend_choices())
        parsed = parser.parse_args(["--moe-flex-dispatcher-backend", "deepep_moe"])
        assert parsed.moe_flex_dispatcher_backend == "deepep_moe"
        assert _backend_choices() == (*before, "deepep_moe")
    finally:
        disable()
    assert _backend_choices() == before


@pytest.mark.parametrize("option", ["num_max_tokens_per_rank", "expert_alignment"])
def test_enable_refuses_numbers_below_one(option):
    with pytest.raises(ValueError, match=f"{option} is 0; it must be a positive whole number"):
        enable(**{option: 0})


@pytest.mark.parametrize("value", [True, 2.0, "2"])
@pytest.mark.parametrize("option", ["num_max_tokens_per_rank", "expert_alignment"])
def test_enable_refuses_what_is_no_int(option, value):
    with pytest.raises(TypeError, match=f"{option} is {value!r}; it must be an int"):
        enable(**{option: value})


def test_enable_names_the_backends():
    with pytest.raises(ValueError, match=r"backend is 'nccl'; it must be one of \['auto', 'shm', 'nvlink', 'nvshmem', 'collective'\]"):
        enable(backend="nccl")


def test_no_config_loses_the_backend_without_an_error():
    """Megatron-Core puts it back to DeepEP's where moe_enable_deepep is set."""
    _backend_choices()  # skips where there is no such field
    choice = selection() | {"moe_enable_deepep": True}
    assert layer_config(**choice).moe_flex_dispatcher_backend == "deepep"
    enable()
    try:
        with pytest.raises(ValueError, match="puts moe_flex_dispatcher_backend='deepep_moe' back to DeepEP's 'deepep'; leave moe_enable"):
            layer_config(**choice)
        assert layer_config(**selection()).moe_flex_dispatcher_backend == "deepep_moe"
        asked_for = layer_config(moe_token_dispatcher_type="flex", moe_enable_deepep=True)
        assert asked_for.moe_flex_dispatcher_backend == "deepep"
    finally:
        disable()
    assert layer_config(**choice).moe_flex_dispatcher_backend == "deepep"


def test_enable_refuses_what_is_no_switch():
    with pytest.raises(ValueError, match="gate is 0; it must be True or False"):
        enable(gate=0)


def _refused(match: str, error: type[Exception] = ValueError, **changes) -> None:
    """A layer of ours with these settings (set late, past Megatron's own checks) is refused with this message."""
    config = layer_config(**selection())
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(error, match=match):
        build_layer(config)


@on_ranks(1)
def test_refusals_and_other_configurations(rank: int, num_ranks: int) -> None:
    from megatron.core.transformer.moe import token_dispatcher

    with model_parallel():
        _refused("hidden_size is 30, so a row in torch.float32 has 120 bytes, .*; set hidden_size to a multiple of 4", hidden_size=30)
        _refused(
            "hidden_size is 36, so a row in torch.bfloat16 has 72 bytes, .*; set hidden_size to a multiple of 8", hidden_size=36,
            params_dtype=torch.bfloat16,
        )  # fmt: skip
        _refused("moe_pad_expert_input_to_capacity is True, .*; set it to False", moe_pad_expert_input_to_capacity=True)
        padding = "moe_router_padding_for_quantization"
        if not hasattr(layer_config(), padding):
            padding = "moe_router_padding_for_fp8"
        _refused(r"expert_alignment is 1, .*; call enable\(expert_alignment=16\)", **{padding: True})

        # Other configurations get the classes and the errors they had.
        for kind, name in (("alltoall", "MoEAlltoAllTokenDispatcher"), ("allgather", "MoEAllGatherTokenDispatcher")):
            layer = build_layer(layer_config(moe_token_dispatcher_type=kind))
            assert type(layer.token_dispatcher) is getattr(token_dispatcher, name)
        _other_flex_is_untouched(token_dispatcher.MoEFlexTokenDispatcher)
        layer = build_layer(layer_config(**selection()))
        assert isinstance(layer.token_dispatcher, token_dispatcher.MoEFlexTokenDispatcher)
        assert layer.token_dispatcher.get_expert_zero_copy_buffers() == (None, None)
        layer(torch.randn(4, 2, HIDDEN))
    with pytest.raises(BufferDestroyedError, match=r"disabled in this process; call .*enable\(\) and build the model again"):
        layer.token_dispatcher.token_dispatch(torch.randn(8, HIDDEN), torch.rand(8, 4))


def _other_flex_is_untouched(original: type) -> None:
    """Flex with DeepEP asked for: refused by Megatron-Core in its own words, before and after."""
    from megatron.core.transformer.moe import moe_layer

    config = layer_config(moe_token_dispatcher_type="flex", moe_enable_deepep=True)
    messages = []
    for build in (original, moe_layer.MoEFlexTokenDispatcher):
        with pytest.raises(Exception) as caught:
            groups = {"pg_collection": _groups()} if _takes_pg_collection(original) else {"model_comm_pgs": _groups()}
            build(8, list(range(8)), config=config, **groups)
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]


def _takes_pg_collection(original: type) -> bool:
    import inspect

    return "pg_collection" in inspect.signature(original.__init__).parameters


def _groups() -> object:
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "get_default_pg_collection"):
        return moe_utils.get_default_pg_collection()
    return moe_utils.get_default_model_comm_pgs()


def _bound_worker(rank: int, num_ranks: int, chosen: int | None) -> str:
    """300 tokens after 140; without a bound as on GPUs, where buffers have one."""
    growing._is_bounded = lambda device: chosen is None
    with model_parallel(ep=num_ranks) as sizes:
        if chosen is not None:
            disable()
            enable(num_max_tokens_per_rank=chosen)
        layers = [build_layer(layer_config(**sizes, **selection())) for _ in range(2)]
        outputs = [layer(torch.randn(70 if rank else 10, 2, HIDDEN))[0] for layer in layers]  # agreed: 140 tokens, rounded up to 256
        dispatchers = [layer.token_dispatcher for layer in layers]
        assert dispatchers[0].buffer is dispatchers[1].buffer and dispatchers[0].buffer.num_max_tokens_per_rank == (chosen or 256)
        try:
            outputs.append(layers[0](torch.randn(150 if rank else 10, 2, HIDDEN))[0])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        assert dispatchers[0].buffer.num_max_tokens_per_rank == 384
        outputs.append(layers[1](torch.randn(70 if rank else 10, 2, HIDDEN))[0])
        assert dispatchers[0].buffer is dispatchers[1].buffer
        sum(output.square().mean() for output in outputs).backward()
        assert all(parameter.grad.isfinite().all() for layer in layers for parameter in layer.parameters())
        return "grown"


def test_more_tokens_than_before():
    assert run_ranks(_bound_worker, 2, None) == ["grown"] * 2


def test_more_tokens_than_the_bound_name_the_option():
    peer, culprit = run_ranks(_bound_worker, 2, 256)
    assert peer.startswith("EPPeerError") and "300 tokens" in peer
    assert culprit.startswith(
        "OutgrownError: a rank dispatches 300 tokens, but its buffer has room for 256; set num_max_tokens_per_rank of "
        "deepep_moe.integrations.megatron.enable(), the launcher's --num-max-tokens-per-rank, to the most tokens that a rank ever has"
    )


def _excess_worker(rank: int, num_ranks: int) -> str:
    with model_parallel(ep=num_ranks) as sizes:
        dispatcher = build_layer(layer_config(**sizes, **selection())).token_dispatcher
        routing_map = torch.zeros(3, 8, dtype=torch.bool)
        routing_map[1, : 4 + rank] = True  # top-4
        sent = dispatcher.dispatch_preprocess(torch.randn(3, 1, HIDDEN), routing_map, torch.rand(3, 8))
        with pytest.raises(Exception) as caught:
            dispatcher.token_dispatch(*sent)
        return f"{type(caught.value).__name__}: {caught.value}"


def test_more_experts_than_top_k_are_refused_on_all_ranks():
    peer, culprit = run_ranks(_excess_worker, 2)
    assert peer.startswith("EPPeerError")
    assert culprit == (
        "ValueError: a token is routed to more than moe_router_topk=4 of 8 experts; set moe_router_topk to the largest count"
    )


SCRIPT = """
import sys, os
from helper import WORD
from megatron.core.transformer.moe import moe_layer
print(WORD, sys.argv[1:], __name__, os.path.basename(sys.argv[0]), moe_layer.MoEFlexTokenDispatcher.__name__)
from deepep_moe.integrations.megatron import enable
enable(num_max_tokens_per_rank=64, backend="collective", grouped_experts=True)  # would raise, had the launcher enabled other options
"""


def _launch(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", "-m", "deepep_moe.integrations.megatron", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120)


def test_launcher_runs_a_script_enabled(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "pretrain.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "helper.py").write_text("WORD = 'found'")
    options = ("--backend", "collective", "--num-max-tokens-per-rank", "64", "--grouped-experts")
    done = _launch(*options, "scripts/pretrain.py", "--backend", "nccl", "-x", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == ("found ['--backend', 'nccl', '-x'] __main__ pretrain.py SelectingFlexTokenDispatcher")


FLEX = ["--moe-token-dispatcher-type", "flex"]
OURS = ["--moe-flex-dispatcher-backend", "deepep_moe"]


@pytest.mark.parametrize(
    ("given", "added"),
    [
        (["-x", *OURS, "-y"], FLEX),
        (["=".join(OURS)], FLEX),
        ([*OURS, *FLEX], []),
        ([*OURS, "=".join(FLEX)], []),
        ([*OURS, "--moe-token-dispatcher-type", "alltoall"], []),  # Megatron-Core says what it takes
        ([OURS[0], "deepep"], []),
        ([*OURS, "-x", OURS[0], "deepep"], []),  # argparse takes the last
        ([*OURS, f"{OURS[0]}=deepep"], []),
        ([f"{OURS[0]}=deepep", "-x", *OURS], FLEX),
        (["--name", "deepep_moe"], []),
    ],
)
def test_launcher_needs_one_flag(given, added):
    assert with_flex(given) == [*given, *added]


def test_launcher_gives_a_script_the_flex_dispatcher(tmp_path):
    (tmp_path / "pretrain.py").write_text("import sys; print(sys.argv[1:])")
    for given in (OURS, ["=".join(OURS)]):
        done = _launch("pretrain.py", *given, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().splitlines()[-1] == str(given + FLEX)


def test_pages_show_one_flag():
    pages = ("README.md", "docs/megatron.md", "examples/megatron/README.md", "integrations/megatron/__main__.py")
    for page in pages:
        commands = [text for text in (ROOT / page).read_text().split("-m deepep_moe.integrations.megatron") if ".py" in text[:60]]
        assert commands and any(" ".join(OURS) in text for text in commands), page
        assert " ".join(FLEX + OURS) not in (ROOT / page).read_text(), page


def test_launcher_says_how_to_use_it(tmp_path):
    usage = _launch("--help", folder=tmp_path)
    assert usage.returncode == 0 and "pretrain_gpt.py \\\n      --moe-flex-dispatcher-backend deepep_moe" in usage.stdout
    missing = _launch("nowhere.py", folder=tmp_path)
    assert missing.returncode == 2 and "no such script: 'nowhere.py'" in missing.stderr


def test_cpu_layer_puts_everything_back():
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from deepep_moe.integrations.megatron.harness.cpu import disable_cpu, enable_cpu

    owners = (torch.cuda, torch.cuda.nvtx, CudaRNGStatesTracker, LocalSpecProvider, WrappedTorchNorm)
    if torch.cuda.is_available():
        with pytest.raises(ValueError, match="Megatron-Core needs no CPU layer there"):
            enable_cpu()
        return
    before = [dict(vars(owner)) for owner in owners]
    enable_cpu()
    enable_cpu()
    assert torch.cuda.current_device() == torch.device("cpu")
    disable_cpu()
    disable_cpu()
    assert [dict(vars(owner)) for owner in owners] == before


# ---- groups that are made again ----


@on_ranks(2)
def test_buffers_go_with_their_groups(rank, num_ranks):
    """Buffers of forgotten and of destroyed groups go, those of other groups stay, and a layer of a forgotten group goes on."""
    from megatron.core import parallel_state

    with model_parallel(ep=num_ranks) as sizes:
        x, apart = torch.randn(4, 1, HIDDEN), dist.new_group()
        layer = build_layer(layer_config(**sizes, **selection()))
        expected = layer(x)[0]
        plugin._enabled.buffers.ready(apart, 4, HIDDEN, 8, 2, device=x.device)
        assert len(all_buffers()) == 2
        parallel_state.destroy_model_parallel()
        (kept,) = all_buffers()
        assert kept.num_topk == 2
        parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks)
        build_layer(layer_config(**sizes, **selection()))(x)
        assert len(all_buffers()) == 2
        assert torch.equal(layer(x)[0], expected) and len(all_buffers()) == 3
        dist.destroy_process_group(apart)
        assert kept not in all_buffers() and len(all_buffers()) == 2

        group = dist.new_group()
        warn_once("a warning", group)
        reference = weakref.ref(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert reference() is None
