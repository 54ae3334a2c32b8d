"""Models that tests of the Hugging Face adapter share."""

from typing import Any

import torch
from scripts import ROOT, modules_of
from torch import nn

EXAMPLE = ROOT / "examples" / "huggingface"


def build(name: str, **changes: Any) -> nn.Module:
    """A model with random weights, the same on every rank; `changes` of its config."""
    torch.manual_seed(3)
    if name == "stand-in":
        return modules_of(EXAMPLE, "model")[0].build(stand_in=True)
    import transformers

    common = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    common |= {"num_key_value_heads": 2, "num_experts_per_tok": 2}
    qwen = common | {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}
    deepseek = common | {"n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    deepseek |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    deepseek |= {"num_key_value_heads": 4}
    if name == "qwen3-vl":
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
        text = qwen | {"moe_intermediate_size": 24, "rope_parameters": rope}
        config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision | {"deepstack_visual_indexes": [0]})
        return transformers.Qwen3VLMoeForConditionalGeneration(config)
    make, fields = {
        "mixtral": (transformers.MixtralConfig, common | {"num_local_experts": 4}),
        "qwen3": (transformers.Qwen3MoeConfig, qwen | {"norm_topk_prob": True}),
        "deepseek": (transformers.DeepseekV3Config, deepseek),
        "deepseek_v2": (transformers.DeepseekV2Config, deepseek | {"topk_method": "group_limited_greedy", "n_shared_experts": 1}),
    }[name]
    return transformers.AutoModelForCausalLM.from_config(make(**(fields | changes)))
