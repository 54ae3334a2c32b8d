"""Two configurations of one architecture, DeepSeek-V3: `tiny` for two CPU ranks, `full` with the published numbers (671B)."""

from typing import Any

import torch

# Every switch of the architecture; both configurations share them and differ in numbers only.
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
    # One dense layer, then MoE layers of 16 routed experts (4 groups, 2 of them per token, 4 experts per token) and 1 shared.
    "moe_layer_freq": [0, 1, 1, 1],
    "num_moe_experts": 16,
    "moe_ffn_hidden_size": 96,
    "moe_shared_expert_intermediate_size": 96,
    "moe_router_topk": 4,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_bias_update_rate": 1e-3,
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

NUMBERS = {"tiny": TINY, "full": FULL}
VOCAB_SIZE = {"tiny": 256, "full": 129280}
