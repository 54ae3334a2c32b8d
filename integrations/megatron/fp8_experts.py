"""Grouped experts whose products take the fp8 rows of a dispatch, and what their layers cannot be combined with (`enable(fp8=True)`)."""

from typing import Any

import torch

from deepep_moe.integrations.megatron.grouped_experts import GroupedMLP
from deepep_moe.integrations.megatron.options import Config
from deepep_moe.integrations.megatron.patches import Patches, Stock
from deepep_moe.ops.fp8_kept import KeptWeights, is_captured
from deepep_moe.ops.fp8_products import check_widths

_REFUSED = {
    "fp8_param": "set it to False (drop --fp8-param-gather), as experts quantize their bf16 weights in each pass",
    "add_bias_linear": "set it to False (--disable-bias-linear)",
    "moe_apply_probs_on_input": "set it to False",
}


class Fp8GroupedMLP(GroupedMLP):
    """A `GroupedMLP` that gets `QuantizedRows`: all products of both passes take fp8. Parameters and checkpoints are the same.

    Megatron-Core's schedules call `set_is_first_microbatch()` of the model before the first micro-batch of a step, as for
    TransformerEngine's modules. From then on that forward quantizes the weights, and those of the other micro-batches use its copies.
    """

    takes_fp8_rows = True

    is_first_microbatch: bool | None = None
    """None: not set yet, and each forward quantizes. Forwards set True to False."""

    def __init__(self, num_local_experts: int, config: Config, *args: Any, **kwargs: Any):
        super().__init__(num_local_experts, config, *args, **kwargs)
        self.kept_weights = KeptWeights()

    @classmethod
    def check_config(cls, config: Config, is_te: bool) -> None:
        super().check_config(config, is_te)
        check_widths(moe_ffn_hidden_size=config.moe_ffn_hidden_size or config.ffn_hidden_size)

    @staticmethod
    def refused(is_te: bool) -> dict[str, str]:
        return {name: fix for name, fix in GroupedMLP.refused(is_te).items() if name != "fp8"} | _REFUSED

    def release_fp8_weights(self) -> None:
        """Drop the fp8 copies of the weights. The next forward makes new ones, if it shares them with others."""
        self.kept_weights.release()

    def _copies_of_weights(self, w1: torch.Tensor, w2: torch.Tensor) -> dict[str, Any]:
        if is_captured(w1):
            self.kept_weights.release()  # of forwards before the capture
            return {}
        if self.is_first_microbatch is None or getattr(self.config, "disable_parameter_transpose_cache", False):
            return {}
        is_first = self.is_first_microbatch or not self.kept_weights.has(w1, w2)
        self.is_first_microbatch = False
        return {"kept": self.kept_weights, "is_first_microbatch": is_first}


def serve_first_microbatches(patches: Patches) -> None:
    """Let `set_is_first_microbatch()` of a model reach fp8 experts whatever the config's `fp8` is, without which Megatron-Core does
    nothing in it."""
    from megatron.core.transformer.module import MegatronModule

    @patches.around(MegatronModule, "set_is_first_microbatch")
    def set_in_all(stock: Stock, model: MegatronModule) -> None:
        stock(model)
        for module in model.modules():
            if isinstance(module, Fp8GroupedMLP):
                module.is_first_microbatch = True


def check_fp8(config: Config) -> None:
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
