"""Settings that Megatron-Core's config would refuse, or replace, for a dispatcher that it does not know."""

import contextlib
from collections.abc import Callable

from deepep_moe.integrations.common.meanwhile import meanwhile
from deepep_moe.integrations.megatron.cuda_graphs import moe_part_hidden
from deepep_moe.integrations.megatron.options import Config
from deepep_moe.integrations.megatron.patches import Patches, Stock
from deepep_moe.integrations.megatron.shared_experts import check_shared_overlap


def serve_config(
    patches: Patches,
    choose: Callable[[Config], None],
    is_ours: Callable[[Config], bool],
    backend_field: str,
    is_sync_free: Callable[[Config], bool],
) -> None:
    """Let `choose` complete configs, and let those of which `is_ours` is true then keep what they ask for.

    `moe_enable_deepep` would replace our backend by DeepEP's with a warning at most, and is an error. `moe_shared_expert_overlap` (before
    0.18) and `moe_expert_rank_capacity_factor` are hidden from the checks, which know the dispatchers by name. Where `is_sync_free`, so is
    the part "moe" of CUDA graphs.
    """
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    hidden: dict[str, object] = {"moe_expert_rank_capacity_factor": None}
    if not hasattr(SharedExpertMLP, "wait_current_stream"):
        hidden["moe_shared_expert_overlap"] = False

    @patches.around(TransformerConfig, "__post_init__")
    def complete(stock: Stock, config: TransformerConfig, /, *args: object, **kwargs: object) -> None:
        choose(config)
        if not is_ours(config):
            stock(config, *args, **kwargs)
            return
        if hasattr(config, backend_field) and getattr(config, "moe_enable_deepep", False):
            backend = getattr(config, backend_field)
            raise ValueError(
                f"moe_enable_deepep is True, which puts {backend_field}={backend!r} back to DeepEP's 'deepep'; leave "
                "moe_enable_deepep out (drop --moe-enable-deepep)"
            )
        with contextlib.ExitStack() as undo:
            if is_sync_free(config):
                undo.enter_context(moe_part_hidden(config))
            undo.enter_context(meanwhile(config, **{name: value for name, value in hidden.items() if hasattr(config, name)}))
            stock(config, *args, **kwargs)
        check_shared_overlap(config)
