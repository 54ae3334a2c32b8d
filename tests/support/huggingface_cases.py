"""Models that tests of the Hugging Face adapter share."""

import sys
from pathlib import Path

import torch
from torch import nn

EXAMPLE = Path(__file__).parents[2] / "examples" / "huggingface"


def example(name: str):
    sys.path.insert(0, str(EXAMPLE))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(EXAMPLE))


def build(name: str) -> nn.Module:
    """A model with random weights, the same on every rank."""
    torch.manual_seed(3)
    if name == "stand-in":
        return example("model").build(stand_in=True)
    import transformers

    common = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    common |= {"num_key_value_heads": 2, "num_experts_per_tok": 2}
    if name == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**common, num_local_experts=4))
    if name == "qwen3":
        config = transformers.Qwen3MoeConfig(**common, num_experts=4, moe_intermediate_size=16, norm_topk_prob=True, head_dim=8)
        return transformers.Qwen3MoeForCausalLM(config)
    if name == "qwen3-vl":
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
        text = common | {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8, "rope_parameters": rope}
        vision = {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
        }
        config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
        return transformers.Qwen3VLMoeForConditionalGeneration(config)
    deepseek = {"n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    deepseek |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**common | {"num_key_value_heads": 4}, **deepseek))
