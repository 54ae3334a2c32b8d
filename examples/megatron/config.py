"""Configurations of one architecture, DeepSeek-V3: `tiny` for a few CPU ranks, `small` for a GPU, `full` with the published numbers (671B).

`python config.py` prints the `pretrain_gpt.py` command line of the full one.
"""

import shlex
from typing import Any

import torch

# Every switch of the architecture; the configurations share them and differ in numbers only.
ARCHITECTURE: dict[str, Any] = {
    # Multi-head latent attention (RMSNorm, rotary embedding on a part of each head) and gated SiLU everywhere.
    "multi_latent_attention": True,
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "layernorm_epsilon": 1e-6,
    # Routing: sigmoid scores, top-k inside the best groups, a bias per expert that balances the load without a loss.
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-4,
}

TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 128,
    "ffn_hidden_size": 384,
    "num_attention_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
    "rope_type": "rope",
    "rotary_base": 10000,
    "init_method_std": 0.02,
    # One dense layer, then MoE layers of 16 routed experts (4 groups, 1 of them per token, 2 experts per token) and 1 shared.
    # Two experts per token, because a sum of two has one rounding: dispatchers that add in different orders agree to the bit. With
    # four, last bits differ, and after some 30 steps top-k and the sign in the bias update have made another run of it (README.md).
    # One group per token, because two groups would exclude nothing: the two best experts always lie in the two best groups.
    "moe_layer_freq": [0, 1, 1, 1],
    "num_moe_experts": 16,
    "moe_ffn_hidden_size": 96,
    "moe_shared_expert_intermediate_size": 96,
    "moe_router_topk": 2,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 1,
    # Ten times the published rate: a run of hundreds of steps has no time for the slow one.
    "moe_router_bias_update_rate": 1e-2,
}

# Layers of a real width, as many as one GPU of 80 GB trains: 1.7 billion parameters in experts.
SMALL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 2048,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 16,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rope_type": "rope",
    "rotary_base": 10000,
    "init_method_std": 0.02,
    "moe_layer_freq": [0, 1, 1, 1],
    "num_moe_experts": 64,
    "moe_ffn_hidden_size": 1408,
    "moe_shared_expert_intermediate_size": 2816,
    "moe_router_topk": 8,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_router_bias_update_rate": 1e-2,
}

FULL: dict[str, Any] = {
    "num_layers": 61,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rope_type": "yarn",
    "rotary_base": 10000,
    "rotary_scaling_factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "init_method_std": 0.006,
    # Three dense layers, then 58 MoE layers of 256 routed experts (8 groups, 4 of them per token, 8 experts per token) and 1 shared.
    "moe_layer_freq": [0] * 3 + [1] * 58,
    "num_moe_experts": 256,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_router_topk": 8,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_router_bias_update_rate": 1e-3,
}

NUMBERS = {"tiny": TINY, "small": SMALL, "full": FULL}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TRAINING: dict[str, dict[str, Any]] = {
    "tiny": {"num_sequences": 8, "seq_length": 128, "lr": 3e-3},
    "small": {"num_sequences": 8, "seq_length": 1024, "lr": 3e-4},
}
"""Defaults of a training: sequences of a rank in a step, tokens of a sequence, the highest learning rate."""
DEEP_EP = "deepep"
DISPATCHERS = ("deepep_moe", "alltoall", "allgather", DEEP_EP)
"""The last is Megatron-Core's own code for DeepEP, on deepep_moe's module of that name (docs/coming_from_deepep.md)."""


def model_config(name: str, dispatcher: str, *, dtype: str, exact: bool, ep: int, tp: int, etp: int, **others: Any) -> Any:
    """Megatron-Core's config of the model `name`, one of NUMBERS, with one of DISPATCHERS and of DTYPES, the sizes of the parallel groups,
    and `others`, fields of the config. `exact`: a GPU computes the same bits in every run."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from deepep_moe.integrations.megatron.config_switches import selection

    stock = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": DEEP_EP}
    switches = NUMBERS[name] | (stock if dispatcher == DEEP_EP else selection(dispatcher)) | others
    # Fused kernels need apex or TransformerEngine, and a GPU.
    for fusion in ("gradient_accumulation", "bias_dropout", "bias_activation", "masked_softmax", "apply_rope"):
        switches[f"{fusion}_fusion"] = False
    return MLATransformerConfig(
        **ARCHITECTURE,
        **switches,
        params_dtype=DTYPES[dtype],
        bf16=dtype == "bf16",
        persist_layer_norm=False,
        # An embedding whose gradient does not depend on the order of atomics.
        deterministic_mode=exact,
        expert_model_parallel_size=ep,
        tensor_model_parallel_size=tp,
        expert_tensor_parallel_size=etp,
        sequence_parallel=tp > 1,
    )


# Options of pretrain_gpt.py that are not fields of the config, or are spelled otherwise there.
_IMPLIED = ("activation_func", "gated_linear_unit", "add_bias_linear")  # --swiglu and --disable-bias-linear
_DEFAULTS = ("original_max_position_embeddings", "beta_fast", "beta_slow")  # no options, and the config's own defaults
_RENAMED = {"num_moe_experts": "num_experts", "layernorm_epsilon": "norm_epsilon"}
_EXTRA = """
--use-mcore-models --transformer-impl transformer_engine --bf16 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
--position-embedding-type rope --no-rope-fusion --seq-length 4096 --max-position-embeddings 4096 --mtp-num-layers 1
--mtp-loss-scaling-factor 0.3 --moe-grouped-gemm --use-distributed-optimizer
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 16 --pipeline-model-parallel-layout Et*3|(tt|)*29m|L
--expert-model-parallel-size 64 --expert-tensor-parallel-size 1 --micro-batch-size 1 --global-batch-size 15360 --train-samples 585937500
--lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --lr-warmup-samples 30720000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
--clip-grad 1.0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model deepseek-ai/DeepSeek-V3
--moe-flex-dispatcher-backend deepep_moe
"""


def pretrain_gpt_arguments() -> list[str]:
    """Arguments of `pretrain_gpt.py` for the full configuration, data and checkpoints left to the user."""
    arguments = []
    for field, value in (ARCHITECTURE | FULL).items():
        if field in _IMPLIED + _DEFAULTS:
            continue
        flag = "--" + _RENAMED.get(field, field).replace("_", "-")
        if field == "moe_layer_freq":
            arguments += [flag, f"([0]*{value.count(0)}+[1]*{value.count(1)})"]
        elif value is True:
            arguments.append(flag)
        else:
            arguments += [flag, str(value)]
    return arguments + _EXTRA.split()


def pretrain_gpt_command() -> str:
    """The whole command, one option a line."""
    lines = ["torchrun --nnodes 128 --nproc-per-node 8 -m deepep_moe.integrations.megatron pretrain_gpt.py"]
    for argument in pretrain_gpt_arguments():
        if argument.startswith("--"):
            lines.append(f"    {argument}")
        else:
            lines[-1] += f" {shlex.quote(argument)}"
    return " \\\n".join(lines)


if __name__ == "__main__":
    print(pretrain_gpt_command())
