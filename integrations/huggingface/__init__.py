"""Models of Hugging Face's transformers, 5 and newer: `spread_experts(model)` spreads the experts of every MoE block over the ranks.

It asks for the shape of a block alone and does not import transformers, so modules of your own that have this shape are served too.
"""

from deepep_moe.integrations.huggingface.blocks import SpreadExperts, expert_parameters, spread_experts

__all__ = ["SpreadExperts", "expert_parameters", "spread_experts"]
