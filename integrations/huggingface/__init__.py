"""Models of Hugging Face's transformers, 5 and newer: `spread_experts(model)` spreads the experts of every MoE block over the ranks.

It asks for the shape of a block alone and does not import transformers, so modules of your own that have this shape are served too. A
spread model of transformers saves itself whole with `save_pretrained`, which every rank calls.
"""

from deepep_moe.integrations.huggingface.blocks import SpreadExperts, expert_parameters, spread_experts
from deepep_moe.integrations.huggingface.loading import load_spread
from deepep_moe.integrations.huggingface.saving import gathered_state_dict

__all__ = ["spread_experts", "load_spread", "expert_parameters", "gathered_state_dict", "SpreadExperts"]
