"""Switching on and off, what is refused, and the launcher. Everything else must stay as it was."""

import argparse
import contextlib
import dataclasses
import functools
import gc
import inspect
import io
import re
import typing
import weakref

import pytest
import torch
import torch.distributed as dist
from exchange_cases import modes_of_calls
from megatron_cases import HIDDEN, build_layer, enabled, expert_biases, layer_config, layer_of, model_parallel, on_megatron
from on_ranks import on_ranks
from scripts import ROOT, run_python

import deepep_moe
from deepep_moe.errors import BufferDestroyedError, EPPeerError, OutgrownError
from deepep_moe.exchange import growing
from deepep_moe.integrations.common import warn_once
from deepep_moe.integrations.common.registry import all_buffers
from deepep_moe.integrations.megatron import disable, enable, grow_recv_capacity, plugin, take_metrics
from deepep_moe.integrations.megatron.config_switches import selection
from deepep_moe.integrations.megatron.options import Options

pytest.importorskip("megatron.core")


def _backend_choices() -> tuple[str, ...]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    field = TransformerConfig.__dataclass_fields__.get("moe_flex_dispatcher_backend")
    if field is None:
        pytest.skip("megatron-core before 0.16 has no backend flag")
    return typing.get_args(field.type)


def test_disable_restores_what_enable_replaced():
    from megatron.core.tensor_parallel.random import CheckpointFunction
    from megatron.core.transformer.moe import experts, moe_layer

    owners, stock = (moe_layer, moe_layer.MoELayer, CheckpointFunction), moe_layer.MoEFlexTokenDispatcher
    init_experts = experts.SequentialMLP.__init__
    before = [dict(vars(owner)) for owner in owners]
    disable()
    assert [dict(vars(owner)) for owner in owners] == before
    enable()
    assert moe_layer.MoEFlexTokenDispatcher is not stock and issubclass(moe_layer.MoEFlexTokenDispatcher, stock)
    assert all(vars(owner) != of_owner for owner, of_owner in zip(owners, before, strict=True))
    enable()  # the same again: nothing
    with pytest.raises(ValueError, match=r"already enabled with Options\(.*backend='auto'.*call disable\(\) first"):
        enable(backend="collective")
    disable()
    assert [dict(vars(owner)) for owner in owners] == before and experts.SequentialMLP.__init__ is init_experts


def test_command_line_and_configs_take_the_backend_while_enabled():
    before = _backend_choices()
    with enabled():
        # Megatron-LM makes its argument from the field: choices are the members of its Literal.
        parser = argparse.ArgumentParser()
        parser.add_argument("--moe-flex-dispatcher-backend", choices=_backend_choices())
        parsed = parser.parse_args(["--moe-flex-dispatcher-backend", "deepep_moe"])
        assert parsed.moe_flex_dispatcher_backend == "deepep_moe"
        assert _backend_choices() == (*before, "deepep_moe")
    assert _backend_choices() == before
    # Megatron-Core puts the backend back to DeepEP's where moe_enable_deepep is set.
    choice = selection() | {"moe_enable_deepep": True}
    assert layer_config(**choice).moe_flex_dispatcher_backend == "deepep"
    with enabled():
        with pytest.raises(ValueError, match="puts moe_flex_dispatcher_backend='deepep_moe' back to DeepEP's 'deepep'; leave moe_enable"):
            layer_config(**choice)
        assert layer_config(**selection()).moe_flex_dispatcher_backend == "deepep_moe"
        asked_for = layer_config(moe_token_dispatcher_type="flex", moe_enable_deepep=True)
        assert asked_for.moe_flex_dispatcher_backend == "deepep"
    assert layer_config(**choice).moe_flex_dispatcher_backend == "deepep"


def test_our_backend_selects_flex():
    _backend_choices()  # skips where there is no such field
    from megatron.core.transformer.transformer_config import TransformerConfig

    @dataclasses.dataclass
    class OtherDefault(TransformerConfig):
        moe_token_dispatcher_type: str = "alltoall"

    ours = {"moe_flex_dispatcher_backend": "deepep_moe"}
    assert layer_config(**ours).moe_token_dispatcher_type == "allgather"
    with enabled():
        assert layer_config(**ours).moe_token_dispatcher_type == "flex"
        assert OtherDefault(num_layers=1, num_attention_heads=4, hidden_size=32, **ours).moe_token_dispatcher_type == "flex"
        assert layer_config(**ours, moe_token_dispatcher_type="alltoall").moe_token_dispatcher_type == "alltoall"
        assert layer_config().moe_token_dispatcher_type == "allgather"


@on_ranks(2)
def test_one_line_says_whether_it_is_on(rank: int, num_ranks: int) -> None:
    """The first rank logs the line once, without any setting of logging."""
    warn_once.log_once.cache_clear()
    lines = io.StringIO()
    with contextlib.redirect_stderr(lines), model_parallel(ep=num_ranks) as sizes:
        for changes in [{}, {}] + [{"moe_flex_dispatcher_backend": "deepep_moe"}] * hasattr(layer_config(), "moe_flex_dispatcher_backend"):
            layer_of(sizes, "alltoall", **changes)
        layers = [layer_of(sizes) for _ in range(3)]
        for _ in range(2):
            for layer in layers:
                layer(torch.randn(4, 1, HIDDEN))
    reported = [line for line in lines.getvalue().splitlines() if "deepep_moe" in line]
    if rank:
        assert reported == []
        return
    *off, on = reported
    if len(off) == 2:
        assert off[0].endswith(
            "does not use it: moe_token_dispatcher_type is 'alltoall' and moe_flex_dispatcher_backend is 'deepep'; "
            "set moe_token_dispatcher_type='flex' and moe_flex_dispatcher_backend='deepep_moe'"
        )
    assert off[-1].endswith("does not use it: moe_token_dispatcher_type is 'alltoall'; set moe_token_dispatcher_type='flex'")
    start = f"deepep_moe {deepep_moe.__version__}: 3 MoE layers on this rank, backend shm"
    assert on.startswith(f"{start}, experts are Megatron-Core's SequentialMLP: params_dtype is")


@on_megatron(1, experts="own")
def test_other_configurations(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    """They get the classes and the errors that they had: flex with DeepEP is refused in Megatron-Core's own words."""
    from megatron.core.transformer.moe import experts, moe_layer, moe_utils, token_dispatcher

    for kind, name in (("alltoall", "MoEAlltoAllTokenDispatcher"), ("allgather", "MoEAllGatherTokenDispatcher")):
        layer = layer_of(sizes, kind)
        assert type(layer.token_dispatcher) is getattr(token_dispatcher, name) and type(layer.experts) is experts.SequentialMLP
    config, original = layer_config(moe_token_dispatcher_type="flex", moe_enable_deepep=True), token_dispatcher.MoEFlexTokenDispatcher
    make_groups = getattr(moe_utils, "get_default_pg_collection", None) or moe_utils.get_default_model_comm_pgs
    argument = "pg_collection" if "pg_collection" in inspect.signature(original.__init__).parameters else "model_comm_pgs"
    messages = []
    for build in (original, moe_layer.MoEFlexTokenDispatcher):
        with pytest.raises(Exception) as caught:
            build(8, list(range(8)), config=config, **{argument: make_groups()})
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]
    layer = layer_of(sizes)
    assert isinstance(layer.token_dispatcher, original)
    assert layer.token_dispatcher.buffer is None and layer.token_dispatcher._comm_manager.get_number_of_tokens_per_expert() is None
    assert layer.token_dispatcher.get_expert_zero_copy_buffers() == (None, None)
    layer(torch.randn(4, 2, HIDDEN))
    disable()
    with pytest.raises(BufferDestroyedError, match=r"disabled in this process; call .*enable\(\) and build the model again"):
        layer.token_dispatcher.token_dispatch(torch.randn(8, HIDDEN), torch.rand(8, 4))


@on_ranks(2, chosen=(None, 256))
def test_more_tokens_than_before(rank: int, num_ranks: int, chosen: int | None) -> None:
    """300 tokens after 140; without a bound as on GPUs, where buffers have one. What outgrows a bound names the option."""
    growing._is_bounded = lambda device: chosen is None
    with model_parallel(ep=num_ranks, num_max_tokens_per_rank=chosen) as sizes:
        layers = [layer_of(sizes) for _ in range(2)]
        outputs = [layer(torch.randn(70 if rank else 10, 2, HIDDEN))[0] for layer in layers]  # agreed: 140 tokens, rounded up to 256
        dispatchers = [layer.token_dispatcher for layer in layers]
        assert dispatchers[0].buffer is dispatchers[1].buffer and dispatchers[0].buffer.num_max_tokens_per_rank == (chosen or 256)
        more = torch.randn(150 if rank else 10, 2, HIDDEN)
        if chosen is not None:
            message = r"dispatches 300 tokens, .* room for 256; set num_max_tokens_per_rank of .*, the launcher's --num-max-tokens-per-rank"
            with pytest.raises(OutgrownError if rank else EPPeerError, match=message if rank else "300 tokens"):
                layers[0](more)
            return
        outputs.append(layers[0](more)[0])
        assert dispatchers[0].buffer.num_max_tokens_per_rank == 384
        modes = modes_of_calls(dispatchers[0].buffer)
        for layer in layers[::-1]:
            outputs.append(layer(torch.randn(70 if rank else 10, 2, HIDDEN))[0])
        assert 0 < modes[2].layer < modes[0].layer, "each layer names itself"
        assert dispatchers[0].buffer is dispatchers[1].buffer
        sum(output.square().mean() for output in outputs).backward()
        assert all(parameter.grad.isfinite().all() for layer in layers for parameter in layer.parameters())


@on_megatron(2)
def test_more_experts_than_top_k_are_refused_on_all_ranks(rank: int, num_ranks: int, sizes: dict[str, int]) -> None:
    dispatcher = layer_of(sizes).token_dispatcher
    routing_map = torch.zeros(3, 8, dtype=torch.bool)
    routing_map[1, : 4 + rank] = True  # top-4
    sent = dispatcher.dispatch_preprocess(torch.randn(3, 1, HIDDEN), routing_map, torch.rand(3, 8))
    message = "a token is routed to more than moe_router_topk=4 of 8 experts" if rank else "rank 1 did not make its call"
    with pytest.raises(ValueError if rank else EPPeerError, match=message):
        dispatcher.token_dispatch(*sent)


SCRIPT = """
import argparse, sys, os
from helper import WORD
from megatron.core.transformer.moe import moe_layer
parser = argparse.ArgumentParser(allow_abbrev=False)  # it knows no --moe-token-dispatcher-type
parser.add_argument("--backend")
parser.add_argument("--moe-flex-dispatcher-backend")
parser.parse_args()
print(WORD, sys.argv[1:], __name__, os.path.basename(sys.argv[0]), moe_layer.MoEFlexTokenDispatcher.__name__)
from deepep_moe.integrations.megatron import enable
enable(num_max_tokens_per_rank=64, backend="collective", experts="own")  # would raise, had the launcher enabled other options
"""


_launch = functools.partial(run_python, "-m", "deepep_moe.integrations.megatron")


def test_launcher_runs_a_script_enabled(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "pretrain.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "helper.py").write_text("WORD = 'found'")
    options = ("--backend", "collective", "--num-max-tokens-per-rank", "64", "--experts", "own")
    done = _launch("--bind", *options, "scripts/pretrain.py", "--backend", "nccl", *OURS, cwd=tmp_path)
    assert "local rank 0" in done.stderr, done.stderr
    assert "no such script: 'nowhere.py'" in _launch("nowhere.py", cwd=tmp_path, code=2).stderr
    wrong = _launch("--balance", "99", "scripts/pretrain.py", cwd=tmp_path, code=2)
    assert wrong.stderr.splitlines()[-1].endswith("megatron: num_slots is 99; it must be at most 32")
    line = f"found {['--backend', 'nccl', *OURS]} __main__ pretrain.py SelectingFlexTokenDispatcher"
    assert done.stdout.strip().splitlines()[-1] == line


OWN_SCRIPT = """
import argparse
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

argparse.ArgumentParser().parse_args()
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_moe_experts=4, add_bias_linear=False, attention_dropout=0.0,
    moe_flex_dispatcher_backend="deepep_moe",
)
model = GPTModel(config, get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False), vocab_size=64, max_sequence_length=16)
tokens, positions, mask = torch.randint(64, (1, 16)), torch.arange(16)[None], torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
model(tokens, positions, mask, labels=tokens).mean().backward()
dist.destroy_process_group()
"""


def test_own_script_on_cpus(tmp_path, monkeypatch):
    """It has no options of Megatron-LM, and begins with the line of the page."""
    _backend_choices()  # skips where the config has no backend
    line, folder = re.search(
        r"begins with `([^`]*)` and runs with\s`PYTHONPATH=([^`]*)`", (ROOT / "docs" / "megatron.md").read_text()
    ).groups()
    monkeypatch.setenv("PYTHONPATH", str(ROOT / folder))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "own.py").write_text(line + OWN_SCRIPT)
    done = _launch("own.py", cwd=tmp_path)
    assert f"deepep_moe {deepep_moe.__version__}: 2 MoE layers on this rank, backend shm, " in done.stderr


OURS = ["--moe-flex-dispatcher-backend", "deepep_moe"]


def test_cpu_layer_puts_everything_back():
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron_cpu import disable_cpu, enable_cpu

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


@on_megatron(2)
def test_buffers_go_with_their_groups(rank, num_ranks, sizes):
    """Buffers of forgotten and of destroyed groups go, those of other groups stay, and a layer of a forgotten group goes on."""
    from megatron.core import parallel_state

    x, apart = torch.randn(4, 1, HIDDEN), dist.new_group()
    layer = layer_of(sizes)
    expected = layer(x)[0]
    plugin._buffers.ready(apart, 4, HIDDEN, 8, 2, device=x.device)
    assert len(all_buffers()) == 2
    parallel_state.destroy_model_parallel()
    (kept,) = all_buffers()
    assert kept.num_topk == 2
    parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks)
    layer_of(sizes)(x)
    assert len(all_buffers()) == 2
    assert torch.equal(layer(x)[0], expected) and len(all_buffers()) == 3
    dist.destroy_process_group(apart)
    assert kept not in all_buffers() and len(all_buffers()) == 2

    group = dist.new_group()
    warn_once.warn_once("a warning", group)
    reference = weakref.ref(group)
    dist.barrier(group)  # the other rank has connected
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert reference() is None


# ---- options of `enable()` and configs of layers that are refused before anything is sent ----

GROUPED = {"experts": "own"}
SYNC_FREE, FP8 = GROUPED | {"sync_free": True}, GROUPED | {"fp8": True}

OPTIONS = [
    ({"expert_alignment": 0}, ValueError, "expert_alignment is 0; it must be at least 1"),
    ({"num_max_tokens_per_rank": 0}, ValueError, "num_max_tokens_per_rank is 0"),
    ({"expert_alignment": 2.0}, TypeError, "expert_alignment is 2.0"),
    ({"num_sms": -1}, ValueError, "num_sms is -1"),
    ({"backend": "nccl"}, ValueError, r"backend is 'nccl'; it must be one of \['auto', 'shm',"),
    *(({name: 1}, ValueError, f"{name} is 1; it must be True or False") for name in ("gate", "sync_free", "fp8")),
    ({"experts": "grouped"}, ValueError, r"experts is 'grouped'; it must be one of \['auto', 'framework', 'own'\]"),
    ({"fp8": True, "experts": "framework"}, ValueError, "fp8 is True, but experts is 'framework'"),
    (FP8 | {"expert_alignment": 16}, ValueError, "expert_alignment is 16, but fp8 experts need a multiple of 128"),
    ({"recv_capacity_factor": 2.0}, ValueError, "recv_capacity_factor is given without sync_free"),
    (SYNC_FREE | {"recv_capacity_factor": "2"}, TypeError, "recv_capacity_factor is '2'; it must be a float"),
    (SYNC_FREE | {"recv_capacity_factor": 0.0}, ValueError, "recv_capacity_factor is 0.0; it must be a positive number"),
    (SYNC_FREE | {"recv_capacity_factor": float("nan")}, ValueError, "recv_capacity_factor is nan"),
]


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS)
def test_options(options, error, message):
    with pytest.raises(error, match=message):
        enable(**options)


def test_options_that_are_there():
    assert Options(**FP8).expert_alignment == 128
    grow_recv_capacity(2.0)  # nothing is enabled
    with pytest.raises(ValueError, match="times is -1; it must be a positive number"):
        grow_recv_capacity(-1)
    with pytest.raises(ValueError, match=r"no metrics are gathered; call enable\(metrics=True\)"):
        take_metrics()


# ---- configs ----

PADDING = "moe_router_padding_for_quantization"  # before 0.15: moe_router_padding_for_fp8
RECIPE, BESIDE = {"fp8": "e4m3", "fp8_recipe": "blockwise"}, {"moe_shared_expert_overlap": True}
# Settings that Megatron-Core does not build with fp8 and without TransformerEngine are left out.
OF_FP8 = {"bf16": True, "params_dtype": torch.bfloat16, "hidden_size": 128, "moe_ffn_hidden_size": 128}
OF_FP8 |= {"moe_shared_expert_intermediate_size": None}

CONFIGS: list[tuple[dict, dict, str | None]] = [  # None: not refused
    ({}, {"hidden_size": 30}, "hidden_size is 30, so a row in torch.float32 has 120 bytes, .* a multiple of 4"),
    ({}, {"hidden_size": 36, "params_dtype": torch.bfloat16}, "hidden_size is 36, so a row in torch.bfloat16 has 72 bytes, .* of 8"),
    ({}, {"moe_pad_expert_input_to_capacity": True}, "moe_pad_expert_input_to_capacity is True, .*; set it to False"),
    ({}, {PADDING: True}, r"expert_alignment is 1, .*; call enable\(expert_alignment=16\)"),
    ({"expert_alignment": 16}, {PADDING: True, "fp8": "e4m3", "fp8_recipe": "mxfp8"}, r"call enable\(expert_alignment=32\)"),
    ({"expert_alignment": 16}, {PADDING: True, "fp8": "e4m3", "moe_shared_expert_intermediate_size": None}, None),
    ({"sync_free": True}, {}, r"SequentialMLP reads its counts on the host; call enable\(experts='own'\)"),
    ({"sums": "lanes"}, {"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input is True, but sums='lanes'"),
    (GROUPED, {"moe_expert_rank_capacity_factor": 0}, "moe_expert_rank_capacity_factor is 0; it must be a positive number"),
    (GROUPED, {"activation_func_fp8_input_store": True}, "activation_func_fp8_input_store is True"),
    (GROUPED, {"use_te_activation_func": True}, "use_te_activation_func is True"),
    (GROUPED, {"fp8": "hybrid"}, "fp8 is 'hybrid', which grouped experts do not support"),
    (GROUPED, {"expert_tensor_parallel_size": 2}, r"size is 2, .* not split; .* experts='framework' \(--experts framework\)"),
    (GROUPED, {"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input is True with moe_router_topk=4"),
    (FP8, {"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "fp8_recipe is 'mxfp8', but deepep_moe's experts have scales of blocks"),
    (FP8, {"bf16": False, "params_dtype": torch.float32}, "params_dtype is torch.float32, but fp8 experts take bf16 rows"),
    (FP8, {"hidden_size": 192}, "hidden_size is 192, but fp8 experts need multiples of 128"),
    (FP8, {"moe_ffn_hidden_size": 100}, "moe_ffn_hidden_size is 100, but fp8 experts need multiples of 128"),
    (FP8, {**RECIPE, "fp8_param": True}, "fp8_param is True, which grouped experts do not support"),
    (FP8, {**RECIPE, "first_last_layers_bf16": True}, "first_last_layers_bf16 is True, but fp8 of enable"),
    (FP8, {"add_bias_linear": True}, "add_bias_linear is True, which grouped experts do not support"),
    (FP8, {"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm is True, whose schedule frees rows"),
    ({}, {**BESIDE, "overlap_moe_expert_parallel_comm": True}, "and overlap_moe_expert_parallel_comm True"),
    ({}, {**BESIDE, "moe_latent_size": 16}, "moe_shared_expert_overlap is True and moe_latent_size 16"),
    (
        {}, {**BESIDE, "recompute_granularity": "selective", "recompute_modules": ["shared_experts"]},
        "moe_shared_expert_overlap is True and recompute_modules has 'shared_experts'",
    ),
]  # fmt: skip


@on_ranks(1)
def test_configs(rank: int, num_ranks: int) -> None:
    from deepep_moe.integrations.megatron.shared_experts import check_shared_overlap

    for options, changes, message in CONFIGS:
        if "add_bias_linear" in changes and not expert_biases():
            continue
        with model_parallel(**options) as sizes:
            config = layer_config(**sizes, **selection(), **(OF_FP8 if "fp8" in options else {}))
            for name, value in changes.items():  # late, past Megatron-Core's own checks
                setattr(config, name if name != PADDING or hasattr(config, PADDING) else "moe_router_padding_for_fp8", value)
            with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
                if "moe_latent_size" in changes:  # which needs TransformerEngine first
                    check_shared_overlap(config)
                build_layer(config)
