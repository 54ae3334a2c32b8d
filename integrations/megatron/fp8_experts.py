"""Grouped experts whose products take the fp8 rows of a dispatch, and what their layers cannot be combined with (`enable(fp8=True)`)."""

from typing import Any

import torch

from deepep_moe.integrations.megatron.grouped_experts import REFUSED, GroupedMLP, check_config
from deepep_moe.ops.fp8_products import check_widths

_REFUSED = {name: fix for name, fix in REFUSED.items() if name != "fp8"} | {
    "fp8_param": "set it to False (drop --fp8-param-gather), as experts quantize their bf16 weights in each pass",
    "add_bias_linear": "set it to False (--disable-bias-linear)",
    "moe_apply_probs_on_input": "set it to False",
}


class Fp8GroupedMLP(GroupedMLP):
    """A `GroupedMLP` that gets `QuantizedRows`: all products of both passes take fp8. Parameters and checkpoints are the same."""

    takes_fp8_rows = True

    @staticmethod
    def check_config(config: Any) -> None:
        check_config(config, _REFUSED)
        check_widths(moe_ffn_hidden_size=config.moe_ffn_hidden_size or config.ffn_hidden_size)


def check_fp8(config: Any) -> None:
    """Raise ValueError for a layer whose rows cannot travel as fp8."""
    if config.fp8 and config.fp8_recipe != "blockwise":
        raise ValueError(
            f"fp8_recipe is {config.fp8_recipe!r}, but deepep_moe's experts have scales of blocks; set it to 'blockwise' "
            "(--fp8-recipe blockwise), or leave out fp8 of enable()"
        )
    if getattr(config, "first_last_layers_bf16", False):
        raise ValueError("first_last_layers_bf16 is True, but fp8 of enable() is for all MoE layers; set it to False, or leave out fp8")
    if config.params_dtype != torch.bfloat16:
        raise ValueError(f"params_dtype is {config.params_dtype}, but fp8 experts take bf16 rows; train in bf16 (--bf16)")
    name = "moe_latent_size" if getattr(config, "moe_latent_size", None) else "hidden_size"
    check_widths(**{name: getattr(config, name)})
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        raise ValueError(
            "overlap_moe_expert_parallel_comm is True, whose schedule frees rows that fp8 experts share; set it to False, or leave out fp8 "
            "of enable()"
        )
