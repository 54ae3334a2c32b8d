"""Options of `enable()` and configs of layers that are refused before anything is sent."""

import contextlib

import pytest
import torch
from megatron_cases import build_layer, enabled, expert_biases, layer_config, layer_of, model_parallel
from on_ranks import on_ranks

from deepep_moe.integrations.megatron import enable, grow_recv_capacity, take_metrics
from deepep_moe.integrations.megatron.config_switches import selection
from deepep_moe.integrations.megatron.options import Options

pytest.importorskip("megatron.core")

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
    (SYNC_FREE | {"recv_capacity_factor": "2"}, TypeError, "recv_capacity_factor is '2'; it must be a number"),
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
    with enabled(**FP8), pytest.raises(ValueError, match=r"already enabled with Options\(.*fp8=True.*call disable\(\) first"):
        enable(**GROUPED)


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


@on_ranks(1)
def test_before_the_first_forward(rank: int, num_ranks: int) -> None:
    """Megatron-Core's schedules ask layers that have not run yet."""
    with model_parallel() as sizes:
        dispatcher = layer_of(sizes).token_dispatcher
        assert dispatcher.buffer is None and dispatcher._comm_manager.get_number_of_tokens_per_expert() is None
